"""The upper level: the main search's relaxed plans, with a price in steps next to the price in seconds.

The objective of a relaxed plan is `log(seconds per step) + log(steps to target)`: the surrogate of the cost
table, the augmented Lagrangian of memory, and the expectation of `LogSlowdown`, linear in the weights.
Pipeline degree, micro-batches, degrees, ZeRO stage, recomputation and bits are all chosen here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from darts_parallel.bilevel.joint_space import FIRST_BLOCK, Candidate, JointSpace, LogSlowdown
from darts_parallel.config import SearchConfig
from darts_parallel.cost import HardPlans, evaluate_batch
from darts_parallel.gradient import (
    Adam,
    LeadingPlan,
    RelaxedPlans,
    RestartBatch,
    Schedules,
    StepRecord,
    SurrogateCost,
    repair,
    surrogate,
)

MAX_REPAIRS = 2
"""Infeasible plans of a table that are repaired after a step."""
LAYER_LOGITS = "layerwise"


@dataclass(frozen=True)
class JointPlan:
    """A hard plan of the joint space and what it costs."""

    table: int
    plans: HardPlans
    """A batch of length 1, of the table of that number."""
    seconds: float
    """Predicted seconds a step."""
    log_slowdown: float

    @property
    def value(self) -> float:
        """The upper objective, `log(seconds) + log(steps)`; lower is better."""
        return log(self.seconds) + self.log_slowdown


@dataclass(frozen=True)
class UpperStep:
    """One step of the logits."""

    record: StepRecord
    """The leading relaxed plan, as the main search reports it."""
    log_slowdown: float
    """Expected log slowdown of the leading relaxed plan."""
    plan: JointPlan | None
    """The best hard plan that this step's relaxed plans round to; None where none fits the memory."""


