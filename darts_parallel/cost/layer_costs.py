"""Seconds and bytes of one kind of layer on one kind of stage, for all strategies at once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from darts_parallel.config import RECOMPUTE
from darts_parallel.cost.collectives import all_reduce, reduce_scatter, split_group, wire_bytes
from darts_parallel.cost.compute import (
    BACKWARD_FACTOR,
    IN_BLOCKS,
    computation_seconds,
    exposed,
    recomputed_seconds,
    stream_seconds,
    weight_cast_seconds,
)
from darts_parallel.cost.memory import (
    activation_bytes,
    between_passes,
    gathered_bytes,
    key_value_bytes,
    parameters_per_rank,
    static_bytes,
    weight_gradient_bytes,
)
from darts_parallel.cost.sharding import (
    ShardGroup,
    accumulation_seconds,
    data_group,
    layer_shards,
    ring_group,
    sharding_seconds,
)
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms import TERMS, Contribution, CostTerm, terms_of
from darts_parallel.problem import LayerSpec

CONTEXT = "context_parallel"
MESSAGES = tuple(dict.fromkeys([CONTEXT, *(term.message for term in TERMS if term.message)]))
TIME_TERMS = ("compute", "recompute", "tensor_parallel", *MESSAGES, "sharding")
"""Causes of a micro-batch's seconds: arithmetic, repeated forward, collectives of tp and cp, messages of
`cost/terms` (and waiting for the launches of experts), ZeRO-2/3."""
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
    """Seconds of the part of `backward` that only the optimizer waits for."""
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
    """Bytes among or next to them that a split backward keeps from its first pass to that of the weights."""
    working: Tensor
    """Bytes that exist only while the layer is computed."""


def layer_costs(stage: StageContext, layer: LayerSpec, *, counts_table: bool) -> LayerCosts:
    """Price `layer` on a stage.

    Args:
        counts_table: False where the layer's vocabulary table is another layer's on the same device.
    """
    if layer.half_of is not None:
        whole, other = layer.half_of
        parts = (replace(layer, half_of=None), other, whole)
        return _half(*(layer_costs(stage, part, counts_table=counts_table) for part in parts))
    device, choices, state = stage.device, stage.choices, stage.state
    shards = shard_groups(stage, layer, counts_table=counts_table)
    added = {term: term.layer_cost(stage, layer) for term in terms_of(layer)}
    seconds, forward, backward, weights = _micro_batch_seconds(stage, layer, added)
    accumulation = sum(accumulation_seconds(stage, part) for part in shards)
    accumulation = torch.as_tensor(accumulation).expand_as(backward)
    seconds["compute"] = seconds["compute"] + accumulation
    backward, weights = backward + accumulation, weights + accumulation
    sync = sharding_seconds(stage, shards, forward, backward)
    traffic = OPTIMIZER_TRAFFIC * (state.optimizer + state.gradient) + state.parameter
    stored = _activations(stage, layer, added)
    saved = torch.stack([stored[kind] for kind in RECOMPUTE])
    activation = saved.gather(0, choices.recompute.expand(1, *stored["none"].shape)).squeeze(0)
    zero, none = choices.zero_stage, torch.zeros_like(forward)
    needed = weight_gradient_bytes(
        layer, choices.tokens, choices.tp, choices.sequence_shards, stage.width
    )
    # with ZeRO-3 a rank casts its own shard before it is gathered
    cast = 1.0 / (choices.tp * torch.where(zero == 3, choices.shards, 1.0))
    optimizer = none + weight_cast_seconds(layer, cast, device)
    static, optimizer_state, working = none, none, stored["none"] - activation
    for part in shards:
        mine = torch.where(zero >= 1, part.parameters / part.shards, part.parameters)
        if not part.frozen:
            optimizer = optimizer + stream_seconds(mine * traffic, device)
        per_parameter = part.held(state)
        optimizer_state = optimizer_state + mine * per_parameter.optimizer
        static = static + static_bytes(part.parameters, part.shards, zero, per_parameter)
        working = working + gathered_bytes(part.parameters, zero, per_parameter)
    for own in added.values():
        needed, working = needed + own.kept, working + own.working
    if choices.cp > 1:  # two parts of the sequence's keys and values: one in use, one on its way
        working = working + 2.0 * key_value_bytes(layer, choices.tokens, choices.tp, stage.width)
    needed = device.activation_factor * needed
    return LayerCosts(
        forward=forward + sync["forward"],
        backward=backward + sync["backward"],
        weight_gradient=weights,
        terms=seconds | {"sharding": sync["forward"] + sync["backward"]},
        gradient_sync=sync["iteration"],
        optimizer=optimizer,
        static=device.state_factor * static,
        state=device.state_factor * optimizer_state,
        activation=activation,
        for_weights=between_passes(layer, needed, stored["none"], activation),
        working=working,
    )


def _half(own: LayerCosts, other: LayerCosts, whole: LayerCosts) -> LayerCosts:
    """Return the costs of half a block: its share of those of the whole, which both halves make up.

    So no cut adds a launch, or the block's input that full recomputation keeps. Working memory is the
    block's: the largest layer of a stage counts.
    """

    def share(mine: Tensor, rest: Tensor, both: Tensor) -> Tensor:
        none = mine + rest == 0
        return both * torch.where(none, 0.5, mine / torch.where(none, 1.0, mine + rest))

    terms = {
        name: share(own.terms[name], other.terms[name], both) for name, both in whole.terms.items()
    }
    parts = {
        entry.name: share(*(getattr(costs, entry.name) for costs in (own, other, whole)))
        for entry in fields(whole)
        if entry.name not in ("terms", "working")
    }
    # forward and backward have shares of their own
    terms["compute"] = terms["compute"] + (
        parts["forward"] + parts["backward"] - sum(terms.values())
    )
    return LayerCosts(**parts, terms=terms, working=whole.working)


def shard_groups(stage: StageContext, layer: LayerSpec, *, counts_table: bool) -> list[ShardGroup]:
    """Return the parameters of `layer` on a rank, those with replicas or states of their own apart.

    Args:
        counts_table: False where the layer's vocabulary table is another layer's on the same device.
    """
    spec = layer if counts_table else replace(layer, vocabulary_parameters=0)
    parameters = parameters_per_rank(spec, stage.model.config.vocab_size, stage.choices.tp)
    apart = [group for term in terms_of(layer) for group in term.shard_groups(stage, layer)]
    return [layer_shards(stage, parameters, frozen=layer.frozen), *apart]


def _micro_batch_seconds(
    stage: StageContext, layer: LayerSpec, added: Mapping[CostTerm, Contribution]
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Return terms, forward, backward, and the part of backward that is gradients of weights."""
    choices, modules = stage.choices, stage.training.recompute_modules
    forward_pass, back, core, of_weights = computation_seconds(stage, layer)
    part = recomputed_seconds(stage, layer)
    part = part + core if "core_attn" in modules else part
    for own in added.values():
        forward_pass, back = forward_pass + own.forward, back + own.backward
        of_weights, part = of_weights + own.weight_gradient, part + own.recomputed
    messages = [(CONTEXT, "core_attn", _key_seconds(stage, layer, core))]
    for term in added:
        sent = term.message_seconds(stage, layer, (forward_pass, back))
        messages += [(term.message, term.repeated_with, sent)] if term.message else []
    of_weights = of_weights / back
    # measured times hold the launch overhead already
    forward_pass = stage.measured_figure(layer, "forward", forward_pass)
    back = stage.measured_figure(layer, "backward", back)
    selective = (choices.recompute == RECOMPUTE.index("selective")) & layer.recomputable
    full = (choices.recompute == RECOMPUTE.index("full")) & layer.recomputable
    none = torch.zeros_like(core)
    again = torch.where(full, forward_pass, torch.where(selective, part, none))
    forward_tp, backward_tp = _tensor_parallel_seconds(stage, layer, full)
    terms = {
        "compute": forward_pass + back,
        "recompute": again,
        "tensor_parallel": forward_tp + backward_tp,
    }
    terms |= dict.fromkeys(MESSAGES, none)
    forward, backward = forward_pass + forward_tp, back + again + backward_tp
    for name, module, (there, in_backward) in messages:
        repeated = full | selective if module in modules else full
        in_backward = in_backward + torch.where(repeated, there, 0.0)
        forward, backward = forward + there, backward + in_backward
        terms[name] = terms[name] + (there + in_backward)
    return terms, forward, backward, of_weights * back


