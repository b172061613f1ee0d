"""accelerate objects of a plan."""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 4 · tp 2 · pp 1 · micro-batch 2 × 2 · ZeRO-2 · recompute full

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig

MICRO_BATCH_SIZE = 2
"""Sequences of one batch of the data loader, per process."""


def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    return Accelerator(
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(dp_replicate_size=1, dp_shard_size=4, tp_size=2, cp_size=1),
    )
