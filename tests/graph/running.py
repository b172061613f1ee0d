"""Run plans on gloo processes and compare them with one process."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from darts_parallel.config.composition import load_config
from darts_parallel.graph.execute import PlanRun, RankMesh
from darts_parallel.graph.plan import GraphPlan, make_mesh, plan_module
from darts_parallel.problem.cluster import Cluster

Made = tuple[nn.Module, list[Tensor], dict[str, Any]]
FAST = ["cluster=h100_1x8", "cluster.nodes.0.intra_node.latency_us=0.0001",
        "cluster.nodes.0.intra_node.bandwidth_GBps=20000"]  # fmt: skip
"""Links on which small modules are worth splitting."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ON_GLOO = {"all_to_all": "all_gather"}
"""Gloo has no all-to-all: DTensor gathers and takes its part."""


def check_module(
    make: Callable[[], Made], ranks: tuple[int, ...], options: dict[str, Any], seed: int | None = None
) -> dict[str, Any]:
    """Plan, run forward and backward, and compare with the whole module; on every process.

    Args:
        make: Returns module, inputs and further inputs by name.
        ranks: Of the mesh.
        options: Of `plan_module`.
        seed: Choose for every operator at random instead.

    Returns:
        Largest differences of outputs and gradients, relative to their largest entries, collectives that ran
        and that the plan lists, by kind, and the labels of the operators.
    """
    torch.manual_seed(0)
    module, inputs, kwargs = make()
    mesh = make_mesh(Cluster.from_config(load_config(FAST).cluster, "bf16"), ranks)
    planned = plan_module(module, inputs, mesh, kwargs, **options)
    if seed is not None:
        groups, rng = planned.plan.space.groups, np.random.default_rng(seed)
        picks = tuple(int(rng.integers(len(group.choices))) for group in groups)
        planned = replace(planned, plan=GraphPlan(planned.plan.space, picks))
    names = tuple(f"axis{k}" for k in range(len(ranks)))
    here = RankMesh(init_device_mesh("cpu", ranks, mesh_dim_names=names))
    run = PlanRun(planned.plan, here, module, planned.exported.constants)
    tensors = [*inputs, *(value for value in kwargs.values() if isinstance(value, Tensor))]
    sources = [op for op in planned.graph.operators if op.op == "input"]
    whole = {op.target: tensor for op, tensor in zip(sources, tensors, strict=True)}
    with CommDebugMode() as comms:
        outputs = run.forward(whole)
        cotangents = {name: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype)
                      for name, t in outputs.items()}  # fmt: skip
        total = sum((outputs[name] * cotangents[name]).sum() for name in outputs)
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]
    ran: Counter[str] = Counter()
    for kind, count in comms.get_comm_counts().items():
        name = str(kind).split(".")[-1]
        ran[next(k for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") if k in name)] += (
            count
        )
    listed = Counter(ON_GLOO.get(c.step.kind, c.step.kind) for c in planned.plan.collectives)
    differences = _differences(module, inputs, kwargs, run, outputs, cotangents)
    labels = {op.name: planned.plan.choice(op).labels for op in planned.graph.computing}
    unknown = [op.op for op in planned.unknown]
    return {"differences": differences, "ran": dict(ran), "listed": dict(listed), "labels": labels,
            "unknown": unknown}  # fmt: skip


def _differences(
    module: nn.Module, inputs: list[Tensor], kwargs: dict[str, Any], run: PlanRun, outputs: dict[str, Tensor],
    cotangents: dict[str, Tensor],
) -> dict[str, float]:  # fmt: skip
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    answer = module(*leaves, **kwargs)
    answer = list(answer.values()) if isinstance(answer, dict) else answer
    flat = [answer] if isinstance(answer, Tensor) else [one for one in answer if isinstance(one, Tensor)]
    flat = flat[: len(outputs)]
    total = sum((one * cotangents[name]).sum() for one, name in zip(flat, outputs, strict=True))
    assert isinstance(total, Tensor)
    total.backward()  # type: ignore[no-untyped-call]
    found = {name: _distance(outputs[name], one) for one, name in zip(flat, outputs, strict=True)}
    by_name = dict(module.named_parameters(remove_duplicate=False))
    sources = [op for op in run.plan.space.graph.operators if op.op == "input"]
    by_name |= {op.target: leaf for op, leaf in zip(sources, leaves, strict=False)}
    produced = {op.target: run.plan.choice(op).outputs for op in run.plan.space.graph.operators if op.target}
    unit = max(float(one.grad.abs().max()) for one in by_name.values() if one.grad is not None)
    for name, leaf in run.leaves.items():
        reference = by_name[name].grad
        if reference is None and leaf.grad is None:
            continue
        assert reference is not None, name
        assert leaf.grad is not None, name
        largest = float(reference.abs().max())
        part = run.mesh.part(reference, produced[name][0])
        found[name] = float((leaf.grad - part).abs().max()) / max(largest, 1e-3 * unit)
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-12))
