"""The end of a bilevel search: the logits' own plan, the proven optimum of what was learned, and checks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.upper.joint_space import (
    SYNCHRONOUS,
    JointSpace,
    at_batch,
    way_of,
    with_bits,
    with_fixed_bits,
)
from darts_parallel.bilevel.upper.learned_optimum import LearnedOptimum, learned_optimum
from darts_parallel.bilevel.upper.log_steps import LogSteps
from darts_parallel.bilevel.upper.relaxed_plans import JointPlan
from darts_parallel.exact.layerwise import solve
from darts_parallel.exact.result import TableResult
from darts_parallel.exact.uniform import solve_uniform
from darts_parallel.exact.verification import Verification
from darts_parallel.gradient.infeasibility import explain_infeasible
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem


@dataclass(frozen=True)
class BilevelPlan:
    """A discretized plan and what the search holds of it."""

    plan: Plan
    blocks: tuple[Candidate, ...]
    global_batch_size: int
    seconds: float
    """Predicted, per step."""
    log_steps: float
    """Learned, up to what all plans share."""

    @property
    def way(self) -> str:
        """Its pipeline schedule, as training feels it."""
        return way_of(self.plan)

    @staticmethod
    def of(space: JointSpace, priced: JointPlan) -> "BilevelPlan":
        """Read a priced plan."""
        plan = space.to_plan(priced.table, priced.plans)
        batch = space.batch_of[priced.table]
        return BilevelPlan(plan, space.blocks_of(plan), batch, priced.seconds, priced.log_steps)


@dataclass(frozen=True)
class BilevelFound:
    """The end of one search."""

    own: BilevelPlan | None
    """What the logits themselves round to; None where that does not fit the memory."""
    chosen: BilevelPlan
    """The better of the logits' own plan and the exact optimum of the learned objective."""
    optimum: LearnedOptimum
    log_steps: LogSteps
    seconds: float
    """Wall-clock of the search, trials and exact optimum included."""

    @property
    def own_gap(self) -> float | None:
        """How much longer the logits' own plan takes to the target than the chosen one, as a fraction."""
        if self.own is None:
            return None
        a, b = self.own, self.chosen
        return a.seconds / b.seconds * exp(a.log_steps - b.log_steps) - 1.0


def conclude(search: BilevelSearch) -> BilevelFound:
    """Round the logits and solve the learned objective exactly.

    Errors:
        InfeasibleError: no plan of the space fits the memory.
    """
    space, known = search.space, search.log_steps
    own = search.upper.best_plan(known)
    optimum = learned_optimum(space, known, search.settings.exact_seconds)
    plans = [plan for plan in (optimum.plan, own) if plan is not None]
    if not plans:
        raise explain_infeasible(search.problem, list(space.whole))
    chosen = min(plans, key=lambda plan: plan.value)
    return BilevelFound(
        own=None if own is None else BilevelPlan.of(space, own),
        chosen=BilevelPlan.of(space, chosen),
        optimum=optimum,
        log_steps=known,
        seconds=time.perf_counter() - search.began,
    )


def fixed_bits_optimum(
    space: JointSpace, blocks: Sequence[Candidate], batch: int, budget: float
) -> BilevelPlan | None:
    """The fastest plan of all whose blocks send the bits of the given ones; None where none fits.

    Args:
        space: Priced plans.
        blocks: Whose bits are meant; their degrees are free.
        batch: Global batch size.
        budget: Seconds of wall-clock.
    """
    answer, numbers, bits = _solve_fixed(space, blocks, batch, budget, uniform=False)
    if answer.best is None:
        return None
    table = numbers[answer.best.table]
    own = [with_fixed_bits(space.whole[number], bits) for number in numbers]
    plan = space.tidied(with_bits(answer.best.to_plan(own), bits), table)
    return BilevelPlan(plan, space.blocks_of(plan), batch, answer.best.time, float("nan"))


def _solve_fixed(
    space: JointSpace,
    blocks: Sequence[Candidate],
    batch: int,
    budget: float,
    *,
    uniform: bool,
    way: str = SYNCHRONOUS,
) -> tuple[TableResult, list[int], list[tuple[int, int]]]:
    """An exact planner's answer with all bits fixed, the numbers of its tables, and the bits by layer."""
    numbers = space.of_batch(batch, way)
    edges = [(16, 16)] * (space.num_layers - len(blocks) - 1)
    bits = [(16, 16), *((c.tp_comm_bits, c.grad_comm_bits) for c in blocks), *edges]
    tables = [with_fixed_bits(space.whole[number], bits) for number in numbers]
    deadline = time.monotonic() + budget
    if uniform:
        return solve_uniform(tables, deadline=deadline), numbers, bits
    return solve(tables, "layerwise", deadline=deadline), numbers, bits


def verify(space: JointSpace, found: BilevelPlan, budget: float) -> list[Verification]:
    """Exhaustive and dynamic programming over (dp, tp, pp, micro-batches, ZeRO, ...) at the plan's bits.

    Args:
        space: Priced plans.
        found: The plan that is verified.
        budget: Seconds of wall-clock of each.
    """
    entries = []
    for name, kind in (("exhaustive", "uniform"), ("dynamic_programming", "layerwise")):
        began = time.monotonic()
        answer, numbers, bits = _solve_fixed(
            space, found.blocks, found.global_batch_size, budget, uniform=kind == "uniform", way=found.way
        )
        tables = [with_fixed_bits(space.whole[number], bits) for number in numbers]
        result = answer.to_baseline(tables, time.monotonic() - began)
        plan = None if result.plan is None else with_bits(result.plan, bits)
        note = f"{result.note}, at the plan's bits" if result.note else "at the plan's bits"
        entries.append(Verification.of(name, kind, replace(result, plan=plan, note=note), found.seconds))
    return entries


def search_result(search: BilevelSearch, found: BilevelFound, history: Sequence[StepRecord]) -> SearchResult:
    """The search as `plan.json` and the report know searches.

    Args:
        search: At its end.
        found: What it concluded.
        history: Records of its logit steps.
    """
    raw = found.own or found.chosen
    gap = found.own_gap
    words = (
        "the logits' own plan" if gap is not None and gap < 1e-9 else "the optimum of the learned objective"
    )
    return SearchResult(
        plan=found.chosen.plan,
        iteration_time_s=found.chosen.seconds,
        raw_plan=raw.plan,
        raw_iteration_time_s=raw.seconds,
        alternatives=(),
        history=tuple(history),
        seconds=found.seconds,
        steps=search.trainer.step,
        restarts=search.settings.num_restarts,
        seed=search.settings.seed,
        plans_evaluated=search.upper.evaluated + found.optimum.plans_evaluated,
        method="bilevel",
        why=f"{words}, least learned time to target",
    )


def plan_problem(problem: Problem, plan: BilevelPlan) -> Problem:
    """The problem at the plan's global batch size."""
    return at_batch(problem, plan.global_batch_size)
