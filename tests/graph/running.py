"""Plans of tests, and their files on gloo processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from darts_parallel.config.composition import load_config
from darts_parallel.graph._mesh import DeviceMeshSpec
from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._space import GraphSpace
from darts_parallel.graph.capture import capture_module, make_inputs
from darts_parallel.graph.execute import plan_script
from darts_parallel.graph.operators import ModuleGraph
from darts_parallel.graph.plan import GraphPlan, make_mesh
from darts_parallel.graph.verify import Made, collectives_on_gloo, run_file
from darts_parallel.problem.cluster import Cluster
from darts_parallel.run.workers import Workers

EVEN = [
    "cluster=h100_1x8",
    "cluster.devices.h100.collective_start_us=0",
    "cluster.devices.h100.divided_half_size=0",
]
"""Products that lose nothing when they are divided."""
STEEP = [*EVEN, "cluster.nodes.0.intra_node.latency_us=88"]
"""Prices of tests that ask which plan is found; those of the calibration may move."""
FAST = [
    *EVEN,
    "cluster.nodes.0.intra_node.latency_us=0.0001",
    "cluster.nodes.0.intra_node.bandwidth_GBps=20000",
]
"""Links on which small modules are worth splitting."""


def mesh(*ranks: int, job: Sequence[str] = STEEP) -> DeviceMeshSpec:
    """Return a mesh on a cluster."""
    return make_mesh(Cluster.from_config(load_config(list(job)).cluster, "bf16"), ranks)


def on_meta(make: Callable[[], nn.Module], *shapes: Any) -> ModuleGraph:
    """Capture a module on the meta device, with inputs of these shapes."""
    with torch.device("meta"):
        return capture_module(make(), make_inputs(shapes))


@cache
def captured(make: Callable[[], Made]) -> ModuleGraph:
    """Capture a module once for all of its tests."""
    return capture_module(*make())


def plan_made(
    make: Callable[[], Made], ranks: tuple[int, ...], seed: int | None = None, **options: Any
) -> GraphPlan:
    """Plan a module on fast links; with a seed, choose for every operator at random instead."""
    space = GraphSpace(captured(make), mesh(*ranks, job=FAST), **options)
    if seed is None:
        answer = GraphProgramme(space).solve()
        assert answer.seconds == pytest.approx(answer.lp_seconds, rel=1e-5), (
            "of a microsecond's step, too"
        )
        return GraphPlan(space, answer.assignment)
    rng = np.random.default_rng(seed)
    return GraphPlan(space, tuple(int(rng.integers(len(group.choices))) for group in space.groups))


@dataclass(frozen=True)
class ForcedPlan:
    """A plan in which one operator splits a dimension, and all others nothing."""

    label: str
    plan: GraphPlan
    text: str


def forced_plans(graph: ModuleGraph, ranks: int) -> Iterator[ForcedPlan]:
    """Yield a plan for every choice of every operator."""
    space = GraphSpace(graph, mesh(ranks), 4)
    for number, group in enumerate(space.groups):
        op = group.operators[0]
        for k, choice in enumerate(group.choices):
            if k and op.node is not None:
                assignment = [0] * len(space.groups)
                assignment[number] = k
                plan = GraphPlan(space, tuple(assignment))
                label = f"{op.overload} {choice.labels} {choice.inputs}"
                yield ForcedPlan(label, plan, plan_script(plan))


def check_file(workers: Workers, make: Callable[[], Made], text: str, plan: GraphPlan) -> None:
    """Assert that a file computes what one process does, with the plan's collectives."""
    runs = workers.run(run_file, make, text, plan.space.mesh.ranks)
    assert runs, "an earlier job failed and stopped the processes"
    for run in runs:
        assert max(run.differences.values()) < 1e-5, run.differences
        assert run.collectives == collectives_on_gloo(plan)