def _tensor_parallel_seconds(
    stage: StageContext, layer: LayerSpec, full: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the exposed seconds of tensor-parallel collectives in forward and backward, `(O, C)`.

    Args:
        full: Strategies that compute all of the layer again, bool.
    """
    choices, topology = stage.choices, stage.topology
    elements = choices.tokens * stage.model.config.hidden_size
    ring = ring_group([topology.tensor_parallel(int(tp)) for tp in choices.tp.tolist()], topology)
    sent = wire_bytes(stage.width, choices.tp_comm_bits, stage.lossy_block)
    # inputs of products in 8 bits are cast before sequence parallelism gathers them: half of an all-reduce
    # moves a byte an element (Transformer Engine, pytorch/module/layernorm_linear.py: ln_out)
    narrow = stage.device.eight_bit and any(gemm.split in IN_BLOCKS for gemm in layer.gemms)
    cast = (choices.sequence_shards > 1) & narrow
    collective, exact = (
        all_reduce(
            torch.where(cast, (width + width.clamp(max=1.0)) / 2.0, width) * elements,
            ring,
            *stage.links,
        )
        for width in (sent, torch.full_like(sent, stage.width))
    )
    shown = 1.0 - stage.device.tp_hidden_share
    forward = shown * stage.measured_figure(layer, "tp_forward", layer.tp_collectives * collective)
    # only the forward sums are rounded: those of backward are gradients of the straight-through estimate
    backward = stage.measured_figure(layer, "tp_backward", layer.tp_collectives_backward * exact)
    return forward, shown * backward + torch.where(full, forward, 0.0)


def _key_seconds(stage: StageContext, layer: LayerSpec, core: Tensor) -> tuple[Tensor, Tensor]:
    """Return the seconds by which fetching keys and values lengthens attention forward and backward.

    With context parallelism every rank needs all keys and values of the sequence for its own queries:
    `cp - 1` of `cp` parts come from the other ranks, as an all-gather (Llama 3, Dubey et al. 2024, arXiv
    2407.21783, section 3.3.2) or step by step around a ring (Ring Attention, Liu et al. 2023, arXiv
    2310.01889; Megatron-LM), which moves the same bytes. Backward fetches them again and reduce-scatters
    their gradients. Grouped-query attention sends its few KV heads only. Runs next to the attention core,
    which cp balances.
    """
    choices, none = stage.choices, torch.zeros_like(core)
    if choices.cp == 1 or not layer.cores:
        return none, none
    parts = torch.full_like(choices.ranks, choices.cp)
    ring, _ = split_group(data_group(stage), choices.ranks, parts)
    whole = choices.cp * key_value_bytes(layer, choices.tokens, choices.tp, stage.width)
    gather = reduce_scatter(whole, ring, *stage.links)
    exponent = stage.device.overlap_exponent
    return exposed(core, gather, exponent), exposed(BACKWARD_FACTOR * core, 2.0 * gather, exponent)


def _activations(
    stage: StageContext, layer: LayerSpec, added: Mapping[CostTerm, Contribution]
) -> dict[str, Tensor]:
    """Return the bytes that the layer keeps for backward, by recomputation."""
    training, device, choices = stage.training, stage.device, stage.choices
    formula = activation_bytes(
        layer,
        choices.tokens,
        training.seq_len,
        choices.tp,
        choices.sequence_shards,
        stage.width,
        training.recompute_modules,
        stage.software,
    )
    for own in added.values():
        formula["none"] = formula["none"] + own.kept
        formula["selective"] = formula["selective"] + own.kept - own.dropped
    # a block's input, which full recomputation keeps, is one tensor whatever the framework
    exact = ("full",) if layer.recomputable else ()
    stored = {
        kind: x if kind in exact else device.activation_factor * x for kind, x in formula.items()
    }
    none = stage.measured_figure(layer, "saved", stored["none"])
    none = device.activation_factor * none if layer.captured else none
    return stored | {"none": none} | ({"selective": none} if layer.captured else {})
