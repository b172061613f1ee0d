"""Elasticities of a plan's time: d log(seconds per iteration) / d log(hardware parameter).

The derivatives of all figures but memory are exact, by automatic differentiation of the plan's price (of
its critical path where the pipeline is simulated). Memory changes no seconds of a given plan, only which
plans fit: its figure is what the plan gains by local moves once every device has 10 % more.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log

import torch
from torch import Tensor

from darts_parallel.config import OFFLOADS
from darts_parallel.cost import (
    HardPlans,
    build_tables,
    evaluate_batch,
    hard_plan,
    with_memory,
    without_dominated,
)
from darts_parallel.errors import DartsParallelError
from darts_parallel.gradient import polish
from darts_parallel.plans import OuterSpace, Plan, outer_spaces, plan_space
from darts_parallel.problem import Device, Link, NodeGroup, Problem

MEMORY = "memory"
STEP = 1.1
"""Factor of memory whose worth is asked."""
MOST_SIMULATED = 4_000
"""Micro-batches times stages of a simulated plan whose moves are tried: a second or so for all of them."""
NO_SECONDS = ("memory", "reserved", "state_factor", "activation_factor", "half_share")
"""Figures of a device that change no seconds of a given plan, or follow from others."""


def sensitivity(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return the elasticity of the seconds per iteration in every figure of the hardware.

    -0.3 at a bandwidth: 1 % more of it makes the iteration 0.3 % shorter. Figures that the plan does not
    depend on have 0.

    Args:
        problem: With any cost model but the Searcher report's, which knows no such figures: then empty.

    Returns:
        By name, e.g. `devices.a10.peak_flops`, `intra_node.bandwidth`, `inter_node.latency`, and `memory`
        where the plan fits and is not too long to be simulated often.

    Errors:
        PlanError: the plan does not fit the problem.
    """
    result = time_elasticities(plan, problem)
    if not result:
        return {}
    worth = _worth_of_memory(plan, problem)
    return result if worth is None else result | {MEMORY: worth}


