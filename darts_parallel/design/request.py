"""Read what a design asks: `conf/design/NAME.yaml`, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from darts_parallel.config import config_dir
from darts_parallel.design.figures import FIGURES, MEMORY, figure_of, places, reference
from darts_parallel.errors import ConfigError, closest
from darts_parallel.problem import Problem, load_problem

UNITS = ("gpu", "node", "cluster")
DESIGN = {"jobs": list, "knobs": dict, "options": dict, "unit": "USD", "budget": 0.0, "target": 0.0,
          "budgets": [0.8, 0.9, 1.1, 1.25], "tolerance": 1e-3}  # fmt: skip
JOB = {"overrides": list, "weight": 1.0}
OPTION: dict[str, Any] = {"overrides": [], "fixed": {}, "knobs": {}}
FIXED = dict.fromkeys(UNITS, 0.0)
KNOB = {"price": float, "exponent": 1.0, "per": UNITS, "bounds": [0.25, 4.0]}
"""Keys, each with its default, its values with the default first, or the type of what must be given."""
WORDS = {float: "a number", list: "a list", dict: "a mapping", str: "text"}


@dataclass(frozen=True)
class Knob:
    """A figure that money changes: at `factor` times its reference it costs `price * goodness ** exponent`.

    The goodness is the factor, or its inverse where less of the figure is better.
    """

    name: str
    price: float
    """Price of the whole cluster at the reference."""
    exponent: float
    low: float
    """Least goodness."""
    high: float
    """Largest goodness."""
    reference: float
    """SI units."""

    @property
    def sense(self) -> int:
        """Return 1 where more of the figure is better, -1 where less is."""
        return FIGURES[figure_of(self.name)][0]


@dataclass(frozen=True)
class Option:
    """One discrete choice: its jobs on the cluster that it names, its fixed part and its knobs."""

    name: str
    problems: tuple[Problem, ...]
    overrides: tuple[tuple[str, ...], ...]
    """Overrides of the configuration by job."""
    fixed: float
    """Price of the whole cluster, whatever the knobs."""
    knobs: tuple[Knob, ...]


@dataclass(frozen=True)
class Design:
    """A whole question: the best use of a budget, or the least that a target costs."""

    name: str
    unit: str
    budget: float
    """Zero where a target is given."""
    target: float
    """Seconds per iteration; zero where a budget is given."""
    budgets: tuple[float, ...]
    """Budgets of the Pareto front, over the budget; rising."""
    tolerance: float
    """Gap to the bound, relative, at which the search ends."""
    weights: tuple[float, ...]
    """Weights of the logarithms of the jobs' seconds; their sum is 1."""
    options: tuple[Option, ...]


def read_design(name: str, folder: Path | None = None, changes: dict[str, Any] | None = None) -> Design:
    """Read and check `NAME.yaml` of a folder, or else of `conf/design`, where changes take precedence.

    Errors:
        ConfigError: whatever breaks a rule, in one sentence.
    """
    folder = Path(config_dir()) / "design" if folder is None else folder
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        near = closest(name, names or ["buyers"])
        raise ConfigError(f"design={name} must be one of {', '.join(names)}; try {near}.")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"design={name} cannot be read ({error}); try YAML in UTF-8.") from None
    if changes and isinstance(raw, dict):
        raw |= dict.fromkeys({"budget", "target"} if {"budget", "target"} & set(changes) else ()) | changes
    return design_of(name, raw)


def design_of(name: str, raw: Any) -> Design:
    """Check what a design file holds."""
    given = _fields("design", raw, DESIGN)
    if (given["budget"] > 0.0) == (given["target"] > 0.0):
        raise ConfigError("design.budget or design.target must be given, and not both; try budget=1e6.")
    factors = sorted({1.0, *(_number("design.budgets", factor) for factor in given["budgets"])})
    jobs = [_fields(f"design.jobs.{index}", job, JOB) for index, job in enumerate(given["jobs"])]
    weights = [_number(f"design.jobs.{index}.weight", job["weight"]) for index, job in enumerate(jobs)]
    options = tuple(_option(key, value, given["knobs"], jobs) for key, value in given["options"].items())
    tolerance = _number("design.tolerance", given["tolerance"])
    return Design(
        name, given["unit"], given["budget"], given["target"], tuple(factors), tolerance,
        tuple(weight / sum(weights) for weight in weights), options,
    )  # fmt: skip


