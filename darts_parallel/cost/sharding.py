"""Parameters of a layer on a rank, the ranks that share them, and the seconds of their communication."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.collectives import (
    RingGroup,
    all_reduce,
    reduce_scatter,
    single_ring,
    split_group,
    wire_bytes,
)
from darts_parallel.cost.compute import exposed, stream_seconds
from darts_parallel.cost.memory import StateBytes
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.problem import StageTopology

BUCKET = 40e6
"""Parameters whose gradients travel as one message, however many layers they are of (the default size of a
bucket in Megatron-Core's DistributedDataParallelConfig); ZeRO-3 gathers layer by layer."""


@dataclass(frozen=True)
class ShardGroup:
    """Parameters of a layer on a rank, and the ranks that hold the same ones; tensors of shape `(C,)`.

    A layer has one such group, and terms with replicas of their own (experts, adapters) add theirs.
    """

    parameters: Tensor
    shards: Tensor
    """Ranks over which ZeRO states are sharded."""
    inner: RingGroup
    """Ranks of a shard group."""
    across: RingGroup
    """Ranks that hold the same shard."""
    frozen: bool = False
    """Not trained: no gradient, no optimizer state, and nothing travels but the gathers of ZeRO-3."""

    def held(self, state: StateBytes) -> StateBytes:
        """Return the bytes per parameter of this group, from those of trained ones."""
        return StateBytes(state.parameter, 0.0, 0.0) if self.frozen else state


def layer_shards(stage: StageContext, parameters: Tensor, *, frozen: bool = False) -> ShardGroup:
    """Return a group of parameters that are replicated over the data-parallel ranks of a layer."""
    choices = stage.choices
    inner, across = split_group(data_group(stage), choices.ranks, choices.shards)
    return ShardGroup(parameters, choices.shards, inner, across, frozen)


def data_group(stage: StageContext) -> RingGroup:
    """Return the data-parallel groups of every strategy."""
    topology = stage.topology
    return ring_group(
        [topology.data_parallel(int(tp)) for tp in stage.choices.tp.tolist()], topology
    )


def ring_group(shapes: list[tuple[int, int]], topology: StageTopology) -> RingGroup:
    """Return groups from their ranks on a node and the nodes that they cross."""
    local, nodes = (float_tensor([shape[i] for shape in shapes]) for i in (0, 1))
    return RingGroup(local=local, nodes=nodes, gpus=torch.full_like(local, topology.gpus_per_node))


def accumulation_seconds(stage: StageContext, part: ShardGroup) -> Tensor:
    """Return the seconds to add the gradients of one micro-batch to those before it, shape `(C,)`.

    The sum is read and written at its own width and the new gradient read at that of the parameters;
    with ZeRO-2 and 3 a rank adds its shard only (ZeRO, section 5). Frozen parameters have none.
    """
    if part.frozen:
        return torch.zeros_like(part.parameters)
    mine = torch.where(
        stage.choices.zero_stage >= 2, part.parameters / part.shards, part.parameters
    )
    return stream_seconds(mine * (2.0 * stage.state.gradient + stage.state.parameter), stage.device)


def sharding_seconds(
    stage: StageContext, parts: list[ShardGroup], forward: Tensor, backward: Tensor
) -> dict[str, Tensor]:
    """Return the exposed seconds of data-parallel communication: per micro-batch and per iteration.

    Context-parallel ranks hold the same weights, so they count as data-parallel ones here.
    ZeRO-0 all-reduces gradients once; ZeRO-1 reduce-scatters them once and all-gathers parameters;
    ZeRO-2 reduce-scatters after every micro-batch; ZeRO-3 also gathers parameters in every forward
    and backward. Each runs next to the computation of the same layer. With hybrid sharding all of this
    stays inside a shard group, and once per iteration the groups all-reduce their shards (the two hops
    of MiCS, Zhang et al. 2022, arXiv 2205.00119, section 3.4). Gradients travel at their bits and at the
    framework's width, parameters as they are; layers share the broadcasts of their owners by size.
    """
    choices, links, software, state = stage.choices, stage.links, stage.software, stage.state
    none, zero = torch.zeros_like(forward), choices.zero_stage
    sent = wire_bytes(state.gradient, choices.grad_comm_bits, stage.lossy_block)
    scatter, reduced, replicas, gather = none, none, none, none
    for part in parts:
        if software.single_ring:
            part = replace(part, inner=single_ring(part.inner, choices.zero_stage == 3))
        gradients = part.parameters * sent
        # a layer without parameters sends no message, and so has no latency
        there = part.parameters > 0
        messages = torch.where(zero == 3, 1.0, (part.parameters / BUCKET).clamp(max=1.0))
        gathers = there * reduce_scatter(
            part.parameters * state.parameter, part.inner, *links, messages
        )
        gather = gather + (gathers * (zero == 3) if part.frozen else gathers)
        if part.frozen:
            continue
        scatter = scatter + there * reduce_scatter(gradients, part.inner, *links, messages)
        reduced = reduced + there * all_reduce(gradients, part.inner, *links, messages)
        replicas = replicas + there * all_reduce(
            gradients / part.shards, part.across, *links, messages
        )

    def exposed_by(compute: Tensor, communication: Tensor) -> Tensor:
        return exposed(compute, communication, stage.device.overlap_exponent)

    per_forward = torch.where(zero == 3, exposed_by(forward, gather), none)
    scattered = torch.where(zero == 2, exposed_by(backward, scatter), none)
    per_backward = torch.where(zero == 3, exposed_by(backward, gather + scatter), scattered)
    sharded = torch.where(zero == 1, scatter, 0.0) + replicas
    last = exposed_by(backward, torch.where(zero == 0, reduced, sharded))
    gathered = torch.where((zero == 1) | (zero == 2), exposed_by(forward, gather), none)
    stages = stage.cluster.num_devices / sum(stage.topology.counts)
    share = stages * parts[0].parameters / stage.model.num_parameters * choices.tp
    owners = choices.shards * ((choices.shards > 1) & ((zero == 1) | (zero == 2)))
    gathered = gathered + software.owner_broadcast * owners * share
    return {"forward": per_forward, "backward": per_backward, "iteration": last + gathered}