def time_elasticities(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return the elasticities of `sensitivity` without that of memory.

    Errors:
        PlanError: the plan does not fit the problem.
    """
    if not problem.config.cost.knows_stages:
        return {}
    figures: dict[str, Tensor] = {}
    changed = _with_tensors(problem, figures, offloads=bool(plan.offload))
    seconds = hard_plan(plan, changed)[2].iteration_time[0]
    slopes = torch.autograd.grad(seconds, list(figures.values()), allow_unused=True)
    total, rows = float(seconds.detach()), zip(figures.items(), slopes, strict=True)
    return {
        n: 0.0 if slope is None else float(slope * value.detach()) / total
        for (n, value), slope in rows
    }


def offload_slopes(plan: Plan, problem: Problem) -> list[dict[str, dict[str, float]]]:
    """Return what a larger share in host memory does, for every device of the pipeline and kind of tensor.

    Args:
        plan: A plan that offloads.

    Returns:
        By kind, `iteration_time_s` and `memory_bytes` for the whole of it at the plan's slope.
    """
    table, hard, _ = hard_plan(plan, problem)
    shares = torch.tensor(plan.offload, dtype=torch.float64, requires_grad=True)
    assert table.host is not None
    cost = evaluate_batch(replace(table, host=replace(table.host, fractions=shares)), hard)
    slopes = []
    # a share changes the memory of its device alone
    for value in (cost.iteration_time[0], cost.memory.sum()):
        (slope,) = torch.autograd.grad(value, [shares], retain_graph=True)
        slopes.append(slope.tolist())
    return [
        {
            kind: {"iteration_time_s": seconds[i], "memory_bytes": size[i]}
            for i, kind in enumerate(OFFLOADS)
        }
        for seconds, size in zip(*slopes, strict=True)
    ]


def _with_tensors(
    problem: Problem, figures: dict[str, Tensor], *, offloads: bool = False
) -> Problem:
    """Return the problem with every figure of the hardware as a leaf tensor, collected in `figures`."""

    def leaf(name: str, value: float | Tensor) -> Tensor:
        if name not in figures:
            figures[name] = torch.tensor(float(value), dtype=torch.float64, requires_grad=True)
        return figures[name]

    def leaves(owner: Device | Link, name: str) -> dict[str, Tensor]:
        numbers = (
            f.name for f in fields(owner) if isinstance(getattr(owner, f.name), (float, Tensor))
        )
        asked = [
            n for n in numbers if n not in NO_SECONDS and (offloads or not n.startswith("host_"))
        ]
        return {n: leaf(f"{name}.{n}", getattr(owner, n)) for n in asked}

    cluster = problem.cluster
    groups = []
    for index, group in enumerate(cluster.groups):
        device = replace(group.device, **leaves(group.device, f"devices.{group.device.name}"))  # type: ignore[arg-type]
        intra = replace(
            group.intra_node, **leaves(group.intra_node, _link_name(cluster.groups, index))
        )  # type: ignore[arg-type]
        inter = group.inter_node
        if inter is not None:
            inter = replace(inter, **leaves(inter, f"nodes.{index}.inter_node"))  # type: ignore[arg-type]
        groups.append(replace(group, device=device, intra_node=intra, inter_node=inter))
    between = replace(cluster.inter_node, **leaves(cluster.inter_node, "inter_node"))  # type: ignore[arg-type]
    return replace(problem, cluster=replace(cluster, groups=tuple(groups), inter_node=between))


def _link_name(groups: Sequence[NodeGroup], index: int) -> str:
    """Return `intra_node` where all nodes have the same, else that of the first group that has this one."""
    links = [group.intra_node for group in groups]
    first = links.index(links[index])
    return "intra_node" if all(link == links[0] for link in links) else f"nodes.{first}.intra_node"


def _worth_of_memory(plan: Plan, problem: Problem) -> float | None:
    """Return the elasticity in the memory of every device, by what local moves gain.

    None where the plan does not fit, and where moves would be simulated through too many passes. The moves
    keep the outer choice but the number of micro-batches. They are tried with the present memory first, so
    that only what memory buys is counted.
    """
    space = _useful_space(plan, problem)
    (table,) = build_tables(problem, [space])
    if table.pipeline.simulated and table.num_stages * plan.num_micro_batches > MOST_SIMULATED:
        return None
    index = {choice: number for number, choice in enumerate(table.choices)}
    best = HardPlans(
        outer=torch.tensor([space.num_micro_batches.index(plan.num_micro_batches)]),
        choices=torch.tensor([[index[layer] for layer in plan.layers]]),
        first_layers=torch.tensor([plan.boundaries[:-1]]),
    )
    if not bool(evaluate_batch(table, best).feasible[0]):
        return None
    kind, times = problem.config.space.kind, list[float]()
    larger = problem.with_devices(lambda device: replace(device, memory=device.memory * STEP))
    for own in (table, with_memory(table, larger.cluster, larger.margin)):
        best, seconds, _ = polish(own, best, kind)
        times.append(seconds)
    return log(times[1] / times[0]) / log(STEP)


def _useful_space(plan: Plan, problem: Problem) -> OuterSpace:
    """Return the plan's outer choices and strategies with the useful ones of the problem's space."""
    own = plan_space(plan)
    try:
        spaces = outer_spaces(problem)
    except DartsParallelError:  # a given plan need not obey the pins
        return own
    for space in spaces:
        if replace(space, num_micro_batches=own.num_micro_batches, choices=own.choices) == own:
            useful = without_dominated(build_tables(problem, [space])[0]).choices
            counts = tuple(sorted({*space.num_micro_batches, *own.num_micro_batches}))
            return replace(
                own, num_micro_batches=counts, choices=tuple(dict.fromkeys(own.choices + useful))
            )
    return own
