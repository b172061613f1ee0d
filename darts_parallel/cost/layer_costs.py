"""Seconds and bytes of one kind of layer on one kind of stage, for all strategies at once."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.config.schema import RECOMPUTE
from darts_parallel.cost.choices import ChoiceTensors, float_tensor
from darts_parallel.cost.collectives import RingGroup, all_reduce, reduce_scatter, split_group, wire_bytes
from darts_parallel.cost.compute import (
    BACKWARD_FACTOR,
    FUSED_BACKWARD_FACTOR,
    forward_seconds,
    stream_seconds,
    weight_gradient_seconds,
)
from darts_parallel.cost.memory import (
    StateBytes,
    activation_bytes,
    gathered_bytes,
    key_value_bytes,
    parameters_per_rank,
    state_bytes,
    static_bytes,
)
from darts_parallel.problem.cluster import Device, StageTopology
from darts_parallel.problem.model import LayerSpec
from darts_parallel.problem.problem import Problem

TIME_TERMS = ("compute", "recompute", "tensor_parallel", "context_parallel", "sharding")
"""What a micro-batch spends on a layer: arithmetic, repeated forward, tp and cp collectives, ZeRO-2/3."""
OPTIMIZER_TRAFFIC = 2.0
"""The optimizer reads and writes each of its bytes once (stream model)."""


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one kind of layer, each of shape `(O, C)`: outer choices x strategies."""

    forward: Tensor
    """Seconds of one micro-batch forward, communication included."""
    backward: Tensor
    """The same backward, recomputation included."""
    weight_gradient: Tensor
    """The part of `backward` that only the optimizer waits for."""
    terms: dict[str, Tensor]
    """`forward + backward` split by `TIME_TERMS`."""
    gradient_sync: Tensor
    """Seconds per iteration of gradient synchronisation that backward does not hide."""
    optimizer: Tensor
    """Seconds per iteration of the optimizer step."""
    static: Tensor
    """Bytes of parameters, gradients and optimizer state."""
    activation: Tensor
    """Bytes kept for backward per micro-batch in flight."""
    working: Tensor
    """Bytes that exist only while the layer is computed."""


def exposed(compute: Tensor, communication: Tensor, device: Device) -> Tensor:
    """Seconds by which `communication` beside `compute` lengthens it.

    `T = (a^g + b^g)^(1/g)` (Pollux, Qiao et al. 2021, equation 11), minus `a`, in a form that is
    exact for small ratios. g = 1 hides nothing, a large g hides all but the longer of the two.
    """
    g = device.overlap_exponent
    return compute * torch.expm1(torch.log1p((communication / compute) ** g) / g)


def layer_costs(
    problem: Problem, layer: LayerSpec, topology: StageTopology, choices: ChoiceTensors, *, counts_table: bool
) -> LayerCosts:
    """Costs of `layer` on a stage of `topology`.

    Args:
        counts_table: False where the layer's vocabulary table is another layer's on the same device.
    """
    state = state_bytes(problem.training.precision, problem.training.optimizer)
    device = problem.cluster.groups[topology.group].device
    spec = layer if counts_table else replace(layer, vocabulary_parameters=0)
    parameters = parameters_per_rank(spec, problem.model.config.vocab_size, choices.tp)
    terms, forward, backward, weights = _micro_batch_seconds(problem, layer, topology, choices)
    accumulation = accumulation_seconds(parameters, choices, state, device).expand_as(backward)
    terms["compute"] = terms["compute"] + accumulation
    backward, weights = backward + accumulation, weights + accumulation
    sync = _sharding_seconds(problem, topology, choices, parameters, state, forward, backward)
    shard = torch.where(choices.zero_stage >= 1, parameters / choices.shards, parameters)
    traffic = OPTIMIZER_TRAFFIC * (state.optimizer + state.gradient) + state.parameter
    kept = _activations(problem, layer, device, choices)
    saved = torch.stack([kept[kind] for kind in RECOMPUTE])
    activation = saved.gather(0, choices.recompute.expand(1, *kept["none"].shape)).squeeze(0)
    gathered = gathered_bytes(parameters, choices.zero_stage, state)
    return LayerCosts(
        forward=forward + sync["forward"],
        backward=backward + sync["backward"],
        weight_gradient=weights,
        terms=terms | {"sharding": sync["forward"] + sync["backward"]},
        gradient_sync=sync["iteration"],
        optimizer=stream_seconds(shard * traffic, device).expand_as(forward),
        static=device.state_factor * static_bytes(parameters, choices.shards, choices.zero_stage, state),
        activation=activation,
        working=kept["none"] - activation + gathered + _received_keys(problem, layer, choices),
    )


