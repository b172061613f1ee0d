"""Plans that recompute some blocks of every stage, for trainers that run these next to uniform ones.

Megatron-LM's `--recompute-method block` takes one number of first blocks for all stages, and its
layout takes stages of any lengths. torchtitan 0.2.2 recomputes every n-th block of a stage: its
`torchtitan/distributed/activation_checkpoint.py` counts the blocks of a process. Such a plan keeps
as many activations as the memory holds, where a uniform one keeps all or none.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from darts_parallel.config import LAYER
from darts_parallel.cost import (
    CostTable,
    HardPlans,
    PricedPlan,
    even_starts,
    fastest,
    flatnonzero,
)
from darts_parallel.gradient import with_moved_boundaries
from darts_parallel.planner._session import Asked

MOST_PLANS = 4096
"""Plans that are priced at once; they bound the memory."""
SHIFTS = 8
"""Rounds in which the stage boundaries of the best plan are moved by a layer."""


def some_blocks_plan(asked: Asked, seconds: float) -> PricedPlan | None:
    """Return the fastest plan with some blocks of every stage recomputed, faster than `seconds`.

    Returns:
        None where the trainer runs no such plan, or none is faster.
    """
    problem = asked.problem
    tables = asked.tables
    config = problem.config
    kind = config.rules.some_blocks
    # the first blocks of a stage are the encoder's, and a trainer counts those of the decoder, too
    if not kind or config.space.cut != LAYER or config.model.num_encoder_layers:
        return None
    every = kind == "every"
    blocks = torch.tensor([layer.recomputable for layer in problem.model.layers])
    best: PricedPlan | None = None
    for number, table in enumerate(tables):
        if table.simulated or not table.has_plain_stages:
            continue
        for starts in even_cuts(table):
            for pair in _pairs(table):
                plans = _with_some_blocks(table, pair, starts, blocks, every, seconds)
                best = _faster(best, number, table, plans, seconds)
    for _ in range(SHIFTS):
        moved = best and _moved(best, tables[best.table], blocks, every)
        if moved is best:
            break
        best = moved
    return best


def _moved(best: PricedPlan, table: CostTable, blocks: Tensor, every: bool) -> PricedPlan:
    """Return the fastest plan with one stage boundary moved by a layer, or the plan itself."""
    used = set(best.plan.choices[0][blocks].tolist())
    kept, full = sorted(used, key=lambda own: table.choices[own].recompute == "full")
    found = best
    for starts in with_moved_boundaries(table, best.plan, most=0).first_layers:
        plans = _with_some_blocks(table, (kept, full), starts, blocks, every, best.time)
        plans = plans[plans.outer == best.plan.outer]
        found = _faster(found, best.table, table, plans, best.time) or found
    return found


def _pairs(table: CostTable) -> Iterator[tuple[int, int]]:
    """Yield every strategy that recomputes nothing, with the one that differs in that alone."""
    index = {choice: number for number, choice in enumerate(table.choices)}
    for choice, number in index.items():
        full = index.get(replace(choice, recompute="full"))
        if choice.recompute == "none" and full is not None:
            yield number, full


def even_cuts(table: CostTable) -> list[Tensor]:
    """Return the stages as trainers cut them by themselves, with the ends on top or not."""
    starts = [even_starts(table, ends_apart=apart)[0] for apart in (False, True)]
    distinct = {tuple(own.tolist()): own for own in starts}
    return [own for key, own in distinct.items() if list(key) == sorted(set(key))]


def _with_some_blocks(
    table: CostTable,
    pair: tuple[int, int],
    starts: Tensor,
    blocks: Tensor,
    every: bool,
    limit: float,
) -> HardPlans:
    """Return the plans with every number of first blocks recomputed, of outer choices that may win.

    Args:
        blocks: Whether a layer can be recomputed, `(L,)`.
        every: Every n-th block of a stage is recomputed instead, with every n above 1.
    """
    kept, full = pair
    layers = torch.arange(table.num_layers)
    begun = torch.searchsorted(starts, layers, right=True) - 1
    before = blocks.long().cumsum(0) - blocks.long()
    place = before - before[starts][begun]
    most = int(place[blocks].max())
    allowed = table.allowed[:, kept] & table.allowed[:, full]
    # without recomputation a plan is as fast as its pairs can be, in stages of equal seconds
    work = table.time[..., kept].amin(1).sum(1)
    least = work * (1.0 + (table.num_micro_batches - 1.0) / table.pp)
    outer = flatnonzero(allowed & (least < limit))
    counts = torch.arange(1, most + 1).unsqueeze(1)
    repeated = (place + 1) % (counts + 1) == 0 if every else place < counts
    rows = torch.where(blocks & repeated, full, kept)
    choices = rows.repeat(len(outer), 1)
    return HardPlans(outer.repeat_interleave(most), choices, starts.expand(len(choices), -1))


def _faster(
    best: PricedPlan | None, number: int, table: CostTable, plans: HardPlans, limit: float
) -> PricedPlan | None:
    """Return the fastest of some plans that fit, or the best so far."""
    least = limit if best is None else best.time
    for first in range(0, len(plans), MOST_PLANS):
        part = plans[first : first + MOST_PLANS]
        found = fastest(number, table, part)
        if found.time < least:
            best = found
            least = found.time
    return best
