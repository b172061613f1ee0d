"""Exact strategies of one stage whose layers, memory and neighbours are given.

A label-setting program over the layers of the stage: labels are (weighted seconds, bytes) of a prefix,
kept apart by activation layout and pruned by dominance. The largest working memory of the stage is
taken care of by trying each of its possible values as a limit. Used to polish plans stage by stage.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import HardPlans
from darts_parallel.table import CostTable

Array = NDArray[np.float64]
MAX_LABELS = 96
"""Labels of one layout that are kept; thinned evenly in memory beyond that."""
MAX_LIMITS = 6
"""Values of the working memory that are tried."""


@dataclass(frozen=True)
class _Labels:
    """Prefixes of the stage: weighted seconds, bytes, layout, last choice, and the prefix before."""

    cost: Array
    memory: Array
    layout: NDArray[np.int64]
    choice: NDArray[np.int64]
    previous: NDArray[np.int64]


class StageSolver:
    """Solves stages of one outer choice of a table; answers are remembered."""

    def __init__(self, table: CostTable, outer: int) -> None:
        self.table, self.outer = table, outer
        self.time, self.sync = table.time[outer].numpy(), table.sync[outer].numpy()
        self.once = table.once[outer].numpy()
        self.reshard, self.p2p = table.reshard[outer].numpy(), table.p2p[outer].numpy()
        self.static, self.activation = table.static[outer].numpy(), table.activation[outer].numpy()
        self.working = table.working[outer].numpy()
        self.layout = table.layout.numpy()
        self.allowed = np.flatnonzero(table.allowed[outer].numpy())
        self.known: dict[tuple[int, ...], list[list[int]]] = {}

    def solve(self, stage: int, first: int, end: int, before: int, after: int) -> list[list[int]]:
        """Strategies of layers `first` to `end - 1` on `stage`, for several weights of its seconds.

        Args:
            before, after: Layouts of the neighbouring layers, -1 where there is none.

        Returns:
            Distinct candidates, each of `end - first` strategies; empty where none fits.
        """
        key = (stage, first, end, before, after)
        if key not in self.known:
            count = float(self.table.num_micro_batches[self.outer])
            found: dict[tuple[int, ...], None] = {}
            for weights in ((count, 1.0), (count, 0.0), (1.0, 1.0)):
                for limit in self._limits(stage, first, end):
                    answer = self._solve(key, limit, *weights)
                    if answer is not None:
                        found[tuple(answer)] = None
            self.known[key] = [list(choices) for choices in found]
        return self.known[key]

    def _limits(self, stage: int, first: int, end: int) -> list[float]:
        """Values that the largest working memory may take; the largest alone where all fits anyway."""
        working = self.working[first:end][:, self.allowed]
        flight = float(self.table.in_flight[self.outer, stage])
        kept = (self.static + flight * self.activation)[first:end][:, self.allowed]
        values = np.unique(working)
        values = values[values >= working.min(1).max()]
        if kept.max(1).sum() + values[-1] <= float(self.table.capacity[stage]):
            return [float(values[-1])]
        if len(values) > MAX_LIMITS:
            values = values[np.linspace(0, len(values) - 1, MAX_LIMITS).round().astype(int)]
        return [float(value) for value in values]

    def _solve(self, key: tuple[int, ...], limit: float, per_time: float, per_sync: float) -> list[int] | None:
        stage, first, end, before, after = key
        kind = int(self.table.stage_kind[stage])
        flight = float(self.table.in_flight[self.outer, stage])
        capacity = float(self.table.capacity[stage]) - limit
        trail: list[_Labels] = []
        labels = _Labels(np.zeros(1), np.zeros(1), np.full(1, before), np.zeros(1, int), np.zeros(1, int))
        for layer in range(first, end):
            choices = self.allowed[self.working[layer, self.allowed] <= limit]
            seconds = per_time * self.time[kind, layer, choices] + per_sync * self.sync[kind, layer, choices]
            seconds = seconds + self.once[layer, choices]
            change = self._change(stage, kind, layer, labels.layout, self.layout[choices], layer == first)
            cost = labels.cost[:, None] + seconds + per_time * change
            need = (self.static + flight * self.activation)[layer, choices]
            memory = labels.memory[:, None] + need
            labels = _prune(cost, memory, self.layout[choices], choices, capacity)
            if not len(labels.cost):
                return None
            trail.append(labels)
        final = labels.cost + per_time * self._leave(stage, end, labels.layout, after)
        return _trace(trail, int(final.argmin()))

    def _change(
        self, stage: int, kind: int, layer: int, held: NDArray[np.int64], wanted: NDArray[np.int64], entry: bool
    ) -> Array:
        """Seconds of resharding, or of p2p at the stage's entry, for labels x choices."""
        if layer == 0:
            return np.zeros((len(held), len(wanted)))
        if entry:
            border = int(self.table.boundary_kind[stage - 1])
            return np.asarray(self.p2p[border, layer - 1][held[:, None], wanted])
        return np.asarray(self.reshard[kind, layer - 1][held[:, None], wanted])

    def _leave(self, stage: int, end: int, held: NDArray[np.int64], after: int) -> Array:
        """Seconds of p2p into the next stage."""
        if after < 0:
            return np.zeros(len(held))
        border = int(self.table.boundary_kind[stage])
        return np.asarray(self.p2p[border, end - 1][held, after])