def accumulation_seconds(
    parameters: Tensor, choices: ChoiceTensors, state: StateBytes, device: Device
) -> Tensor:
    """Seconds to add the gradients of one micro-batch to those before it, shape `(C,)`.

    The sum is read and written at its own width and the new gradient read at that of the parameters;
    with ZeRO-2 and 3 a rank adds its shard only (ZeRO, section 5).
    """
    mine = torch.where(choices.zero_stage >= 2, parameters / choices.shards, parameters)
    return stream_seconds(mine * (2.0 * state.gradient + state.parameter), device)


def _micro_batch_seconds(
    problem: Problem, layer: LayerSpec, topology: StageTopology, choices: ChoiceTensors
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Terms, forward, backward, and the part of backward that is gradients of weights."""
    group = problem.cluster.groups[topology.group]
    device, training = group.device, problem.training
    width = element_bytes(problem)
    once, core = forward_seconds(
        layer, choices.tokens, training.seq_len, choices.tp, choices.sequence_shards, device,
        fused=training.fused_attention, width=width,
    )  # fmt: skip
    once = once + device.layer_overhead
    extra = FUSED_BACKWARD_FACTOR - BACKWARD_FACTOR if training.fused_attention else 0.0
    back = BACKWARD_FACTOR * once + extra * core
    of_weights = weight_gradient_seconds(layer, choices.tokens, choices.tp, device, width) / back
    if problem.measured is not None:
        # measured times hold the launch overhead already
        sizes = choices.tokens / training.seq_len
        once, back = problem.measured.seconds(device.name, layer.kind, choices.tp, sizes) or (once, back)
    elements = choices.tokens * problem.model.config.hidden_size
    ring, links = _tensor_group(topology, choices), (group.intra_node, problem.cluster.nic(topology.group))
    collective = all_reduce(wire_bytes(width, choices.tp_comm_bits) * elements, ring, *links)
    exact = all_reduce(width * elements, ring, *links)
    selective = (choices.recompute == RECOMPUTE.index("selective")) & layer.recomputable
    full = (choices.recompute == RECOMPUTE.index("full")) & layer.recomputable
    keys = _context_seconds(problem, layer, topology, choices, core)
    again = torch.where(full, once, torch.where(selective, core, torch.zeros_like(core)))
    forward_keys = keys["forward"]
    backward_keys = keys["backward"] + torch.where(full | selective, forward_keys, 0.0)
    shown = 1.0 - device.tp_hidden_share
    forward_tp = shown * layer.tp_collectives * collective
    # only the forward sums are rounded: those of backward are gradients of the straight-through estimate
    backward_tp = shown * layer.tp_collectives_backward * exact + torch.where(full, forward_tp, 0.0)
    terms = {
        "compute": once + back,
        "recompute": again,
        "tensor_parallel": forward_tp + backward_tp,
        "context_parallel": forward_keys + backward_keys,
    }
    backward = back + again + backward_tp + backward_keys
    return terms, once + forward_tp + forward_keys, backward, of_weights * back


def _context_seconds(
    problem: Problem, layer: LayerSpec, topology: StageTopology, choices: ChoiceTensors, core: Tensor
) -> dict[str, Tensor]:
    """Seconds by which fetching the keys and values of other context-parallel ranks lengthens attention.

    Every rank needs all keys and values of the sequence for its own queries: `cp - 1` of `cp` parts
    come from the others, as an all-gather (Llama 3, Dubey et al. 2024, arXiv 2407.21783, section 3.3.2)
    or step by step around a ring (Ring Attention, Liu et al. 2023, arXiv 2310.01889; Megatron-LM), which
    moves the same bytes. Backward fetches them again and reduce-scatters their gradients. Grouped-query
    attention sends its few KV heads only. Runs beside the attention core, which cp balances.
    """
    none = torch.zeros_like(core)
    if choices.cp == 1 or not layer.cores:
        return {"forward": none, "backward": none}
    group = problem.cluster.groups[topology.group]
    ring, _ = split_group(
        _data_group(topology, choices), choices.ranks, torch.full_like(choices.ranks, choices.cp)
    )
    whole = choices.cp * key_value_bytes(layer, choices.tokens, choices.tp, element_bytes(problem))
    gather = reduce_scatter(whole, ring, group.intra_node, problem.cluster.nic(topology.group))
    return {
        "forward": exposed(core, gather, group.device),
        "backward": exposed(BACKWARD_FACTOR * core, 2.0 * gather, group.device),
    }


def _sharding_seconds(
    problem: Problem,
    topology: StageTopology,
    choices: ChoiceTensors,
    parameters: Tensor,
    state: StateBytes,
    forward: Tensor,
    backward: Tensor,
) -> dict[str, Tensor]:
    """Exposed seconds of data-parallel communication: per micro-batch and per iteration.

    Context-parallel ranks hold the same weights, so they count as data-parallel ones here.
    ZeRO-0 all-reduces gradients once; ZeRO-1 reduce-scatters them once and all-gathers parameters;
    ZeRO-2 reduce-scatters after every micro-batch; ZeRO-3 also gathers parameters in every forward
    and backward. Each runs beside the computation of the same layer. With hybrid sharding all of this
    stays inside a shard group, and once per iteration the groups all-reduce their shards (the two hops
    of MiCS, Zhang et al. 2022, arXiv 2205.00119, section 3.4). Gradients travel at their bits,
    parameters as they are.
    """
    group = problem.cluster.groups[topology.group]
    links = (group.intra_node, problem.cluster.nic(topology.group))
    inner, across = split_group(_data_group(topology, choices), choices.ranks, choices.shards)
    gradients = parameters * wire_bytes(state.gradient, choices.grad_comm_bits)
    scatter = reduce_scatter(gradients, inner, *links)
    replicas = all_reduce(gradients / choices.shards, across, *links)
    gather = reduce_scatter(parameters * state.parameter, inner, *links)
    # a layer without parameters sends no message, and so has no latency
    scatter, replicas, gather = ((parameters > 0) * seconds for seconds in (scatter, replicas, gather))
    zero, none = choices.zero_stage, torch.zeros_like(forward)

    def beside(compute: Tensor, communication: Tensor) -> Tensor:
        return exposed(compute, communication, group.device)

    per_forward = torch.where(zero == 3, beside(forward, gather), none)
    per_backward = torch.where(
        zero == 3, beside(backward, gather + scatter), torch.where(zero == 2, beside(backward, scatter), none)
    )
    last = beside(
        backward, torch.where(zero == 0, 2.0 * scatter, torch.where(zero == 1, scatter, 0.0) + replicas)
    )
    gathered = torch.where((zero == 1) | (zero == 2), beside(forward, gather), none)
    return {"forward": per_forward, "backward": per_backward, "iteration": last + gathered}


def _activations(
    problem: Problem, layer: LayerSpec, device: Device, choices: ChoiceTensors
) -> dict[str, Tensor]:
    formula = activation_bytes(
        layer,
        choices.tokens,
        problem.training.seq_len,
        choices.tp,
        choices.sequence_shards,
        element_bytes(problem),
    )
    # a block's input, which full recomputation keeps, is one tensor whatever the software
    exact = ("full",) if layer.recomputable else ()
    kept = {kind: x if kind in exact else device.activation_factor * x for kind, x in formula.items()}
    if problem.measured is None:
        return kept
    sizes = choices.tokens / problem.training.seq_len
    saved = problem.measured.saved_bytes(device.name, layer.kind, choices.tp, sizes)
    return kept if saved is None else kept | {"none": saved}


def _received_keys(problem: Problem, layer: LayerSpec, choices: ChoiceTensors) -> Tensor:
    """Bytes of two parts of the sequence's keys and values: one in use, one on its way (double buffer)."""
    parts = 0.0 if choices.cp == 1 else 2.0
    return parts * key_value_bytes(layer, choices.tokens, choices.tp, element_bytes(problem))


def _tensor_group(topology: StageTopology, choices: ChoiceTensors) -> RingGroup:
    return _ring_group([topology.tensor_parallel(int(tp)) for tp in choices.tp.tolist()], topology)


def _data_group(topology: StageTopology, choices: ChoiceTensors) -> RingGroup:
    return _ring_group([topology.data_parallel(int(tp)) for tp in choices.tp.tolist()], topology)


def _ring_group(shapes: list[tuple[int, int]], topology: StageTopology) -> RingGroup:
    local, nodes = (float_tensor([shape[i] for shape in shapes]) for i in (0, 1))
    return RingGroup(local=local, nodes=nodes, gpus=torch.full_like(local, topology.gpus_per_node))


def element_bytes(problem: Problem) -> int:
    """Bytes of one activation element; fp8 training keeps activations in 16 bits."""
    return 4 if problem.training.precision == "fp32" else 2
