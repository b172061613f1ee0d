"""Model of a plan for deepspeed.initialize."""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 4 · tp 2 · pp 1 · micro-batch 2 × 2 · ZeRO-2 · recompute full

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def planned_model(name: str) -> Any:
    """Load the model as the plan prices it."""
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.config.use_cache = False  # recomputed layers would find their keys in it already
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def planned_optimizer(model: Any, **settings: Any) -> Any:
    """Make the optimizer whose state the plan prices; rates and decay are yours."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **settings)
