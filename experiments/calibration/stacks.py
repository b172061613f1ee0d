"""Training software by source: what a row leaves unsaid because everybody at that place did it so.

A stack is recognised by words in a row's source, model and notes. Its rules are facts of that software
(their references stand beside them); its speed parameters are fitted (`calibrated.yaml`).
"""

import re
from dataclasses import dataclass

from experiments.calibration.rows import Row


@dataclass(frozen=True)
class Stack:
    """Rules of one training software."""

    name: str
    words: str
    """Regular expression that recognises it, on lower-case text."""
    fused_attention: bool
    """FlashAttention-like kernels; else the score matrix goes through memory."""
    sequence_parallel: bool
    """On wherever tp > 1 and the row does not say."""
    tied: bool | None = None
    """Tied embeddings; None: by the family of the model."""


STACKS = (
    # Megatron-LM before FlashAttention and sequence parallelism (2022-05, arXiv 2205.05198)
    Stack("amp", r"\bamp \(neurips|results of real trials", False, False, True),
    Stack("bigscience", r"bigscience|megatron-deepspeed", False, False, True),
    Stack("nanotron", r"nanotron", True, True),
    Stack("torchtitan_compile", r"torchtitan(?=.*(torch\.compile|compile;))", True, True, False),
    Stack("torchtitan", r"torchtitan", True, True, False),
    Stack("llm_foundry", r"llm-foundry|mosaicml", True, False, True),
    Stack("internevo", r"internevo|internlm", True, False, False),
    Stack("nemo", r"dgxc|nemo\b|nemotron|megatron-bridge|mcore|megatron.core", True, True),
    Stack(
        "megatron_2021", r"megatron|2104\.04473|2205\.05198|2201\.11990|calculon|vtrain", False, False, True
    ),
)  # fmt: skip
DEFAULT = Stack("default", "", True, True)
"""For a source that no words recognise: today's common practice."""


def stack_of(row: Row) -> Stack:
    """The software that a row's words name, else `DEFAULT`."""
    text = " ".join(row.text(key) for key in ("source", "model", "notes")).lower()
    return next((stack for stack in STACKS if re.search(stack.words, text)), DEFAULT)
