"""Run the files of plans on gloo processes and compare them with one process."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from darts_parallel.config.composition import load_config
from darts_parallel.graph._mesh import DeviceMeshSpec
from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._space import GraphSpace
from darts_parallel.graph.capture import capture_module, make_inputs
from darts_parallel.graph.operators import ModuleGraph
from darts_parallel.graph.plan import GraphPlan, make_mesh
from darts_parallel.problem.cluster import Cluster
from darts_parallel.run.workers import Workers

Made = tuple[nn.Module, list[Tensor], dict[str, Any]]
FAST = [
    "cluster=h100_1x8",
    "cluster.nodes.0.intra_node.latency_us=0.0001",
    "cluster.nodes.0.intra_node.bandwidth_GBps=20000",
]
"""Links on which small modules are worth splitting."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ON_GLOO = {"all_to_all": "all_gather"}
"""Gloo has no all-to-all: DTensor gathers and takes its part."""


def mesh(*ranks: int, job: Sequence[str] = ("cluster=h100_1x8",)) -> DeviceMeshSpec:
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


def listed(plan: GraphPlan) -> dict[str, int]:
    """Count the collectives of a plan as gloo runs them."""
    return dict(Counter(ON_GLOO.get(c.step.kind, c.step.kind) for c in plan.collectives))


def check_file(workers: Workers, make: Callable[[], Made], text: str, plan: GraphPlan) -> None:
    """Assert that a file computes what one process does, with the plan's collectives."""
    for differences, ran in workers.run(run_file, make, text, plan.space.mesh.ranks):
        assert max(differences.values()) < 1e-5, differences
        assert ran == listed(plan)


def run_file(
    make: Callable[[], Made], text: str, ranks: tuple[int, ...]
) -> tuple[dict[str, float], Any]:
    """Return differences of a plan's file and the whole module over their largest entries, and moves."""
    file: dict[str, Any] = {}
    exec(text, file)
    torch.manual_seed(0)
    module, inputs, kwargs = make()
    module.eval()
    mesh = init_device_mesh(
        "cpu", ranks, mesh_dim_names=tuple(f"axis{k}" for k in range(len(ranks)))
    )
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs
    ]
    whole = dict(zip(file["INPUTS"], leaves, strict=True))
    weights = file["distribute"](file["tensors_of"](module), file["WEIGHTS"], mesh)
    parts = file["distribute"](whole, file["INPUTS"], mesh)
    answer = module(*leaves, **kwargs)
    answer = list(answer.values()) if isinstance(answer, dict) else answer
    flat = (
        [answer]
        if isinstance(answer, Tensor)
        else [one for one in answer if isinstance(one, Tensor)]
    )
    with CommDebugMode() as comms:
        outputs = file["forward"](mesh, weights, parts)
        sums, found = [torch.zeros(())] * 2, dict[str, float]()
        for made, one in zip(outputs.values(), flat, strict=False):
            cotangent = torch.randn(one.shape, generator=torch.Generator().manual_seed(1)).to(
                one.dtype
            )
            own = DTensor.from_local(cotangent, mesh, [Replicate()] * mesh.ndim, run_check=False)
            local = made.to_local() * own.redistribute(placements=made.placements).to_local()
            sums = [sums[0] + local.sum(), sums[1] + (one * cotangent).sum()]
        sums[0].backward()  # type: ignore[no-untyped-call]
    sums[1].backward()  # type: ignore[no-untyped-call]
    ran: Counter[str] = Counter()
    for kind, count in comms.get_comm_counts().items():
        ran[next(k for k in KINDS if k in str(kind))] += count
    for (name, made), one in zip(outputs.items(), flat, strict=False):
        found[name] = float(
            (made.full_tensor() - one).abs().max() / one.abs().max().clamp(min=1e-12)
        )
    by_name = whole | dict(module.named_parameters(remove_duplicate=False))
    unit = max(float(one.grad.abs().max()) for one in by_name.values() if one.grad is not None)
    for name, part in (weights | parts).items():
        expected = by_name[name].grad if name in by_name else None
        assert (expected is None) == (part.grad is None), name
        if expected is not None:
            largest = max(float(expected.abs().max()), 1e-3 * unit)
            found[name] = float((part.grad.full_tensor() - expected).abs().max()) / largest
    return found, dict(ran)
