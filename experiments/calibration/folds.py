"""Held-out predictions: parameters fitted without a whole house, model, source or device, tried on it.

The posterior of the parameters (Laplace) does not explain everything: the variance of a prediction's
logarithm is a multiple of theirs (`widening`: the model's form is wrong, too) plus that of release, tuning
and disturbance (`own`). So a width grows with the distance from what was measured. The two are read off
held-out runs: 80 % intervals of seconds shall hold 80 % of those of left-out houses and sources, and bytes
of left-out houses, sources and models shall be likely.
A fold counts as the root of its runs: what is asked for next is one more source, not one more run of the
source with the most.

A user's loss by trusting the model's order is priced in every measured job: runs that differ only in their
strategy. The regret of k trials is how much slower the fastest of the first k plans of an order is than the
fastest measured one, as a fraction. Orders: the model's; plans of the smallest tp x pp first, which is what
one tries who knows nothing but what fits; and chance (the mean over all orders).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb, exp, isnan, log, log2, nan

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import Array
from darts_parallel.errors import Amounts, Entries
from darts_parallel.planner import EXPERTS, NORMAL
from darts_parallel.report import csv_text
from experiments.calibration.calibrated import Parameters, Place
from experiments.calibration.errors import ErrorSummary, spearman, summarise
from experiments.calibration.fit import (
    PARTS,
    Residuals,
    linear_fit,
    measured_figures,
    posterior,
    residuals,
)
from experiments.calibration.predict import predict
from experiments.calibration.problems import MeasuredCase
from experiments.data.runs import MeasuredRun

SMALLEST_GROUP = 4
"""Plans that a rank correlation needs to say anything."""
TRIALS = (1, 3)
MODEL, SMALLEST, CHANCE = ORDERS = ("model", "smallest", "chance")
"""Orders of the plans of a job."""


@dataclass(frozen=True)
class JobRanking:
    """How well orders sort the plans of one job."""

    name: str
    plans: int
    spearman: float
    """Rank correlation of predicted and measured seconds; `nan` where either side is constant."""
    regret: Mapping[tuple[str, int], float]
    """Relative loss by order and number of trials; of equal scores the mean over their orders."""


def job_of(run: MeasuredRun) -> tuple[object, ...]:
    """Return what runs have in common that differ only in their strategy: model, job, machine, source.

    Global batches within some 10 % are one job (not every dp divides the same batch); such runs are
    compared by their seconds per sequence.
    """
    model = (run.num_layers, run.hidden_size, run.num_heads, run.vocab_size, run.seq_len)
    batch = round(4 * log2(run.global_batch_size))
    hardware = (run.gpu.lower(), run.gpus, run.printed_precision.lower())
    return (run.file, run.source.split("@")[0], run.framework, batch, *model, *hardware)


def job_rankings(cases: Sequence[MeasuredCase], predicted: Sequence[float]) -> list[JobRanking]:
    """Rank all jobs with at least `SMALLEST_GROUP` measured plans.

    Args:
        cases: Measured runs; those without seconds are left out.
        predicted: Seconds per iteration of every case.
    """
    jobs: dict[object, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, case in enumerate(cases):
        if case.run.iteration_s is not None:
            # one plan of several releases or days is no alternative to itself
            same = (case.plan, case.run.global_batch_size, repr(case.problem.training))
            jobs[job_of(case.run)][same].append(i)
    return [
        _ranking(cases, predicted, list(plans.values()))
        for plans in jobs.values()
        if len(plans) >= SMALLEST_GROUP
    ]


def _ranking(
    cases: Sequence[MeasuredCase],
    predicted: Sequence[float],
    plans: Sequence[Sequence[int]],
) -> JobRanking:
    """Rank the plans of a job by the seconds of one sequence, of repeats the median."""
    runs = [cases[repeats[0]].run for repeats in plans]
    batches = np.array([run.global_batch_size for run in runs])
    truth = np.array(
        [np.median([cases[i].run.iteration_s or nan for i in repeats]) for repeats in plans]
    )
    truth = truth / batches
    orders = {MODEL: np.array([predicted[repeats[0]] for repeats in plans]) / batches}
    orders[SMALLEST] = np.array([float(run.tp * run.pp) for run in runs])
    orders[CHANCE] = np.zeros(len(truth))
    losses = {}
    for name, trials in product(orders, TRIALS):
        losses[name, trials] = regret(orders[name], truth, trials)
    correlation = spearman(orders[MODEL].tolist(), truth.tolist())
    return JobRanking(runs[0].name, len(plans), correlation, losses)


def rankings_csv(rankings: Sequence[JobRanking]) -> str:
    """Return a line a job: plans, rank correlation, and the regrets of every order, as fractions."""
    columns = list(product(ORDERS, TRIALS))
    names = [f"{order}_regret_{trials}".removeprefix("model_") for order, trials in columns]
    rows = []
    for job in rankings:
        regrets = [f"{job.regret[column]:.6g}" for column in columns]
        correlation = "" if isnan(job.spearman) else f"{job.spearman:.6g}"
        rows.append((job.name, job.plans, correlation, *regrets))
    return csv_text(("job", "plans", "spearman", *names), rows)


def regret(scores: Array, truth: Array, trials: int) -> float:
    """Compute how much slower the fastest of an order's first trials is than the fastest of all.

    Plans of equal score come in every order equally often.

    Args:
        scores: What the order sorts by, rising, `(N,)`.
        truth: Measured seconds, `(N,)`.
    """
    order = np.argsort(scores, kind="stable")
    last = scores[order[min(trials, len(order)) - 1]]
    sure = np.flatnonzero(scores < last)
    tied = np.sort(truth[scores == last])
    free = min(trials, len(order)) - len(sure)
    best = float(truth[sure].min()) if len(sure) else np.inf
    # the minimum of a random subset: its k-th smallest member is the smallest with a hypergeometric chance
    smallest = [comb(later, free - 1) for later in reversed(range(len(tied)))]
    expected = np.array(smallest) @ np.minimum(tied, best) / comb(len(tied), free)
    return float(expected / truth.min()) - 1.0


def mean(values: Sequence[float]) -> float:
    """Average those that are numbers; `nan` where none is."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else nan


