"""Other ways to train a module on the same ranks: a part of the batch each, with whole weights or shards.

Seconds are those of the main command's formulas: `cost` prices the operators on a rank's part of the batch,
the collectives of gradients and weights, and how much of them runs next to the computation.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from darts_parallel.cost import all_reduce, exposed, reduce_scatter
from darts_parallel.errors import Entries, UnsupportedError
from darts_parallel.graph._mesh import DeviceMeshSpec, tensor
from darts_parallel.graph._programme import GIB
from darts_parallel.graph._space import STATE_BYTES, GraphSpace
from darts_parallel.graph.capture import capture_module, load_module, make_inputs
from darts_parallel.graph.layers import plan_figures
from darts_parallel.graph.operators import PARAMETER, ModuleGraph
from darts_parallel.graph.plan import GraphPlan

TENSOR = "tensor parallelism"
BATCH = "batch split (DDP)"
SHARDED = "batch split with sharded weights (FSDP)"
HEAD = '''\
"""{name} on {ranks} ranks; written by darts-parallel.

    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", ({ranks},))
    module = parallelize(module, mesh)

Every rank passes its own part of the batch; gradients are means over the ranks.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
'''
DDP = '''\
from torch.nn.parallel import DistributedDataParallel


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Average the gradients of all ranks."""
    return DistributedDataParallel(module, process_group=mesh.get_group())
'''
FSDP = '''\
from torch.distributed.fsdp import fully_shard

UNITS = {units}
"""Modules whose weights are gathered together."""


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the weights over the ranks."""
    for path in UNITS:
        fully_shard(module.get_submodule(path), mesh=mesh)
    return fully_shard(module, mesh=mesh)
'''


@dataclass(frozen=True)
class Alternative:
    """One way to train a module on some ranks."""

    name: str
    seconds: float
    """Seconds of a step."""
    bytes: float
    """Bytes of a rank."""
    text: str
    """File that does so."""

    def entry(self) -> Entries:
        """Return it as `graph.json` lists it."""
        return {"name": self.name, "seconds": self.seconds, "bytes": self.bytes}


def fastest(found: Sequence[Alternative], memory: float) -> Alternative:
    """Return the fastest alternative within the bytes of a rank; the lightest where none is."""
    fitting = [one for one in found if one.bytes <= memory]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(found, key=lambda one: one.bytes)


def alternatives(plan: GraphPlan, text: str, path: str, shapes: Sequence[Any]) -> list[Alternative]:
    """Return tensor parallelism with the file of a plan, and what splits the batch, where ranks divide it."""
    space = plan.space
    found = [Alternative(TENSOR, plan.seconds, space.memory_bytes(plan.assignment), text)]
    ranks = prod(space.mesh.ranks)
    batch = shapes[0][0]
    if not isinstance(batch, int) or batch % ranks:
        return found
    parts = [[batch // ranks if first == batch else first, *others] for first, *others in shapes]
    try:
        graph = capture_module(load_module(path), make_inputs(parts))
    except UnsupportedError:  # the module's code knows the size of its batch
        return found
    alone = GraphSpace(graph, replace(space.mesh, ranks=()), space.width)
    own = GraphPlan(alone, (0,) * len(alone.groups))
    return found + _batch_splits(own, replace(space.mesh, ranks=(ranks,)))


def _batch_splits(own: GraphPlan, mesh: DeviceMeshSpec) -> list[Alternative]:
    """Price both ways to split the batch, from the plan of one rank's part."""
    graph = own.space.graph
    width = own.space.width
    ranks = mesh.ranks[0]
    group = mesh.groups[0]
    overlap = mesh.device.overlap_exponent
    forward, backward, kept, *_ = map(tensor, plan_figures(own))
    units = _units(graph)
    trained = graph.elements(trained=True)
    gradients = tensor(trained * width)
    gather = torch.zeros_like(forward)
    for elements in units.values():
        gather = gather + reduce_scatter(tensor(elements * width), group)
    whole = forward + backward + exposed(backward, all_reduce(gradients, group), overlap)
    scatter = gather + reduce_scatter(gradients, group)
    sharded = forward + exposed(forward, gather, overlap)
    sharded = sharded + backward + exposed(backward, scatter, overlap)
    states = STATE_BYTES * trained
    gathered = max(units.values(), default=0) * width
    ddp = HEAD.format(name=BATCH, ranks=ranks) + DDP
    fsdp = HEAD.format(name=SHARDED, ranks=ranks)
    fsdp += FSDP.format(units=[path for path in units if path])
    activations = float(kept)
    part = states / ranks + gathered + activations
    split = Alternative(BATCH, float(whole), states + activations, ddp)
    return [split, Alternative(SHARDED, float(sharded), part, fsdp)]


def _units(graph: ModuleGraph) -> dict[str, int]:
    """Return the parameters of the blocks whose weights travel together, by path; the rest has none.

    A block is a module with an index in a list of modules, the outermost one.
    """
    units: dict[str, int] = defaultdict(int)
    for op in graph.of_kind(PARAMETER):
        block = re.match(r"(.*?\.)??\d+(?![^.])", op.owner)
        units[block[0] if block else ""] += graph.values[op.outputs[0]].elements
    return units


def alternative_lines(found: Sequence[Alternative], best: Alternative) -> list[str]:
    """Compare tensor parallelism with splits of the batch, where ranks divide it."""
    lines = []
    for one in found:
        mark = " (fastest that fits)" if one is best and len(found) > 1 else ""
        seconds = 1e3 * one.seconds
        lines.append(f"{one.name}: {seconds:.4f} ms, {one.bytes / GIB:.2f} GiB a rank{mark}")
    return lines
