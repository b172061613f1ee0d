"""Diagnose a run that the model does not believe: by how much it is off, what would explain it.

A run whose error is within `BELIEVED` standard deviations moves the calibrated figures
(`run_figures`). A run further off is more likely another job, a broken link or a busy machine than
a figure that is that wrong. It moves nothing. Each figure that would explain it alone is listed.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import NamedTuple

from darts_parallel.config import ClusterConfig, RunConfig
from darts_parallel.cost import evaluate
from darts_parallel.planner.figure_posterior import posterior, slopes_of
from darts_parallel.planner.run_figures import (
    Figure,
    Trial,
    figures_of,
    memory_run,
    own_cluster,
    peak_stage,
    seconds_run,
)
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

SECONDS = "seconds"
BELIEVED = 3.0
"""Standard deviations of an error that the model allows for."""
FURTHEST = 1e3
"""Largest factor of a figure that is tried."""


class NeededFigure(NamedTuple):
    """A figure that explains a run, if all other figures are right."""

    words: str
    """Key of the figure, or the link in words."""
    value: float
    needed: float
    unit: str


@dataclass(frozen=True)
class Deviation:
    """A measured quantity further off than the model believes."""

    quantity: str
    """`seconds` or `peak bytes`."""
    ratio: float
    """Measured per predicted."""
    sds: float
    """Distance in standard deviations of the prediction."""
    explanations: tuple[NeededFigure, ...]
    """Smallest change first."""

    def sentences(self) -> Iterator[str]:
        """Yield the sentences for the user."""
        times = f"{self.ratio:.3g} times the predicted ones"
        yield (
            f"the measured {self.quantity} are {times}, {self.sds:.1f} standard deviations off, "
            "and change no figure."
        )
        if not self.explanations:
            yield "no single figure of the cluster explains this run; is it the log of this plan?"
            return
        yield "each of these, as the framework has it, would explain this run alone:"
        for own in self.explanations:
            yield f"  {own.words}: {own.needed:.3g} instead of {own.value:.3g}{own.unit}"


def deviations(problem: Problem, trial: Trial) -> list[Deviation]:
    """Return the figures of a trial that the model finds too unlikely; none where it may learn from it."""
    known = posterior(problem)
    found = []
    whole = (SECONDS, seconds_run(trial, problem), None)
    peak = ("peak bytes", memory_run(trial, problem), peak_stage(trial, problem))
    for quantity, run, stage in (whole, peak):
        if run is None:
            continue
        sd = sqrt(known.variance(slopes_of(run)) + run.sd**2)
        sds = abs(run.error) / sd
        if sds > BELIEVED:
            causes = sorted(_explanations(problem, trial.plan, stage, run), key=_change)
            found.append(Deviation(quantity, exp(run.error), sds, tuple(causes)))
    return found


def _change(own: NeededFigure) -> float:
    """Return how far a figure has to move."""
    return abs(log(own.needed / own.value))


def _explanations(
    problem: Problem, plan: Plan, stage: int | None, run: RunConfig
) -> Iterator[NeededFigure]:
    """Yield every figure that alone brings the prediction to what was measured."""
    cluster = replace(own_cluster(problem), runs=[replace(run, slopes={})])
    before = _predicted(problem, cluster, plan, stage)
    goal = before + run.error
    moved = deepcopy(cluster)
    for figure in figures_of(posterior(problem), moved, problem.software.name):
        value = float(getattr(figure.owner, figure.field))
        if value <= 0.0:
            continue

        def missing(tried: float, figure: Figure = figure) -> float:
            setattr(figure.owner, figure.field, tried)
            return _predicted(problem, moved, plan, stage) - goal

        least, most = figure.limits
        ends = (max(least, value / FURTHEST), min(most, value * FURTHEST))
        needed = [_root(missing, value, end) for end in ends if missing(end) * run.error > 0.0]
        setattr(figure.owner, figure.field, value)
        if needed:
            yield _explanation(figure, value, needed[0])


def _root(missing: Callable[[float], float], value: float, end: float) -> float:
    """Return the value between a figure and a limit at which nothing is missing."""
    from scipy.optimize import brentq

    found = brentq(lambda change: missing(exp(change)), log(value), log(end), xtol=1e-3)
    return exp(float(found))


def _explanation(figure: Figure, value: float, needed: float) -> NeededFigure:
    """Say a figure as its data sheet does: a link by its bandwidth."""
    if figure.link_rate is None:
        return NeededFigure(figure.words, value, needed, "")
    rate = figure.link_rate
    return NeededFigure(figure.words, rate * value, rate * needed, " GB/s")


def _predicted(problem: Problem, cluster: ClusterConfig, plan: Plan, stage: int | None) -> float:
    """Return the logarithm of a plan's seconds, or of the bytes of a device of a stage."""
    cost = evaluate(plan, problem.with_config(cluster=cluster))
    return log(cost.iteration_time_s if stage is None else cost.memory_bytes[stage])