TOTALS = ("all dense", "all mixtures", "all")
KINDS = {"house": "house", "model": "model", "source": "file", "device": "device_family"}
"""Kinds of folds that are left out as a whole, and the field of a run that names them."""
FIT = "fit"
SHARE = 0.8
"""Share of the runs that an interval holds."""
ASKED_NEXT = {"seconds": ("house", "source"), "memory": ("house", "model", "source")}
"""Kinds of folds that are like what is asked for next, by figure.

Bytes count left-out models, too. Plans of a known framework are off by what no parameter explains, which
houses and sources alone put down to the parameters.
"""
COMMON_RUNS = 2.0
"""Weight of the spread of all GPUs, next to the root of the runs of a GPU."""
FLOOR = 0.02
"""Smallest spread: that of one run, where repeats differ by 1.0 % in the median and 4.6 % for nine of ten."""
OWN_SPREADS = tuple(float(f"{FLOOR * 1.08**n:.3g}") for n in range(42))
WIDENINGS = tuple(float(f"{1.1**n:.3g}") for n in range(24))


@dataclass(frozen=True)
class Width:
    """Spread of a prediction's logarithm: the root of `own ** 2 + widening * variance of the parameters`."""

    own: float
    widening: float


@dataclass(frozen=True)
class HeldOut:
    """A figure of a run, predicted with parameters that never saw its fold."""

    fold: str
    case: MeasuredCase
    part: str
    """A name of `PARTS`, or `FIT`: 1 where the plan is predicted to fit, or did."""
    predicted: float
    measured: float
    variance: float
    """Variance of the logarithm, by the posterior without the fold."""
    averaged: float = nan
    """As `predicted`, with the quantities of seconds of the average framework; switches and memory stay."""

    @property
    def ratio(self) -> float:
        """Return predicted / measured."""
        return self.predicted / self.measured

    @property
    def device(self) -> str:
        """Return the first device."""
        return self.case.run.devices[0]

    @property
    def error(self) -> float:
        """Return log(predicted / measured)."""
        return log(self.ratio)

    @property
    def mixture(self) -> bool:
        """Tell whether the run is of a mixture of experts."""
        return self.case.problem.model.has_experts

    @property
    def total(self) -> str:
        """Name of the runs of its kind, one of `TOTALS`."""
        return TOTALS[self.mixture]


HeldOutByKind = Mapping[str, Sequence[HeldOut]]
"""Left-out figures by the kind of fold."""


def folds(cases: Sequence[MeasuredCase], kind: str) -> dict[str, set[int]]:
    """Group the indices of runs by fold."""
    members = defaultdict(set)
    for i, case in enumerate(cases):
        members[getattr(case.run, KINDS[kind])].add(i)
    return dict(sorted(members.items()))


