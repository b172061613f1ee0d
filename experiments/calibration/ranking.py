"""Price a user's loss by trusting the model's order: rank correlation and regret in every measured job.

Runs that differ only in their strategy are a job. Its regret of k trials is how much slower the fastest of
the first k plans of an order is than the fastest measured one, as a fraction. Orders: the model's; plans of
the smallest tp x pp first, which is what one tries who knows nothing but what fits; and chance (the mean over
all orders).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, log2, nan

import numpy as np
from numpy.typing import NDArray

from darts_parallel.report import csv_text
from experiments.calibration.errors import spearman
from experiments.calibration.problems import MeasuredCase
from experiments.data.runs import MeasuredRun

SMALLEST_GROUP = 4
"""Plans that a rank correlation needs to say anything."""
TRIALS = (1, 3)
MODEL, SMALLEST, CHANCE = "", "smallest", "random"
"""Orders; that by the predictions which are validated has no prefix in its columns."""


@dataclass(frozen=True)
class JobRanking:
    """How well orders sort the plans of one job."""

    name: str
    plans: int
    spearman: Mapping[str, float]
    """Rank correlation with the measured seconds by order; `nan` where either side is constant."""
    regret: Mapping[tuple[str, int], float]
    """Relative loss by order and number of trials; of equal scores the mean over their orders."""
    best_place: int
    """Place, from 1, that the model gives the plan measured as fastest."""

    @property
    def orders(self) -> list[str]:
        """List the orders, that by chance last."""
        return list(dict.fromkeys(name for name, _ in self.regret))


def job_of(run: MeasuredRun) -> tuple[object, ...]:
    """Return what runs have in common that differ only in their strategy: model, job, machine, source.

    Global batches within some 10 % are one job (not every dp divides the same batch); such runs are
    compared by their seconds per sequence.
    """
    return (
        run.file, run.source.split("@")[0], run.num_layers, run.hidden_size, run.num_heads, run.vocab_size,
        run.seq_len, run.gpu.lower(), run.gpus, round(4 * log2(run.global_batch_size)),
        run.printed_precision.lower(), run.framework,
    )  # fmt: skip


def job_rankings(cases: Sequence[MeasuredCase], scores: Mapping[str, Sequence[float]]) -> list[JobRanking]:
    """Rank all jobs with at least `SMALLEST_GROUP` measured plans.

    Args:
        cases: Measured runs; those without seconds are left out.
        scores: Seconds per iteration that an order expects of every case, by order.
    """
    jobs: dict[object, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, case in enumerate(cases):
        if case.run.iteration_s is not None:
            # one plan of several releases or days is no alternative to itself
            same = (case.plan, case.run.global_batch_size, repr(case.problem.training))
            jobs[job_of(case.run)][same].append(i)
    return [
        _ranking(cases, scores, list(plans.values()))
        for plans in jobs.values()
        if len(plans) >= SMALLEST_GROUP
    ]


def _ranking(
    cases: Sequence[MeasuredCase], scores: Mapping[str, Sequence[float]], plans: Sequence[Sequence[int]]
) -> JobRanking:
    """Rank the plans of a job by the seconds of one sequence, of repeats the median."""
    runs = [cases[repeats[0]].run for repeats in plans]
    batches = np.array([run.global_batch_size for run in runs])
    truth = np.array([np.median([cases[i].run.iteration_s or nan for i in repeats]) for repeats in plans])
    truth = truth / batches
    orders = {
        name: np.array([own[repeats[0]] for repeats in plans]) / batches for name, own in scores.items()
    }
    orders[SMALLEST] = np.array([float(run.tp * run.pp) for run in runs])
    everything = orders | {CHANCE: np.zeros(len(truth))}
    return JobRanking(
        runs[0].name,
        len(plans),
        {name: spearman(own.tolist(), truth.tolist()) for name, own in orders.items()},
        {(name, k): regret(own, truth, k) for name, own in everything.items() for k in TRIALS},
        1 + int((orders[MODEL] < orders[MODEL][truth.argmin()]).sum()),
    )


def regret(scores: NDArray[np.float64], truth: NDArray[np.float64], trials: int) -> float:
    """Compute how much slower the fastest of an order's first trials is than the fastest of all.

    Plans of equal score come in every order equally often.

    Args:
        scores: What the order sorts by, rising, `(N,)`.
        truth: Measured seconds, `(N,)`.
    """
    order = np.argsort(scores, kind="stable")
    last = scores[order[min(trials, len(order)) - 1]]
    sure, tied = np.flatnonzero(scores < last), np.sort(truth[scores == last])
    free = min(trials, len(order)) - len(sure)
    best = float(truth[sure].min()) if len(sure) else np.inf
    # the minimum of a random subset: its k-th smallest member is the smallest with a hypergeometric chance
    chances = [comb(len(tied) - place - 1, free - 1) / comb(len(tied), free) for place in range(len(tied))]
    expected = sum(chance * min(best, float(value)) for chance, value in zip(chances, tied, strict=True))
    return expected / float(truth.min()) - 1.0


def rankings_csv(rankings: Sequence[JobRanking]) -> str:
    """Write `ranking.csv`: one line a job, rank correlations and regrets (as fractions) by order."""
    rows = []
    for job in rankings:
        cells: dict[str, object] = {"job": job.name, "plans": job.plans, "best_place": job.best_place}
        for name in job.orders:
            own = {"spearman": job.spearman[name]} if name in job.spearman else {}
            own |= {f"regret_{k}": job.regret[name, k] for k in TRIALS}
            cells |= {f"{name}_{key}".lstrip("_"): "" if v != v else f"{v:.6g}" for key, v in own.items()}
        rows.append(cells)
    return csv_text(tuple(rows[0]) if rows else ("job",), [tuple(row.values()) for row in rows])


def mean(values: Sequence[float]) -> float:
    """Average those that are numbers; `nan` where none is."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else nan
