"""Local improvement of hard plans: steepest descent over runs of layers, stages, stage boundaries.

The search reports its raw plan next to the polished one, so that this step hides nothing.
"""

from dataclasses import replace
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import GAIN_TOLERANCE, CostTable, HardPlans, Index, evaluate_batch
from darts_parallel.exact import ChosenStages, DeadlineError
from darts_parallel.gradient.rounding import with_moved_boundaries
from darts_parallel.gradient.screening import MoveEvaluator

MAX_EDGE_MOVES = 1_000
"""Moves of ranges of stage boundaries up to which all are tried; above, single boundaries move."""
MAX_RUNS = 20_000
"""Runs of layers times strategies up to which all are tried."""
LIMITS_ABOVE = 8
"""Stage limits above the smallest feasible one that `repartitioned` tries: a slower bottleneck may
have a smaller sum."""


class Polished(NamedTuple):
    """A plan that no move improves."""

    plan: HardPlans
    seconds: float
    """Seconds per iteration."""
    evaluated: int
    """Plans that were evaluated."""


def polish(
    table: CostTable,
    plan: HardPlans,
    space_kind: str,
    *,
    evaluator: MoveEvaluator | None = None,
    runs: bool = True,
) -> Polished:
    """Descend from a feasible plan until no move of any neighbourhood helps.

    A neighbourhood is tried only where the earlier, cheaper ones have no move.

    Args:
        space_kind: `uniform`, `stagewise` or `layerwise`: moves stay in the space.
        evaluator: Prices the plans of the table, and ends the descent where it says so. None:
            one that never stops. Use a new one for every descent.
        runs: Whether layers and runs of layers change their strategies in a layer-wise space.
    """
    evaluator = evaluator or MoveEvaluator(table)
    visited = evaluator.visited
    seconds = float(evaluate_batch(table, plan).iteration_time[0])
    strategies = space_kind if runs or space_kind != "layerwise" else "uniform"
    # moves; then, as the last level, all boundaries for the strategies
    last = int(space_kind != "stagewise" and table.has_plain_stages)
    level = 0
    while level <= last and not evaluator.stop():
        key = plan_key(plan)
        if level:
            candidates = repartitioned(table, plan)
        else:
            if key in visited:
                break
            candidates = _moves(table, plan, strategies, edges=space_kind)
        visited.add(key)
        times = evaluator.seconds(candidates, seconds)
        best = int(times.argmin())
        level += 1
        # a move must gain more than rounding
        if float(times[best]) < seconds * (1.0 - GAIN_TOLERANCE):
            plan = candidates[best : best + 1]
            seconds = float(times[best])
            level = 0
    return Polished(plan, seconds, evaluator.simulated)


def plan_key(plan: HardPlans) -> bytes:
    """Return one plan of a table as a key of sets."""
    numbers = torch.cat([plan.outer, plan.first_layers[0], plan.choices[0]])
    return numbers.numpy().tobytes()


def repartitioned(table: CostTable, plan: HardPlans, most: int = LIMITS_ABOVE) -> HardPlans:
    """Split the plan again: the best for its strategies under each of `most` limits of the stages.

    Each split has the smallest `sum + (m - 1) max` of stage seconds that fits. Synchronisation is
    left out; the caller evaluates the plans.
    """
    if table.pp == 1:
        return plan
    try:
        chosen = ChosenStages.of(table, plan)
    except DeadlineError:  # too many layers to split
        return plan
    # all pipeline configurations share the segments
    seconds = np.where(chosen.fits(), chosen.seconds(), np.inf)
    limits = list(islice(chosen.segments.rising_limits(seconds), most))
    if not limits:
        return plan
    starts = [starts for _, starts in chosen.segments.splits_below(seconds, limits)]
    return replace(plan.repeated(len(starts)), first_layers=torch.tensor(starts))


