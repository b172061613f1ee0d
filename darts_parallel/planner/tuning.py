"""Trials of a few plans: what they say of the others, and which to try next.

The plans of the uniform space, which every trainer runs, in the model's own order; a trial's seconds, memory
or failure comes back, and the expected seconds of all plans move by the rules of a Gaussian: one scale that
all plans of the job share (most of what a trial tells), the fitted quantities that the trial's time depends
on (maximum a posteriori, prior: the shipped posterior), and, where the structure of the model is wrong, a
residual over dp, tp, pp and micro-batch that near plans share. The order hardly changes; the seconds do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2

import torch
from torch import Tensor

from darts_parallel.cost import (
    CostBreakdown,
    CostTable,
    PricedPlan,
    build_tables,
    evaluate,
    even_uniform_plans,
)
from darts_parallel.errors import PlanError
from darts_parallel.exact import find_uniform_plan
from darts_parallel.gradient import PlanPool, TablePlans, repartitioned
from darts_parallel.planner.elasticities import time_elasticities
from darts_parallel.planner.uncertainty import (
    NORMAL,
    Posterior,
    out_of_memory,
    posterior,
    time_slopes,
)
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

CANDIDATES = 24
"""Plans of the model's order that trials may move; the first three suffice where its structure is right."""
REPEAT = 0.015
"""Standard deviation of the logarithm of a repeated measurement (1.0 % median difference of releases)."""
NEAR = 1.0
"""Distance in log2 of (dp, tp, pp, micro-batch) over which plans share what the model gets wrong."""


@dataclass(frozen=True)
class Trial:
    """A measurement of one plan."""

    name: str
    """Its file."""
    plan: Plan
    seconds: float | None
    """Per iteration; None: it ran out of memory."""
    memory_bytes: float | None = None
    """Peak bytes of the fullest device."""


@dataclass(frozen=True)
class Proposal:
    """A plan, and what is expected of it after the trials."""

    plan: Plan
    predicted_s: float
    """Seconds per iteration by the model alone."""
    expected_s: float
    interval_s: tuple[float, float]
    """80 %."""
    trials: int
    """How often it was tried."""
    chance: float | None
    """Probability that the job runs out of memory, after the peaks that trials measured; None: unknown."""


@dataclass(frozen=True)
class Tuning:
    """Knowledge after some trials."""

    proposals: tuple[Proposal, ...]
    """All candidates that are thought to fit, the fastest expected first."""
    scale: float
    """Geometric mean of measured over predicted seconds of the trials; 1 without one."""
    excluded: int
    """Candidates left out because trials say that they need too much memory."""

    def next(self, top: int) -> list[Proposal]:
        """Return the first plans that were not tried yet."""
        return [proposal for proposal in self.proposals if not proposal.trials][:top]


def tune(
    problem: Problem, first: Plan, trials: Sequence[Trial], others: Sequence[Plan] = ()
) -> Tuning:
    """Return the expected seconds of the best plans after some trials.

    Args:
        first: The plan that the search found; it is a candidate, uniform or not.
        trials: What was measured; none yet at the first call.
        others: Further candidates, of any space.

    Errors:
        PlanError: every candidate is left out by trials that ran out of memory.
    """
    plans = _candidates(problem, (first, *others), trials)
    costs = [evaluate(plan, problem) for plan in plans]
    tried = [[t for t in trials if t.plan == plan] for plan in plans]
    fits = _fitting(costs, tried)
    if not any(fits):
        raise PlanError(
            "tune.measured: every candidate needs at least the memory of a plan that ran out of it; try "
            "another space (space.recompute=null) or more devices."
        )
    mean, variance = _posterior_of(problem, plans, costs, tried)
    proposals, peaks = [], [(t.plan, t.memory_bytes) for t in trials if t.memory_bytes is not None]
    for i in range(len(plans)):
        if fits[i]:
            seconds, half = costs[i].iteration_time_s, exp(NORMAL * float(variance[i]) ** 0.5)
            middle = seconds * exp(mean[i])
            around, chance = (middle / half, middle * half), out_of_memory(plans[i], problem, peaks)
            proposals.append(Proposal(plans[i], seconds, middle, around, len(tried[i]), chance))
    ratios = [error for _, error in _errors(costs, tried)]
    scale = exp(sum(ratios) / len(ratios)) if ratios else 1.0
    ranked = tuple(sorted(proposals, key=lambda proposal: proposal.expected_s))
    return Tuning(ranked, scale, len(plans) - len(proposals))


def _candidates(problem: Problem, given: Sequence[Plan], trials: Sequence[Trial]) -> list[Plan]:
    """Return the best plans of the uniform space, those that were given, and all that were tried."""
    tables = build_tables(problem)
    if problem.config.cost.pipeline == "simulated" or any(table.host for table in tables):
        found = _cut_again(tables)
    else:
        found = find_uniform_plan(tables, count=CANDIDATES).alternatives
    return list(
        dict.fromkeys([*given, *(t.plan for t in trials), *(own.to_plan(tables) for own in found)])
    )


