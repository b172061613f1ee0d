"""Read what a design asks: `conf/design/NAME.yaml`, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from darts_parallel.config import config_dir
from darts_parallel.design.figures import FIGURES, MEMORY, members, reference, split_name
from darts_parallel.errors import ConfigError
from darts_parallel.problem import Problem, load_problem

UNITS = ("gpu", "node", "cluster")
DESIGN = ("unit", "budget", "budgets", "jobs", "knobs", "options", "tolerance")
KNOB = ("price", "exponent", "per", "bounds")
DEFAULT_BUDGETS = (0.8, 0.9, 1.1, 1.25)
"""Further budgets of the Pareto front, over the budget."""


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
        return FIGURES[split_name(self.name)[1]]

    @property
    def is_memory(self) -> bool:
        """Whether the figure is the capacity of devices."""
        return split_name(self.name)[1] == MEMORY


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
    """A whole question."""

    name: str
    unit: str
    budget: float
    budgets: tuple[float, ...]
    """Budgets of the Pareto front, rising."""
    tolerance: float
    """Gap to the bound, relative, at which the search ends."""
    weights: tuple[float, ...]
    """Weights of the logarithms of the jobs' seconds; their sum is 1."""
    options: tuple[Option, ...]


def read_design(name: str, folder: Path | None = None, changes: dict[str, Any] | None = None) -> Design:
    """Read and check a design.

    Args:
        folder: Where `NAME.yaml` lies; None: `conf/design`.
        changes: Values that take the place of the file's.

    Errors:
        ConfigError: whatever breaks a rule, in one sentence.
    """
    folder = Path(config_dir()) / "design" if folder is None else folder
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        near = (get_close_matches(name, names, n=1, cutoff=0.0) or ["buyers"])[0]
        raise ConfigError(f"design={name} must be one of {', '.join(names)}; try {near}.")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"design={name} cannot be read ({error}); try YAML in UTF-8.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"design={name} must hold keys and values; try {', '.join(DESIGN)}.")
    return _design(name, {str(key): value for key, value in raw.items()} | (changes or {}))


def _design(name: str, raw: dict[str, Any]) -> Design:
    """Check a design that was read."""
    _known("design", raw, DESIGN)
    for key in ("budget", "jobs", "knobs", "options"):
        if not raw.get(key):
            raise ConfigError(f"design.{key} must be given; try design=buyers for an example.")
    for key, kind in (("jobs", list), ("knobs", dict), ("options", dict)):
        if not isinstance(raw[key], kind):
            raise ConfigError(f"design.{key} must be a {kind.__name__}; try design=buyers for an example.")
    budget = _number("design.budget", raw["budget"])
    factors = raw.get("budgets", list(DEFAULT_BUDGETS))
    if not isinstance(factors, list):
        raise ConfigError(
            f"design.budgets={factors} must be a list of factors of the budget; try [0.8,1.25]."
        )
    budgets = sorted({budget, *(budget * _number("design.budgets", factor) for factor in factors)})
    tolerance = _number("design.tolerance", raw.get("tolerance", 1e-3))
    weights, jobs = [], []
    for index, job in enumerate(raw["jobs"]):
        place = f"design.jobs.{index}"
        _known(place, job, ("overrides", "weight"))
        jobs.append(_overrides(place, job))
        weights.append(_number(f"{place}.weight", job.get("weight", 1.0)))
    options = tuple(_option(key, value, raw["knobs"], jobs) for key, value in raw["options"].items())
    whole = sum(weights)
    return Design(
        name, str(raw.get("unit", "USD")), budget, tuple(budgets), tolerance,
        tuple(weight / whole for weight in weights), options,
    )  # fmt: skip