def _moves(table: CostTable, plan: HardPlans, space_kind: str, *, edges: str) -> HardPlans:
    """Change strategies as in the space `space_kind`, boundaries as in `edges`, or the configuration."""
    changes = {"uniform": _whole, "stagewise": _per_stage, "layerwise": _every_run}
    choices = changes[space_kind](table, plan)
    strategies = replace(plan.repeated(len(choices)), choices=choices)
    number = table.num_outer
    other_outers = replace(plan.repeated(number), outer=torch.arange(number))
    # boundaries: layers that change stage keep their strategy, or adopt one of their new stage's
    boundaries = []
    kept = with_moved_boundaries(table, plan, MAX_EDGE_MOVES)
    if len(kept) and edges != "stagewise":
        boundaries.append(kept)
    if len(kept) and edges != "uniform":
        boundaries.append(replace(kept, choices=_adopt(plan, kept)))
    return HardPlans.concatenate([plan, strategies, *boundaries, other_outers])


def _whole(table: CostTable, plan: HardPlans) -> Tensor:
    """Return every strategy for the whole model, as the following functions `(B, L)`."""
    every = torch.arange(len(table.choices)).unsqueeze(1)
    return every.expand(-1, table.num_layers)


def _per_stage(table: CostTable, plan: HardPlans) -> Tensor:
    """Return every stage, and every stage with all later ones, with every strategy."""
    stages = plan.stages()[0]
    numbers = torch.arange(table.num_stages).unsqueeze(1)
    masks = torch.cat([stages == numbers, stages >= numbers])
    return _replace(table, plan, masks)


def _runs(table: CostTable, plan: HardPlans) -> Index:
    """Return every run of layers inside a stage: its first layer and the one after its last, `(N, 2)`.

    Where there are too many, only single layers, pairs, and runs at either end of a stage.
    """
    ends = [*plan.first_layers[0].tolist(), table.num_layers]
    spans = []
    for first, end in pairwise(ends):
        inside = np.triu_indices(end - first)
        spans.append(np.add(inside, [[first], [first + 1]]))
    runs = np.concatenate(spans, axis=1).T
    if len(runs) * len(table.choices) > MAX_RUNS:
        at_end = np.isin(runs, ends).any(axis=1)
        short = runs[:, 1] - runs[:, 0] <= 2
        runs = runs[short | at_end]
    return np.ascontiguousarray(runs)


def _every_run(table: CostTable, plan: HardPlans) -> Tensor:
    """Return every run of layers inside a stage, and the whole model, with every strategy."""
    layers = torch.arange(table.num_layers)
    whole = torch.tensor([[0, table.num_layers]])
    inside = torch.from_numpy(_runs(table, plan))
    runs = torch.cat([inside, whole])
    begun = layers >= runs[:, :1]
    masks = begun & (layers < runs[:, 1:])
    return _replace(table, plan, masks)


def _replace(table: CostTable, plan: HardPlans, masks: Tensor) -> Tensor:
    """Return choices with the layers of every mask `(N, L)` set to every strategy, `(N * C, L)`."""
    targets = torch.arange(len(table.choices)).view(1, -1, 1)
    present = plan.choices.view(1, 1, -1)
    replaced = torch.where(masks.unsqueeze(1), targets, present)
    return replaced.reshape(-1, table.num_layers)


def _adopt(plan: HardPlans, moved: HardPlans) -> Tensor:
    """Give each moved layer the strategy of its new stage's adjacent boundary layer, `(B, L)`."""
    old = plan.stages().expand(len(moved), -1)
    new = moved.stages()
    starts = plan.first_layers[0]
    num_layers = torch.tensor([plan.choices.shape[1]])
    ends = torch.cat([starts[1:], num_layers]) - 1
    # a layer that moved to a later stage is now in front of the layer that this stage began with
    first_of_stage = plan.choices[0][starts[new]]
    last_of_stage = plan.choices[0][ends[new]]
    adopted = torch.where(new > old, first_of_stage, last_of_stage)
    own = plan.choices.expand_as(new)
    return torch.where(new == old, own, adopted)
