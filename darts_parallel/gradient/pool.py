"""The best hard plans that a search has met."""

import math
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from operator import attrgetter

import torch
from torch import Tensor

from darts_parallel.cost import (
    BatchCost,
    CostTable,
    HardPlans,
    PricedPlan,
    canonical,
    evaluate_batch,
    filled,
    flatnonzero,
    float_tensor,
    table_reading,
)
from darts_parallel.exact import balanced_plans
from darts_parallel.gradient._stopwatch import Stopwatch
from darts_parallel.gradient.polishing import repartitioned
from darts_parallel.gradient.rounding import fill, fit, repair
from darts_parallel.gradient.screening import work_seconds
from darts_parallel.plans import Plan

SPLITS = 3
"""Other splits of a fitted plan that are tried, those of the fastest slowest stage."""
MOST_SECONDS = 1e300
"""Stands for an infinite time in differences."""

by_time = attrgetter("time")


class PlanPool:
    """Keep the best few distinct feasible plans of every pipeline configuration.

    Args:
        tables: The cost tables that candidates refer to.
        space_kind: Space of the plans; plans outside of it are not kept. Only layer-wise plans are
            repaired, and canonicalised when encoded.
        clock: Of the search; None begins now.
    """

    PER_OUTER = 4
    """Plans that are kept of every pipeline configuration."""
    MAX_REPAIRS = 2
    """Infeasible plans of every pipeline configuration that are repaired at a time."""
    AT_ONCE = 4
    """Plans of every pipeline configuration that are simulated at a time, most promising first."""
    OFFLOADING_AT_ONCE = 64
    """Plans at a time where each one searches shares in host memory first, all in one pass."""

    def __init__(
        self, tables: list[CostTable], space_kind: str, clock: Stopwatch | None = None
    ) -> None:
        self.tables = tables
        self.space_kind = space_kind
        self.evaluated = 0
        self.clock = clock or Stopwatch()
        self.entries: dict[tuple[int, int], list[PricedPlan]] = {}
        self.local_optima: dict[int, set[bytes]] = defaultdict(set)
        """Plans of simulated tables that no cheap move makes better."""
        self._seen: set[tuple[str, int, bytes]] = set()
        """Steps of fitting that some plans went through, by step, table and plan."""

    @property
    def best(self) -> PricedPlan | None:
        """Return the fastest feasible plan, or None."""
        firsts = [entries[0] for entries in self.entries.values()]
        return min(firsts, key=by_time, default=None)

    @property
    def best_time(self) -> float:
        """Return its seconds per iteration, `inf` without one."""
        return self.best.time if self.best else inf

    def add(
        self,
        number: int,
        plans: HardPlans,
        repair_score: Tensor | None = None,
        *,
        fitting: str = "repair",
    ) -> None:
        """Evaluate plans of a table and keep what is good.

        Args:
            repair_score: Repair priority, lower is better, `(B,)`; the best infeasible plans of every
                pipeline configuration are repaired. None keeps only plans that fit as they are.
            fitting: One of `config.search.FITTINGS`; what happens to the best plans besides repair.
        """
        table = self.tables[number]
        if repair_score is None and table.simulated:
            self._keep_promising(number, plans)
            return
        if repair_score is not None:
            new = self._new(f"added, {fitting}", number, plans, plans.choices)
            if not len(new):
                return
        cost = evaluate_batch(table, plans)
        self._keep(number, plans, cost)
        if repair_score is not None and self.space_kind == "layerwise":
            self._fit(number, plans, cost, repair_score, fitting)

    def _fit(
        self, number: int, plans: HardPlans, cost: BatchCost, repair_score: Tensor, fitting: str
    ) -> None:
        """Make the most promising plans fit; then use the memory that is left, as `fitting` says."""
        hopeless = cost.feasible | (cost.iteration_time >= self.best_time)
        lowest = _lowest(plans, repair_score, hopeless)
        repaired = self._new("repair", number, lowest, lowest.choices)
        if len(repaired):
            repaired, fitted = repair(self.tables[number], repaired, self.best_time)
            self._keep(number, repaired, fitted)
        if fitting == "repair":
            return
        parts = [repaired, _lowest(plans, cost.iteration_time, ~cost.feasible)]
        if fitting in ("prices", "splits"):
            promising = _lowest(plans, repair_score, torch.zeros_like(cost.feasible))
            priced = self._fit_prices(number, promising)
            parts.append(priced)
            if fitting == "splits" and self.tables[number].has_plain_stages:
                whole = self._new("splits", number, priced, priced.choices)
                split = [whole[:0]]
                for row in range(len(whole)):
                    split.append(repartitioned(self.tables[number], whole[row : row + 1], SPLITS))
                # strategies are selected again for the new stages
                parts.append(self._fit_prices(number, HardPlans.concatenate(split)))
        self._fill(number, HardPlans.concatenate(parts))

    def _fit_prices(self, number: int, plans: HardPlans) -> HardPlans:
        """Select strategies under a price of memory, for boundaries and layouts not seen before."""
        table = self.tables[number]
        return fit(table, self._new("prices", number, plans, table.layout[plans.choices]))

    def _fill(self, number: int, plans: HardPlans) -> None:
        """Spend memory that is left; keep the plans."""
        table = self.tables[number]
        plans = fill(table, self._new("fill", number, plans, plans.choices))
        if len(plans):
            self._keep(number, plans, evaluate_batch(table, plans))

    def add_balanced(self, number: int, outers: Sequence[int]) -> None:
        """Add plans of equally long devices for some configurations, repaired in layer-wise spaces."""
        balanced = balanced_plans(self.tables[number], outers)
        if balanced is not None:
            no_preference = filled(0.0, len(balanced))
            self.add(number, balanced, no_preference)

    def _new(self, step: str, number: int, plans: HardPlans, values: Tensor) -> HardPlans:
        """Return the plans that did not go through a step of fitting before.

        Plans of equal stages and equal `values` `(B, L)` count as the same.
        """
        columns = [plans.outer.unsqueeze(1), plans.first_layers, values]
        rows = []
        for row, features in enumerate(torch.cat(columns, dim=1).numpy()):
            key = (step, number, features.tobytes())
            if key not in self._seen:
                self._seen.add(key)
                rows.append(row)
        return plans[torch.tensor(rows, dtype=torch.long)]

    def _keep_promising(self, number: int, plans: HardPlans) -> None:
        """Keep the same plans as `_keep`, without simulating plans that do not fit or are too slow.

        No schedule is faster than the work of a device. So plans come in the order of this bound,
        until it exceeds the seconds of the plans that are kept of their pipeline configuration.
        """
        table = self.tables[number]
        reading = table_reading(table, plans)
        least = work_seconds(table, plans, reading)
        least = least.masked_fill(~reading.feasible, torch.inf)
        at_once = self.AT_ONCE if table.host is None else self.OFFLOADING_AT_ONCE
        waiting = {}
        for outer in _outers(plans):
            rows = flatnonzero(plans.outer == outer)
            waiting[outer] = rows[least[rows].argsort()]
        while waiting:
            chosen = []
            for outer in list(waiting):
                rows = waiting.pop(outer)
                rows = rows[least[rows] < self._slowest_kept(number, outer)]
                chosen.append(rows[:at_once])
                if len(rows) > at_once:
                    waiting[outer] = rows[at_once:]
            some = plans[torch.cat(chosen)]
            self._keep(number, some, evaluate_batch(table, some))

    def _slowest_kept(self, table: int, outer: int) -> float:
        """Return the seconds that a plan must beat to be kept; infinite where there is room."""
        kept = self.entries.get((table, outer), [])
        return kept[-1].time if len(kept) == self.PER_OUTER else inf

    def _keep(self, number: int, plans: HardPlans, cost: BatchCost) -> None:
        """Keep the fastest plans that fit and lie in the space."""
        self.evaluated += len(plans)
        allowed = cost.feasible & plans.within(self.space_kind)
        times = cost.iteration_time.masked_fill(~allowed, torch.inf)
        for outer in _outers(plans):
            kept = self.entries.get((number, outer), [])
            limit = self._slowest_kept(number, outer)
            rows = flatnonzero(plans.outer == outer)
            fastest = times[rows].argsort(stable=True)[: self.PER_OUTER]
            for row in rows[fastest].tolist():
                seconds = float(times[row])
                if seconds < limit and all(seconds != entry.time for entry in kept):
                    kept = [*kept, PricedPlan(number, plans[row : row + 1], seconds)]
            if kept:
                self.entries[number, outer] = sorted(kept, key=by_time)[: self.PER_OUTER]

    def gap_to_best(self, table: int, outers: Tensor) -> Tensor:
        """Return log-seconds of configurations' fastest plans above the best; infinite without one."""
        times = []
        for outer in outers.tolist():
            entries = self.entries.get((table, outer))
            times.append(entries[0].time if entries else inf)
        # without any plan at all the best of all is infinite, too
        best = math.log(min(self.best_time, MOST_SECONDS))
        fastest = float_tensor(times)
        return fastest.log() - best

    def top(self, count: int) -> list[PricedPlan]:
        """Return the fastest entries, at most two of a configuration so that several are tried."""
        everything = [entry for entries in self.entries.values() for entry in entries[:2]]
        return sorted(everything, key=by_time)[:count]

    def by_outer(self) -> list[PricedPlan]:
        """Return the fastest entry of every pipeline configuration, fastest first."""
        fastest = [entries[0] for entries in self.entries.values()]
        return sorted(fastest, key=by_time)

    def plan(self, entry: PricedPlan) -> Plan:
        """Read an entry as stages and strategies."""
        table = self.tables[entry.table]
        plan = canonical(table, entry.plan) if self.space_kind == "layerwise" else entry.plan
        return plan.to_plan(0, table)


def _outers(plans: HardPlans) -> list[int]:
    """List the pipeline configurations of plans."""
    return sorted(set(plans.outer.tolist()))


def _lowest(plans: HardPlans, score: Tensor, barred: Tensor) -> HardPlans:
    """Return the `MAX_REPAIRS` plans of lowest finite score of every configuration, barred ones not.

    Args:
        score, barred: Shape `(B,)`.
    """
    rows: list[int] = []
    for outer in _outers(plans):
        others = plans.outer != outer
        masked = score.masked_fill(barred | others, torch.inf)
        lowest = masked.argsort(stable=True)[: PlanPool.MAX_REPAIRS]
        rows += [row for row in lowest.tolist() if masked[row] < torch.inf]
    return plans[torch.tensor(rows, dtype=torch.long)]
