"""A better plan under FASOP's own costs: more placements, exact partitions, moves judged by the recurrence.

FASOP's space and costs stay; what changes is the search. Placements are all orders of the nodes where they
are few, and otherwise the rotations, and the swaps of two nodes of the best one. Every strategy starts from
exact min-max partitions and from FASOP's own, so that no plan is lost; the best of each cluster then move
single layers between stages as long as the simulated step falls. Where the moves are many, those are tried
that the slopes of the recurrence promise most of.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import factorial, prod

import numpy as np

from baselines.fasop import Floats, Integers
from experiments.fasop.costs import Batch, CostModel, Flags
from experiments.fasop.partition import exact_heads, exact_partition, exact_tails
from experiments.fasop.program import (
    FasopPlan,
    Priced,
    encoder_stages,
    pipeline_ends,
    price,
    program_partition,
)
from experiments.fasop.setting import Degrees, cyclic_placements, enumerate_degrees

FEW_PLACEMENTS = 70
"""Orders of the nodes that are all tried; four and four nodes have as many."""
SHORTLIST = 6
"""Strategies of a cluster whose partitions are improved."""
MOVES = 48
"""Moves tried at a time."""
SLOPE_STEP = 1e-4
"""Change of a stage's seconds that its slope is measured with, relative to the slowest stage."""
LEAST_GAIN = 1e-9
"""Relative; a smaller one is rounding."""


def better_plans(
    model: CostModel,
    clusters: Sequence[tuple[int, ...]],
    *,
    few_placements: int = FEW_PLACEMENTS,
) -> list[FasopPlan | None]:
    """The best plan found for each of clusters with equally many nodes; it fits the memory, or is None.

    Args:
        model: Costs of the job.
        clusters: Nodes of each type, equal in sum.
        few_placements: Where a cluster has no more orders of its nodes, all are tried.
    """
    options = [placements_of(counts, few_placements) for counts in clusters]
    placements = np.concatenate(options)
    owner = np.repeat(np.arange(len(clusters)), [len(rows) for rows in options])
    leaders: list[list[FasopPlan]] = [[] for _ in clusters]
    for degrees in enumerate_degrees(model.job, model.offer.gpus_per_node, placements.shape[1]):
        priced = _start(model.batch(degrees, placements), model)
        for index, leading in enumerate(leaders):
            rows = owner == index
            leaders[index] = _merge(leading, priced, rows, SHORTLIST)
    found = [_fastest(plans) for plans in _refine_all(leaders, model)]
    swapped = [
        _after_swaps(plan, model) if plan and len(rows) < num_orders(counts) else []
        for plan, rows, counts in zip(found, options, clusters, strict=True)
    ]
    reordered = _refine_all(swapped, model)
    return [
        _fastest([*plans, *([plan] if plan else [])]) for plans, plan in zip(reordered, found, strict=True)
    ]


def _fastest(plans: Sequence[FasopPlan]) -> FasopPlan | None:
    return min(plans, key=lambda plan: plan.seconds, default=None)


