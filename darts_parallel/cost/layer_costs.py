"""Seconds and bytes of one kind of layer on one kind of stage, for all strategies at once."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.config.schema import RECOMPUTE
from darts_parallel.cost.choices import ChoiceTensors, element_bytes, float_tensor
from darts_parallel.cost.collectives import (
    RingGroup,
    all_reduce,
    reduce_scatter,
    single_ring,
    split_group,
    wire_bytes,
)
from darts_parallel.cost.compute import (
    BACKWARD_FACTOR,
    computation_seconds,
    exposed,
    recomputed_seconds,
    stream_seconds,
    weight_cast_seconds,
)
from darts_parallel.cost.memory import (
    StateBytes,
    activation_bytes,
    between_passes,
    gathered_bytes,
    key_value_bytes,
    parameters_per_rank,
    state_bytes,
    static_bytes,
    weight_gradient_bytes,
)
from darts_parallel.cost.mixture.expert_costs import (
    ExpertCosts,
    expert_costs,
    exposed_exchange,
)
from darts_parallel.problem.cluster import Device, StageTopology
from darts_parallel.problem.model import LayerSpec
from darts_parallel.problem.problem import Problem

TIME_TERMS = ("compute", "recompute", "tensor_parallel", "context_parallel", "expert_parallel", "sharding")
"""What a micro-batch spends on a layer: arithmetic, repeated forward, tp and cp collectives, dispatch and
combine of experts' tokens (and waiting for the launches of experts), ZeRO-2/3."""
OPTIMIZER_TRAFFIC = 2.0
"""The optimizer reads and writes each of its bytes once (stream model)."""


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one kind of layer, each of shape `(O, C)`: outer choices x strategies."""

    forward: Tensor
    """Seconds of one micro-batch forward, communication included."""
    backward: Tensor
    """Seconds of one micro-batch backward, recomputation included."""
    weight_gradient: Tensor
    """The part of `backward` that only the optimizer waits for."""
    terms: dict[str, Tensor]
    """`forward + backward` split by `TIME_TERMS`."""
    gradient_sync: Tensor
    """Seconds per iteration of gradient synchronisation that backward does not hide."""
    optimizer: Tensor
    """Seconds per iteration of the optimizer step, and of casting the new weights below 16 bits."""
    static: Tensor
    """Bytes of parameters, gradients and optimizer state."""
    state: Tensor
    """Bytes of optimizer state among them."""
    activation: Tensor
    """Bytes kept for backward per micro-batch in flight."""
    for_weights: Tensor
    """Bytes among or beside them that a split backward keeps from its first pass to that of the weights."""
    working: Tensor
    """Bytes that exist only while the layer is computed."""


def layer_costs(
    problem: Problem, layer: LayerSpec, topology: StageTopology, choices: ChoiceTensors, *, counts_table: bool
) -> LayerCosts:
    """Costs of `layer` on a stage of `topology`.

    Args:
        counts_table: False where the layer's vocabulary table is another layer's on the same device.
    """
    state = state_bytes(problem.training.precision, problem.training.optimizer)
    device = problem.cluster.groups[topology.group].device
    shards = shard_groups(problem, layer, topology, choices, counts_table=counts_table)
    experts = None
    if layer.experts is not None:
        width = element_bytes(problem)
        experts = expert_costs(problem, layer.experts, topology, choices, width, frozen=layer.frozen)
    terms, forward, backward, weights = _micro_batch_seconds(problem, layer, topology, choices, experts)
    accumulation = sum(accumulation_seconds(part, choices, state, device) for part in shards)
    accumulation = torch.as_tensor(accumulation).expand_as(backward)
    terms["compute"] = terms["compute"] + accumulation
    backward, weights = backward + accumulation, weights + accumulation
    sync = _sharding_seconds(problem, topology, choices, shards, state, forward, backward)
    traffic = OPTIMIZER_TRAFFIC * (state.optimizer + state.gradient) + state.parameter
    kept = _activations(problem, layer, device, choices, experts)
    saved = torch.stack([kept[kind] for kind in RECOMPUTE])
    activation = saved.gather(0, choices.recompute.expand(1, *kept["none"].shape)).squeeze(0)
    zero, none = choices.zero_stage, torch.zeros_like(forward)
    needed = weight_gradient_bytes(
        layer, choices.tokens, choices.tp, choices.sequence_shards, element_bytes(problem)
    )
    needed = device.activation_factor * (needed if experts is None else needed + experts.kept)
    # with ZeRO-3 a rank casts its own shard before it is gathered
    own = 1.0 / (choices.tp * torch.where(zero == 3, choices.shards, 1.0))
    optimizer = none + weight_cast_seconds(layer, own, device)
    static, held, working = none, none, kept["none"] - activation
    for part in shards:
        mine = torch.where(zero >= 1, part.parameters / part.shards, part.parameters)
        if not part.frozen:
            optimizer = optimizer + stream_seconds(mine * traffic, device)
        own_state = part.held(state)
        held = held + mine * own_state.optimizer
        static = static + static_bytes(part.parameters, part.shards, zero, own_state)
        working = working + gathered_bytes(part.parameters, zero, own_state)
    if experts is not None:
        working = working + experts.buffers
    return LayerCosts(
        forward=forward + sync["forward"],
        backward=backward + sync["backward"],
        weight_gradient=weights,
        terms=terms | {"sharding": sync["forward"] + sync["backward"]},
        gradient_sync=sync["iteration"],
        optimizer=optimizer,
        static=device.state_factor * static,
        state=device.state_factor * held,
        activation=activation,
        for_weights=between_passes(layer, needed, kept["none"], activation),
        working=working + _received_keys(problem, layer, choices),
    )


@dataclass(frozen=True)
class ShardGroup:
    """Parameters of a layer on a rank, and the ranks that hold the same ones; tensors of shape `(C,)`.

    A layer has one such group, its experts another one, and so have adapters.
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
        """Bytes per parameter of this group, of those of trained ones."""
        return StateBytes(state.parameter, 0.0, 0.0) if self.frozen else state


