"""Records of a search: one of its steps, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from darts_parallel.errors import Amounts
from darts_parallel.gradient.relaxation import Schedules
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, SurrogateCost
from darts_parallel.gradient.restarts import RestartBatch
from darts_parallel.plans import Plan, counted


@dataclass(frozen=True)
class StepRecord:
    """Record one step of the search; tensors belong to the leading relaxed plan."""

    step: int
    seconds: float
    schedules: Schedules
    loss: float
    surrogate_time_s: float
    best_time_s: float
    entropy: float
    outer_weights: Amounts
    pp: int
    choices: tuple[str, ...]
    probabilities: Tensor
    """Shape `(L, C)`."""
    rows: tuple[str, ...] = ()
    """Names of the rows of `probabilities`; none where they are the layers."""
    memory_violation: float = 0.0
    """Memory of the fullest stage above its capacity, relative to it; 0 where the plan fits."""
    terms: Amounts = field(default_factory=dict)
    """The surrogate's seconds per iteration by cause; they sum to `surrogate_time_s`."""


@dataclass(frozen=True)
class PlanStage:
    """A plan on the way from the relaxed one to the one that is chosen."""

    name: str
    """`relaxed`: mean weights over the last third of the steps, rounded, of the restart whose rounded
    plan is best; `repaired`: made to fit by the cheapest exchanges; `fitted`:
    strategies and stage boundaries chosen again; `polished`; `chosen`."""
    iteration_time_s: float
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """The best plan, the descent's own plan, and how the search went."""

    plan: Plan
    iteration_time_s: float
    raw_iteration_time_s: float
    """Seconds per iteration of the winning restart's repaired plan; infinite where it does not fit."""
    alternatives: tuple[tuple[float, Plan], ...] = field(default=(), repr=False)
    """Best plan of every other pipeline configuration that was visited, fastest first."""
    history: tuple[StepRecord, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    steps: int = 0
    restarts: int = 0
    seed: int = 0
    plans_evaluated: int = 0
    stopped_by: str | None = None
    """`user` (Ctrl-C) or `time_limit` where the search ended early; None where it completed."""
    method: str = "gradient"
    """Method that found the plan: `gradient`, or an exact one."""
    gradient_iteration_time_s: float | None = None
    """Seconds per iteration of the gradient search's own polished plan; None without a descent."""
    why: str = ""
    """Reason for the method, one clause; empty where the user asked for it."""
    stages: tuple[PlanStage, ...] = ()
    """The plans of a descent but the chosen one, in the order in which they were made."""

    def __str__(self) -> str:
        """Return seconds and plan in one line; equal layers are counted."""
        passes = f"pp {self.plan.pp} · {self.plan.num_micro_batches} micro-batches"
        return f"{self.iteration_time_s:.4g} s · {passes} · {counted(self.plan.layers)}"


@dataclass(frozen=True)
class LeadingPlan:
    """Point to one of the relaxed plans of a group."""

    group: RestartBatch
    weights: RelaxedPlans
    cost: SurrogateCost
    merit: float
    outer: int
    restart: int

    @staticmethod
    def of(
        groups: Sequence[RestartBatch],
        merits: Sequence[Tensor],
        weights: Sequence[RelaxedPlans],
        costs: Sequence[SurrogateCost],
    ) -> "LeadingPlan":
        """Return the plan of the lowest merit; all sequences follow the groups, merits `(O, R)`."""
        least = [float(merit.min()) for merit in merits]
        merit = min(least)
        lead = least.index(merit)
        restarts = merits[lead].shape[1]
        place = divmod(int(merits[lead].argmin()), restarts)
        return LeadingPlan(groups[lead], weights[lead], costs[lead], merit, *place)

    def record(self, **now: Any) -> StepRecord:
        """Return the state of the search at a step; `now` holds the fields that the loop alone knows."""
        probabilities = self.weights.choices[self.outer, self.restart].detach()
        memory = self.cost.memory[self.outer, self.restart].detach()
        fullest = float((memory / self.cost.capacity).max())
        entropy = float(torch.special.entr(probabilities).sum(-1).mean())
        now |= {"loss": self.merit, "entropy": entropy, "terms": self._terms()}
        table = self.group.table
        now |= {"pp": table.pp, "choices": tuple(choice.label() for choice in table.choices)}
        return StepRecord(
            **now,
            surrogate_time_s=self._value(self.cost.iteration_time),
            memory_violation=max(fullest - 1.0, 0.0),
            probabilities=probabilities.clone(),
        )

    def _value(self, values: Tensor) -> float:
        """Read the plan's entry of values `(O, R)`."""
        return float(values[self.outer, self.restart].detach())

    def _terms(self) -> Amounts:
        """Return seconds per iteration by cause; the last one takes what smoothing adds."""
        cost = self.cost
        stages = cost.stage_seconds[self.outer, self.restart].detach()
        slowest = float(stages.max())
        count = float(self.group.table.num_micro_batches[self.outer])
        terms = {
            "slowest_stage": count * slowest,
            "pipeline_bubble": float(stages.sum()) - slowest,
            "gradient_sync_and_optimizer": self._value(cost.sync),
        }
        rest = self._value(cost.iteration_time) - sum(terms.values())
        return terms | {"tied_embedding_sync_and_smoothing": rest}
