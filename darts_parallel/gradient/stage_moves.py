"""Exact stage edges for given strategies: the smallest `sum + (m - 1) max` of stage seconds that fits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.chosen_stages import ChosenStages
from darts_parallel.gradient.stage_solver import StageSolver

LIMITS_ABOVE = 8
"""Limits above the smallest feasible one that are tried: a slower bottleneck may have a smaller sum."""


def repartitioned(table: CostTable, plan: HardPlans, most: int = LIMITS_ABOVE) -> HardPlans:
    """The plan with other edges: the best for its strategies under each of `most` limits of the stages.

    Synchronisation is left out of the program; the caller evaluates what comes back.
    """
    if table.pp == 1:
        return plan
    chosen = ChosenStages.of(table, plan)
    # all outer choices share the segments, and what they remember
    seconds = np.where(chosen.fits(), chosen.seconds(), np.inf)
    limits = list(islice(chosen.segments.rising_limits(seconds), most))
    if not limits:
        return plan
    starts = [starts for _, starts in chosen.segments.splits_below(seconds, limits)]
    count = len(starts)
    return HardPlans(plan.outer.expand(count), plan.choices.expand(count, -1), torch.tensor(starts))


CHAIN_LIMIT = 40_000
"""Layers x layouts^2 x strategies up to which a chain of all stages is solved."""
NEIGHBOUR_LIMIT = 120_000
"""The same up to which two neighbouring stages are."""
CHAIN_LABELS = 48
"""Partial chains of one layout that are kept."""


def resolved_stages(solver: StageSolver, plan: HardPlans) -> HardPlans:
    """The plan with each stage in turn solved anew."""
    table = solver.table
    bounds = [*plan.first_layers[0].tolist(), table.num_layers]
    rows = [row for k in range(table.pp) for row in _with_stage(solver, plan.choices[0].tolist(), bounds, k)]
    return _plans(plan, [plan.choices[0].tolist(), *rows], [bounds[:-1]] * (len(rows) + 1))


def resolved_neighbours(solver: StageSolver, plan: HardPlans) -> HardPlans:
    """The plan with every two neighbouring stages solved anew for every layout between them."""
    table = solver.table
    current, bounds = plan.choices[0].tolist(), [*plan.first_layers[0].tolist(), table.num_layers]
    rows = [current]
    if table.num_layouts > 1 and _size(solver) <= NEIGHBOUR_LIMIT:
        for stage in range(table.pp - 1):
            first, end = bounds[stage], bounds[stage + 1]
            before = int(solver.layout[current[first - 1]]) if first else -1
            for layout in range(table.num_layouts):
                for answer in solver.solve(stage, first, end, before, layout, weights=2):
                    changed = current[:first] + answer + current[end:]
                    rows.extend(_with_stage(solver, changed, bounds, stage + 1, weights=2))
    return _plans(plan, rows, [bounds[:-1]] * len(rows))


def resolved_edges(solver: StageSolver, plan: HardPlans, starts: torch.Tensor) -> HardPlans:
    """The plan with other stage starts, and every stage that this changes solved anew, in order.

    Args:
        starts: Shape `(B, K)`.
    """
    old = [*plan.first_layers[0].tolist(), solver.table.num_layers]
    rows, kept = [], []
    for new_starts in starts.tolist():
        bounds = [*new_starts, solver.table.num_layers]
        partial = [plan.choices[0].tolist()]
        for k in range(solver.table.pp):
            if (bounds[k], bounds[k + 1]) != (old[k], old[k + 1]):
                partial = [
                    row for choices in partial for row in _with_stage(solver, choices, bounds, k, weights=1)
                ]
        rows.extend(partial)
        kept.extend([new_starts] * len(partial))
    return _plans(plan, [plan.choices[0].tolist(), *rows], [old[:-1], *kept])


def _with_stage(
    solver: StageSolver, choices: list[int], bounds: list[int], stage: int, *, weights: int = 3
) -> list[list[int]]:
    first, end = bounds[stage], bounds[stage + 1]
    before = int(solver.layout[choices[first - 1]]) if first else -1
    after = int(solver.layout[choices[end]]) if end < len(choices) else -1
    answers = solver.solve(stage, first, end, before, after, weights=weights)
    return [choices[:first] + answer + choices[end:] for answer in answers]


def _plans(plan: HardPlans, choices: list[list[int]], starts: list[list[int]]) -> HardPlans:
    return HardPlans(plan.outer.expand(len(choices)), torch.tensor(choices), torch.tensor(starts))


@dataclass(frozen=True)
class _Chain:
    """Strategies of the first stages, and what the pipeline makes of their seconds."""

    choices: list[int]
    total: float
    slowest: float
    sync: float
    """Largest synchronisation of a stage."""

    def seconds(self, count: float) -> float:
        """Seconds per iteration if nothing followed."""
        return self.total + (count - 1) * self.slowest + self.sync


def resolved_chain(solver: StageSolver, plan: HardPlans) -> HardPlans:
    """The plan with all stages solved anew from first to last, for every layout between them.

    Partial chains are kept apart by the layout in which they end, and pruned by dominance in the
    sum and the maximum of stage seconds and the largest synchronisation. Only where the problem is
    small enough (`CHAIN_LIMIT`).
    """
    table = solver.table
    current, bounds = plan.choices[0].tolist(), [*plan.first_layers[0].tolist(), table.num_layers]
    if _size(solver) > CHAIN_LIMIT or table.num_layouts == 1:
        return plan
    count = float(table.num_micro_batches[solver.outer])
    chains = {-1: [_Chain([], 0.0, 0.0, 0.0)]}
    for stage in range(table.pp):
        grown: dict[int, list[_Chain]] = {}
        for before, partials in chains.items():
            for answer, seconds, sync in _answers(solver, plan, current, bounds, stage, before):
                for chain in partials:
                    slowest, largest = max(chain.slowest, seconds), max(chain.sync, sync)
                    longer = _Chain(chain.choices + answer, chain.total + seconds, slowest, largest)
                    grown.setdefault(int(solver.layout[answer[-1]]), []).append(longer)
        chains = {layout: _shortest(partials, count) for layout, partials in grown.items()}
    rows = [chain.choices for partials in chains.values() for chain in partials]
    return _plans(plan, [current, *rows], [bounds[:-1]] * (len(rows) + 1))


def _size(solver: StageSolver) -> int:
    table = solver.table
    return table.num_layers * table.num_layouts**2 * len(table.choices)


def _answers(
    solver: StageSolver, plan: HardPlans, current: list[int], bounds: list[int], stage: int, before: int
) -> Iterator[tuple[list[int], float, float]]:
    """Strategies of a stage behind the layout `before`, with its seconds and its synchronisation."""
    first, end = bounds[stage], bounds[stage + 1]
    answers = solver.solve_by_layout(stage, first, end, before)
    if not answers:
        return
    # any plan with these layers and a predecessor of the right layout shows the stage's seconds
    entry = int((solver.layout == before).argmax()) if first else 0
    head = current[:first] and [*current[: first - 1], entry]
    rows = [head + answer + current[end:] for answer in answers]
    cost = evaluate_batch(solver.table, _plans(plan, rows, [bounds[:-1]] * len(rows)))
    yield from zip(
        answers, cost.stage_seconds[:, stage].tolist(), cost.sync_seconds[:, stage].tolist(), strict=True
    )


def _shortest(chains: list[_Chain], count: float) -> list[_Chain]:
    """Chains that no other beats in all three figures; the fastest `CHAIN_LABELS` of them."""
    kept: list[_Chain] = []
    for chain in sorted(chains, key=lambda c: (c.total, c.slowest, c.sync)):
        if not any(k.slowest <= chain.slowest and k.sync <= chain.sync for k in kept):
            kept.append(chain)
    return sorted(kept, key=lambda chain: chain.seconds(count))[:CHAIN_LABELS]
