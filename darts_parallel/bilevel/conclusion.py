"""The end of a bilevel search: the logits' own plan, the proven optimum of what was learned, and checks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

from darts_parallel.bilevel._candidates import Candidate
from darts_parallel.bilevel._log_slowdown import LogSlowdown
from darts_parallel.bilevel._relaxed_plans import JointPlan
from darts_parallel.bilevel.joint_space import (
    EXACT_BITS,
    Bits,
    JointSpace,
    at_batch,
    with_bits,
    with_fixed_bits,
)
from darts_parallel.bilevel.learned_optimum import find_learned_optimum
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.cost import LOSSLESS, CostTable
from darts_parallel.exact import Verification, find_layerwise_plan, find_uniform_plan
from darts_parallel.gradient import SearchResult, StepRecord, explain_infeasible
from darts_parallel.plan import Plan
from darts_parallel.problem import Problem


@dataclass(frozen=True)
class BilevelPlan:
    """A hard plan and its prices."""

    plan: Plan
    blocks: tuple[Candidate, ...]
    global_batch_size: int
    seconds: float
    """Predicted seconds a step."""
    log_slowdown: float = float("nan")
    """Learned, up to a constant that all plans share; not a number where nothing was learned of it."""

    @staticmethod
    def of(space: JointSpace, priced: JointPlan) -> "BilevelPlan":
        """Read a priced plan."""
        plan = space.to_plan(priced.table, priced.plans)
        batch = space.batch_of[priced.table]
        return BilevelPlan(plan, space.blocks_of(plan), batch, priced.seconds, priced.log_slowdown)

    def problem(self, problem: Problem) -> Problem:
        """Set the plan's global batch size."""
        return at_batch(problem, self.global_batch_size)


@dataclass(frozen=True)
class Conclusion:
    """Result of one search."""

    raw: BilevelPlan | None
    """The plan that the logits themselves round to; None where that does not fit the memory."""
    chosen: BilevelPlan
    """The better of the logits' own plan and the exact optimum of the learned objective."""
    proven: bool
    """Whether no plan of the space is better by the learned objective."""
    plans_evaluated: int
    prices: LogSlowdown
    seconds: float
    """Wall-clock seconds of the search, trials and exact optimum included."""
    stopped_by: str | None = None
    """`user` where Ctrl-C ended the search early."""

    @property
    def raw_gap(self) -> float | None:
        """How much longer the logits' own plan takes to the target than the chosen one, as a fraction."""
        if self.raw is None:
            return None
        a, b = self.raw, self.chosen
        return a.seconds / b.seconds * exp(a.log_slowdown - b.log_slowdown) - 1.0


def conclude(search: BilevelSearch, stopped_by: str | None = None) -> Conclusion:
    """Round the logits and solve the learned objective exactly; without any prices take 16 bits.

    Args:
        search: At its end, or where Ctrl-C stopped it.
        stopped_by: `user` after Ctrl-C.

    Errors:
        InfeasibleError: no plan of the space fits the memory.
    """
    space, prices, budget = search.space, search.log_slowdown, search.settings.exact_seconds
    raw, proven, evaluated = None, False, search.upper.evaluated
    plans: list[BilevelPlan] = []
    if search.priced:
        rounded = search.upper.best_plan(prices)
        optimum = find_learned_optimum(space, prices, budget)
        proven, evaluated = optimum.proven, search.upper.evaluated + optimum.plans_evaluated
        raw = None if rounded is None else BilevelPlan.of(space, rounded)
        found = [plan for plan in (optimum.plan, rounded) if plan is not None]
        plans = [BilevelPlan.of(space, min(found, key=lambda plan: plan.value))] if found else []
    else:
        exact = uniform_plan(search, LOSSLESS, LOSSLESS)
        plans = [] if exact is None else [exact]
    if not plans:
        raise explain_infeasible(search.problem, list(space.whole))
    seconds = time.perf_counter() - search.began
    return Conclusion(raw, plans[0], proven, evaluated, prices, seconds, stopped_by)


def uniform_plan(search: BilevelSearch, sums: int, sent: int) -> BilevelPlan | None:
    """Return the fastest plan whose blocks all send `sums` and `sent` bits; None where none fits."""
    settings = search.settings
    batch = min(settings.batches, key=lambda size: size != settings.global_batch_size)
    blocks = (Candidate(1, 1, sums, sent),) * settings.num_blocks
    return fixed_bits_optimum(search.space, blocks, batch, settings.exact_seconds)


def fixed_bits_optimum(
    space: JointSpace, blocks: Sequence[Candidate], batch: int, budget: float
) -> BilevelPlan | None:
    """Return the fastest plan of all whose blocks send the bits of the given ones; None where none fits.

    Args:
        space: Priced plans.
        blocks: Candidates with the bits; their degrees are free.
        batch: Global batch size.
        budget: Wall-clock seconds.
    """
    tables, bits = _at_fixed_bits(space, blocks, batch)
    best = find_layerwise_plan(tables, "layerwise", deadline=time.monotonic() + budget).best
    if best is None:
        return None
    number = space.of_batch(batch)[best.table]
    plan = space.canonicalized(with_bits(best.to_plan(tables), bits), number)
    return BilevelPlan(plan, space.blocks_of(plan), batch, best.time)


def _at_fixed_bits(
    space: JointSpace, blocks: Sequence[Candidate], batch: int
) -> tuple[list[CostTable], list[Bits]]:
    """Return the tables of a global batch size with the blocks' bits fixed, and the bits of all layers."""
    edges = [EXACT_BITS] * (space.num_layers - len(blocks) - 1)
    bits = [EXACT_BITS, *((block.tp_comm_bits, block.grad_comm_bits) for block in blocks), *edges]
    return [with_fixed_bits(space.whole[number], bits) for number in space.of_batch(batch)], bits


def verify(space: JointSpace, found: BilevelPlan, budget: float) -> list[Verification]:
    """Solve by exhaustive search and by dynamic programming over (dp, tp, pp, ...) at the plan's bits.

    Args:
        space: Priced plans.
        found: The plan that is verified.
        budget: Wall-clock seconds of each method.
    """
    entries, uniform = [], None
    tables, bits = _at_fixed_bits(space, found.blocks, found.global_batch_size)
    for name, kind in (("exhaustive", "uniform"), ("dynamic_programming", "layerwise")):
        began = time.monotonic()
        if kind == "uniform":
            answer = uniform = find_uniform_plan(tables, deadline=began + budget)
        else:
            answer = find_layerwise_plan(tables, kind, deadline=began + budget, uniform=uniform)
        result = answer.verification(tables, time.monotonic() - began, name, kind)
        plan = None if result.plan is None else with_bits(result.plan, bits)
        note = f"{result.note}, at the plan's bits" if result.note else "at the plan's bits"
        entries.append(replace(result, plan=plan, note=note).with_gap(found.seconds))
    return entries


def search_result(search: BilevelSearch, found: Conclusion, history: Sequence[StepRecord]) -> SearchResult:
    """Describe the search as `plan.json` and the report do.

    Args:
        search: At its end.
        found: What it concluded.
        history: Records of its logit steps.
    """
    raw, gap = found.raw or found.chosen, found.raw_gap
    words = (
        "the logits' own plan" if gap is not None and gap < 1e-9 else "the optimum of the learned objective"
    )
    why = f"{words}, least learned time to target" if search.priced else "nothing is known yet of few bits"
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
        plans_evaluated=found.plans_evaluated,
        stopped_by=found.stopped_by,
        method="bilevel",
        why=why,
    )