def _option(name: Any, raw: Any, knobs: dict[str, Any], jobs: Sequence[dict[str, Any]]) -> Option:
    """Check one discrete choice and build its problems."""
    place = f"design.options.{name}"
    given = _fields(place, raw, OPTION)
    overrides = tuple(tuple(map(str, [*given["overrides"], *job["overrides"]])) for job in jobs)
    problems = tuple(load_problem(list(own)) for own in overrides)
    for problem in problems:
        space, cost = problem.config.space, problem.config.cost
        if space.kind != "uniform" or space.offload is not None or not cost.knows_stages:
            raise ConfigError(
                f"design.jobs must have space=uniform, space.offload=null and cost=analytic, not space="
                f"{space.kind} with cost={cost.name}; try space=uniform."
            )
    cluster = problems[0].cluster
    if any(problem.cluster.num_devices != cluster.num_devices for problem in problems):
        raise ConfigError(f"{place} must give every job the same cluster; try cluster= in it, not in jobs.")
    counts = _counts(range(len(cluster.groups)), problems[0])
    fixed = sum(counts[unit] * p for unit, p in _fields(f"{place}.fixed", given["fixed"], FIXED).items())
    merged = (knobs | given["knobs"]).items()
    return Option(str(name), problems, overrides, fixed,
                  tuple(_knob(str(key), value, problems[0]) for key, value in merged))  # fmt: skip


def _counts(groups: Sequence[int], problem: Problem) -> dict[str, int]:
    """Return how many of each unit node groups have."""
    chosen = [problem.cluster.groups[index] for index in groups]
    nodes, gpus = sum(g.count for g in chosen), sum(g.count * g.gpus for g in chosen)
    return {"gpu": gpus, "node": nodes, "cluster": 1}


def _knob(name: str, raw: Any, problem: Problem) -> Knob:
    """Check one knob; its price is that of the whole cluster."""
    place, cluster = f"design.knobs.{name}", problem.cluster
    places(name, cluster)
    given = _fields(place, raw, KNOB)
    bounds = [_number(f"{place}.bounds", bound) for bound in given["bounds"]]
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise ConfigError(f"{place}.bounds={given['bounds']} must be two factors that rise; try [0.25,4].")
    value = reference(name, cluster)
    if value <= 0.0:
        raise ConfigError(f"{place} must be a figure above 0 on this cluster; leave it out or try {MEMORY}.")
    groups = [int(name.split(".")[1])] if name.startswith("nodes.") else range(len(cluster.groups))
    price = _number(f"{place}.price", given["price"]) * _counts(groups, problem)[given["per"]]
    low, high = bounds if FIGURES[figure_of(name)][0] > 0 else (1.0 / bounds[1], 1.0 / bounds[0])
    return Knob(name, price, _number(f"{place}.exponent", given["exponent"]), low, high, value)


def _fields(place: str, raw: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a mapping, checked by the rules of its keys, and the defaults of what it lacks."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{place}={raw} must hold keys; try {', '.join(rules)}.")
    for key in raw:
        if key not in rules:
            near = closest(str(key), rules)
            raise ConfigError(f"{place}.{key} is not a key ({', '.join(rules)}); try {near}.")
    found = {}
    for key, rule in rules.items():
        value, default = raw.get(key), rule[0] if isinstance(rule, tuple) else rule
        kind = rule if isinstance(rule, type) else type(default)
        if value in (None, [], {}) and isinstance(rule, type):
            raise ConfigError(f"{place}.{key} must be given; try {WORDS[kind]}, as in design=buyers.")
        found[key] = value = default if value is None else value
        if isinstance(rule, tuple) and value not in rule:
            raise ConfigError(f"{place}.{key}={value} must be one of {', '.join(rule)}; try {default}.")
        if kind is float:
            found[key] = _number(f"{place}.{key}", value, least=default)
        elif not isinstance(value, kind):
            raise ConfigError(f"{place}.{key}={value} must be {WORDS[kind]}; try design=buyers for one.")
    return found


def _number(place: str, value: Any, least: Any = None) -> float:
    """Return a number above 0, or one from 0 on where that is the least."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not good or value < 0 or (value == 0 and least != 0.0):
        rule = "from 0 on" if least == 0 else "above 0"
        raise ConfigError(f"{place}={value} must be a number {rule}; try 1.0.")
    return float(value)
