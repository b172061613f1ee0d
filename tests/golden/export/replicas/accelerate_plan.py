"""accelerate objects of a plan."""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 8 · tp 1 · pp 1 · micro-batch 1 × 2 · ZeRO-0

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from transformers import AutoModelForCausalLM

MICRO_BATCH_SIZE = 1
"""Sequences of one batch of the data loader, per process."""


def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, sync_each_batch=False
        ),
    )
    return accelerator


def planned_model(accelerator: Any, name: str) -> Any:
    """Load the model as the plan prices it."""
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model


def planned_optimizer(model: Any, **settings: Any) -> Any:
    """Make the optimizer whose state the plan prices; rates and decay are yours."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **settings)
