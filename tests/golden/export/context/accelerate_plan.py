"""accelerate objects of a plan."""

# toy_llama on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 1 · cp 4 · pp 1 · micro-batch 2 × 4 · ZeRO-3

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig

MICRO_BATCH_SIZE = 2
"""Sequences of one batch of the data loader, per process."""


def planned_accelerator() -> Accelerator:
    """The accelerator; start its program by `accelerate launch --config_file accelerate.yaml`."""
    return Accelerator(
        gradient_accumulation_steps=4,
        parallelism_config=ParallelismConfig(dp_replicate_size=1, dp_shard_size=2, tp_size=1, cp_size=4),
    )
