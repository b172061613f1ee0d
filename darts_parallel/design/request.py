"""Read what a design asks: `conf/design/NAME.yaml` or a file of the user, checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from omegaconf import OmegaConf

from darts_parallel.config import (
    config_dir,
    require,
    require_at_least,
    require_few_values,
    require_member,
    require_members,
)
from darts_parallel.design.bound import Knobs
from darts_parallel.design.figures import MEMORY, reference, sense
from darts_parallel.errors import ConfigError
from darts_parallel.problem import NodeGroup, Problem, load_problem

UNITS = ("gpu", "node", "cluster")
DESIGN = {
    "jobs": list,
    "knobs": dict,
    "options": dict,
    "unit": "USD",
    "budget": 0.0,
    "target": 0.0,
    "budgets": [0.8, 0.9, 1.1, 1.25],
    "tolerance": 1e-3,
}
JOB = {"overrides": list, "weight": 1.0}
OPTION: dict[str, Any] = {"overrides": [], "fixed": {}, "knobs": {}}
FIXED = dict.fromkeys(UNITS, 0.0)
KNOB = {"price": float, "exponent": 1.0, "per": UNITS, "bounds": [0.25, 4.0]}
"""Keys, each with its default, its values with the default first, or the type of what must be given."""
WORDS = {float: "a number", list: "a list", dict: "a mapping", str: "text"}
EXCLUSIVE = {"budget", "target"}
"""Keys of which one is the question; a change of one takes the place of the other."""


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


def read_design(request: str, changes: Mapping[str, Any] | None = None) -> Design:
    """Read and check a design, where changes take precedence.

    Args:
        request: Name of a file of `conf/design`, or a path that ends in `.yaml`.
    """
    shipped = Path(config_dir()) / "design"
    file = Path(request)
    if file.suffix != ".yaml":
        names = sorted(path.stem for path in shipped.glob("*"))
        require_member("design", request, tuple(names))
        file = shipped / f"{request}.yaml"
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
    return design_of(file.stem, raw)


def design_of(name: str, raw: Any) -> Design:
    """Check what a design file holds."""
    given = _fields("design", raw, DESIGN)
    either = (given["budget"] > 0.0) != (given["target"] > 0.0)
    require(either, "design.budget or design.target", "be given, and not both", "budget=1e6")
    jobs = []
    for index, job in enumerate(given["jobs"]):
        jobs.append(_fields(f"design.jobs.{index}", job, JOB))
    weight = sum(job["weight"] for job in jobs)
    budgets = {_number("design.budgets", factor) for factor in given["budgets"]}
    options = []
    for key, own in given["options"].items():
        options.append(_option(key, own, given["knobs"], jobs))
    weights = tuple(job["weight"] / weight for job in jobs)
    budget = given["budget"]
    target = given["target"]
    factors = tuple(sorted(budgets | {1.0}))
    gap = given["tolerance"]
    unit = given["unit"]
    return Design(name, unit, budget, target, factors, gap, weights, tuple(options))


def _option(
    name: Any,
    raw: Any,
    knobs: dict[str, Any],
    jobs: Sequence[dict[str, Any]],
) -> Option:
    """Check one discrete choice and build its problems."""
    place = f"design.options.{name}"
    given = _fields(place, raw, OPTION)
    problems = []
    for job in jobs:
        overrides = [*given["overrides"], *job["overrides"]]
        problems.append(load_problem([str(own) for own in overrides]))
    for problem in problems:
        _require_priceable(problem)
    sizes = {problem.cluster.num_devices for problem in problems}
    rule = "give every job the same cluster"
    require(len(sizes) == 1, place, rule, "cluster= in it, not in jobs")
    counts = _counts(problems[0].cluster.groups)
    prices = _fields(f"{place}.fixed", given["fixed"], FIXED)
    fixed = sum(counts[unit] * price for unit, price in prices.items())
    rows = {}
    for key, value in (knobs | given["knobs"]).items():
        rows[str(key)] = _knob(str(key), value, problems[0])
    columns = np.array(list(rows.values())).T
    every = Knobs(tuple(rows), *columns)
    return Option(str(name), tuple(problems), fixed, every)


def _require_priceable(problem: Problem) -> None:
    """Refuse a job whose plans the bound does not cover."""
    space, cost = problem.config.space, problem.config.cost
    covered = space.kind == "uniform" and space.offload is None and cost.knows_stages
    covered = covered and cost.term is None
    rule = "have space=uniform, space.offload=null, cost.term=null and cost=analytic"
    given = f"space={space.kind} with cost={cost.name}"
    require(covered, "design.jobs", f"{rule}, not {given}", "space=uniform")


def _counts(groups: Iterable[NodeGroup]) -> dict[str, int]:
    """Return how many of each unit some node groups have."""
    nodes = [(group.count, group.gpus) for group in groups]
    return {
        "gpu": sum(count * gpus for count, gpus in nodes),
        "node": sum(count for count, _ in nodes),
        "cluster": 1,
    }


class _Knob(NamedTuple):
    """One row of `Knobs`."""

    price: float
    exponent: float
    low: float
    high: float
    reference: float


def _knob(
    name: str,
    raw: Any,
    problem: Problem,
) -> _Knob:
    """Check one knob."""
    place = f"design.knobs.{name}"
    value = reference(name, problem.cluster)
    given = _fields(place, raw, KNOB)
    bounds = [_number(f"{place}.bounds", bound) for bound in given["bounds"]]
    rises = len(bounds) == 2 and bounds[0] <= bounds[1]
    require(rises, f"{place}.bounds={given['bounds']}", "be two factors that rise", "[0.25,4]")
    if value <= 0.0:
        raise ConfigError(
            f"{place} must be a figure above 0 on this cluster; leave it out or try {MEMORY}."
        )
    groups = problem.cluster.groups
    if name.startswith("nodes."):
        number = int(name.split(".")[1])
        groups = (groups[number],)
    price = given["price"] * _counts(groups)[given["per"]]
    low, high = sorted(sense(name) * log(bound) for bound in bounds)
    return _Knob(price, given["exponent"], low, high, value)


def _fields(
    place: str,
    raw: Any,
    rules: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the values of a mapping, checked by the rules of its keys, and the defaults of missing ones."""
    require(isinstance(raw, dict), f"{place}={raw}", "hold keys", ", ".join(rules))
    require_members(f"{place}: key", map(str, raw), tuple(rules))
    found = {}
    for key, rule in rules.items():
        found[key] = _field(f"{place}.{key}", raw.get(key), rule)
    return found


def _field(
    place: str,
    value: Any,
    rule: Any,
) -> Any:
    """Return one value, checked by the rule of its key."""
    if isinstance(rule, tuple):
        value = rule[0] if value is None else str(value)
        require_member(place, value, rule)
        return value
    needed = isinstance(rule, type)
    kind = rule if needed else type(rule)
    if needed:
        missing = value in (None, [], {})
        require(not missing, place, "be given", f"{WORDS[kind]}, as in design=buyers")
    elif value is None:
        value = rule
    if kind is float:
        return _number(place, value, strict=rule != 0.0)
    if not isinstance(value, kind):
        raise ConfigError(f"{place}={value} must be {WORDS[kind]}; try design=buyers for one.")
    return value


def _number(
    place: str,
    value: Any,
    *,
    strict: bool = True,
) -> float:
    """Return a number above 0, or from 0 on."""
    require(type(value) in (int, float), f"{place}={value}", "be a number", "1.0")
    require_at_least(place, value, 0, strict=strict)
    return float(value)
