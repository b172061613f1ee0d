"""Build the problems that experiments compare methods on, listed in `experiments/data/problems.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from darts_parallel.config import read_yaml
from darts_parallel.cost import CostTable, Tables, build_tables, evaluate_batch, lightest_plans
from darts_parallel.errors import ConfigError, Entries, closest
from darts_parallel.problem import Problem, load_problem
from experiments.data import DATA

LIST = DATA / "problems.yaml"
TIGHTNESS = 1.15
"""Memory of a tight problem's devices, relative to what the lightest plan needs."""


@dataclass(frozen=True)
class SuiteCase:
    """Name one problem; its cost tables are built where they are needed."""

    name: str
    """Name that tables show and `problems=` matches."""
    overrides: tuple[str, ...]
    variant: str = "loose"
    """`loose`: as the presets say; `tight`: with little memory; `uneven`: with random layers."""
    seed: int = 0
    """Seed of the random factors of an uneven problem."""

    @cached_property
    def problem(self) -> Problem:
        """Load model, cluster, job and space."""
        problem = load_problem(list(self.overrides))
        return tight(problem) if self.variant == "tight" else problem

    def tables(self) -> tuple[CostTable, ...]:
        """Build the cost tables of the whole space."""
        tables = tuple(build_tables(self.problem))
        return uneven(tables, self.seed) if self.variant == "uneven" else tables


def tight(problem: Problem) -> Problem:
    """Give the devices little more memory than the lightest plan needs."""
    tables = tuple(build_tables(problem))
    lightest = lightest_plans(tables, "layerwise")
    peaks = []
    for table, plans in zip(tables, lightest, strict=True):
        peaks.append(evaluate_batch(table, plans).memory.amax(1).min())
    memory = TIGHTNESS * float(torch.stack(peaks).min())
    return problem.with_devices(lambda device: replace(device, memory=memory + device.reserved))


def uneven(tables: Tables, seed: int) -> tuple[CostTable, ...]:
    """Multiply every layer's seconds by a factor in [0.5, 2], its bytes by one in [0.7, 1.4]."""
    rng = torch.Generator().manual_seed(seed)
    shape = (tables[0].num_layers, 1)
    seconds = 2.0 ** (2.0 * torch.rand(shape, generator=rng, dtype=torch.float64) - 1.0)
    size = 2.0 ** (torch.rand(shape, generator=rng, dtype=torch.float64) - 0.5)
    factors = {
        "forward": seconds,
        "backward": seconds,
        "static": size,
        "activation": size,
        "working": size,
    }
    changed = []
    for table in tables:
        fields = {name: getattr(table, name) * factor for name, factor in factors.items()}
        changed.append(replace(table, **fields))
    return tuple(changed)


def _preset_case(entry: Entries, variant: str, seed: int) -> SuiteCase:
    model = entry["model"]
    cluster = entry["cluster"]
    training = entry.get("training", model)
    overrides = [f"model={model}", f"cluster={cluster}", f"training={training}", "space=layerwise"]
    size = ""
    if "nodes" in entry:
        overrides.append(f"cluster.nodes.0.count={entry['nodes']}")
        size = f" x {entry['nodes']} nodes"
    name = f"{model} on {cluster}{size}, {variant}"
    return SuiteCase(name, tuple(overrides), variant, seed)


def suite(parts: Sequence[str] = ()) -> list[SuiteCase]:
    """Return the problems of `compare`, or those whose name contains one of `parts`.

    `core` alone stands for a third of them. A problem's place in the file is its seed.

    Errors:
        ConfigError: one of the parts fits no problem.
    """
    listed = read_yaml(LIST)
    cases: list[SuiteCase] = []
    for entry in listed["compare"] + listed["smoke"]:
        for variant in entry["variants"]:
            cases.append(_preset_case(entry, variant, len(cases)))
    if tuple(parts) == ("core",):
        return [case for case in cases if case.name in listed["core"]]
    if parts:
        return named(cases, parts)
    smoke = sum(len(entry["variants"]) for entry in listed["smoke"])
    return cases[:-smoke]


def named(cases: Sequence[SuiteCase], parts: Sequence[str]) -> list[SuiteCase]:
    """Return the cases whose name contains one of `parts`; all of them without parts.

    Errors:
        ConfigError: one of the parts fits no case.
    """
    for part in parts:
        if not any(part in case.name for case in cases):
            raise _unknown(part, cases)
    return [case for case in cases if any(part in case.name for part in parts or [""])]


def _unknown(part: str, cases: Sequence[SuiteCase]) -> ConfigError:
    words = {word.strip(",") for case in cases for word in case.name.split()}
    near = closest(part, sorted(words))
    given = f"problems={part} is part of no problem's name"
    return ConfigError(f"{given}, such as {cases[0].name!r}; try {near}.")
