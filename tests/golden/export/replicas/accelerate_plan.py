"""accelerate objects of a plan."""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 8 · tp 1 · pp 1 · micro-batch 1 × 2 · ZeRO-0

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

MICRO_BATCH_SIZE = 1
"""Sequences of one batch of the data loader, per process."""


def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, sync_each_batch=False
        ),
    )
