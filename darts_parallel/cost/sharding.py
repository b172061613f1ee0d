"""Parameters of a layer on a rank, the ranks that share them, and the seconds of their communication."""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.choices import Tensors
from darts_parallel.cost.collectives import (
    RingGroup,
    all_reduce,
    reduce_scatter,
    split_group,
    wire_bytes,
)
from darts_parallel.cost.compute import exposed, stream_seconds
from darts_parallel.cost.memory import StateBytes
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.problem import LayerSpec, Scalar

BUCKET = 40e6
"""Parameters whose gradients travel as one message, of any number of layers (the default size of
a bucket in Megatron-Core's DistributedDataParallelConfig); ZeRO-3 gathers layer by layer."""


FROZEN_BYTES = {8: 1.0, 4: 0.5 + 4.0 / 64.0}
"""Bytes of frozen weights below 16 bits; those of 4 bits have a float32 scale for 64 numbers
(bitsandbytes' NF4, Dettmers et al. 2023, arXiv 2305.14314)."""


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
    frozen: float | None = None
    """Bytes of a parameter that is not trained: no gradient, no optimizer state, no communication
    but the gathers of ZeRO-3; None: it is trained."""
    matrices: Scalar = 0.0
    """Modules of one matrix each, which some frameworks gather one by one under ZeRO-3."""

    def held(self, state: StateBytes) -> StateBytes:
        """Return bytes per parameter; frozen parameters keep no gradient or optimizer state."""
        if self.frozen is None:
            return state
        # an explanation asks for one part of the state at a time, which may be no parameter
        return StateBytes(self.frozen if state.parameter else 0.0, 0.0, 0.0)


def frozen_bytes(stage: StageContext, layer: LayerSpec) -> float | None:
    """Return the bytes of a weight of a layer that is not trained; None where weights are trained.

    Tables of vocabularies keep the width of the job.
    """
    if not layer.frozen:
        return None
    whole = stage.state.parameter
    return (
        whole
        if layer.vocabulary_parameters
        else FROZEN_BYTES.get(stage.training.frozen_bits, whole)
    )


def layer_shards(
    stage: StageContext, parameters: Tensor, frozen: float | None = None
) -> ShardGroup:
    """Return a group of parameters that are replicated over the data-parallel ranks of a layer."""
    return ShardGroup(parameters, stage.choices.shards, *stage.shard_rings, frozen)


def context_gather(stage: StageContext, size: Tensor) -> Tensor:
    """Return the seconds to all-gather `size` bytes over the context-parallel ranks, `(O, C)`."""
    choices = stage.choices
    parts = torch.full_like(choices.ranks, choices.cp)
    ring, _ = split_group(stage.data_parallel(choices.tp), choices.ranks, parts)
    return reduce_scatter(size, ring)


def accumulation_seconds(stage: StageContext, part: ShardGroup) -> Tensor:
    """Return the seconds to add the gradients of one micro-batch to those before it, shape `(C,)`.

    The sum is read and written at its own width; the new gradient is read at the parameters' width.
    With ZeRO-2 and 3 a rank adds its shard only (ZeRO, section 5). Products that add to the sum
    themselves leave nothing to do. Frozen parameters have no gradient.
    """
    if part.frozen is not None:
        return torch.zeros_like(part.parameters)
    sharded = stage.choices.zero_stage >= 2
    whole = part.parameters * (not stage.software.fused_accumulation)
    added = torch.where(sharded, part.parameters / part.shards, whole)
    traffic = 2.0 * stage.state.gradient + stage.state.parameter
    return stream_seconds(added * traffic, stage.device)


def sharding_seconds(
    stage: StageContext,
    parts: list[ShardGroup],
    forward: Tensor,
    backward: Tensor,
) -> Tensors:
    """Return the exposed seconds of data-parallel communication: per micro-batch and per iteration.

    Context-parallel ranks hold the same weights, so they count as data-parallel ones here. ZeRO-0
    all-reduces gradients once. ZeRO-1 reduce-scatters them once and all-gathers parameters. ZeRO-2
    reduce-scatters after every micro-batch. ZeRO-3 also gathers parameters in every forward and
    backward. Each collective runs next to the computation of the same layer.

    With hybrid sharding all of this stays inside a shard group, and once per iteration the groups
    all-reduce their shards (the two hops of MiCS, Zhang et al. 2022, arXiv 2205.00119, section
    3.4). Gradients travel at their bits and at the framework's width, parameters at their own
    width.
    """
    zero = stage.choices.zero_stage
    none = torch.zeros_like(forward)
    gather, scatter, replicas = _collectives(stage, parts)

    def exposed_by(compute: Tensor, communication: Tensor) -> Tensor:
        return exposed(compute, communication, stage.device.overlap_exponent)

    third = zero == 3
    gathered = exposed_by(forward, gather)
    per_forward = torch.where(third, gathered, none)
    often = exposed_by(backward, torch.where(third, gather + scatter, scatter))
    per_backward = torch.where(zero >= 2, often, none)
    # without shards the gradients are all-reduced
    once = torch.where(zero == 0, 2.0 * scatter, torch.where(zero == 1, scatter, 0.0))
    last = exposed_by(backward, once + replicas)
    waited = gathered
    if stage.software.owner_broadcast_ms:  # broadcasts are waited for before the next forward pass
        # one from each rank of a shard group; the layer's share is by its size
        choices = stage.choices
        stages = stage.cluster.num_devices / sum(stage.topology.counts)
        share = stages * parts[0].parameters / stage.model.num_parameters * choices.tp
        owners = choices.shards * (choices.shards > 1)
        waited = gather + 1e-3 * stage.software.owner_broadcast_ms * owners * share
    gathered = torch.where((zero == 0) | third, none, waited)
    return {"forward": per_forward, "backward": per_backward, "iteration": last + gathered}


def _collectives(stage: StageContext, parts: list[ShardGroup]) -> tuple[Tensor, Tensor, Tensor]:
    """Price the collectives of all groups of parameters of a layer, before any overlap.

    Returns:
        Seconds, each `(C,)`: all-gather of parameters, reduce-scatter of gradients inside shard
        groups, and all-reduce of shards across them.
    """
    choices = stage.choices
    state = stage.state
    third_stage = choices.zero_stage == 3
    bytes_sent = wire_bytes(state.gradient, choices.grad_comm_bits, stage.lossy_block)
    gathers = scatters = replicas = torch.zeros_like(choices.ranks)
    for part in parts:
        # a layer without parameters sends no message, and so has no latency
        present = part.parameters > 0
        bucket_share = (part.parameters / BUCKET).clamp(max=1.0)
        messages = torch.where(third_stage, 1.0, bucket_share)
        size = part.parameters * part.held(state).parameter
        gather = present * reduce_scatter(size, part.inner, messages)
        one_by_one = torch.as_tensor(1e-3 * stage.software.module_gather_ms * part.matrices)
        gather = gather + torch.where(third_stage & (part.shards > 1), one_by_one, 0.0)
        if part.frozen is not None:
            gathers = gathers + gather * third_stage
            continue
        gathers = gathers + gather
        gradients = part.parameters * bytes_sent
        scatter = reduce_scatter(gradients, part.inner, messages)
        scatters = scatters + present * scatter
        across = all_reduce(gradients / part.shards, part.across, messages)
        replicas = replicas + present * across
    return gathers, scatters, replicas
