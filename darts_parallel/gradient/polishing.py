"""Local improvement of hard plans: steepest descent over layers, runs of layers, stages and edges.

The search reports its raw plan beside the polished one, so that this step hides nothing.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost import CostTable, HardPlans, evaluate_batch, unit_starts
from darts_parallel.gradient._run_moves import RunMoves
from darts_parallel.gradient.screening import MoveEvaluator
from darts_parallel.gradient.stage_moves import repartitioned

RELATIVE_GAIN = 1e-12
"""A move must gain more than rounding."""
MOST_EDGE_MOVES = 1_000
"""Moves of ranges of edges up to which all are tried; where there are more, single edges move."""
MOST_RUNS = 20_000
"""Runs of layers times strategies up to which all are tried."""


def polish(
    table: CostTable,
    plan: HardPlans,
    space_kind: str,
    *,
    evaluator: MoveEvaluator | None = None,
    visited: set[bytes] | None = None,
) -> tuple[HardPlans, float, int]:
    """Descend from a feasible plan until no move of any neighbourhood helps.

    A neighbourhood is asked only where the earlier, cheaper ones have no move.

    Args:
        space_kind: `uniform`, `stagewise` or `layerwise`: moves stay in the space.
        evaluator: Prices the plans of the table, and ends the descent early where it is out of budget; None:
            one that never is. A new one for every descent.
        visited: Plans that equal descents of this table came through, to which its own are added: where a
            descent meets one of them it ends, because it would go on as that one did.

    Returns:
        The plan, its seconds per iteration, and how many plans were evaluated.
    """
    levels = _neighbourhoods(table, space_kind)
    by_runs = space_kind == "layerwise" and table.has_plain_stages and not table.pipeline.simulated
    best = float(evaluate_batch(table, plan).iteration_time[0])
    evaluator = evaluator or MoveEvaluator(table)
    met, level = set() if visited is None else visited, 0
    while level < len(levels) and not evaluator.out_of_budget():
        if level == 0 and plan_key(plan) in met:
            break
        met.add(plan_key(plan))
        candidates = levels[level](plan)
        times = evaluator.seconds(candidates, best)
        index = int(times.argmin())
        changed, found = candidates[index : index + 1], float(times[index])
        if by_runs and level == 0:
            moves = RunMoves.price(table, plan, _runs(table, plan))
            evaluator.simulated += moves.seconds.size
            other, seconds = moves.best()
            if seconds < found:
                # sums of differences round otherwise than the plan's own
                changed, found = other, float(evaluate_batch(table, other).iteration_time[0])
        if found < best * (1.0 - RELATIVE_GAIN):
            plan, best, level = changed, found, 0
        else:
            level += 1
    return plan, best, evaluator.simulated


def plan_key(plan: HardPlans) -> bytes:
    """Return one plan of a table as a key of sets."""
    return torch.cat([plan.outer, plan.first_layers[0], plan.choices[0]]).numpy().tobytes()


def _neighbourhoods(table: CostTable, space_kind: str) -> list[Callable[[HardPlans], HardPlans]]:
    """Return what a plan may change into, the cheapest neighbourhood first.

    Changes of layers, runs, stages and stage boundaries; all boundaries again for the given strategies.
    """
    single, layerwise = table.has_plain_stages, space_kind == "layerwise"
    closed = single and not table.pipeline.simulated
    # runs of layers are priced apart, by what they change
    strategies = "uniform" if layerwise and closed else space_kind
    levels: list[Callable[[HardPlans], HardPlans]] = [
        lambda current: _moves(table, current, strategies, edges=space_kind)
    ]
    if space_kind != "stagewise" and single:
        levels.append(lambda current: repartitioned(table, current))
    return levels


def _moves(table: CostTable, plan: HardPlans, space_kind: str, *, edges: str) -> HardPlans:
    """Change strategies as in the space `space_kind`, boundaries as in `edges`, and the outer choice."""
    change = {"uniform": _whole, "stagewise": _per_stage, "layerwise": _every_run}[space_kind]
    strategies = change(table, plan)
    parts = [plan, strategies, *_edge_moves(table, plan, edges)]
    rest = (values.expand(table.num_outer, -1) for values in (plan.choices, plan.first_layers))
    return HardPlans.concatenate([*parts, HardPlans(torch.arange(table.num_outer), *rest)])


def _with_choices(plan: HardPlans, choices: Tensor) -> HardPlans:
    return HardPlans(
        plan.outer.expand(len(choices)), choices, plan.first_layers.expand(len(choices), -1)
    )


def _whole(table: CostTable, plan: HardPlans) -> HardPlans:
    return _with_choices(
        plan, torch.arange(len(table.choices)).unsqueeze(1).expand(-1, table.num_layers)
    )


def _per_stage(table: CostTable, plan: HardPlans) -> HardPlans:
    """Return every stage, and every pair of neighbouring edges' stages, with every strategy."""
    stages = plan.stages()[0]
    masks = torch.stack([stages == k for k in range(table.num_stages)])
    tails = torch.stack([stages >= k for k in range(table.num_stages)])
    return _with_choices(plan, _replace(table, plan, torch.cat([masks, tails])))