def _prune(
    cost: Array, memory: Array, layouts: NDArray[np.int64], choices: NDArray[np.int64], capacity: float
) -> _Labels:
    """Labels that fit and that no other of their layout beats in both seconds and bytes."""
    rows, columns = np.nonzero(memory <= capacity)
    costs, sizes, held = cost[rows, columns], memory[rows, columns], layouts[columns]
    kept = []
    for layout in np.unique(held):
        mine = np.flatnonzero(held == layout)
        mine = mine[np.lexsort((costs[mine], sizes[mine]))]
        best = np.minimum.accumulate(costs[mine])
        first = np.ones(len(mine), bool)
        first[1:] = costs[mine[1:]] < best[:-1]
        mine = mine[first]
        if len(mine) > MAX_LABELS:
            mine = mine[np.linspace(0, len(mine) - 1, MAX_LABELS).round().astype(int)]
        kept.append(mine)
    index = np.concatenate(kept) if kept else np.zeros(0, int)
    return _Labels(costs[index], sizes[index], held[index], choices[columns[index]], rows[index])


def _trace(trail: list[_Labels], last: int) -> list[int]:
    result = []
    for labels in reversed(trail):
        result.append(int(labels.choice[last]))
        last = int(labels.previous[last])
    return result[::-1]


def resolved_stages(solver: StageSolver, plan: HardPlans) -> HardPlans:
    """The plan with each stage in turn solved anew."""
    table = solver.table
    bounds = [*plan.starts[0].tolist(), table.num_layers]
    rows = [row for k in range(table.pp) for row in _with_stage(solver, plan.choices[0].tolist(), bounds, k)]
    return _plans(plan, [plan.choices[0].tolist(), *rows], [bounds[:-1]] * (len(rows) + 1))


def resolved_edges(solver: StageSolver, plan: HardPlans, starts: torch.Tensor) -> HardPlans:
    """The plan with other stage starts, and every stage that this changes solved anew, in order.

    Args:
        starts: Shape `(B, K)`.
    """
    old = [*plan.starts[0].tolist(), solver.table.num_layers]
    rows, kept = [], []
    for new_starts in starts.tolist():
        bounds = [*new_starts, solver.table.num_layers]
        partial = [plan.choices[0].tolist()]
        for k in range(solver.table.pp):
            if (bounds[k], bounds[k + 1]) != (old[k], old[k + 1]):
                partial = [row for choices in partial for row in _with_stage(solver, choices, bounds, k)[:1]]
        rows.extend(partial)
        kept.extend([new_starts] * len(partial))
    return _plans(plan, [plan.choices[0].tolist(), *rows], [old[:-1], *kept])


def _with_stage(solver: StageSolver, choices: list[int], bounds: list[int], stage: int) -> list[list[int]]:
    first, end = bounds[stage], bounds[stage + 1]
    before = int(solver.layout[choices[first - 1]]) if first else -1
    after = int(solver.layout[choices[end]]) if end < len(choices) else -1
    answers = solver.solve(stage, first, end, before, after)
    return [choices[:first] + answer + choices[end:] for answer in answers]


def _plans(plan: HardPlans, choices: list[list[int]], starts: list[list[int]]) -> HardPlans:
    return HardPlans(plan.outer.expand(len(choices)), torch.tensor(choices), torch.tensor(starts))