class UpperLevel:
    """Logits of all outer choices and restarts, moved by Adam as in the main search."""

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
                start = (table, LAYER_LOGITS, config, generator, index, outers)
                self.groups.append(RestartBatch.initial(*start))
        names = [name for group in self.groups for name in self._names(group)]
        self.names = names
        self.outer_logits = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
        rates = (config.learning_rate, config.boundary_learning_rate)
        parameters: list[tuple[Tensor, float]] = []
        for group in self.groups:
            parameters += zip(group.parameters, rates, strict=False)
        parameters.append((self.outer_logits, config.learning_rate))
        self.optimizer = Adam(parameters)
        self.step_number = 0
        self.began = time.perf_counter()
        self.evaluated = 0

    def _names(self, group: RestartBatch) -> list[str]:
        if len(self.space.batches) == 1:
            return group.names
        batch = self.space.batch_of[group.table_index]
        return [f"{name} b{batch}" for name in group.names]

    def leading_weights(self, prices: LogSlowdown) -> tuple[tuple[Candidate, ...], Tensor]:
        """Return what the leading relaxed plan lets every block choose from.

        Args:
            prices: Prices in steps, which decide with the seconds what leads.

        Returns:
            Candidates C, and their weights in every block `(blocks, C)`.
        """
        with torch.no_grad():
            relaxed = self._relaxed()
            costs, _, merits = self._priced(prices, relaxed)
            lead = LeadingPlan.of(self.groups, merits, relaxed, costs)
        rows = lead.weights.choices[lead.outer, lead.restart]
        inside = rows[FIRST_BLOCK : FIRST_BLOCK + self.space.num_blocks].detach()
        return tuple(Candidate.of(choice) for choice in lead.group.table.choices), inside

    def step(self, prices: LogSlowdown) -> UpperStep:
        """Move all logits by one gradient step at the given prices in steps."""
        self.optimizer.zero_grad()
        relaxed = self._relaxed()
        costs, expected, merits = self._priced(prices, relaxed)
        total = torch.zeros((), dtype=torch.float64)
        for group, cost, steps in zip(self.groups, costs, expected, strict=True):
            total = total + (group.loss(cost, self.config) + steps).sum()
        leading = torch.cat([merit.amin(1) for merit in merits])
        weights = torch.softmax(self.outer_logits, 0)
        (total + (weights * leading).sum()).backward()  # type: ignore[no-untyped-call]
        lead = LeadingPlan.of(self.groups, merits, relaxed, costs)
        number = next(i for i, group in enumerate(self.groups) if group is lead.group)
        plan = self._round(relaxed, merits, prices)
        outer_weights = dict(zip(self.names, weights.tolist(), strict=True))
        spent = time.perf_counter() - self.began
        now: dict[str, Any] = {
            "step": self.step_number,
            "seconds": spent,
            "schedules": self._schedules(),
        }
        best = plan.seconds if plan else float("nan")
        record = lead.record(**now, best_time_s=best, outer_weights=outer_weights)
        self.optimizer.step()
        self.step_number += 1
        log_slowdown = float(expected[number][lead.outer, lead.restart].detach())
        return UpperStep(record, log_slowdown, plan)

    def best_plan(self, prices: LogSlowdown) -> JointPlan | None:
        """Return the best hard plan that the present relaxed plans round to."""
        with torch.no_grad():
            relaxed = self._relaxed()
            _, _, merits = self._priced(prices, relaxed)
        return self._round(relaxed, merits, prices)

    def _relaxed(self) -> list[RelaxedPlans]:
        return [group.relax(self._schedules(), None) for group in self.groups]

    def _schedules(self) -> Schedules:
        return Schedules.at(self.config, self.step_number, self.num_steps)

    def _priced(
        self, prices: LogSlowdown, relaxed: Sequence[RelaxedPlans]
    ) -> tuple[list[SurrogateCost], list[Tensor], list[Tensor]]:
        """Return seconds and bytes, expected log slowdown `(O, R)` and merit `(O, R)` of every group."""
        sharpness = self._schedules().sharpness
        costs = []
        expected = []
        merits = []
        for group, weights in zip(self.groups, relaxed, strict=True):
            cost = surrogate(weights, group.table, sharpness)
            by_layer = prices.on_choices(group.table.choices, group.table.num_layers, FIRST_BLOCK)
            steps = (weights.choices * by_layer).sum((-1, -2))
            steps = steps + prices.by_batch[self.space.batch_of[group.table_index]]
            costs.append(cost)
            expected.append(steps)
            merits.append(group.merit(cost) + steps.detach())
        return costs, expected, merits

    def _round(
        self,
        relaxed: Sequence[RelaxedPlans],
        merits: Sequence[Tensor],
        prices: LogSlowdown,
    ) -> JointPlan | None:
        """Return the best feasible plan of all roundings; promising ones that do not fit are repaired."""
        best: JointPlan | None = None
        for group, weights, merit in zip(self.groups, relaxed, merits, strict=True):
            candidate = group.hard_plans(weights)
            found = price_plans(self.space, candidate.table, candidate.plans, prices)
            self.evaluated += len(candidate.plans)
            if found is None:
                promising = candidate.plans[merit.flatten().argsort()[:MAX_REPAIRS]]
                fixed, _ = repair(self.space.tables[candidate.table], promising, float("inf"))
                found = price_plans(self.space, candidate.table, fixed, prices)
            if found is not None and (best is None or found.value < best.value):
                best = found
        return best


def price_plans(
    space: JointSpace,
    table: int,
    plans: HardPlans,
    prices: LogSlowdown,
) -> JointPlan | None:
    """Return the best of some hard plans by the upper objective; None where none fits the memory.

    Args:
        plans: B plans.
    """
    own = space.tables[table]
    cost = evaluate_batch(own, plans)
    by_layer = prices.on_choices(own.choices, own.num_layers, FIRST_BLOCK)
    steps = by_layer[torch.arange(own.num_layers), plans.choices].sum(1)
    steps = steps + prices.by_batch[space.batch_of[table]]
    value = (cost.iteration_time.log() + steps).masked_fill(~cost.feasible, torch.inf)
    index = int(value.argmin())
    if not bool(cost.feasible[index]):
        return None
    seconds = float(cost.iteration_time[index])
    return JointPlan(table, plans[index : index + 1], seconds, float(steps[index]))