def _cut_again(tables: list[CostTable]) -> Sequence[PricedPlan]:
    """Return good uniform plans that no exact method ranks: even at first, the best of them cut again."""
    pool = PlanPool(tables, "uniform")
    pool.add_all(
        TablePlans(number, even_uniform_plans(table)) for number, table in enumerate(tables)
    )
    for entry in pool.top(CANDIDATES):
        pool.add(TablePlans(entry.table, repartitioned(tables[entry.table], entry.plan)))
    return pool.top(CANDIDATES)


def _fitting(costs: Sequence[CostBreakdown], tried: Sequence[Sequence[Trial]]) -> list[bool]:
    """Return which candidates are expected to fit: by the model, scaled by the bytes that trials measured.

    A plan that ran fits. One that ran out of memory does not, nor does any whose fullest device is predicted
    to be as full.
    """
    fill = [
        max(u / c for u, c in zip(x.memory_bytes, x.capacity_bytes, strict=True)) for x in costs
    ]
    pairs = [(t.memory_bytes, cost) for own, cost in zip(tried, costs, strict=True) for t in own]
    factors = [
        log(measured / max(cost.memory_bytes)) for measured, cost in pairs if measured is not None
    ]
    factor = exp(sum(factors) / len(factors)) if factors else 1.0
    failed = [f for f, own in zip(fill, tried, strict=True) if any(t.seconds is None for t in own)]
    limit = min(failed, default=float("inf"))
    ran = [any(t.seconds is not None for t in own) for own in tried]
    return [
        done or (share < limit and share * factor <= 1.0)
        for share, done in zip(fill, ran, strict=True)
    ]


def _errors(
    costs: Sequence[CostBreakdown], tried: Sequence[Sequence[Trial]]
) -> list[tuple[int, float]]:
    """Return candidate and log(measured / predicted seconds) of every trial that ran."""
    return [
        (row, log(trial.seconds / cost.iteration_time_s))
        for row, (trials, cost) in enumerate(zip(tried, costs, strict=True))
        for trial in trials
        if trial.seconds is not None
    ]


def _posterior_of(
    problem: Problem,
    plans: Sequence[Plan],
    costs: Sequence[CostBreakdown],
    tried: Sequence[Sequence[Trial]],
) -> tuple[Tensor, Tensor]:
    """Return mean and variance, `(N,)`, of log(true / predicted seconds) after the trials."""
    known = posterior(problem)
    kernel = _prior(problem, plans, known)
    errors = _errors(costs, tried)
    rows, ratios = [row for row, _ in errors], [error for _, error in errors]
    if not rows:
        return torch.zeros(len(plans), dtype=torch.float64), torch.diagonal(kernel).clone()
    noise = REPEAT**2 * torch.eye(len(rows), dtype=torch.float64)
    gain = torch.linalg.solve(kernel[rows][:, rows] + noise, kernel[rows]).T
    mean = gain @ torch.tensor(ratios, dtype=torch.float64)
    variance = torch.diagonal(kernel) - (gain * kernel[:, rows]).sum(1)
    return mean, variance.clamp(min=0.0)


def _prior(problem: Problem, plans: Sequence[Plan], known: Posterior | None) -> Tensor:
    """Return the covariance of log(true / predicted seconds) of all plans before any trial, `(N, N)`."""
    if known is None:
        return 0.2**2 + 0.1**2 * _nearness(problem, plans)
    slopes = [time_slopes(known, problem, time_elasticities(plan, problem)) for plan in plans]
    shared, own = known.job_spread(problem)
    return known.covariances(slopes) + shared**2 + own**2 * _nearness(problem, plans)


def _nearness(problem: Problem, plans: Sequence[Plan]) -> Tensor:
    """Return the correlation of what the model gets wrong of two plans, `(N, N)`."""
    batch = problem.training.global_batch_size
    places = torch.tensor([_place(plan, batch) for plan in plans], dtype=torch.float64)
    return torch.exp(-(torch.cdist(places, places) ** 2) / (2.0 * NEAR**2))


def _place(plan: Plan, batch: int) -> tuple[float, ...]:
    """Return log2 of dp, tp, pp and micro-batch (means over layers), ZeRO stage, recomputation in steps."""
    count = len(plan.layers)
    dp, tp = (
        sum(log2(getattr(layer, name)) for layer in plan.layers) / count for name in ("dp", "tp")
    )
    zero = sum(layer.zero_stage for layer in plan.layers) / count
    again = (
        sum(("none", "selective", "full").index(layer.recompute) for layer in plan.layers) / count
    )
    micro = log2(batch / plan.num_micro_batches) - dp
    return dp, tp, log2(plan.pp), micro, zero, again