def shard_groups(
    problem: Problem, layer: LayerSpec, topology: StageTopology, choices: ChoiceTensors, *, counts_table: bool
) -> list[ShardGroup]:
    """The parameters of `layer` on a rank, those of its experts apart: they have other replicas.

    Args:
        counts_table: False where the layer's vocabulary table is another layer's on the same device.
    """
    spec = layer if counts_table else replace(layer, vocabulary_parameters=0)
    parameters = parameters_per_rank(spec, problem.model.config.vocab_size, choices.tp)
    inner, across = split_group(_data_group(topology, choices), choices.ranks, choices.shards)
    groups = [ShardGroup(parameters, choices.shards, inner, across, layer.frozen)]
    if layer.frozen:
        adapters = layer.adapter_parameters / choices.tp + layer.replicated_adapter_parameters
        groups.append(ShardGroup(adapters, choices.shards, inner, across))
    if layer.experts is not None:
        degrees = (choices.ep * choices.etp).tolist()
        whole = _ring_group([topology.data_parallel(int(degree)) for degree in degrees], topology)
        replicas = choices.expert_replicas
        inner, across = split_group(whole, replicas, replicas)
        numbers = layer.experts.parameters / (choices.ep * choices.etp)
        groups.append(ShardGroup(numbers, replicas, inner, across, layer.frozen))
    return groups


def accumulation_seconds(
    part: ShardGroup, choices: ChoiceTensors, state: StateBytes, device: Device
) -> Tensor:
    """Seconds to add the gradients of one micro-batch to those before it, shape `(C,)`.

    The sum is read and written at its own width and the new gradient read at that of the parameters;
    with ZeRO-2 and 3 a rank adds its shard only (ZeRO, section 5). Frozen parameters have none.
    """
    if part.frozen:
        return torch.zeros_like(part.parameters)
    mine = torch.where(choices.zero_stage >= 2, part.parameters / part.shards, part.parameters)
    return stream_seconds(mine * (2.0 * state.gradient + state.parameter), device)


