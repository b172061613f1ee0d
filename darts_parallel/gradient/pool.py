"""The best hard plans that a search has met."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from darts_parallel.cost import (
    BatchCost,
    CostTable,
    HardPlans,
    PricedPlan,
    canonical,
    evaluate_batch,
    table_reading,
)
from darts_parallel.exact import balanced_plans
from darts_parallel.gradient._stopwatch import Stopwatch
from darts_parallel.gradient.rounding import fill, fit, repair
from darts_parallel.gradient.screening import work_seconds
from darts_parallel.gradient.stage_moves import repartitioned
from darts_parallel.plans import Plan


@dataclass(frozen=True)
class TablePlans:
    """Hold hard plans of one table."""

    table: int
    plans: HardPlans


SPLITS = 3
"""Other splits of a fitted plan that are tried, those of the fastest slowest stage."""
MOST_SECONDS = 1e300
"""Stands for an infinite time in differences."""


class PlanPool:
    """Keep the best few distinct feasible plans of every outer choice.

    Args:
        tables: The cost tables that candidates refer to.
        space_kind: Space of the plans: no other one is kept, whoever made it. Only layer-wise ones are
            repaired, and canonicalized when they are put in words.
        clock: Of the search; None begins now.
    """

    PER_OUTER = 4
    """Plans that are kept of every outer choice."""
    MAX_REPAIRS = 2
    """Infeasible plans of every outer choice that are repaired at a time."""
    AT_ONCE = 4
    """Plans of every outer choice that are simulated at a time, where only the best are wanted."""

    def __init__(
        self, tables: list[CostTable], space_kind: str, clock: Stopwatch | None = None
    ) -> None:
        self.tables, self.space_kind = tables, space_kind
        self.evaluated = 0
        self.clock = Stopwatch() if clock is None else clock
        self.curve: list[tuple[float, float]] = []
        """Seconds of the search and iteration time of every improvement of the best plan."""
        self.entries: dict[tuple[int, int], list[PricedPlan]] = {}
        self.local_optima: dict[int, set[bytes]] = defaultdict(set)
        """Plans of simulated tables that no cheap move makes better."""
        self._fitted: set[tuple[str, int, bytes]] = set()

    @property
    def best(self) -> PricedPlan | None:
        """Return the fastest feasible plan, or None."""
        firsts = [entries[0] for entries in self.entries.values()]
        return min(firsts, key=lambda entry: entry.time, default=None)

    @property
    def best_time(self) -> float:
        """Return its seconds per iteration, `inf` without one."""
        return self.best.time if self.best else float("inf")

    def add_all(self, candidates: Iterable[TablePlans]) -> None:
        """Evaluate and keep what is good."""
        for candidate in candidates:
            self.add(candidate)

    def add(
        self,
        candidate: TablePlans,
        repair_score: torch.Tensor | None = None,
        *,
        fitting: str = "repair",
    ) -> None:
        """Evaluate plans and keep what is good.

        Args:
            repair_score: How unpromising each plan is, shape `(B,)`; the best infeasible ones of every
                outer choice are then repaired. None keeps only plans that fit as they are.
            fitting: One of `config.search.FITTINGS`; what happens to the best plans besides repair.
        """
        table, plans = self.tables[candidate.table], candidate.plans
        if repair_score is None and table.pipeline.simulated:
            self._keep_promising(candidate.table, plans)
            return
        known = f"added, {fitting}"
        if repair_score is not None and not len(
            self._new(known, candidate.table, plans, plans.choices)
        ):
            return
        cost = evaluate_batch(table, plans)
        self._keep(candidate.table, plans, cost)
        if repair_score is None or self.space_kind != "layerwise":
            return
        each = [plans.outer == outer for outer in sorted(set(plans.outer.tolist()))]

        def best(score: torch.Tensor, barred: torch.Tensor) -> HardPlans:
            masked = score.masked_fill(barred, torch.inf)
            rows = [row for mine in each for row in _lowest(masked, mine, self.MAX_REPAIRS)]
            return plans[torch.tensor(rows, dtype=torch.long)]

        found = best(repair_score, cost.feasible | (cost.iteration_time >= self.best_time))
        found = self._new("repair", candidate.table, found, found.choices)
        if len(found):
            found, own = repair(table, found, self.best_time)
            self._keep(candidate.table, found, own)
        if fitting == "repair":
            return
        parts = [found, best(cost.iteration_time, ~cost.feasible)]
        if fitting in ("prices", "splits"):
            promising = best(repair_score, torch.zeros_like(cost.feasible))
            new = self._new("prices", candidate.table, promising, table.layout[promising.choices])
            parts.append(fit(table, new))
            if fitting == "splits" and table.has_plain_stages:
                whole = self._new("splits", candidate.table, parts[-1], parts[-1].choices)
                split = [
                    repartitioned(table, whole[row : row + 1], SPLITS) for row in range(len(whole))
                ]
                moved = HardPlans.concatenate([whole[:0], *split])
                moved = self._new("prices", candidate.table, moved, table.layout[moved.choices])
                parts.append(fit(table, moved))
        found = HardPlans.concatenate(parts)
        found = fill(table, self._new("fill", candidate.table, found, found.choices))
        if len(found):
            self._keep(candidate.table, found, evaluate_batch(table, found))

    def add_balanced(self, table: int, outers: Sequence[int]) -> None:
        """Add plans of equally long devices for some outer choices, repaired where the space allows it."""
        balanced = balanced_plans(self.tables[table], outers)
        if balanced is not None:  # every outer choice deserves a plan
            self.add(TablePlans(table, balanced), torch.zeros(len(balanced), dtype=torch.float64))

    def _new(self, fitting: str, table: int, plans: HardPlans, values: torch.Tensor) -> HardPlans:
        """Return the plans that were not fitted before: equal edges and equal `values` `(B, L)` fit alike."""
        numbers = torch.cat([plans.outer.unsqueeze(1), plans.first_layers, values], dim=1).numpy()
        rows = []
        for row, own in enumerate(numbers):
            key = (fitting, table, own.tobytes())
            if key not in self._fitted:
                self._fitted.add(key)
                rows.append(row)
        return plans[torch.tensor(rows, dtype=torch.long)]

    def _keep_promising(self, number: int, plans: HardPlans) -> None:
        """Keep the same plans as `_keep`, without simulating those that fit not or are too slow for sure.

        No schedule is faster than the work of a device: plans come in its order, until it exceeds the
        seconds of those that are kept of their outer choice.
        """
        table, reading = self.tables[number], table_reading(self.tables[number], plans)
        least = work_seconds(table, plans, reading).masked_fill(~reading.feasible, torch.inf)
        each = {outer: plans.outer == outer for outer in sorted(set(plans.outer.tolist()))}
        left = {
            outer: torch.nonzero(own).flatten()[least[own].argsort()] for outer, own in each.items()
        }
        while left:
            now = []
            for outer, rows in list(left.items()):
                kept = self.entries.get((number, outer), [])
                worst = kept[-1].time if len(kept) == self.PER_OUTER else float("inf")
                rows = rows[least[rows] < worst]
                now.append(rows[: self.AT_ONCE])
                left[outer] = rows[self.AT_ONCE :]
                if not len(left[outer]):
                    del left[outer]
            some = plans[torch.cat(now)]
            self._keep(number, some, evaluate_batch(table, some))

    def _keep(self, table: int, plans: HardPlans, cost: BatchCost) -> None:
        self.evaluated += len(plans)
        kept_out = ~(cost.feasible & plans.within(self.space_kind))
        times = cost.iteration_time.masked_fill(kept_out, torch.inf)
        for outer in sorted(set(plans.outer.tolist())):
            mine = torch.nonzero(plans.outer == outer).squeeze(1)
            mine = mine[times[mine].argsort(stable=True)[: self.PER_OUTER]]
            kept = self.entries.get((table, outer), [])
            worst = kept[-1].time if len(kept) == self.PER_OUTER else float("inf")
            for index in mine.tolist():
                value = float(times[index])
                if value >= worst or value == float("inf"):
                    break
                if all(value != entry.time for entry in kept):
                    kept = [*kept, PricedPlan(table, plans[index : index + 1], value)]
            if kept:
                self.entries[(table, outer)] = sorted(kept, key=lambda entry: entry.time)[
                    : self.PER_OUTER
                ]
        if self.best_time < (self.curve[-1][1] if self.curve else float("inf")):
            self.curve.append((self.clock.seconds, self.best_time))

    def gap_to_best(self, table: int, outers: torch.Tensor) -> torch.Tensor:
        """Return log-seconds of outer choices' fastest plans above the best, `(O,)`; infinite without."""
        kept = [self.entries.get((table, outer)) for outer in outers.tolist()]
        times = [entries[0].time if entries else float("inf") for entries in kept]
        # without any plan at all the best of all is infinite, too
        return torch.tensor(times, dtype=torch.float64).log() - math.log(
            min(self.best_time, MOST_SECONDS)
        )

    def top(self, count: int) -> list[PricedPlan]:
        """Return the fastest entries, at most two of an outer choice so that several are tried."""
        everything = [entry for entries in self.entries.values() for entry in entries[:2]]
        return sorted(everything, key=lambda entry: entry.time)[:count]

    def by_outer(self) -> list[PricedPlan]:
        """Return the fastest entry of every outer choice, fastest first."""
        return sorted(
            (entries[0] for entries in self.entries.values()), key=lambda entry: entry.time
        )

    def plan(self, entry: PricedPlan) -> Plan:
        """Read an entry as stages and strategies."""
        table = self.tables[entry.table]
        plan = canonical(table, entry.plan) if self.space_kind == "layerwise" else entry.plan
        return plan.to_plan(0, table)


def _lowest(score: torch.Tensor, mask: torch.Tensor, count: int) -> list[int]:
    """Return indices of the `count` lowest finite scores under `mask`."""
    masked = score.masked_fill(~mask, torch.inf)
    order = masked.argsort(stable=True)[:count]
    return [i for i in order.tolist() if masked[i] < torch.inf]
