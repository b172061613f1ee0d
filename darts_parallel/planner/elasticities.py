"""Elasticities of a plan's time: d log(seconds per iteration) / d log(hardware parameter).

The derivatives of all figures but memory are exact, by automatic differentiation of the plan's
price (of its critical path where the pipeline is simulated). Memory changes no seconds of a given
plan, only which plans fit: its figure is what the plan gains by local moves once every device has
10 % more.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from darts_parallel.config import OFFLOADS
from darts_parallel.cost import (
    HardPlans,
    Tensors,
    build_tables,
    evaluate,
    evaluate_batch,
    float_tensor,
    hard_plan,
    with_memory,
    without_dominated,
)
from darts_parallel.errors import Amounts, DartsParallelError, Entries
from darts_parallel.gradient import polish
from darts_parallel.planner.memory_chance import tightened
from darts_parallel.plans import OuterSpace, Plan, outer_spaces, plan_space
from darts_parallel.problem import Cluster, Device, Link, NodeGroup, Problem

MEMORY = "memory"
STEP = 1.1
"""Factor of memory whose worth is asked."""
MOST_LAYERS = 300
"""Layers up to which moves say what memory is worth: 1,000 layers took 7 GB and four minutes."""
MOST_SIMULATED = 4_000
"""Micro-batches times stages of a simulated plan whose moves are tried: a second or so for all of them."""
NO_SECONDS = ("memory", "reserved", "state_factor", "activation_factor", "half_share")
"""Figures of a device that change no seconds of a given plan, or follow from others."""


def sensitivity(plan: Plan, problem: Problem) -> Amounts:
    """Return the elasticity of the seconds per iteration in every figure of the hardware.

    -0.3 at a bandwidth: 1 % more of it makes the iteration 0.3 % shorter. Figures that the plan
    does not depend on have 0.

    Args:
        problem: With any cost model but `cost=searcher`, which knows no such figures: then empty.

    Returns:
        By name, e.g. `devices.a10.peak_flops`, `intra_node.bandwidth`, `inter_node.latency`, and
        `memory` where the plan fits and is not too long to be simulated often.

    Errors:
        PlanError: the plan does not fit the problem.
    """
    result = time_elasticities(plan, problem)
    if not result:
        return {}
    worth = _worth_of_memory(plan, problem)
    return result if worth is None else result | {MEMORY: worth}


def time_elasticities(plan: Plan, problem: Problem) -> Amounts:
    """Return the elasticities of `sensitivity` without the one of memory.

    Errors:
        PlanError: the plan does not fit the problem.
    """
    if not problem.config.cost.knows_stages:
        return {}
    leaves = _Leaves(offloads=bool(plan.offload))
    changed = replace(problem, cluster=leaves.cluster(problem.cluster))
    seconds = hard_plan(plan, changed)[2].iteration_time[0]
    figures = leaves.figures
    slopes = torch.autograd.grad(seconds, list(figures.values()), materialize_grads=True)
    total = float(seconds.detach())
    return {
        name: float(slope * value.detach()) / total
        for (name, value), slope in zip(figures.items(), slopes, strict=True)
    }


def offload_slopes(plan: Plan, problem: Problem) -> list[dict[str, Amounts]]:
    """Return what a larger share in host memory does, for every device of the pipeline and kind of tensor.

    Args:
        plan: A plan that offloads.

    Returns:
        By kind, `iteration_time_s` and `memory_bytes` for the whole of it at the plan's slope.
    """
    table, hard, _ = hard_plan(plan, problem)
    assert table.host is not None
    shares = float_tensor(plan.offload).requires_grad_()
    host = replace(table.host, fractions=shares)
    cost = evaluate_batch(replace(table, host=host), hard)
    seconds = cost.iteration_time[0]
    (time_slopes,) = torch.autograd.grad(seconds, [shares], retain_graph=True)
    # a share changes the memory of its device alone
    (memory_slopes,) = torch.autograd.grad(cost.memory.sum(), [shares])
    result = []
    for device in range(len(shares)):
        kinds = {}
        for column, kind in enumerate(OFFLOADS):
            kinds[kind] = {
                "iteration_time_s": float(time_slopes[device, column]),
                "memory_bytes": float(memory_slopes[device, column]),
            }
        result.append(kinds)
    return result


class _Leaves:
    """Leaf tensors of the figures of a cluster, by name."""

    def __init__(self, *, offloads: bool) -> None:
        self.offloads = offloads
        """Whether the plan uses host memory."""
        self.figures: Tensors = {}

    def of(self, owner: Device | Link, name: str) -> Any:
        """Return a device or link whose figures are leaf tensors, shared by all of that name."""
        changed: Entries = {}
        for own in fields(owner):
            value = getattr(owner, own.name)
            if not isinstance(value, (float, Tensor)) or own.name in NO_SECONDS:
                continue
            if own.name.startswith("host_") and not self.offloads:
                continue
            key = f"{name}.{own.name}"
            if key not in self.figures:
                leaf = float_tensor(float(value))
                self.figures[key] = leaf.requires_grad_()
            changed[own.name] = self.figures[key]
        return replace(owner, **changed)

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return a cluster whose figures are leaf tensors."""
        groups = []
        for index, group in enumerate(cluster.groups):
            device = self.of(group.device, f"devices.{group.device.name}")
            intra = self.of(group.intra_node, _link_name(cluster.groups, index))
            inter = group.inter_node
            if inter is not None:
                inter = self.of(inter, f"nodes.{index}.inter_node")
            groups.append(replace(group, device=device, intra_node=intra, inter_node=inter))
        between = self.of(cluster.inter_node, "inter_node")
        return replace(cluster, groups=tuple(groups), inter_node=between)


