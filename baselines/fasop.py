"""FASOP (HPDC'24) as a baseline: its enumeration, placements, partition heuristic and cost model.

`minmax_partition` is the heuristic of FASOP's published program, which `experiments/reproduce_fasop.py` runs
over measured layer times; `solve` is its algorithm on the project's own tables.
"""

import numpy as np
import torch

from baselines._planner import Incumbent, on_tables
from darts_parallel.cost import Array, CostTable, HardPlans, Index, neighbour_seconds, unit_starts

TICK = 1e-15
"""Seconds of a tick: stage times are whole ticks, so that equal stages tie exactly, as in the program."""


def first_partition(num_layers: int, stages: int) -> Index:
    """Return even stages, `(stages,)`; the remainder goes to the last stage, then to the first in order."""
    counts = np.full(stages, num_layers // stages, dtype=np.int64)
    counts[np.arange(num_layers % stages) - 1] += 1
    return counts


def minmax_partition(
    ticks: Index,
    stage_type: Index,
    comm: Index,
) -> tuple[Index, Index]:
    """Return the partition where FASOP's heuristic ends, and the one whose stage times it goes on with.

    From even stages, one layer moves from the slowest stage to the fastest (the first of each) until the
    slowest time grows, or stays while a partition comes back: then the last move is undone. It also ends when
    the slowest stage has one layer, or is an end stage of two layers. In that last case the program gives the
    slowest stage one more layer but goes on with the times from before: both are returned.

    Args:
        ticks: Prefix sums of the layers by node type, `(types, L + 1)`.
        stage_type: Type of every stage, `(B, pp)`.
        comm: Ticks that a stage needs beside its layers, `(B, pp)`.

    Returns:
        Layers of every stage, `(B, pp)`: as the program reports them, and as it prices them.
    """
    batch, stages = stage_type.shape
    even = first_partition(ticks.shape[1] - 1, stages)
    counts = np.tile(even, (batch, 1))
    reported = counts.copy()
    priced = counts.copy()
    active = np.arange(batch)
    slow_before = fast_before = np.zeros(batch, dtype=np.int64)
    last = np.full(batch, np.iinfo(np.int64).max)
    history = [counts]
    while len(active):
        kinds = stage_type[active]
        end = counts.cumsum(1)
        compute = ticks[kinds, end] - ticks[kinds, end - counts]
        times = compute + comm[active]
        slow = times.argmax(1)
        fast = times.argmin(1)
        rows = np.arange(len(active))
        worst = times[rows, slow]
        moved = len(history) > 1
        undo = (worst > last) & moved
        again = (worst == last) & moved
        if again.any():
            seen = np.stack([past[again] for past in history[:-1]])
            equal = (seen == counts[again]).all(2)
            undo[again] = equal.any(0)
        at_end = (slow == 0) | (slow == stages - 1)
        layers = counts[rows, slow]
        short = ~undo & at_end & (layers == 2)
        stuck = ~undo & ~short & (layers <= 1)
        source = np.where(undo, fast_before, slow)
        priced_now = _move(counts, source, np.where(undo, slow_before, slow))
        reported_now = counts
        if moved:
            source = np.where(short, fast, 0)
            reported_now = _move(counts, source, np.where(short, slow, 0))
        reported_now = np.where(undo[:, None], priced_now, reported_now)
        done = undo | short | stuck
        reported[active[done]] = reported_now[done]
        priced[active[done]] = priced_now[done]
        counts = _move(counts, slow, fast)[~done]
        history = [past[~done] for past in history] + [counts]
        active = active[~done]
        last = worst[~done]
        slow_before = slow[~done]
        fast_before = fast[~done]
    return reported, priced


def _move(
    counts: Index,
    source: Index,
    target: Index,
) -> Index:
    """Move one layer between stages, row by row; nothing where both are the same."""
    rows = np.arange(len(counts))
    result = counts.copy()
    result[rows, source] -= 1
    result[rows, target] += 1
    return result


def ticks_of(seconds: Array) -> Index:
    """Return whole ticks of seconds."""
    return np.rint(seconds / TICK).astype(np.int64)


def middle_comm(p2p: Array) -> Index:
    """Return ticks of receiving that FASOP's heuristic adds to stages neither first nor last, `(B, pp)`.

    Args:
        p2p: Seconds over every boundary, `(B, pp - 1)`.
    """
    comm = np.pad(ticks_of(p2p), ((0, 0), (1, 0)))
    if comm.shape[1] > 1:
        comm[:, -1] = 0
    return comm


def offer_plans(incumbent: Incumbent) -> None:
    """Offer FASOP's uniform plans of every table, which lie in every space."""
    for index, table in enumerate(incumbent.tables):
        if incumbent.over():
            break
        incumbent.offer(index, fasop_plans(table))


solve = on_tables(offer_plans)


def fasop_plans(table: CostTable) -> HardPlans:
    """Offer every configuration with every strategy for all layers, partitioned by FASOP's heuristic.

    Its stage times are compute, collectives included, and for stages that are neither first nor last p2p.
    """
    outer, choice = torch.nonzero(table.allowed, as_tuple=True)
    units = unit_starts(table.fused_to_previous)
    last = torch.tensor([table.num_layers])
    ends = torch.cat([units[1:], last])
    # (B, kinds, layers), then the end of every unit of layers that cannot be parted
    by_layer = table.time.detach()[outer, :, :, choice]
    seconds = by_layer.cumsum(2)[:, :, ends - 1]
    kinds = seconds.shape[1]
    ticks = ticks_of(seconds.numpy().reshape(-1, len(units)))
    first_kind = np.arange(len(outer))[:, None] * kinds
    stage_type = first_kind + table.stage_kind.numpy()
    choices = choice.unsqueeze(1).expand(-1, table.num_layers)

    def plans(counts: Index) -> HardPlans:
        first = torch.from_numpy(counts.cumsum(1) - counts)
        return HardPlans(outer, choices, units[first])

    even = plans(np.tile(first_partition(len(units), table.num_stages), (len(outer), 1)))
    # the heuristic takes the messages of even stages
    _, p2p = neighbour_seconds(table, even, even.stages())
    sums = np.pad(ticks, ((0, 0), (1, 0)))
    _, counts = minmax_partition(sums, stage_type, middle_comm(p2p.detach().numpy()))
    return plans(counts)
