"""The upper level: the main search's relaxed plans, with a price in steps next to the price in seconds.

The objective of a relaxed plan is `log(seconds per step) + log(steps to target)`: the surrogate of the cost
table, the augmented Lagrangian of memory, and the expectation of `LogSlowdown`, linear in the weights. Global
batch size, pipeline degree, micro-batches, degrees, ZeRO stage, recomputation and bits are all chosen here.
"""

import time
from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from darts_parallel.bilevel.space import (
    FIRST_BLOCK,
    BatchPlan,
    Candidate,
    JointSpace,
    LogSlowdown,
)
from darts_parallel.config import SearchConfig
from darts_parallel.cost import filled, float_tensor
from darts_parallel.errors import Amounts
from darts_parallel.gradient import (
    BOUNDARY_RATE,
    Adam,
    LeadingPlan,
    RelaxedPlans,
    RestartBatch,
    Schedules,
    StepRecord,
    SurrogateCost,
    repair,
)


@dataclass(frozen=True)
class _PricedPlans:
    """Relaxed plans of all groups and their prices."""

    relaxed: list[RelaxedPlans]
    costs: list[SurrogateCost]
    steps: list[Tensor]
    """Expected log slowdown, each `(O, R)`."""
    merits: list[Tensor]
    """Ranks, lower is better, each `(O, R)`."""


@dataclass(frozen=True)
class Leader:
    """Names what the weights train with as the leading relaxed plan says."""

    batch: int
    """Global batch size."""
    candidates: tuple[Candidate, ...]
    weights: Tensor
    """Weights of the candidates in every block, `(blocks, C)`."""


class UpperLevel:
    """Logits of all batch sizes, pipeline configurations and restarts, moved by Adam as in the main search.

    Args:
        num_steps: Over which temperatures fall.
    """

    def __init__(
        self,
        space: JointSpace,
        config: SearchConfig,
        num_steps: int,
        generator: torch.Generator,
    ) -> None:
        self.space = space
        self.config = config
        self.num_steps = num_steps
        self.groups = []
        for index, table in enumerate(space.tables):
            if bool(table.allowed.any(1).all()):
                outers = torch.arange(table.num_outer)
                start = (table, "layerwise", config, generator, index, outers)
                self.groups.append(RestartBatch.initial(*start))
        self.owners = [group for group in self.groups for _ in group.names]
        """Group of every pipeline configuration."""
        self.outer_logits = filled(0.0, len(self.owners)).requires_grad_()
        rates = (config.learning_rate, BOUNDARY_RATE)
        parameters: list[tuple[Tensor, float]] = []
        for group in self.groups:
            parameters += zip(group.parameters, rates, strict=False)
        parameters.append((self.outer_logits, config.learning_rate))
        self.optimizer = Adam(parameters)
        self.step_number = 0
        self.began = time.perf_counter()

    def leader(self, prices: LogSlowdown) -> Leader:
        """Return what leads by seconds and prices in steps."""
        with torch.no_grad():
            lead = self._lead(self._priced(prices))
        rows = lead.weights.choices[lead.outer, lead.restart]
        inside = rows[FIRST_BLOCK : FIRST_BLOCK + self.space.num_blocks].detach()
        candidates = tuple(map(Candidate.of, lead.group.table.choices))
        return Leader(self.space.batches[lead.group.table_index], candidates, inside)

    def step(self, prices: LogSlowdown, *, move: bool = True) -> StepRecord:
        """Move all logits down the gradient, and update the memory multipliers; return what led before it.

        Args:
            move: False leaves the logits where they are.
        """
        self.optimizer.zero_grad()
        priced = self._priced(prices)
        total = float_tensor(0.0)
        for group, cost, steps in zip(self.groups, priced.costs, priced.steps, strict=True):
            total = total + (group.loss(cost, self.config) + steps).sum()
        leading = torch.cat([merit.amin(1) for merit in priced.merits])
        weights = torch.softmax(self.outer_logits, 0)
        (total + (weights * leading).sum()).backward()  # type: ignore[no-untyped-call]
        now = {"step": self.step_number, "schedules": self._schedules()}
        now["seconds"] = time.perf_counter() - self.began
        sums: Amounts = {}
        """Weights of pipeline configurations by pipeline degree, and by batch size."""
        for group, weight in zip(self.owners, weights.tolist(), strict=True):
            batch = self.space.batches[group.table_index]
            for name in (f"pp {group.table.pp}", f"batch {batch}"):
                sums[name] = sums.get(name, 0.0) + weight
        now["outer_weights"] = sums
        record = self._lead(priced).record(**now, best_time_s=nan)
        if move:
            self.optimizer.step()
        self.step_number += 1
        return record

    def rounded(self, prices: LogSlowdown, batch: int) -> BatchPlan | None:
        """Return the best plan of a global batch size that the relaxed plans round to; None: none fits."""
        with torch.no_grad():
            priced = self._priced(prices)
        best: BatchPlan | None = None
        for group, relaxed in zip(self.groups, priced.relaxed, strict=True):
            number = group.table_index
            if self.space.batches[number] != batch:
                continue
            plans = group.hard_plans(relaxed)
            fixed, _ = repair(self.space.tables[number], plans, inf)
            found = self.space.price(number, fixed, prices)
            if found is not None and (best is None or found.value < best.value):
                best = found
        return best

    def _lead(self, priced: _PricedPlans) -> LeadingPlan:
        return LeadingPlan.of(self.groups, priced.merits, priced.relaxed, priced.costs)

    def _schedules(self) -> Schedules:
        return Schedules.at(self.config, self.step_number, self.num_steps)

    def _priced(self, prices: LogSlowdown) -> _PricedPlans:
        """Relax and price all plans."""
        schedules = self._schedules()
        priced = _PricedPlans([], [], [], [])
        for group in self.groups:
            relaxed = group.relax(schedules)
            cost = group.price(relaxed, schedules.sharpness)
            steps = (relaxed.choices * prices.on_choices(group.table)).sum((-1, -2))
            steps = steps + prices.by_batch[self.space.batches[group.table_index]]
            priced.relaxed.append(relaxed)
            priced.costs.append(cost)
            priced.steps.append(steps)
            priced.merits.append(group.merit(cost) + steps.detach())
        return priced
