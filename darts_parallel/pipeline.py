"""Iteration time of a synchronous pipeline from its stage times.

1F1B (PipeDream-Flush, Narayanan et al. 2021): with stage times t_k per micro-batch and m
micro-batches, the first crosses all stages and the others follow at the pace of the slowest:
`sum_k t_k + (m - 1) max_k t_k`.
"""

import torch
from torch import Tensor


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


def in_flight(pp: int, num_micro_batches: Tensor) -> Tensor:
    """Micro-batches whose activations stage k holds under 1F1B: `min(pp - k, m)`, shape `(O, K)`."""
    depth = pp - torch.arange(pp)
    return torch.minimum(depth, num_micro_batches.unsqueeze(1)).to(torch.float64)