def cross_validate(
    cases: Sequence[MeasuredCase],
    parameters: Parameters,
    optimum: Tensor,
    found: Residuals,
    kind: str,
) -> list[HeldOut]:
    """Predict every fold with parameters fitted to all others.

    Args:
        optimum: Fit to all runs; a fold's fit is the minimum of the problem linearized there.
        found: Errors and Jacobian at `optimum`.
        kind: A key of `KINDS`. Variances and averaged frameworks are linear in the logarithm around
            the fold's fit.
    """
    result = []
    for fold, held_out in folds(cases, kind).items():
        rest = found.where(torch.tensor([i not in held_out for i in found.case.tolist()]))
        latent = linear_fit(rest, optimum, parameters)
        covariance = posterior(rest, parameters)
        shift = parameters.averaged(latent) - latent
        for i in sorted(held_out):
            case = cases[i]
            with torch.no_grad():
                values = parameters.values(latent, Place.of_run(case.run))
                fits = predict(case, values).fits
            if figures := measured_figures(case):
                own = residuals([case], parameters, latent)
                rows = zip(figures.items(), own.error.tolist(), own.jacobian, strict=True)
                for (part, measured), error, slopes in rows:
                    predicted = measured * exp(error)
                    variance = float(slopes @ covariance @ slopes)
                    averaged = predicted * exp(float(slopes @ shift))
                    held = HeldOut(fold, case, part, predicted, measured, variance, averaged)
                    result.append(held)
            ran = not case.run.out_of_memory
            result.append(HeldOut(fold, case, FIT, fits, ran, 0.0))
    return result


def fold_errors(held: Sequence[HeldOut]) -> dict[str, ErrorSummary]:
    """Summarize the errors by fold, then of the runs that `TOTALS` names."""
    ratios = defaultdict(list)
    for h in held:
        for name in (h.fold, h.total, TOTALS[-1]):
            ratios[name].append(h.ratio)
    order = sorted(ratios.keys() - set(TOTALS))
    order += [name for name in TOTALS if name in ratios]
    return {name: summarise(ratios[name]) for name in order}


def width_of(held_out: HeldOutByKind, part: str, widenings: Sequence[float] = WIDENINGS) -> Width:
    """Find the width of a figure, a name of `PARTS`.

    Of seconds: the one whose 80 % intervals come closest to holding 80 % of the runs of every kind of
    fold. Of bytes, with few houses: the likeliest if errors are normal. A fold weighs as much as the
    root of the number of its runs; of equal widths the narrowest counts.
    """
    kinds = []
    for held in held_out.values():
        runs = Counter(h.fold for h in held)
        told = [(h.error**2, h.variance, runs[h.fold] ** -0.5) for h in held]
        kinds += [np.array(told).T] if told else []

    def misfit(width: Width) -> float:
        total = 0.0
        for squares, variances, weights in kinds:
            spread = width.own**2 + width.widening * variances
            if part == PARTS[0]:
                share = np.average(squares <= NORMAL**2 * spread, weights=weights)
                total += (share - SHARE) ** 2
            else:
                total += np.average(np.log(spread) + squares / spread, weights=weights)
        return total

    return min((Width(own, widening) for widening in widenings for own in OWN_SPREADS), key=misfit)


def only(held_out: HeldOutByKind, name: str, value: object) -> dict[str, list[HeldOut]]:
    """Keep the figures of which a field or property has a value."""
    found = {}
    for kind, held in held_out.items():
        found[kind] = [h for h in held if getattr(h, name) == value]
    return found


def widths_of(held_out: HeldOutByKind, part: str) -> tuple[Width, Width]:
    """Find the widths of a figure of dense models and of mixtures, whose parameters are widened alike."""
    told = {kind: held for kind, held in held_out.items() if kind in ASKED_NEXT[part]} or held_out
    dense, mixtures = (only(told, "mixture", own) for own in (False, True))
    found = width_of(dense if any(dense.values()) else mixtures, part)
    own = width_of(mixtures, part, [found.widening])
    return found, own if any(mixtures.values()) else found