def _runs(table: CostTable, plan: HardPlans) -> NDArray[np.int64]:
    """Return every run of layers inside a stage: its first layer and the one after its last, `(N, 2)`.

    Where that is too many, only single layers, pairs, and runs at either end of a stage.
    """
    starts = plan.first_layers[0].tolist()
    stages = pairwise([*starts, table.num_layers])
    spans = [np.add(np.triu_indices(end - first), [[first], [first + 1]]) for first, end in stages]
    runs = np.concatenate(spans, axis=1).T
    if len(runs) * len(table.choices) > MOST_RUNS:
        ends = [*starts, table.num_layers]
        at_end = np.isin(runs[:, 0], ends) | np.isin(runs[:, 1], ends)
        runs = runs[(runs[:, 1] - runs[:, 0] <= 2) | at_end]
    return np.ascontiguousarray(runs)


def _every_run(table: CostTable, plan: HardPlans) -> HardPlans:
    """Return every run of layers inside a stage, and the whole model, with every strategy."""
    runs, layers = torch.from_numpy(_runs(table, plan)), torch.arange(table.num_layers)
    runs = torch.cat([runs, torch.tensor([[0, table.num_layers]])])
    masks = (layers >= runs[:, :1]) & (layers < runs[:, 1:])
    return _with_choices(plan, _replace(table, plan, masks))


def _replace(table: CostTable, plan: HardPlans, masks: Tensor) -> Tensor:
    """Return choices with the layers of every mask `(N, L)` set to every strategy, `(N * C, L)`."""
    targets = torch.arange(len(table.choices)).view(1, -1, 1)
    replaced = torch.where(masks.unsqueeze(1), targets, plan.choices.view(1, 1, -1))
    return replaced.reshape(-1, table.num_layers)


def _edge_moves(table: CostTable, plan: HardPlans, space_kind: str) -> list[HardPlans]:
    """Return every range of neighbouring edges moved by one unit either way.

    Layers that change stage keep their strategy, or take that of their new stage.
    """
    starts = _edge_starts(table, plan)
    count = len(starts)
    if count == 0:
        return []
    kept = HardPlans(plan.outer.expand(count), plan.choices.expand(count, -1), starts)
    if space_kind == "uniform":
        return [kept]
    adopted = HardPlans(kept.outer, _adopt(plan, kept), starts)
    return [adopted] if space_kind == "stagewise" else [kept, adopted]


def _edge_starts(table: CostTable, plan: HardPlans) -> Tensor:
    """Return stage starts with a range of neighbouring edges moved by one unit, shape `(B, K)`.

    A range of edges moved together takes a unit from one stage and gives it to another. Where that makes more
    than `MOST_EDGE_MOVES` starts, only single edges are moved.
    """
    if table.num_stages == 1:
        return plan.first_layers[:0]
    units = unit_starts(table.fused_to_previous)
    position = torch.searchsorted(units, plan.first_layers[0].contiguous())
    inner = table.num_stages - 1
    first, last = torch.triu_indices(inner, inner)
    if 2 * len(first) > MOST_EDGE_MOVES:
        first = last = torch.arange(inner)
    order = torch.arange(inner)
    block = ((order >= first.unsqueeze(1)) & (order <= last.unsqueeze(1))).long()
    shifted = torch.cat([position[1:] + block, position[1:] - block])
    full = torch.cat([torch.zeros(len(shifted), 1, dtype=torch.long), shifted], dim=1)
    end = torch.full((len(full), 1), len(units))
    legal = (torch.cat([full, end], 1).diff(dim=1) > 0).all(1)
    return units[full[legal]]


def _adopt(plan: HardPlans, moved: HardPlans) -> Tensor:
    """Let every layer that changed stage take the choice that its new stage began or ended with."""
    old, new = plan.stages().expand(len(moved), -1), moved.stages()
    ends = torch.cat([plan.first_layers[0][1:], torch.tensor([plan.choices.shape[1]])]) - 1
    from_left = plan.choices[0][plan.first_layers[0][new]]
    from_right = plan.choices[0][ends[new]]
    adopted = torch.where(new > old, from_left, from_right)
    return torch.where(new == old, plan.choices.expand_as(new), adopted)