def _after_swaps(plan: FasopPlan, model: CostModel) -> list[FasopPlan]:
    """The best starts among the plan's placements with two nodes swapped."""
    order = np.array(plan.placement)
    here, there = np.nonzero(order[:, None] < order)
    placements = np.tile(order, (len(here), 1))
    rows = np.arange(len(here))
    placements[rows, here], placements[rows, there] = order[there], order[here]
    priced = _start(model.batch(plan.degrees, placements), model)
    return _merge([], priced, np.ones(len(here), dtype=bool), SHORTLIST // 2)


def num_orders(counts: tuple[int, ...]) -> int:
    """Distinct orders of `counts[i]` nodes of type i."""
    return factorial(sum(counts)) // prod(factorial(count) for count in counts)


def placements_of(counts: tuple[int, ...], few: int) -> Integers:
    """Orders of the nodes to try, `(orders, nodes)` of type numbers: all up to `few`, else the rotations."""
    if num_orders(counts) <= few:
        return np.array(list(_orders(counts)), dtype=np.int64)
    return np.unique(cyclic_placements(counts), axis=0)


def _orders(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All distinct orders of `counts[i]` nodes of type i."""
    if not any(counts):
        yield ()
    for kind, count in enumerate(counts):
        if count:
            fewer = (*counts[:kind], count - 1, *counts[kind + 1 :])
            yield from ((kind, *rest) for rest in _orders(fewer))


def _merge(leading: list[FasopPlan], priced: Priced, rows: Flags, size: int) -> list[FasopPlan]:
    """The `size` fastest of `leading` and those of `rows` that fit."""
    seconds = np.where(priced.fits & rows, priced.seconds, np.inf)
    limit = leading[-1].seconds if len(leading) == size else np.inf
    best = np.argsort(seconds, kind="stable")[:size]
    fresh = [priced.plan(int(row)) for row in best if seconds[row] < limit]
    return sorted([*leading, *fresh], key=lambda plan: plan.seconds)[:size]


def _start(batch: Batch, model: CostModel) -> Priced:
    """Every strategy with the best of FASOP's and the exact partitions."""
    reported, own = program_partition(batch, model)
    options = [own, *_exact(batch, model)]
    if (reported != own).any():
        legal = (reported > 0).all(1, keepdims=True)
        options.append(np.where(legal, reported, own))
    rows, width = np.arange(len(batch)), len(options)
    every = price(batch[np.tile(rows, width)], np.concatenate(options), model)
    seconds = np.where(every.fits, every.seconds, np.inf).reshape(width, -1)
    best = seconds.argmin(0)
    counts, least = np.stack(options)[best, rows], seconds[best, rows]
    return Priced(batch, counts, least, np.isfinite(least))


def _exact(batch: Batch, model: CostModel) -> list[Integers]:
    """Exact min-max partitions, one for each split of the stages between encoder and decoder."""
    ticks, kinds, stages = batch.layers.ticks, batch.stage_type, batch.degrees.pp
    if not model.job.encoder_decoder or stages == 1:
        return [exact_partition(ticks, kinds)]
    half = batch.layers.num_layers // 2
    splits = encoder_stages(stages, half)
    heads = exact_heads(ticks[:, : half + 1], kinds, splits)
    decoder = ticks[:, half:] - ticks[:, half : half + 1]
    tails = exact_tails(decoder, kinds, range(stages - splits[-1], stages - splits[0] + 1))
    return [np.concatenate([heads[split], tails[stages - split]], axis=1) for split in splits]


def _refine_all(leaders: Sequence[Sequence[FasopPlan]], model: CostModel) -> list[list[FasopPlan]]:
    """All plans of all clusters, improved, those of equal degrees in one batch."""
    groups: dict[Degrees, list[tuple[int, FasopPlan]]] = defaultdict(list)
    for index, plans in enumerate(leaders):
        for plan in plans:
            groups[plan.degrees].append((index, plan))
    result: list[list[FasopPlan]] = [[] for _ in leaders]
    for degrees, members in groups.items():
        batch = model.batch(degrees, np.array([plan.placement for _, plan in members]))
        counts = np.array([plan.layers_per_stage for _, plan in members])
        better = refine(price(batch, counts, model), model)
        for row, (index, _) in enumerate(members):
            result[index].append(better.plan(row))
    return result


def refine(start: Priced, model: CostModel) -> Priced:
    """Single layers moved from stage to stage as long as a step gets faster and fits.

    Args:
        start: Plans that fit.
        model: Costs of their job.
    """
    batch, counts, seconds = start.batch, start.counts.copy(), start.seconds.copy()
    active = np.arange(len(batch))
    while len(active) and batch.degrees.pp > 1:
        source, target, legal = _moves(batch[active], counts[active], model)
        width = source.shape[1]
        tried = np.repeat(counts[active], width, axis=0)
        rows = np.arange(len(tried))
        tried[rows, source.reshape(-1)] -= 1
        tried[rows, target.reshape(-1)] += 1
        # an illegal move is priced as no move
        tried = np.where(legal.reshape(-1, 1), tried, np.repeat(counts[active], width, axis=0))
        priced = price(batch[np.repeat(active, width)], tried, model)
        value = np.where(priced.fits, priced.seconds, np.inf).reshape(-1, width)
        best = value.argmin(1)
        lanes = np.arange(len(active))
        better = value[lanes, best] < seconds[active] * (1 - LEAST_GAIN)
        chosen = tried[lanes * width + best][better]
        active = active[better]
        counts[active], seconds[active] = chosen, value[lanes, best][better]
    return price(batch, counts, model)


def _moves(batch: Batch, counts: Integers, model: CostModel) -> tuple[Integers, Integers, Flags]:
    """Stages that give and take a layer, `(B, moves)` each, and whether the move is legal."""
    stages = batch.degrees.pp
    source, target = np.nonzero(~np.eye(stages, dtype=bool))
    side = np.zeros(counts.shape, dtype=np.int64)
    if model.job.encoder_decoder:
        side = (counts.cumsum(1) > batch.layers.num_layers // 2).astype(np.int64)
    legal = (counts[:, source] > 1) & (side[:, source] == side[:, target])
    if len(source) <= MOVES:
        return np.tile(source, (len(batch), 1)), np.tile(target, (len(batch), 1)), legal
    layer = batch.stage_ticks(counts) / counts
    saved = _slopes(batch, counts) * layer
    gain = np.where(legal, saved[:, source] - saved[:, target], -np.inf)
    best = np.argpartition(-gain, MOVES, axis=1)[:, :MOVES]
    return source[best], target[best], np.take_along_axis(legal, best, axis=1)


def _slopes(batch: Batch, counts: Integers) -> Floats:
    """Seconds of a step for each second of a stage's micro-batch, `(B, pp)`."""
    stages, ticks = batch.degrees.pp, batch.stage_ticks(counts)
    step = np.maximum(ticks.max(1) * SLOPE_STEP, 1).astype(np.int64)
    raised = np.repeat(ticks, stages, axis=0)
    raised[np.arange(len(raised)), np.tile(np.arange(stages), len(batch))] += np.repeat(step, stages)
    ends = pipeline_ends(batch[np.repeat(np.arange(len(batch)), stages)], raised)[:, 0]
    slopes: Floats = (ends.reshape(-1, stages) - pipeline_ends(batch, ticks)[:, :1]) / step[:, None]
    return slopes
