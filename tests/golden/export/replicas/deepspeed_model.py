"""Model of a plan for deepspeed.initialize."""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 8 · tp 1 · pp 1 · micro-batch 1 × 2 · ZeRO-0

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def planned_model(name: str) -> Any:
    """Load the model as the plan prices it."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    return model
