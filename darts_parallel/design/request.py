"""Read what a design asks: `conf/design/NAME.yaml` or a file of the user, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from omegaconf import MISSING, OmegaConf

from darts_parallel.config import (
    check_rules,
    group_file,
    group_names,
    one_of,
    ranged,
    read_typed,
    require,
    require_few_values,
    require_member,
)
from darts_parallel.design.bound import Knobs
from darts_parallel.design.figures import MEMORY, reference, sense
from darts_parallel.errors import ConfigError
from darts_parallel.problem import NodeGroup, Problem, load_problem

UNITS = ("gpu", "node", "cluster")
EXCLUSIVE = {"budget", "target"}
"""Keys of which one is the question; a change of one takes the place of the other."""
LEAST, MOST = 1e-30, 1e30
"""Limits of numbers above 0."""


@dataclass
class KnobRequest:
    """Costs of a figure."""

    price: float = ranged(MISSING, LEAST, MOST)
    """Money for the reference, of each unit."""
    exponent: float = ranged(1.0, LEAST, MOST)
    """Power of the figure with which the price rises."""
    per: str = one_of("gpu", UNITS)
    bounds: list[float] = ranged([0.25, 4.0], LEAST, MOST)
    """Least and largest factor over the reference."""


@dataclass
class JobRequest:
    """A job, and its weight among several."""

    overrides: list[Any] = MISSING
    weight: float = ranged(1.0, LEAST, MOST)


@dataclass
class FixedCosts:
    """Money that each unit costs whatever the knobs."""

    gpu: float = ranged(0.0, 0.0, MOST)
    node: float = ranged(0.0, 0.0, MOST)
    cluster: float = ranged(0.0, 0.0, MOST)


@dataclass
class OptionRequest:
    """One discrete choice; its knobs take the place of the design's."""

    overrides: list[Any] = field(default_factory=list)
    fixed: FixedCosts = field(default_factory=FixedCosts)
    knobs: dict[str, KnobRequest] = field(default_factory=dict)


@dataclass
class DesignRequest:
    """Content of a design's file."""

    jobs: list[JobRequest] = MISSING
    knobs: dict[str, KnobRequest] = MISSING
    options: dict[str, OptionRequest] = MISSING
    unit: str = "USD"
    budget: float | None = ranged(None, LEAST, MOST)
    target: float | None = ranged(None, LEAST, MOST)
    budgets: list[float] = ranged([0.8, 0.9, 1.1, 1.25], LEAST, MOST)
    tolerance: float = ranged(1e-3, LEAST, MOST)


@dataclass(frozen=True)
class Option:
    """One discrete choice: its jobs on its cluster, what that costs whatever the knobs, and the knobs."""

    name: str
    problems: tuple[Problem, ...]
    fixed: float
    knobs: Knobs


@dataclass(frozen=True)
class Design:
    """A whole question: the best use of a budget, or the least that a target costs (the other is 0)."""

    name: str
    unit: str
    """Unit of money."""
    budget: float
    target: float
    """Seconds per iteration."""
    budgets: tuple[float, ...]
    """Factors of the budget for the Pareto front, rising."""
    tolerance: float
    """Relative gap to the bound that ends the search."""
    weights: tuple[float, ...]
    """Weights of the logarithms of the jobs' seconds; they sum to 1."""
    options: tuple[Option, ...]


def read_design(
    request: str, changes: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Design:
    """Read and check a design, where changes take precedence.

    Args:
        request: Name of a file of `conf/design`, or a path that ends in `.yaml`.
        changes: Values of the file's keys.
        overrides: Of every job, after its own ones.
    """
    file = Path(request)
    if file.suffix != ".yaml":
        require_member("design", request, tuple(group_names("design")))
        file = group_file("design", request)
    require_few_values(f"design={request}", file)
    try:
        raw = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ConfigError(
            f"design={request} cannot be read ({error}); try YAML in UTF-8."
        ) from None
    if changes and isinstance(raw, dict):
        if EXCLUSIVE & set(changes):
            raw.update(dict.fromkeys(EXCLUSIVE))
        raw.update(changes)
    return design_of(file.stem, raw, overrides)


def design_of(name: str, raw: Any, overrides: Sequence[str] = ()) -> Design:
    """Check what a design file holds; arguments as `read_design`."""
    given = read_typed(DesignRequest, raw, "design")
    for key in ("jobs", "knobs", "options"):
        require(bool(getattr(given, key)), f"design.{key}", "be given", "those of design=buyers")
    jobs = given.jobs
    for job in jobs:
        job.overrides.extend(overrides)
    either = (given.budget is None) != (given.target is None)
    require(either, "design.budget or design.target", "be given, and not both", "budget=1e6")
    whole = sum(job.weight for job in jobs)
    weights = tuple(job.weight / whole for job in jobs)
    options = []
    for key, own in given.options.items():
        problems = []
        for job in jobs:
            problem = load_problem(list(map(str, own.overrides + job.overrides)))
            check_rules("design", problem.config)  # the bound covers no other plans
            problems.append(problem)
        sizes = {problem.cluster.num_devices for problem in problems}
        rule = "give every job the same cluster"
        require(len(sizes) == 1, f"design.options.{key}", rule, "cluster= in it, not in jobs")
        counts = _counts(problems[0].cluster.groups)
        fixed = sum(counts[unit] * price for unit, price in vars(own.fixed).items())
        knobs = given.knobs | own.knobs
        rows = {knob: _knob(knob, asked, problems[0]) for knob, asked in knobs.items()}
        columns = np.array(list(rows.values())).T
        options.append(Option(key, tuple(problems), fixed, Knobs(tuple(rows), *columns)))
    budgets = tuple(sorted({1.0, *given.budgets}))
    question = (given.budget or 0.0, given.target or 0.0, budgets, given.tolerance)
    return Design(name, given.unit, *question, weights, tuple(options))


def _counts(groups: Sequence[NodeGroup]) -> dict[str, int]:
    """Return how many of each unit some node groups have."""
    return {
        "gpu": sum(group.count * group.gpus for group in groups),
        "node": sum(group.count for group in groups),
        "cluster": 1,
    }


class _Knob(NamedTuple):
    """One row of `Knobs`."""

    price: float
    exponent: float
    low: float
    high: float
    reference: float


def _knob(name: str, given: KnobRequest, problem: Problem) -> _Knob:
    """Check one knob."""
    bounds = given.bounds
    place = f"design.knobs.{name}"
    value = reference(name, problem.cluster)
    rises = len(bounds) == 2 and bounds[0] <= bounds[1]
    require(rises, f"{place}.bounds={bounds}", "be two factors that rise", "[0.25,4]")
    rule = "be a figure above 0 on this cluster, or left out"
    require(value > 0.0, place, rule, MEMORY)
    groups = problem.cluster.groups
    if name.startswith("nodes."):
        number = int(name.split(".")[1])
        groups = (groups[number],)
    price = given.price * _counts(groups)[given.per]
    low, high = sorted(sense(name) * log(bound) for bound in bounds)
    return _Knob(price, given.exponent, low, high, value)