def _micro_batch_seconds(
    problem: Problem,
    layer: LayerSpec,
    topology: StageTopology,
    choices: ChoiceTensors,
    experts: ExpertCosts | None,
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Terms, forward, backward, and the part of backward that is gradients of weights."""
    device, training = problem.cluster.groups[topology.group].device, problem.training
    width = element_bytes(problem)
    forward_pass, back, core, of_weights = computation_seconds(
        layer, training, choices.tokens, choices.tp, choices.sequence_shards, device,
        width=width, launches=problem.launches,
    )  # fmt: skip
    exchanged = torch.zeros_like(forward_pass), torch.zeros_like(forward_pass)
    if experts is not None:
        forward_pass, back = forward_pass + experts.forward, back + experts.backward
        of_weights = of_weights + experts.weight_gradient
        exchanged = exposed_exchange(problem, layer, choices, experts, device, width, (forward_pass, back))
    of_weights = of_weights / back
    if problem.measured is not None:
        # measured times hold the launch overhead already
        sizes = choices.tokens / training.seq_len
        known = problem.measured.seconds(device.name, layer.kind, choices.tp, sizes)
        forward_pass, back = known or (forward_pass, back)
    elements, block = choices.tokens * problem.model.config.hidden_size, problem.config.cost.lossy_block
    ring = _ring_group([topology.tensor_parallel(int(tp)) for tp in choices.tp.tolist()], topology)
    links = problem.cluster.stage_links(topology)
    collective = all_reduce(wire_bytes(width, choices.tp_comm_bits, block) * elements, ring, *links)
    exact = all_reduce(width * elements, ring, *links)
    selective = (choices.recompute == RECOMPUTE.index("selective")) & layer.recomputable
    full = (choices.recompute == RECOMPUTE.index("full")) & layer.recomputable
    keys = _context_seconds(problem, layer, topology, choices, core)
    modules = training.recompute_modules
    part = _selective_seconds(problem, layer, choices, core, device, experts)
    again = torch.where(full, forward_pass, torch.where(selective, part, torch.zeros_like(core)))
    forward_keys = keys["forward"]
    fetched = full | selective if "core_attn" in modules else full
    backward_keys = keys["backward"] + torch.where(fetched, forward_keys, 0.0)
    sent_again = full | selective if "moe" in modules else full
    backward_exchange = exchanged[1] + torch.where(sent_again, exchanged[0], 0.0)
    shown = 1.0 - device.tp_hidden_share
    forward_tp = shown * layer.tp_collectives * collective
    # only the forward sums are rounded: those of backward are gradients of the straight-through estimate
    backward_tp = shown * layer.tp_collectives_backward * exact + torch.where(full, forward_tp, 0.0)
    terms = {
        "compute": forward_pass + back,
        "recompute": again,
        "tensor_parallel": forward_tp + backward_tp,
        "context_parallel": forward_keys + backward_keys,
        "expert_parallel": exchanged[0] + backward_exchange,
    }
    backward = back + again + backward_tp + backward_keys + backward_exchange
    return terms, forward_pass + forward_tp + forward_keys + exchanged[0], backward, of_weights * back


def _selective_seconds(
    problem: Problem,
    layer: LayerSpec,
    choices: ChoiceTensors,
    core: Tensor,
    device: Device,
    experts: ExpertCosts | None,
) -> Tensor:
    """Seconds to compute again what selective recomputation throws away, collectives left aside."""
    modules = problem.training.recompute_modules
    parts = recomputed_seconds(
        layer, modules, choices.tokens, choices.tp, choices.sequence_shards, device, element_bytes(problem)
    )
    total = parts + core if "core_attn" in modules else parts
    if experts is None:
        return total
    # a whole expert layer holds its activation function; its exchange is charged with the others
    again = experts.forward if "moe" in modules else experts.again["moe_act"]
    return total + again if {"moe", "moe_act"} & set(modules) else total


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
    if choices.cp == 1 or not (layer.cores or layer.scan):
        return {"forward": none, "backward": none}
    group = problem.cluster.groups[topology.group]
    parts = torch.full_like(choices.ranks, choices.cp)
    ring, _ = split_group(_data_group(topology, choices), choices.ranks, parts)
    links = (group.intra_node, problem.cluster.inter_node)
    if layer.scan is not None:  # its heads are divided instead: an all-to-all before and after (Megatron-LM)
        moved = element_bytes(problem) * layer.scan.gathered * choices.tokens / choices.tp
        return dict.fromkeys(("forward", "backward"), reduce_scatter(moved, ring, *links))
    whole = choices.cp * key_value_bytes(layer, choices.tokens, choices.tp, element_bytes(problem))
    gather = reduce_scatter(whole, ring, *problem.cluster.stage_links(topology))
    return {
        "forward": exposed(core, gather, group.device),
        "backward": exposed(BACKWARD_FACTOR * core, 2.0 * gather, group.device),
    }


def _sharding_seconds(
    problem: Problem,
    topology: StageTopology,
    choices: ChoiceTensors,
    parts: list[ShardGroup],
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
    of MiCS, Zhang et al. 2022, arXiv 2205.00119, section 3.4). Gradients travel at their bits and at the
    software's width, parameters as they are; layers share the broadcasts of their owners by size.
    """
    group = problem.cluster.groups[topology.group]
    links, software = problem.cluster.stage_links(topology), problem.software
    width, block = software.gradient_bytes or state.gradient, problem.config.cost.lossy_block
    none, zero = torch.zeros_like(forward), choices.zero_stage
    scatter, replicas, gather = none, none, none
    for part in parts:
        if software.single_ring:
            part = replace(part, inner=single_ring(part.inner, choices.zero_stage == 3))
        gradients = part.parameters * wire_bytes(width, choices.grad_comm_bits, block)
        # a layer without parameters sends no message, and so has no latency
        there = part.parameters > 0
        gathers = there * reduce_scatter(part.parameters * state.parameter, part.inner, *links)
        gather = gather + (gathers * (zero == 3) if part.frozen else gathers)
        if part.frozen:
            continue
        scatter = scatter + there * reduce_scatter(gradients, part.inner, *links)
        replicas = replicas + there * all_reduce(gradients / part.shards, part.across, *links)

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
    stages = problem.cluster.num_devices / sum(topology.counts)
    share = stages * parts[0].parameters / problem.model.num_parameters * choices.tp
    owners = choices.shards * ((choices.shards > 1) & ((zero == 1) | (zero == 2)))
    gathered = gathered + software.owner_broadcast * owners * share
    return {"forward": per_forward, "backward": per_backward, "iteration": last + gathered}


def _activations(
    problem: Problem, layer: LayerSpec, device: Device, choices: ChoiceTensors, experts: ExpertCosts | None
) -> dict[str, Tensor]:
    modules = problem.training.recompute_modules
    seq_len, shards, width = problem.training.seq_len, choices.sequence_shards, element_bytes(problem)
    formula = activation_bytes(layer, choices.tokens, seq_len, choices.tp, shards, width, modules)
    if experts is not None:
        dropped = [experts.saved[module] for module in ("moe", "moe_act") if module in modules]
        less = dropped[0] if dropped else 0.0
        formula["none"] = formula["none"] + experts.kept
        formula["selective"] = formula["selective"] + experts.kept - less
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


def _data_group(topology: StageTopology, choices: ChoiceTensors) -> RingGroup:
    return _ring_group([topology.data_parallel(int(tp)) for tp in choices.tp.tolist()], topology)


def _ring_group(shapes: list[tuple[int, int]], topology: StageTopology) -> RingGroup:
    local, nodes = (float_tensor([shape[i] for shape in shapes]) for i in (0, 1))
    return RingGroup(local=local, nodes=nodes, gpus=torch.full_like(local, topology.gpus_per_node))
