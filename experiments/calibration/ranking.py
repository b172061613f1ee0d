"""What a user loses by trusting the model's order: rank correlation and regret in every measured job.

A job is what rows have in common that differ only in their strategy (`errors.strategy_group`). Its regret
of k trials is how much slower the fastest of the first k plans of an order is than the fastest measured one,
as a fraction. Orders: the model's; a roofline's (peak rates, data-sheet links, no overhead: the structure
alone); plans of the smallest tp x pp first, which is what one tries who knows nothing but what fits; and
chance (the mean over all orders).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_text
from experiments.calibration.errors import SMALLEST_GROUP, spearman, strategy_group
from experiments.calibration.predict import predict
from experiments.calibration.problems import Case
from experiments.calibration.rules import Run

TRIALS = (1, 3)
MODEL = ""
"""Name of the order by the predictions that are validated; its columns have no prefix."""
PEAK = {
    "gemm_efficiency": 0.999, "attention_efficiency": 0.999, "gemm_half_size": 1e-6,
    "misaligned_efficiency": 0.999, "fp8_efficiency": 0.999, "mxfp8_efficiency": 0.999,
    "nvfp4_efficiency": 0.999, "memory_efficiency": 0.999, "streaming_factor": 1.0, "layer_overhead_us": 0.0,
    "overlap_exponent": 2.0, "tp_hidden_share": 0.0, "intra_efficiency": 1.0, "inter_efficiency": 1.0,
    "grouped_gemm_efficiency": 0.999, "all_to_all_efficiency": 0.999, "flex_gain": 1.0,
    "permutation_factor": 1.0, "expert_overhead_us": 0.0,
}  # fmt: skip
"""The quantities of a roofline: every rate that of the data sheet."""


@dataclass(frozen=True)
class Trial:
    """One measured plan of a job, and what each order sorts it by."""

    run: Run
    scores: Mapping[str, float]
    """By name of the order: the lower, the earlier."""
    seconds: float
    """Measured, of one sequence: batches within a job differ by some percent. Of repeats the median."""


@dataclass(frozen=True)
class JobRanking:
    """How well orders sort the plans of one job."""

    name: str
    plans: int
    spearman: Mapping[str, float]
    """By order: rank correlation with the measured seconds; `nan` where either side is constant."""
    regret: Mapping[tuple[str, int], float]
    """By order and number of trials; of equal scores the mean over their orders."""
    random: Mapping[int, float]
    best_place: int
    """Place, from 1, that the model gives the plan measured as fastest."""


def job_rankings(cases: Sequence[Case], scores: Mapping[str, Sequence[float]]) -> list[JobRanking]:
    """Rankings of all jobs with at least `SMALLEST_GROUP` measured plans.

    Args:
        cases: Measured runs; those without seconds are left out.
        scores: By order: seconds per iteration that it expects of every case.
    """
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for i, case in enumerate(cases):
        if case.run.iteration_s is not None:
            # one plan of several releases or days is no alternative to itself
            same = (case.plan, case.run.global_batch, repr(case.problem.training))
            groups[strategy_group(case.run)][same].append(i)
    return [
        _ranking([_trial(cases, scores, repeats) for repeats in plans.values()])
        for plans in groups.values()
        if len(plans) >= SMALLEST_GROUP
    ]


def _trial(cases: Sequence[Case], scores: Mapping[str, Sequence[float]], repeats: Sequence[int]) -> Trial:
    run = cases[repeats[0]].run
    expected = {name: values[repeats[0]] / run.global_batch for name, values in scores.items()}
    measured = [cases[i].run.iteration_s or nan for i in repeats]
    known = expected | {"smallest": float(run.tp * run.pp)}
    return Trial(run, known, float(np.median(measured)) / run.global_batch)


def roofline_seconds(cases: Sequence[Case]) -> list[float]:
    """Seconds per iteration of every case at the rates of its data sheets (`PEAK`)."""
    with torch.no_grad():
        return [float(predict(case, PEAK).seconds) for case in cases]


def _ranking(trials: Sequence[Trial]) -> JobRanking:
    truth = np.array([trial.seconds for trial in trials])
    orders = {name: np.array([t.scores[name] for t in trials]) for name in trials[0].scores}
    run = trials[0].run
    name = (
        f"{run.row.text('model')}, {run.hidden} x {run.layers}, batch {run.global_batch}, {run.gpus} x "
        f"{run.row.text('gpu')}, {run.row.text('precision') or run.precision}, {run.stack.name}"
    )
    model = orders[MODEL]
    return JobRanking(
        name, len(trials),
        {order: spearman(list(values), list(truth)) for order, values in orders.items()},
        {(order, k): regret(values, truth, k) for order, values in orders.items() for k in TRIALS},
        {k: regret(np.zeros(len(truth)), truth, k) for k in TRIALS},
        1 + int((model < model[truth.argmin()]).sum()),
    )  # fmt: skip


def regret(scores: NDArray[np.float64], truth: NDArray[np.float64], trials: int) -> float:
    """How much slower the fastest of an order's first trials is than the fastest of all, as a fraction.

    Plans of equal score come in every order equally often.

    Args:
        scores: What the order sorts by, rising, `(N,)`.
        truth: Measured seconds, `(N,)`.
    """
    order = np.argsort(scores, kind="stable")
    last = scores[order[min(trials, len(order)) - 1]]
    sure, tied = np.flatnonzero(scores < last), np.flatnonzero(scores == last)
    free = min(trials, len(order)) - len(sure)
    best = float(truth[sure].min()) if len(sure) else np.inf
    # the minimum of a random subset: its k-th smallest member is the smallest with a hypergeometric chance
    sorted_tied = np.sort(truth[tied])
    total, expected = _ways(len(tied), free), 0.0
    for place, value in enumerate(sorted_tied):
        chance = _ways(len(tied) - place - 1, free - 1) / total
        expected += chance * min(best, float(value))
    return expected / float(truth.min()) - 1.0


def _ways(size: int, taken: int) -> float:
    """Number of subsets."""
    if taken < 0 or taken > size:
        return 0.0
    value = 1.0
    for i in range(taken):
        value = value * (size - i) / (i + 1)
    return value


def write_rankings(path: Path, rankings: Sequence[JobRanking]) -> None:
    """Write `ranking.csv`: one line a job, regrets as fractions."""
    others = [name for name in (rankings[0].spearman if rankings else ()) if name != MODEL]
    head = ["job", "plans", "spearman", *(f"regret_{k}" for k in TRIALS), "best_place"]
    head += [f"random_regret_{k}" for k in TRIALS]
    for name in others:
        head += [f"{name}_spearman", *(f"{name}_regret_{k}" for k in TRIALS)]
    rows = []
    for job in rankings:
        cells: list[object] = [job.name, job.plans, _cell(job.spearman[MODEL])]
        cells += [_cell(job.regret[MODEL, k]) for k in TRIALS] + [job.best_place]
        cells += [_cell(job.random[k]) for k in TRIALS]
        for name in others:
            cells += [_cell(job.spearman[name]), *(_cell(job.regret[name, k]) for k in TRIALS)]
        rows.append(cells)
    write_text(path, csv_text(head, rows))


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.6g}"


def mean(values: Sequence[float]) -> float:
    """Mean of those that are numbers; `nan` where none is."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else nan
