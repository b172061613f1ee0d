"""Exact min-max partitions of a chain of layers for many placements at once."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from baselines.fasop import Integers, first_partition

FAR = np.iinfo(np.int64).max


def exact_partition(ticks: Integers, stage_type: Integers) -> Integers:
    """The partition whose slowest stage is the fastest possible, `(B, pp)` layers, at least one a stage.

    Args:
        ticks: Prefix sums of the layers by node type, `(types, L + 1)`.
        stage_type: Type of every stage, `(B, pp)`, pp at most L.
    """
    return _trace(_stage_sizes(ticks, stage_type, _widest(ticks, stage_type)), stage_type.shape[1])


def exact_heads(ticks: Integers, stage_type: Integers, widths: range) -> dict[int, Integers]:
    """Partition over the first w stages alone, `(B, w)`, for every w of `widths`; one recursion for all."""
    sizes = _stage_sizes(ticks, stage_type[:, : max(widths)], ticks.shape[1] - 1)
    return {width: _trace(sizes, width) for width in widths}


def exact_tails(ticks: Integers, stage_type: Integers, widths: range) -> dict[int, Integers]:
    """Partition exactly over the last w stages alone."""
    mirrored = ticks[:, -1:] - ticks[:, ::-1]
    heads = exact_heads(mirrored, stage_type[:, ::-1], widths)
    return {width: counts[:, ::-1] for width, counts in heads.items()}


def _stage_sizes(ticks: Integers, stage_type: Integers, widest: int) -> Integers:
    """Layers of stage k in the best partition of the first layers into k + 1 stages, `(pp, B, L + 1)`.

    Dynamic programming: the least bottleneck of the first stages by where they end.

    Args:
        ticks: As `exact_partition`.
        stage_type: The same.
        widest: Layers of a stage at most.
    """
    batch, stages = stage_type.shape
    ends = ticks.shape[1]
    # column w of a window: the stage begins `widest - w` layers before its end
    begins = np.arange(ends)[:, None] - widest + np.arange(widest)
    spans = np.where(begins >= 0, ticks[:, :, None] - ticks[:, np.maximum(begins, 0)], FAR)
    least = np.full((batch, ends), FAR)
    least[:, 0] = 0
    sizes = np.empty((stages, batch, ends), dtype=np.int64)
    for stage in range(stages):
        padded = np.pad(least, ((0, 0), (widest, 0)), constant_values=FAR)
        before = sliding_window_view(padded, widest, axis=1)[:, :ends]
        through = np.maximum(before, spans[stage_type[:, stage]])
        best = through.argmin(2)
        least = np.take_along_axis(through, best[:, :, None], axis=2)[:, :, 0]
        sizes[stage] = widest - best
    return sizes


def _trace(sizes: Integers, stages: int) -> Integers:
    """Layers of every stage, `(B, stages)`, read back from the end of the chain."""
    batch, ends = sizes.shape[1:]
    rows, end = np.arange(batch), np.full(batch, ends - 1)
    counts = np.empty((batch, stages), dtype=np.int64)
    for stage in range(stages - 1, -1, -1):
        counts[:, stage] = sizes[stage, rows, end]
        end = end - counts[:, stage]
    return counts


def _widest(ticks: Integers, stage_type: Integers) -> int:
    """Layers that a stage can hold at most in a partition no slower than even stages."""
    counts = first_partition(ticks.shape[1] - 1, stage_type.shape[1])
    end = counts.cumsum()
    slowest = (ticks[stage_type, end] - ticks[stage_type, end - counts]).max()
    spans = ticks[:, None, :] - ticks[:, :, None]
    first, last = np.nonzero((spans <= slowest).any(0))
    return int((last - first).max())
