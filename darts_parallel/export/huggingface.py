"""The model of a program on Hugging Face's transformers, as the plan prices it.

Full training holds master weights in float32 and computes under mixed precision. Adapters are
those of PEFT, next to weights that are loaded in 16 bits and frozen.
"""

from darts_parallel.config import ModelConfig
from darts_parallel.export.common import Request

MODEL = '''

def planned_model({arguments}) -> Any:
    """Load the model as the plan prices it."""
{check}    model = {kind}.from_pretrained(name, dtype=torch.{dtype}{mesh})
{settings}    return model
'''
ADAPTERS = '''

ADAPTERS = {targets}
"""Endings of the names of the modules that have adapters, by what the plan calls them."""


def with_adapters(model: Any) -> Any:
    """Freeze the model and give it the plan's adapters; routed experts have none."""
    names = [name for name, _ in model.named_modules() if ".experts." not in name]
    for product, ends in ADAPTERS.items():
        if not any(name.endswith(ends) for name in names):
            raise ValueError(f"no module of the model is a {{product}}: add its name to ADAPTERS")
    ends = sum(ADAPTERS.values(), ())
    chosen = [name for name in names if name.endswith(ends)]
    return get_peft_model(model, LoraConfig(r={rank}, target_modules=chosen))
'''
MODULES = {
    "linear_qkv": (
        *(".q_proj", ".k_proj", ".v_proj", ".qkv_proj", ".query_key_value", ".c_attn"),
        *(".q_a_proj", ".q_b_proj", ".kv_a_proj_with_mqa", ".kv_b_proj", ".q", ".k", ".v"),
    ),
    "linear_proj": (".o_proj", ".out_proj", ".attn.c_proj", ".self_attention.dense", ".o"),
    "linear_fc1": (
        *(".gate_proj", ".up_proj", ".gate_up_proj", ".c_fc", ".dense_h_to_4h"),
        *(".wi", ".wi_0", ".wi_1"),
    ),
    "linear_fc2": (".down_proj", ".mlp.c_proj", ".dense_4h_to_h", ".wo"),
}
"""Endings of the names of modules in the models of transformers, by target of LoRA."""
DTYPES = {"fp32": "float32", "fp16": "float16"}
CACHE = "model.config.use_cache = False  # recomputed layers would find their keys in it already"
CHECKPOINTING = 'model.gradient_checkpointing_enable({"use_reentrant": False})'


def half_type(job: Request) -> str:
    """Name PyTorch's type of the job's 16-bit numbers; float32 without any."""
    return DTYPES.get(job.problem.training.precision, "bfloat16")


def model_class(config: ModelConfig) -> str:
    """Name the class of transformers that loads a model."""
    if config.num_encoder_layers:
        return "AutoModelForSeq2SeqLM"
    return "AutoModelForCausalLM" if config.causal else "AutoModelForMaskedLM"


def imports(job: Request) -> list[str]:
    """Return the imports of `model_text`."""
    lines = ["from typing import Any\n", "import torch"]
    if job.problem.training.lora_rank:
        lines.append("from peft import LoraConfig, get_peft_model")
    return [*lines, f"from transformers import {model_class(job.model)}"]


def model_text(
    job: Request, dtype: str, *, checkpointing: bool, mesh: str = "", check: str = ""
) -> str:
    """Write `planned_model`, and the adapters that it adds.

    Args:
        dtype: PyTorch's name of the type in which the weights are loaded.
        checkpointing: Whether the model itself recomputes its blocks.
        mesh: Further arguments of `from_pretrained`, for tensor parallelism.
        check: Lines before the model is loaded.
    """
    training = job.problem.training
    settings = []
    if job.recompute() == "full":
        settings += [CACHE, CHECKPOINTING] if checkpointing else [CACHE]
    if training.lora_rank:
        settings.append("model = with_adapters(model)")
    text = MODEL.format(
        arguments="accelerator: Any, name: str" if mesh else "name: str",
        check=check,
        kind=model_class(job.model),
        dtype=dtype,
        mesh=mesh,
        settings="".join(f"    {line}\n" for line in settings),
    )
    if not training.lora_rank:
        return text
    rows = [f'    "{name}": {MODULES[name]},\n' for name in training.lora_targets]
    targets = "".join(["{\n", *rows, "}"]).replace("'", '"')
    return ADAPTERS.format(targets=targets, rank=training.lora_rank) + text
