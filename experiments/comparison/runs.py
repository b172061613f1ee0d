"""Rows of a comparison: what one method found on one problem with one seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from darts_parallel.errors import Amounts
from experiments.comparison.quantiles import quantile

ORACLE = "dynamic_programming"
UNIFORM = "exhaustive_uniform"
SEARCH = "gradient_search"
SPACE = "layerwise"
AUTO = "auto"
"""Order of methods of `search=auto` (`darts_parallel.planner.methods`)."""


STAGES = {
    "relaxed": "relaxed_time_s",
    "repaired": "repaired_time_s",
    "fitted": "raw_time_s",
    "polished": "iteration_time_s",
}
"""Fields of a row by the stages of a search's plan."""


@dataclass(frozen=True)
class MethodRun:
    """Hold what one method found on one problem with one seed: a row of a comparison."""

    problem: str
    method: str
    seed: int | None
    """None where nothing is random."""
    iteration_time_s: float
    """Seconds per iteration of the method's best plan; infinite without one."""
    seconds: float
    evaluations: int
    proven: bool = False
    """Whether the method proved its answer: optimal in the model over its own space."""
    raw_time_s: float | None = None
    """Seconds per iteration before polishing; None where a method does not polish."""
    gap: float = inf
    """Relative distance from the proven optimum, or from a lower bound where the proof stopped."""
    relaxed_time_s: float = inf
    """Seconds per iteration of the relaxed plan, rounded; infinite where it does not fit."""
    repaired_time_s: float = inf
    """Seconds per iteration of the repaired plan; infinite where it does not fit."""
    cpu_s: float = 0.0


def gap(seconds: float, reference: float) -> float:
    """Return the relative distance from `reference`; infinite where there is no plan."""
    if reference <= 0:
        return inf
    return seconds / reference - 1.0


def grouped(runs: Sequence[MethodRun], name: str) -> dict[str, list[MethodRun]]:
    """Group rows by the field `name`, in their order."""
    groups: dict[str, list[MethodRun]] = {}
    for run in runs:
        groups.setdefault(getattr(run, name), []).append(run)
    return groups


def median_of(runs: Sequence[MethodRun], name: str) -> float:
    """Return the median of the field `name`."""
    return quantile([float(getattr(run, name)) for run in runs], 50)


def best_known(runs: Sequence[MethodRun]) -> Amounts:
    """Return the least seconds per iteration of each problem that any method found."""
    groups = grouped(runs, "problem").items()
    return {name: min(run.iteration_time_s for run in rows) for name, rows in groups}
