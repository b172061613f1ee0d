"""Figures of a user's runs: what a measured plan says of the calibrated figures of its cluster.

A run enters the posterior by one likelihood, whether it was typed (`tune.measured`) or read from a
log (`tune --from-log`): see `Posterior.given_runs`. `tuning` moves the seconds of other plans by
it; `with_run` moves the figures themselves, so that later commands plan with them.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import exp, log
from typing import Any, NamedTuple

from darts_parallel.config import ClusterConfig, RunConfig
from darts_parallel.cost import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.planner.elasticities import time_elasticities
from darts_parallel.planner.figure_posterior import (
    RESERVED,
    LatentPlace,
    Posterior,
    Slopes,
    family,
    link_place,
    posterior,
    slopes_of,
)
from darts_parallel.planner.prediction_intervals import memory_slopes, time_slopes
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

LARGEST_ERROR = log(10.0)
"""Largest |log(measured / predicted)| of a run that is believed to be one of its plan."""
MOST_ERROR = 20.0
"""Largest error that is told apart."""


@dataclass(frozen=True)
class Trial:
    """A measurement of one plan."""

    name: str
    """Its file, or the log of the run."""
    plan: Plan
    seconds: float | None
    """Per iteration; None: it ran out of memory."""
    memory_bytes: float | None = None
    """Peak bytes of one device."""
    ranks: Sequence[int] = ()
    """Ranks one of which has this peak; empty: the fullest one has it."""


def seconds_run(trial: Trial, problem: Problem) -> RunConfig | None:
    """Return the run that the seconds of a trial give; None where it ran out of memory."""
    if trial.seconds is None:
        return None
    known = posterior(problem)
    predicted = evaluate(trial.plan, problem).iteration_time_s
    elasticities = time_elasticities(trial.plan, problem)
    slopes = time_slopes(known, problem, elasticities)
    error = log(trial.seconds / predicted)
    return _run(trial.name, error, known.residuals.measured_seconds, slopes)


def peak_stage(trial: Trial, problem: Problem) -> int | None:
    """Return the stage that a trial's peak is compared with; None: it says nothing.

    A peak that may be of several stages is off only above the fullest or below the emptiest of
    them.
    """
    if trial.memory_bytes is None:
        return None
    used = evaluate(trial.plan, problem).memory_bytes
    cluster = problem.cluster.arranged(trial.plan.node_order)
    size = cluster.num_devices // trial.plan.pp
    own = {cluster.pipeline_ranks.index(rank) // size for rank in trial.ranks}
    stages = sorted(own or range(len(used)), key=lambda stage: used[stage])
    if not own or trial.memory_bytes >= used[stages[-1]]:
        return stages[-1]
    return stages[0] if trial.memory_bytes <= used[stages[0]] else None


def memory_run(trial: Trial, problem: Problem) -> RunConfig | None:
    """Return the run that the peak of a trial gives; None where the trial has no usable peak.

    The allocator's peak says nothing of what is reserved outside of it.
    """
    stage = peak_stage(trial, problem)
    if stage is None or trial.memory_bytes is None:
        return None
    found = memory_slopes(trial.plan, problem)[stage]
    slopes = {own: slope for own, slope in found.items() if own.quantity != RESERVED}
    error = log(trial.memory_bytes / evaluate(trial.plan, problem).memory_bytes[stage])
    return _run(trial.name, error, posterior(problem).residuals.memory, slopes)


def _run(
    name: str,
    error: float,
    sd: float,
    slopes: Slopes,
) -> RunConfig:
    """Return the run; `RunConfig` takes no error above `MOST_ERROR`, which nothing believes."""
    error = min(max(error, -MOST_ERROR), MOST_ERROR)
    texts = {"|".join(place): slope for place, slope in slopes.items() if slope}
    return RunConfig(name, error, sd, texts)


def own_cluster(problem: Problem) -> ClusterConfig:
    """Return the cluster with the figures of its framework and a name of both, for runs to be added."""
    cluster = problem.config.cluster
    software = problem.software
    if cluster.runs:
        return cluster
    devices = {name: software.on(name, device) for name, device in cluster.devices.items()}
    name = f"{cluster.name}_{software.name or 'common'}"
    return replace(cluster, name=name, devices=devices, runs_of=software.name or None)


def with_run(problem: Problem, trial: Trial) -> Problem:
    """Return the problem with figures at the means given a run and the earlier ones of its cluster.

    One linear step, as `tuning` moves the seconds of other plans. Further steps would end at the
    mode, which is far from the mean: the figure whose share of the seconds grows fastest explains
    all of a slow run.

    Errors:
        ConfigError: the run is not of this job, or was read before; the cost model has no figures.
    """
    cost_name = problem.config.cost.name
    if not problem.config.cost.knows_stages:
        raise ConfigError(f"cost={cost_name} has no calibrated figures; try cost=analytic.")
    cluster = own_cluster(problem)
    if trial.name in [run.log for run in cluster.runs]:
        raise ConfigError(
            f"tune.log={trial.name} has been read before; try the log of another run."
        )
    framework = problem.software.name
    known = replace(posterior(problem), runs=())
    before = _means(known, cluster, framework, cluster.runs)
    runs = [*cluster.runs, *_new_runs(trial, problem, before)]
    after = _means(known, cluster, framework, runs)
    moved = deepcopy(cluster)
    for figure in figures_of(known, moved, framework):
        figure.move(known, after[figure.place] - before[figure.place])
    found = problem.with_config(cluster=replace(moved, runs=runs))
    # later prices start from the moved figures, and so do their slopes
    runs = [*cluster.runs, *_new_runs(trial, found, after)]
    return problem.with_config(cluster=replace(moved, runs=runs))


def _new_runs(trial: Trial, problem: Problem, means: dict[LatentPlace, float]) -> list[RunConfig]:
    """Return the runs of a trial, counted from the calibrated figures, which `means` have moved."""
    found = (seconds_run(trial, problem), memory_run(trial, problem))
    return [_before_moves(run, means) for run in found if run]


def _before_moves(run: RunConfig, means: dict[LatentPlace, float]) -> RunConfig:
    """Return a run whose error counts from the calibrated figures, not from the figures moved by `means`.

    Errors:
        ConfigError: the error is too large to be one of the model.
    """
    if abs(run.error) > LARGEST_ERROR:
        times = f"{exp(run.error):.2g} times the predicted seconds or bytes"
        raise ConfigError(f"tune.log={run.log} has {times}; try the log of this plan's own run.")
    moved = sum(slope * means[place] for place, slope in slopes_of(run).items())
    return replace(run, error=run.error + moved)


def _means(
    known: Posterior,
    cluster: ClusterConfig,
    framework: str,
    runs: list[RunConfig],
) -> dict[LatentPlace, float]:
    """Return how far runs move every calibrated figure of a cluster."""
    places = [figure.place for figure in figures_of(known, cluster, framework)]
    rows = [{place: 1.0} for place in places]
    moved = replace(known, runs=runs).given_runs(rows)
    return dict(zip(places, moved.means.tolist(), strict=True))


class Figure(NamedTuple):
    """A calibrated figure of a cluster's configuration."""

    owner: Any
    """Device or link that holds it."""
    field: str
    place: LatentPlace
    words: str
    """Key of the figure, or what its link joins."""
    link_rate: float | None = None
    """10^9 bytes/s of the link by its data sheet, where the figure is its efficiency."""

    @property
    def limits(self) -> tuple[float, float]:
        """Least and largest value that the schema allows."""
        (entry,) = [entry for entry in fields(self.owner) if entry.name == self.field]
        least, most = entry.metadata["range"]
        return float(least), float(most)

    def move(self, known: Posterior, distance: float) -> None:
        """Move the figure on its unbounded scale."""
        value = getattr(self.owner, self.field)
        moved = known.moved_value(self.place.quantity, value, distance)
        setattr(self.owner, self.field, moved)


def figures_of(known: Posterior, cluster: ClusterConfig, framework: str) -> Iterator[Figure]:
    """Yield all calibrated figures of a cluster."""
    for name, device in cluster.devices.items():
        for quantity in known.quantities:
            if quantity in vars(device):
                place = LatentPlace(quantity, family(name), framework)
                yield Figure(device, quantity, place, f"cluster.devices.{name}.{quantity}")
    links = [("intra", group.intra_node) for group in cluster.nodes]
    links.append(("inter", cluster.inter_node))
    for group in cluster.nodes:
        if group.inter_node is not None:
            links.append(("inter", group.inter_node))
    for side, link in links:
        where = "inside nodes" if side == "intra" else "between nodes"
        rate = link.bandwidth_GBps
        place = link_place(f"{side}_efficiency", framework, side, rate)
        yield Figure(link, "efficiency", place, f"bandwidth {where}", rate)
        place = link_place(f"{side}_latency_us", framework, side, rate)
        yield Figure(link, "latency_us", place, f"latency {where}, us")
