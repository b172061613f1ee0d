"""Stage fronts when all layers of a stage share one strategy."""

from collections.abc import Callable

import numpy as np

from baselines.budgets import Uses
from baselines.pareto import pareto
from baselines.stage_fronts import Front
from darts_parallel.bounds import Array, Index, OuterCosts


class StagewiseFronts:
    """Every strategy that fits is one row of a front; prefix sums give its cost."""

    def __init__(self, costs: OuterCosts, uses: Uses, check: Callable[[], None]) -> None:
        self.costs, self.uses, self._check = costs, uses, check
        own = costs.reshard[..., costs.layout, costs.layout]
        self._inside = _prefix(np.concatenate([np.zeros((len(own), 1, len(costs.layout))), own], axis=1))
        self._time, self._sync = _prefix(costs.time), _prefix(costs.sync)
        self._once = _prefix(costs.once)
        self._static, self._activation = _prefix(costs.static), _prefix(costs.activation)
        self.labels_made = 0
        _, self.of_stage = costs.stage_signatures()
        self._known: dict[tuple[int, int, int], Front | None] = {}

    def front(self, stage: int, first: int, end: int) -> Front | None:
        """Front of layers [first, end) on `stage`; None where no strategy fits."""
        key = (int(self.of_stage[stage]), first, end)
        if key not in self._known:
            self._check()
            self._known[key] = self._build(stage, first, end)
        return self._known[key]

    def strategies(self, stage: int, first: int, end: int, origin: int) -> list[int]:
        """Strategies, as numbers of the table, of the layers of one row of a front."""
        return [int(self.costs.choices[origin])] * (end - first)

    def _build(self, stage: int, first: int, end: int) -> Front | None:
        costs, kind = self.costs, self.costs.stage_kind[stage]
        kept = self._static[end] - self._static[first]
        kept = kept + costs.in_flight[stage] * (self._activation[end] - self._activation[first])
        peak = kept + costs.working[first:end].max(axis=0)
        # prefix sums round; a strategy that fits to the byte must not be lost
        fits: Index = np.flatnonzero((peak <= costs.capacity[stage] * (1 + 1e-12)) & costs.kind_allowed[kind])
        self.labels_made += len(peak)
        seconds = self._time[kind, end] - self._time[kind, first]
        seconds = seconds + self._inside[kind, end] - self._inside[kind, first + 1]
        once, sync = self._once[end] - self._once[first], self._sync[kind, end] - self._sync[kind, first]
        values = np.stack([seconds, once, sync], axis=1)[fits]
        # equal layouts are interchangeable at the boundaries, others are all kept
        rows = [group[pareto(values[group])] for y in np.unique(costs.layout[fits])
                if len(group := np.flatnonzero(costs.layout[fits] == y))]  # fmt: skip
        if not rows:
            return None
        chosen = np.sort(np.concatenate(rows))
        layout = costs.layout[fits[chosen]]
        return Front(values[chosen], layout, layout, fits[chosen])


def _prefix(values: Array) -> Array:
    """Prefix sums along the layers, the last but one axis, from 0."""
    zero = np.zeros((*values.shape[:-2], 1, values.shape[-1]))
    return np.concatenate([zero, np.cumsum(values, axis=-2)], axis=-2)
