"""List the problems that experiments compare methods on: presets, tight memory, uneven layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch

from darts_parallel.cost import CostTable, build_tables, evaluate_batch, lightest_plans
from darts_parallel.errors import ConfigError
from darts_parallel.problem import Problem, load_problem

TIGHTNESS = 1.15
"""Memory of a tight problem's devices, relative to what the lightest plan needs."""


VARIANTS = ("loose", "tight", "uneven")


@dataclass(frozen=True)
class SuiteCase:
    """Name one problem of the suite; its cost tables are built where they are needed."""

    model: str
    cluster: str
    training: str
    variant: str
    """`loose`: the preset; `tight`: with little memory; `uneven`: with random layers."""
    seed: int
    """Seed of the random factors of an uneven problem."""
    nodes: int | None = None
    """Number of nodes of the cluster; None: as the preset has it."""

    @property
    def name(self) -> str:
        """Return the name that tables show and filters match."""
        size = "" if self.nodes is None else f" x {self.nodes} nodes"
        return f"{self.model} on {self.cluster}{size}, {self.variant}"

    def tables(self) -> tuple[CostTable, ...]:
        """Build the cost tables of the whole space."""
        size = [] if self.nodes is None else [f"cluster.nodes.0.count={self.nodes}"]
        preset = [f"model={self.model}", f"cluster={self.cluster}", f"training={self.training}"]
        problem = load_problem([*preset, *size, "space=layerwise"])
        if self.variant == "tight":
            problem = tight(problem)
        tables = tuple(build_tables(problem))
        return uneven(tables, self.seed) if self.variant == "uneven" else tables


PRESETS: tuple[tuple[str, str, str], ...] = (
    ("gpt2_xl", "a10_8x4", "gpt2_xl"),
    ("gpt2_xl", "a10_4x4", "gpt2_xl"),
    ("gpt2_xl", "v100_4x8", "gpt2_xl_fp16"),
    ("gpt2_xl", "a100_40_2x8", "gpt2_xl"),
    ("bert_345m", "a10_4x4", "bert_345m"),
    ("bert_345m", "a10_8x4", "bert_345m"),
    ("bert_345m", "a100_40_2x8", "bert_345m"),
    ("t5_1_3b", "a10_4x4", "t5_1_3b"),
    ("t5_1_3b", "a10_8x4", "t5_1_3b"),
    ("t5_1_3b", "a100_40_2x8", "t5_1_3b"),
    ("llama2_7b", "h100_1x8", "llama2_7b"),
    ("llama2_7b", "a100_40_2x8", "llama2_7b"),
    ("llama2_7b", "a100_40_8x8", "llama2_7b"),
    ("llama3_8b", "a100_80_8x8", "llama3_8b"),
    ("llama3_8b", "h100_8x8", "llama3_8b"),
)
"""Model, cluster and training preset of each problem; loose and tight memory are both used."""

LARGE: tuple[tuple[str, str, str, int | None], ...] = (
    ("llama3_70b", "h100_8x8", "llama3_70b", None),
    ("bloom_176b", "a100_80_48x8", "bloom_176b", None),
    ("gpt3_175b", "a100_80_48x8", "gpt3_175b", None),
    ("llama3_405b", "h100_128x8", "llama3_405b", None),
    ("llama3_405b", "h100_128x8", "llama3_405b", 512),
)
"""Real jobs, 80 to 128 layers on 64 to 4,096 GPUs; the last column is the number of nodes."""

MIXED: tuple[tuple[str, str, str], ...] = (
    ("gpt2_xl", "a10_a100_mixed", "gpt2_xl"),
    ("bert_345m", "a10_a100_mixed", "bert_345m"),
)
"""Problems on nodes of more than one kind."""

UNEVEN: tuple[tuple[str, str, str], ...] = (
    PRESETS[0:2] + PRESETS[4:6] + PRESETS[8:9] + PRESETS[10:11]
)
"""Problems that also appear with random factors on their layers' seconds and bytes."""

CORE = (
    "gpt2_xl on a10_8x4, tight",
    "gpt2_xl on a10_8x4, uneven",
    "gpt2_xl on v100_4x8, tight",
    "gpt2_xl on a100_40_2x8, tight",
    "bert_345m on a10_4x4, tight",
    "bert_345m on a10_4x4, uneven",
    "t5_1_3b on a10_8x4, loose",
    "t5_1_3b on a10_8x4, uneven",
    "llama2_7b on h100_1x8, tight",
    "llama3_8b on h100_8x8, tight",
    "gpt2_xl on a10_a100_mixed, loose",
    "llama3_70b on h100_8x8, loose",
    "gpt3_175b on a100_80_48x8, loose",
    "llama3_405b on h100_128x8 x 512 nodes, tight",
)
"""`problems=core`: every kind of problem of the suite, a third as many."""

TOY: tuple[str, str, str] = ("toy", "toy", "toy")
"""Smoke-test problem; excluded unless named."""


def tight(problem: Problem) -> Problem:
    """Give the devices little more memory than the lightest plan needs."""
    tables = tuple(build_tables(problem))
    peaks = [
        evaluate_batch(table, plans).memory.amax(1).min()
        for table, plans in zip(tables, lightest_plans(tables, "layerwise"), strict=True)
    ]
    peak = float(torch.stack(peaks).min())
    return problem.with_devices(
        lambda device: replace(device, memory=TIGHTNESS * peak + device.reserved)
    )


def uneven(tables: Sequence[CostTable], seed: int) -> tuple[CostTable, ...]:
    """Return tables with a random factor in [0.5, 2] on the seconds and bytes of every layer."""
    rng = torch.Generator().manual_seed(seed)
    layers = tables[0].num_layers
    seconds = 2.0 ** (2.0 * torch.rand(layers, generator=rng, dtype=torch.float64) - 1.0)
    size = 2.0 ** (torch.rand(layers, generator=rng, dtype=torch.float64) - 0.5)
    return tuple(
        replace(
            table,
            forward=table.forward * seconds.unsqueeze(1),
            backward=table.backward * seconds.unsqueeze(1),
            static=table.static * size.unsqueeze(1),
            activation=table.activation * size.unsqueeze(1),
            working=table.working * size.unsqueeze(1),
        )
        for table in tables
    )


def suite(names: Sequence[str] = ()) -> list[SuiteCase]:
    """Return the problems, or those whose name contains one of `names`; `core` stands for `CORE`.

    Errors:
        ConfigError: one of the names fits no problem.
    """
    cases: list[SuiteCase] = []
    for preset in PRESETS:
        for variant in VARIANTS if preset in UNEVEN else VARIANTS[:2]:
            cases.append(SuiteCase(*preset, variant=variant, seed=len(cases)))
    cases += [SuiteCase(*preset, variant="loose", seed=0) for preset in MIXED]
    for model, cluster, training, nodes in LARGE:
        for variant in VARIANTS[:2]:
            cases.append(SuiteCase(model, cluster, training, variant, seed=len(cases), nodes=nodes))
    if not names:
        return cases
    if tuple(names) == ("core",):
        return [case for case in cases if case.name in CORE]
    cases += [SuiteCase(*TOY, variant=variant, seed=len(cases)) for variant in VARIANTS]
    for name in names:
        if not any(name in case.name for case in cases):
            known = sorted(
                {case.model for case in cases} | {case.cluster for case in cases} | set(VARIANTS)
            )
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"problems={name} is part of no problem's name, such as {cases[0].name!r}; try {near}."
            )
    return [case for case in cases if any(name in case.name for name in names)]
