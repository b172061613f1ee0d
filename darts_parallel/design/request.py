"""Read what a design asks: `conf/design/NAME.yaml`, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import OmegaConf

from darts_parallel.config import (
    config_dir,
    require,
    require_at_least,
    require_member,
    require_members,
)
from darts_parallel.design.bound import Knobs
from darts_parallel.design.figures import FIGURES, MEMORY, figure_of, reference
from darts_parallel.errors import ConfigError
from darts_parallel.problem import Problem, load_problem

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


@dataclass(frozen=True)
class Option:
    """One discrete choice: its jobs on its cluster, what that costs whatever the knobs, and the knobs."""

    name: str
    problems: tuple[Problem, ...]
    fixed: float
    knobs: Knobs


@dataclass(frozen=True)
class Design:
    """A whole question: the best use of a budget, or the least that a target costs (the other is 0).

    The target is in seconds; `budgets`, of the Pareto front over the budget, rise; the search ends at a
    relative gap to the bound of `tolerance`; the logarithms of the jobs' seconds have `weights` of sum 1.
    """

    name: str
    unit: str
    budget: float
    target: float
    budgets: tuple[float, ...]
    tolerance: float
    weights: tuple[float, ...]
    options: tuple[Option, ...]


def read_design(
    name: str, folder: Path | None = None, changes: dict[str, Any] | None = None
) -> Design:
    """Read and check `NAME.yaml` of a folder, or else of `conf/design`, where changes take precedence."""
    folder = Path(config_dir()) / "design" if folder is None else folder
    require_member(
        "design", name, tuple(sorted(path.stem for path in folder.glob("*.yaml"))) or ("buyers",)
    )
    try:
        raw = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"design={name} cannot be read ({error}); try YAML in UTF-8.") from None
    if changes and isinstance(raw, dict):
        raw |= (
            dict.fromkeys({"budget", "target"} if {"budget", "target"} & set(changes) else ())
            | changes
        )
    return design_of(name, raw)


def design_of(name: str, raw: Any) -> Design:
    """Check what a design file holds."""
    given = _fields("design", raw, DESIGN)
    either = (given["budget"] > 0.0) != (given["target"] > 0.0)
    require(either, "design.budget or design.target", "be given, and not both", "budget=1e6")
    jobs = [_fields(f"design.jobs.{index}", job, JOB) for index, job in enumerate(given["jobs"])]
    weights = tuple(job["weight"] / sum(job["weight"] for job in jobs) for job in jobs)
    budgets = tuple(
        sorted({1.0, *(_number("design.budgets", factor) for factor in given["budgets"])})
    )
    options = tuple(
        _option(key, own, given["knobs"], jobs) for key, own in given["options"].items()
    )
    unit, budget, target, tolerance = (
        given[key] for key in ("unit", "budget", "target", "tolerance")
    )
    return Design(name, unit, budget, target, budgets, tolerance, weights, options)


def _option(name: Any, raw: Any, knobs: dict[str, Any], jobs: Sequence[dict[str, Any]]) -> Option:
    """Check one discrete choice and build its problems."""
    place = f"design.options.{name}"
    given = _fields(place, raw, OPTION)
    problems = tuple(
        load_problem([str(o) for o in (*given["overrides"], *job["overrides"])]) for job in jobs
    )
    for config in (problem.config for problem in problems):
        space, cost = config.space, config.cost
        known = space.kind == "uniform" and space.offload is None and cost.knows_stages
        rule = "have space=uniform, space.offload=null and cost=analytic, not space="
        require(known, "design.jobs", f"{rule}{space.kind} with cost={cost.name}", "space=uniform")
    same = len({problem.cluster.num_devices for problem in problems}) == 1
    require(same, place, "give every job the same cluster", "cluster= in it, not in jobs")
    counts = _counts(problems[0])
    fixed = sum(
        counts[unit] * p for unit, p in _fields(f"{place}.fixed", given["fixed"], FIXED).items()
    )
    every = {
        str(key): _knob(str(key), value, problems[0])
        for key, value in (knobs | given["knobs"]).items()
    }
    return Option(
        str(name), problems, fixed, Knobs(tuple(every), *np.array(list(every.values())).T)
    )


def _counts(problem: Problem, group: str = "") -> dict[str, int]:
    """Return how many of each unit the cluster has, or a node group by its number."""
    chosen = [problem.cluster.groups[int(group)]] if group else problem.cluster.groups
    return {
        "gpu": sum(g.count * g.gpus for g in chosen),
        "node": sum(g.count for g in chosen),
        "cluster": 1,
    }


def _knob(name: str, raw: Any, problem: Problem) -> tuple[float, ...]:
    """Check one knob and return its values in the order of `Knobs`."""
    place, value = f"design.knobs.{name}", reference(name, problem.cluster)
    given = _fields(place, raw, KNOB)
    bounds = [_number(f"{place}.bounds", bound) for bound in given["bounds"]]
    rises = len(bounds) == 2 and bounds[0] <= bounds[1]
    require(rises, f"{place}.bounds={given['bounds']}", "be two factors that rise", "[0.25,4]")
    if value <= 0.0:
        raise ConfigError(
            f"{place} must be a figure above 0 on this cluster; leave it out or try {MEMORY}."
        )
    count = _counts(problem, name.split(".")[1] if name.startswith("nodes.") else "")[given["per"]]
    low, high = bounds if FIGURES[figure_of(name)][0] > 0 else (1.0 / bounds[1], 1.0 / bounds[0])
    return given["price"] * count, given["exponent"], float(np.log(low)), float(np.log(high)), value


def _fields(place: str, raw: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a mapping, checked by the rules of its keys, and the defaults of what it lacks."""
    require(isinstance(raw, dict), f"{place}={raw}", "hold keys", ", ".join(rules))
    require_members(f"{place}: key", map(str, raw), tuple(rules))
    found = {}
    for key, rule in rules.items():
        value, default = raw.get(key), rule[0] if isinstance(rule, tuple) else rule
        kind = rule if isinstance(rule, type) else type(default)
        left_out = value in (None, [], {}) and isinstance(rule, type)
        require(not left_out, f"{place}.{key}", "be given", f"{WORDS[kind]}, as in design=buyers")
        found[key] = value = default if value is None else value
        if isinstance(rule, tuple):
            require_member(f"{place}.{key}", str(value), rule)
        elif kind is float:
            found[key] = _number(f"{place}.{key}", value, strict=default != 0.0)
        elif not isinstance(value, kind):
            raise ConfigError(
                f"{place}.{key}={value} must be {WORDS[kind]}; try design=buyers for one."
            )
    return found


def _number(place: str, value: Any, *, strict: bool = True) -> float:
    """Return a number above 0, or from 0 on."""
    require(type(value) in (int, float), f"{place}={value}", "be a number", "1.0")
    require_at_least(place, value, 0, strict=strict)
    return float(value)
