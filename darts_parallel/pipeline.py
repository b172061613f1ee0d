"""Iteration time of a synchronous pipeline from its stage times.

1F1B (PipeDream-Flush, Narayanan et al. 2021): with stage times t_k per micro-batch and m
micro-batches, the first crosses all stages and the others follow at the pace of the slowest:
`sum_k t_k + (m - 1) max_k t_k`. `simulation.py` is its referee.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost_config import CostConfig


@dataclass(frozen=True)
class PipelineModel:
    """How the seconds of the stages make an iteration; the values of `CostConfig`."""

    simulated: bool = False
    schedule: str = "1f1b"
    blocking: bool = True
    """Messages between stages occupy the later stage."""

    @staticmethod
    def from_config(config: CostConfig) -> "PipelineModel":
        """The model that the user chose."""
        return PipelineModel(config.pipeline == "simulated", config.schedule, config.p2p == "blocking")


def pipeline_seconds(
    stage_seconds: Tensor, num_micro_batches: Tensor, slowest: Tensor | None = None
) -> Tensor:
    """Seconds of all micro-batches through the pipeline.

    Args:
        stage_seconds: Forward and backward seconds of one micro-batch, shape `(..., K)`.
        num_micro_batches: Shape broadcastable to `(...)`.
        slowest: Maximum over stages, shape `(...)`; given where a smooth maximum is wanted.

    Returns:
        Seconds, shape `(...)`.
    """
    bottleneck = stage_seconds.amax(-1) if slowest is None else slowest
    return stage_seconds.sum(-1) + (num_micro_batches - 1) * bottleneck


def in_flight(pp: int, num_micro_batches: Tensor, schedule: str = "1f1b") -> Tensor:
    """Micro-batches whose activations stage k holds, shape `(O, K)`.

    `min(pp - k, m)` under 1F1B, all under GPipe, `min(pp, m)` under ZB-H1 (Qi et al. 2023;
    what a micro-batch holds between its two backward passes counts in full).
    """
    depth = {"1f1b": pp - torch.arange(pp), "zero_bubble": torch.full((pp,), pp)}.get(schedule)
    counts = num_micro_batches.unsqueeze(1)
    held = counts.expand(-1, pp) if depth is None else torch.minimum(depth, counts)
    return held.to(torch.float64)
