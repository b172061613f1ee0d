"""The model of a program on Hugging Face's transformers, as the plan prices it.

Full training holds master weights in float32 and computes under mixed precision. Adapters are
those of PEFT, next to weights that are loaded in 16 bits and frozen.
"""

from darts_parallel.config import ModelConfig
from darts_parallel.export.common import INSTALLED, Request

MODEL = '''

def planned_model({arguments}) -> Any:
    """Load the model as the plan prices it."""
{check}    model = {kind}.from_pretrained(
        name, {values}
    )
{settings}    return model
'''
OPTIMIZER = '''

def planned_optimizer(model: Any, **settings: Any) -> Any:
    """Make the optimizer whose state the plan prices; rates and decay are yours."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {optimizer}(trained, **settings)
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
    return get_peft_model(model, LoraConfig(r={rank}, lora_dropout={dropout}, target_modules=chosen))
'''
CUDNN = (
    "torch.backends.cuda.enable_cudnn_sdp(True)",
    "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda.enable_mem_efficient_sdp(False)",
)
"""Lines that leave cuDNN's attention to PyTorch's choice, next to unfused products."""
FUSED_LOSS = "AutoLigerKernelForCausalLM"
"""Class of Liger Kernel that loads a model with a fused head and loss, and its other kernels."""
DTYPES = {"fp32": "float32", "fp16": "float16"}
CACHE = "model.config.use_cache = False  # recomputed layers would find their keys in it already"
CHECKPOINTING = 'model.gradient_checkpointing_enable({"use_reentrant": False})'


def half_type(job: Request) -> str:
    """Name PyTorch's type of the job's 16-bit numbers; float32 without any."""
    return DTYPES.get(job.training.precision, "bfloat16")


def model_class(config: ModelConfig) -> str:
    """Name the class of transformers that loads a model."""
    if config.num_encoder_layers:
        return "AutoModelForSeq2SeqLM"
    return "AutoModelForCausalLM" if config.causal else "AutoModelForMaskedLM"


def imports(job: Request) -> list[str]:
    """Return the imports of `model_text`."""
    training = job.training
    lines = ["from typing import Any\n", "import torch"]
    module = job.word("optimizer").rpartition(".")[0]
    if module != "torch.optim":
        lines.append(f"import {module}")
    if training.attention_kernel in INSTALLED:
        lines.append(f"import {INSTALLED[training.attention_kernel]}  # what the attention runs on")
    if training.lora_rank:
        lines.append("from peft import LoraConfig, get_peft_model")
    if job.word("frozen_bits"):
        lines.append("from transformers import BitsAndBytesConfig")
    if training.loss == "fused":
        return [*lines, f"from liger_kernel.transformers import {FUSED_LOSS}"]
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
    training = job.training
    kernel = training.attention_kernel
    settings = list(CUDNN) if kernel == "cudnn" else []
    attention = job.word("attention_kernel") or "sdpa"
    values = f'dtype=torch.{dtype}, attn_implementation="{attention}"{mesh}'
    if quantized := job.word("frozen_bits"):
        values += f", quantization_config=BitsAndBytesConfig({quantized.format(dtype=dtype)})"
    fused = training.loss == "fused"
    if fused:
        values += ", fused_linear_cross_entropy=True"
    if job.recompute() == "full":
        settings += [CACHE, CHECKPOINTING] if checkpointing else [CACHE]
    if training.lora_rank:
        settings.append("model = with_adapters(model)")
    arguments = "accelerator: Any, name: str" if job.target == "accelerate" else "name: str"
    kind = FUSED_LOSS if fused else model_class(job.model)
    lines = "".join(f"    {line}\n" for line in settings)
    text = MODEL.format(arguments=arguments, check=check, kind=kind, values=values, settings=lines)
    text += OPTIMIZER.format(optimizer=job.word("optimizer"))
    return _adapters_text(job) + text if training.lora_rank else text


def _adapters_text(job: Request) -> str:
    """Write `with_adapters`."""
    training = job.training
    ends = job.words("lora_targets")
    present = {product.module for layer in job.problem.model.layers for product in layer.gemms}
    # where all MLPs are routed experts no MLP has adapters
    rows = [
        f'    "{name}": {tuple(ends[name].split())},\n'
        for name in training.lora_targets
        if name in present
    ]
    targets = "".join(["{\n", *rows, "}"]).replace("'", '"')
    dropout = training.lora_dropout
    return ADAPTERS.format(targets=targets, rank=training.lora_rank, dropout=dropout)
