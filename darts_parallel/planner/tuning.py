"""Trials of a few plans: what they say of the others, and which to try next.

Candidates are the plans of the uniform space, which every trainer runs, in the model's own order. A
trial's seconds, memory or failure comes back, and the expected seconds of all plans move by the
likelihood of `Posterior.given_runs`. Three things are shared between plans: one scale of the job
(most of what a trial tells), the calibrated figures that their time depends on, and, where the
structure of the model is wrong, a residual that near plans share. The order hardly changes; the
seconds do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, log2
from statistics import fmean

import torch
from torch import Tensor

from darts_parallel.config import RECOMPUTE, RunConfig
from darts_parallel.cost import (
    CostBreakdown,
    PricedPlan,
    build_tables,
    evaluate,
    float_tensor,
)
from darts_parallel.errors import PlanError
from darts_parallel.exact import (
    find_uniform_plan,
    unknown_costs,
)
from darts_parallel.planner._exact_methods import even_pool
from darts_parallel.planner.elasticities import time_elasticities
from darts_parallel.planner.figure_posterior import NORMAL, REPEAT, Moved, posterior
from darts_parallel.planner.prediction_intervals import out_of_memory, time_slopes
from darts_parallel.planner.run_figures import Trial, memory_run, seconds_run
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

CANDIDATES = 24
"""Plans of the model's order that trials may move; the first three suffice where its structure is right."""
NEAR = 1.0
"""Distance in log2 of (dp, tp, pp, micro-batch) over which plans share what the model gets wrong."""


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
    problem: Problem,
    first: Plan,
    trials: Sequence[Trial],
    others: Sequence[Plan] = (),
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
    costs = {plan: evaluate(plan, problem) for plan in plans}
    peaks = [run for trial in trials if (run := memory_run(trial, problem))]
    fitting = _fitting(costs, trials, peaks)
    if not fitting:
        raise PlanError(
            "tune.measured: every candidate needs as much memory as a plan that already ran out of "
            "memory; try another space (space.recompute=null) or more devices."
        )
    moved = _errors_given_trials(problem, plans, trials)
    variances = moved.covariance.diagonal().clamp(min=0.0)
    proposals = []
    for index, plan in enumerate(plans):
        if plan not in fitting:
            continue
        predicted = costs[plan].iteration_time_s
        expected = predicted * exp(moved.means[index])
        factor = exp(NORMAL * variances[index].sqrt())
        interval = (expected / factor, expected * factor)
        tried = sum(trial.plan == plan for trial in trials)
        chance = out_of_memory(plan, problem, peaks)
        proposal = Proposal(plan, predicted, expected, interval, tried, chance)
        proposals.append(proposal)
    proposals.sort(key=lambda proposal: proposal.expected_s)
    excluded = len(plans) - len(proposals)
    return Tuning(tuple(proposals), _scale(costs, trials), excluded)


def _candidates(problem: Problem, given: Sequence[Plan], trials: Sequence[Trial]) -> list[Plan]:
    """Return the plans that were given, all that were tried, and the best ones of the uniform space."""
    tables = build_tables(problem)
    simulated = problem.config.cost.pipeline == "simulated"
    if simulated or unknown_costs(tables):
        found: Sequence[PricedPlan] = even_pool(tables, CANDIDATES).top(CANDIDATES)
    else:
        found = find_uniform_plan(tables, count=CANDIDATES).alternatives
    plans = [*given, *(trial.plan for trial in trials)]
    plans += [candidate.to_plan(tables) for candidate in found]
    return list(dict.fromkeys(plans))


def _fitting(
    costs: dict[Plan, CostBreakdown], trials: Sequence[Trial], peaks: Sequence[RunConfig]
) -> set[Plan]:
    """Return which candidates are expected to fit: by the model, scaled by the bytes that trials measured.

    A plan that ran fits. One that ran out of memory does not, nor does any whose fullest device is
    predicted to be as full.
    """
    fullness = {plan: max(cost.fullness) for plan, cost in costs.items()}
    limit = inf
    ran = set()
    for trial in trials:
        if trial.seconds is None:
            limit = min(limit, fullness[trial.plan])
        else:
            ran.add(trial.plan)
    factor = _geometric_mean([peak.error for peak in peaks])
    for plan, full in fullness.items():
        if full < limit and full * factor <= 1.0:
            ran.add(plan)
    return ran


def _scale(costs: dict[Plan, CostBreakdown], trials: Sequence[Trial]) -> float:
    """Return the geometric mean of measured over predicted seconds."""
    ratios = []
    for trial in trials:
        if trial.seconds is not None:
            predicted = costs[trial.plan].iteration_time_s
            ratios.append(log(trial.seconds / predicted))
    return _geometric_mean(ratios)


def _geometric_mean(logs: Sequence[float]) -> float:
    """Return the exponential of the mean; 1 of none."""
    return exp(fmean(logs)) if logs else 1.0


def _errors_given_trials(problem: Problem, plans: Sequence[Plan], trials: Sequence[Trial]) -> Moved:
    """Return log(true / predicted seconds) of N plans after the trials that ran."""
    known = posterior(problem)
    tried = [trial.plan for trial in trials if trial.seconds is not None]
    runs = [run for trial in trials if (run := seconds_run(trial, problem))]
    near = _nearness(problem.training.global_batch_size, [*plans, *tried])
    residual = known.residuals.shared**2 + known.residuals.own**2 * near
    repeats = float_tensor([0.0] * len(plans) + [REPEAT**2] * len(tried))
    # the figures of the cluster are those after its own runs already, which are of other jobs
    earlier = [replace(run, error=0.0) for run in known.runs]
    noise = float_tensor([run.sd**2 for run in earlier])
    slopes = []
    for plan in plans:
        elasticities = time_elasticities(plan, problem)
        slopes.append(time_slopes(known, problem, elasticities))
    given = replace(known, runs=[*runs, *earlier])
    blocks = (residual + repeats.diag(), noise.diag())
    whole = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return given.given_runs(slopes, whole)


def _nearness(batch: int, plans: Sequence[Plan]) -> Tensor:
    """Return the correlation of what the model gets wrong of two plans, `(N, N)`."""
    places = float_tensor([_coordinates(plan, batch) for plan in plans])
    squares = torch.cdist(places, places) ** 2
    return torch.exp(-squares / (2.0 * NEAR**2))


def _coordinates(plan: Plan, batch: int) -> tuple[float, ...]:
    """Return log2 of dp, tp, pp and micro-batch, ZeRO stage and steps of recomputation; means over layers."""
    dp = fmean(log2(layer.dp) for layer in plan.layers)
    tp = fmean(log2(layer.tp) for layer in plan.layers)
    zero = fmean(layer.zero_stage for layer in plan.layers)
    recompute = fmean(RECOMPUTE.index(layer.recompute) for layer in plan.layers)
    micro_batch = log2(batch / plan.num_micro_batches) - dp
    return dp, tp, log2(plan.pp), micro_batch, zero, recompute