def _link_name(groups: Sequence[NodeGroup], index: int) -> str:
    """Return `intra_node` where all nodes have the same, else that of the first group that has this one."""
    links = [group.intra_node for group in groups]
    first = links.index(links[index])
    return "intra_node" if all(link == links[0] for link in links) else f"nodes.{first}.intra_node"


def _worth_of_memory(plan: Plan, problem: Problem) -> float | None:
    """Return the elasticity in the memory of every device, by what local moves gain.

    None where the plan does not fit, where moves would be simulated through too many passes, and
    where there are more than `MOST_LAYERS`.
    The moves keep the pipeline configuration but the number of micro-batches. They are tried with
    the present memory first, so that only what memory buys is counted. They leave as much memory
    free as `space.out_of_memory` asks for, or the plan's own share if it leaves less.
    """
    problem = problem.leaving_free(0.0)
    cost = evaluate(plan, problem)
    if not cost.feasible or len(plan.layers) > MOST_LAYERS:
        return None
    problem = problem.leaving_free(
        min(tightened(problem).headroom, 1.0 - max(cost.fullness) / problem.usable)
    )
    space = _useful_space(plan, problem)
    (table,) = build_tables(problem, [space])
    if table.simulated and table.num_stages * plan.num_micro_batches > MOST_SIMULATED:
        return None
    outer = space.num_micro_batches.index(plan.num_micro_batches)
    choices = [table.choices.index(layer) for layer in plan.layers]
    best = HardPlans.one(outer, choices, plan.boundaries[:-1])
    kind = problem.config.space.kind
    larger = problem.cluster.with_devices(lambda own: replace(own, memory=own.memory * STEP))
    best, before, _ = polish(table, best, kind)
    roomy = with_memory(table, larger, problem.margin)
    _, after, _ = polish(roomy, best, kind)
    return log(after / before) / log(STEP)


def _useful_space(plan: Plan, problem: Problem) -> OuterSpace:
    """Return the plan's configuration and strategies with the useful ones of the problem's space."""
    own = plan_space(plan)
    try:
        spaces = outer_spaces(problem)
    except DartsParallelError:  # a given plan need not obey the pins
        return own
    for space in spaces:
        if replace(space, num_micro_batches=own.num_micro_batches, choices=own.choices) == own:
            useful = without_dominated(build_tables(problem, [space])[0]).choices
            counts = tuple(sorted({*space.num_micro_batches, *own.num_micro_batches}))
            choices = tuple(dict.fromkeys(own.choices + useful))
            return replace(own, num_micro_batches=counts, choices=choices)
    return own