def standardized(held_out: HeldOutByKind, kind: str, part: str) -> dict[str, Array]:
    """Divide the errors of left-out figures by the widths that the other folds give, by `TOTALS`.

    Returns:
        Two columns: the quotient, and the width, a standard deviation of the logarithm, `(N, 2)`.
    """
    own = only(held_out, "part", part)
    found: dict[str, list[tuple[float, float]]] = {total: [] for total in TOTALS}
    for fold in dict.fromkeys(h.fold for h in own[kind]):
        members = [h for h in own[kind] if h.fold == fold]
        runs = {id(h.case) for h in members}
        rest = {}
        for name, held in own.items():
            rest[name] = [h for h in held if id(h.case) not in runs]
        widths = widths_of(rest, part)
        for h in members:
            width = widths[h.mixture]
            whole = (width.own**2 + width.widening * h.variance) ** 0.5
            for total in (h.total, TOTALS[-1]):
                found[total].append((h.error / whole, whole))
    return {total: np.array(scores) for total, scores in found.items() if scores}


def constant_mfu(held: Sequence[HeldOut]) -> list[HeldOut]:
    """Predict seconds by one share of the peak for each device, that of the other folds' runs."""

    def at_peak(h: HeldOut) -> HeldOut:
        problem = h.case.problem
        flops = (
            problem.model.flops_per_token(problem.training.seq_len) * problem.tokens_per_iteration
        )
        peak = problem.cluster.num_devices * float(problem.cluster.groups[0].device.peak_flops)
        return replace(h, predicted=flops / peak)

    return one_factor([at_peak(h) for h in held])


def one_factor(held: Sequence[HeldOut]) -> list[HeldOut]:
    """Divide predictions by the median of predicted / measured of the other folds' runs of the device.

    A device without runs in other folds gets the median of all; the only fold stays as it is.
    """
    result = []
    for h in held:
        others = [other for other in held if other.fold != h.fold]
        alike = [other for other in others if other.device == h.device] or others
        factor = float(np.median([other.ratio for other in alike])) if alike else 1.0
        result.append(replace(h, predicted=h.predicted / factor))
    return result


def pair_spread(held: Sequence[HeldOut]) -> float:
    """Find the standard deviation of the error of the difference of two plans of one measured job.

    From the errors of jobs around their own mean: what all plans of a job share does not tell them apart. Of
    every job the width whose 80 % interval holds 80 % of its pairs; of the jobs the median: a sweep of
    fifty plans is one job too.
    """
    jobs = defaultdict(list)
    for h in held:
        jobs[job_of(h.case.run)].append(h.error)
    widths = []
    for errors in jobs.values():
        if len(errors) >= SMALLEST_GROUP:
            distances = [abs(a - b) for a, b in combinations(errors, 2)]
            widths.append(float(np.quantile(distances, SHARE)))
    return float(np.median(widths)) / NORMAL if widths else FLOOR


def misfits(places: Sequence[str], errors: Tensor, own: float) -> Amounts:
    """Find the spread of the errors that a fit leaves at a place, where it is above that of all, `own`.

    It holds `SHARE` of the runs of the place. Where they are few it is drawn to `own`.

    Args:
        places: Of each run.
        errors: log(predicted / measured) of each run in the fit.
    """
    result = {}
    for place in sorted(set(places)):
        here = errors[torch.tensor([name == place for name in places])]
        holds = float(here.abs().quantile(SHARE)) / NORMAL
        weight = len(here) ** 0.5
        of_all = COMMON_RUNS * own**2
        spread = ((of_all + weight * holds**2) / (COMMON_RUNS + weight)) ** 0.5
        if spread > own:
            result[place] = round(spread, 3)
    return result


def spreads(held_out: dict[str, list[HeldOut]]) -> dict[str, Entries]:
    """Find the widths by figure, as `planner/figure_posterior.py` reads them.

    `own` is a standard deviation of log(predicted / measured) next to that of the parameters, `widening` the
    factor of their variance, `pair` the spread of the difference of two plans of one measured job. Mixtures
    have an `own` of their own (`experts`).
    """
    result: dict[str, Entries] = {}
    for part in PARTS:
        held = only(held_out, "part", part)
        if not any(held.values()):
            continue
        dense, mixtures = widths_of(held, part)
        jobs = next((held[kind] for kind in ("source", "house") if held.get(kind)), [])
        result[part] = {
            "own": dense.own,
            "widening": dense.widening,
            EXPERTS: {"own": mixtures.own},
        }
        for own, mixture in ((result[part], False), (result[part][EXPERTS], True)):
            if part == PARTS[0]:
                own["pair"] = round(pair_spread([h for h in jobs if h.mixture == mixture]), 4)
    return result
