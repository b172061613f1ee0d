"""Training software by source: what a row leaves unsaid because everybody at that place did it so.

A stack is recognised by words in a row's source, model and notes. Its rules are facts of that software
(their references stand beside them); its speed parameters are fitted (`conf/calibrated.yaml`), and
`conf/software/NAME.yaml` hands both to whoever says `training.software=NAME`.
"""

import re
from dataclasses import dataclass

from experiments.calibration.rows import Row


@dataclass(frozen=True)
class Stack:
    """Rules of one training software."""

    name: str
    family: str
    """Software that shares its ancestry: what is left out together when a whole family is held out."""
    words: str
    """Regular expression that recognises it, on lower-case text."""
    fused_attention: bool = True
    """FlashAttention-like kernels; else the score matrix goes through memory."""
    sequence_parallel: bool = True
    """On wherever tp > 1 and the row does not say."""
    tied: bool | None = None
    """Tied embeddings; None: by the family of the model."""
    gradient_bytes: int | None = None
    """Bytes of one gradient on the wire; None: as they are accumulated (4 with bf16, 2 with fp16)."""
    owner_broadcast_ms: float = 0.0
    """Milliseconds of the broadcast by which each owner of a ZeRO-1 shard returns its parameters; 0:
    all-gather."""
    single_ring: bool = False
    """ZeRO-3 moves each tensor over one ring, by one network adapter of a node."""


STACKS = (
    # Megatron-LM before FlashAttention and sequence parallelism (2022-05, arXiv 2205.05198)
    Stack("amp", "megatron", r"\bamp \(neurips|results of real trials", False, False, True),
    # HF Trainer and Megatron-LM over DeepSpeed's ZeRO-3; DeepSpeed sends gradients in their 16-bit type
    # (`communication_data_type` in its configuration). Its ZeRO-3 of 2021 gathers tensor by tensor: some 60 s
    # an iteration of 175B on 384 to 1,536 GPUs of Selene (arXiv 2104.04473, table 2), which one of a node's
    # eight adapters would take; `single_ring` says so, and waits for figures that are fitted with it
    Stack(
        "deepspeed_hf", "deepspeed", r"hf \+ deepspeed|hf trainer|transformers trainer",
        False, False, True, 2, single_ring=True,
    ),
    Stack(
        "deepspeed", "deepspeed", r"deepspeed zero \(|deepspeed zero-?3|\bdeepspeed\b(?!.*3d)(?=.*zero-?3)",
        False, False, True, 2, single_ring=True,
    ),
    Stack("bigscience", "megatron", r"bigscience|megatron-deepspeed|deepspeed 3d", False, False, True),
    Stack("nanotron", "nanotron", r"nanotron"),
    Stack("torchtitan_compile", "torchtitan", r"torchtitan(?=.*(torch\.compile|compile;))", tied=False),
    Stack("torchtitan", "torchtitan", r"torchtitan", tied=False),
    # Foundation Model Stack: torch.compile and FSDP, gradients reduced in bf16 (`bfSixteen` policy)
    Stack("fms_fsdp", "fsdp", r"\bfms\b|fms-fsdp|foundation.model.stack", tied=False, gradient_bytes=2),
    Stack("llm_foundry", "fsdp", r"llm-foundry|mosaicml", sequence_parallel=False, tied=True),
    # gradients of the bf16 model are all-reduced as they are, parameters come back by one broadcast for every
    # owner of a shard (InternEvo, hybrid_zero_optim.py: `_sync_grad`, `broadcast_params`)
    Stack("internevo", "internevo", r"internevo|internlm", True, False, False, 2, 2.7),
    Stack("jax", "jax", r"maxtext|paxml|\bjax\b"),
    # its own runs of Megatron-Core, whose recipes do not overlap tensor-parallel messages
    Stack("simumax", "nemo", r"simumax"),
    Stack("nemo", "nemo", r"dgxc|nemo\b|nemotron|megatron-bridge"),
    Stack("megatron_core", "nemo", r"mcore|megatron.core|primus|2504\.14960"),
    Stack(
        "megatron_2021", "megatron", r"megatron|2104\.04473|2205\.05198|2201\.11990|calculon|vtrain",
        False, False, True,
    ),
)  # fmt: skip
DEFAULT = Stack("default", "default", "")
"""For a source that no words recognise: today's common practice."""
SINCE_FLASH = re.compile(r"h100|h200|h800|b200|b300|gh200|mi3\d\d")
"""GPUs on which Megatron-LM was never measured without its fused kernels: Megatron-Core's."""


def stack_of(row: Row) -> Stack:
    """The software that a row's words name, else `DEFAULT`."""
    text = " ".join(row.text(key) for key in ("source", "model", "notes", "zero")).lower()
    found = next((stack for stack in STACKS if re.search(stack.words, text)), DEFAULT)
    if found.name == "megatron_2021" and SINCE_FLASH.search(row.text("gpu").lower()):
        return next(stack for stack in STACKS if stack.name == "megatron_core")
    return found
