"""The relaxed plan that leads a step of the search, as curves and pictures show it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from darts_parallel.gradient.relaxation import Schedules
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, SurrogateCost
from darts_parallel.gradient.restarts import RestartBatch


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
    outer_weights: dict[str, float]
    pp: int
    choices: tuple[str, ...]
    probabilities: Tensor
    """Shape `(L, C)`."""
    rows: tuple[str, ...] = ()
    """Names of the rows of `probabilities`; none where they are the layers."""
    terms: dict[str, float] = field(default_factory=dict)
    """The surrogate's seconds per iteration by cause; they sum to `surrogate_time_s`."""


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
        """Return the one of the lowest merit; all sequences in the order of the groups, merits `(O, R)`."""
        lead = min(range(len(groups)), key=lambda index: float(merits[index].min()))
        outer, restart = divmod(int(merits[lead].argmin()), merits[lead].shape[1])
        least = float(merits[lead].min())
        return LeadingPlan(groups[lead], weights[lead], costs[lead], least, outer, restart)

    def record(
        self,
        *,
        step: int,
        seconds: float,
        schedules: Schedules,
        best_time_s: float,
        outer_weights: dict[str, float],
    ) -> StepRecord:
        """Return the state of the search at a step."""
        place, cost, table = (self.outer, self.restart), self.cost, self.group.table
        probabilities = self.weights.choices[place].detach()
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1).mean()
        return StepRecord(
            step=step,
            seconds=seconds,
            schedules=schedules,
            loss=self.merit,
            surrogate_time_s=float(cost.iteration_time[place].detach()),
            best_time_s=best_time_s,
            entropy=float(entropy),
            outer_weights=outer_weights,
            pp=table.pp,
            choices=tuple(choice.label() for choice in table.choices),
            probabilities=probabilities.clone(),
            terms=self._terms(),
        )

    def _terms(self) -> dict[str, float]:
        """Return seconds per iteration by cause; smooth maxima leave a little too much for the last."""
        place, cost = (self.outer, self.restart), self.cost
        stages = cost.stage_seconds[place].detach()
        terms = {
            "slowest_stage": float(self.group.table.num_micro_batches[self.outer] * stages.max()),
            "pipeline_bubble": float(stages.sum() - stages.max()),
            "gradient_sync_and_optimizer": float(cost.sync[place].detach()),
        }
        total = float(cost.iteration_time[place].detach())
        return terms | {"tied_embedding_sync_and_smoothing": total - sum(terms.values())}