def _option(name: Any, raw: Any, knobs: dict[str, Any], jobs: Sequence[list[str]]) -> Option:
    """Check one discrete choice and build its problems."""
    place = f"design.options.{name}"
    _known(place, raw, ("overrides", "fixed", "knobs"))
    own = _overrides(place, raw)
    overrides = [(*own, *job) for job in jobs]
    problems = tuple(load_problem(list(given)) for given in overrides)
    for problem in problems:
        if problem.config.space.kind != "uniform" or problem.config.space.offload is not None:
            raise ConfigError(
                f"design.jobs must be planned with space=uniform and space.offload=null, not "
                f"space={problem.config.space.kind}; try space=uniform."
            )
        if not problem.config.cost.knows_stages:
            raise ConfigError(
                f"design.jobs must go with cost=analytic, not {problem.config.cost.name}; try analytic."
            )
    cluster = problems[0].cluster
    if any(problem.cluster.num_devices != cluster.num_devices for problem in problems):
        raise ConfigError(f"{place} must give every job the same cluster; try cluster= in it, not in jobs.")
    counts = {"gpu": cluster.num_devices, "node": len(cluster.node_types), "cluster": 1}
    given = raw.get("fixed", {})
    _known(f"{place}.fixed", given, UNITS)
    fixed = sum(
        counts[key] * _number(f"{place}.fixed.{key}", value, zero=True) for key, value in given.items()
    )
    merged = knobs | (raw.get("knobs") or {})
    return Option(str(name), problems, tuple(overrides), fixed,
                  tuple(_knob(key, value, problems[0]) for key, value in merged.items()))  # fmt: skip


def _knob(name: Any, raw: Any, problem: Problem) -> Knob:
    """Check one knob; its price is that of the whole cluster."""
    name, place = str(name), f"design.knobs.{name}"
    cluster, sense = problem.cluster, FIGURES[split_name(name)[1]]
    groups = [cluster.groups[index] for index in members(name, cluster)]
    _known(place, raw, KNOB)
    if "price" not in raw:
        raise ConfigError(
            f"{place}.price must be given, since a knob without price has no best value; try 1000."
        )
    per = raw.get("per", "gpu")
    if per not in UNITS:
        raise ConfigError(f"{place}.per={per} must be one of {', '.join(UNITS)}; try gpu.")
    bounds = raw.get("bounds", [0.25, 4.0])
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ConfigError(f"{place}.bounds={bounds} must be two factors of the reference; try [0.25,4].")
    low, high = (_number(f"{place}.bounds", value) for value in bounds)
    if low > high:
        raise ConfigError(f"{place}.bounds={bounds} must rise; try [{high:g},{low:g}].")
    value = reference(name, cluster)
    if value <= 0.0:
        raise ConfigError(f"{place} must be a figure above 0 on this cluster; leave it out or try {MEMORY}.")
    count = {
        "gpu": sum(g.count * g.gpus for g in groups),
        "node": sum(g.count for g in groups),
        "cluster": 1,
    }[per]
    ends = (low, high) if sense > 0 else (1.0 / high, 1.0 / low)
    price = _number(f"{place}.price", raw["price"]) * count
    return Knob(name, price, _number(f"{place}.exponent", raw.get("exponent", 1.0)), *ends, value)


def _known(place: str, raw: Any, keys: Sequence[str]) -> None:
    """Refuse what is no mapping, and keys that do not exist."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{place}={raw} must hold keys; try {', '.join(keys)}.")
    for key in raw:
        if key not in keys:
            near = (get_close_matches(str(key), keys, n=1, cutoff=0.0) or [keys[0]])[0]
            raise ConfigError(f"{place}.{key} is not a key ({', '.join(keys)}); try {near}.")


def _overrides(place: str, raw: dict[str, Any]) -> list[str]:
    """Return the overrides of a job or an option."""
    given = raw.get("overrides", [])
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise ConfigError(f"{place}.overrides={given} must be a list of overrides; try [cluster=h100_8x8].")
    return given


def _number(place: str, value: Any, *, zero: bool = False) -> float:
    """Return a number above 0 (or from 0 on)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        rule = "from 0 on" if zero else "above 0"
        raise ConfigError(f"{place}={value} must be a number {rule}; try 1.0.")
    return float(value)
