"""Seconds and bytes of one kind of layer on one kind of stage, for all strategies at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from darts_parallel.config import RECOMPUTE
from darts_parallel.cost.activations import (
    activation_bytes,
    between_passes,
    key_value_bytes,
    mlp_bytes,
    weight_gradient_bytes,
)
from darts_parallel.cost.choices import BothPasses, Tensors
from darts_parallel.cost.collectives import all_reduce, wire_bytes
from darts_parallel.cost.compute import (
    BACKWARD_FACTOR,
    IN_BLOCKS,
    computation_seconds,
    exposed,
    recomputed_seconds,
    stream_seconds,
    unread_seconds,
    weight_cast_seconds,
)
from darts_parallel.cost.memory import StateBytes, gathered_bytes, parameters_per_rank, static_bytes
from darts_parallel.cost.sharding import (
    ShardGroup,
    accumulation_seconds,
    context_gather,
    frozen_bytes,
    layer_shards,
    sharding_seconds,
)
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms import TERMS, Contribution, CostTerm, terms_of
from darts_parallel.errors import Amounts
from darts_parallel.problem import LayerSpec, Scalar

CONTEXT = "context_parallel"
MESSAGES = tuple(dict.fromkeys([CONTEXT, *(term.message for term in TERMS if term.message)]))
TIME_TERMS = ("compute", "recompute", "tensor_parallel", *MESSAGES, "sharding")
"""Causes of a micro-batch's seconds: arithmetic, repeated forward, collectives of tp and cp,
messages of `cost/terms` (and waiting for the launches of experts), ZeRO-2/3."""
BUFFERED_BYTES = 2.0
"""Bytes of a parameter or gradient in a buffer."""
SUB_GROUP_BYTES = 6.0
"""Bytes of a gradient in a step of ZeRO-3: a flat 16-bit copy, and one in float32."""
NARROW_COPIES = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 1.125}
"""Bytes of a block's weight in narrow copies, one for forward and a transposed one for backward, which
are kept between micro-batches next to the 16-bit weight (Transformer Engine d0067d0d,
pytorch/module/linear.py, lines 461 to 493 and 1958). So are those of weights that ZeRO-3 gathers,
Megatron-FSDP's too, but for PyTorch's FSDP2 (lines 640 to 645)."""
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
    terms: Tensors
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
    """Bytes among or next to them that a split backward keeps from its first pass to that of the
    weights."""
    working: Tensor
    """Bytes that exist only while the layer is computed."""

    def where(self, kept: Tensor, other: "LayerCosts") -> "LayerCosts":
        """Return these costs for the strategies `kept`, `(C,)`, and other ones for the rest."""
        mine = vars(self)
        its = vars(other)
        found = {name: torch.where(kept, mine[name], its[name]) for name in mine if name != "terms"}
        names = self.terms
        terms = {name: torch.where(kept, names[name], other.terms[name]) for name in names}
        return LayerCosts(terms=terms, **found)


def layer_costs(stage: StageContext, layer: LayerSpec, *, counts_table: bool) -> LayerCosts:
    """Price `layer` on a stage.

    Args:
        counts_table: False where another layer on the same device has the vocabulary table.
    """
    if layer.half_of is not None:
        whole, other = layer.half_of
        parts = (replace(layer, half_of=None), other, whole)
        costs = [layer_costs(stage, part, counts_table=counts_table) for part in parts]
        return _half(*costs)
    added = {term: term.layer_cost(stage, layer) for term in terms_of(layer)}
    shards = shard_groups(stage, layer, counts_table=counts_table)
    forward, backward, of_weights, terms = _micro_batch_seconds(stage, layer, added)
    added_up = (accumulation_seconds(stage, part) for part in shards)
    accumulation = sum(added_up, torch.zeros_like(backward))
    backward = backward + accumulation
    sync = sharding_seconds(stage, shards, forward, backward)
    terms["sharding"] = sync["forward"] + sync["backward"]
    terms["compute"] = terms["compute"] + accumulation
    timed = {"forward": forward + sync["forward"], "backward": backward + sync["backward"]}
    timed["weight_gradient"] = of_weights + accumulation
    timed["gradient_sync"] = sync["iteration"]
    timed["optimizer"] = _optimizer_seconds(stage, layer, shards).expand_as(backward)
    return LayerCosts(terms=terms, **timed, **_stored_bytes(stage, layer, shards, added))


def _optimizer_seconds(
    stage: StageContext, layer: LayerSpec, shards: Sequence[ShardGroup]
) -> Tensor:
    """Return the seconds per iteration of the optimizer step and of casting the new weights, `(C,)`."""
    choices = stage.choices
    state = stage.state
    traffic = OPTIMIZER_TRAFFIC * (state.optimizer + state.gradient) + state.parameter
    # with ZeRO-3 a rank casts its own shard before it is gathered
    cast_shards = torch.where(choices.zero_stage == 3, choices.shards, 1.0)
    seconds = weight_cast_seconds(layer, 1.0 / (choices.tp * cast_shards), stage.device)
    for part in shards:
        if part.frozen is None:
            owned = _owned_parameters(stage, part)
            seconds = seconds + stream_seconds(owned * traffic, stage.device)
    if stage.training.optimizer == "muon":
        seconds = seconds + _orthogonalization_seconds(stage, layer)
    return seconds


def _orthogonalization_seconds(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the seconds per iteration of Muon's five Newton-Schulz iterations, `(C,)`.

    An iteration multiplies a matrix of m x n numbers, m <= n, three times (arXiv 2502.16982,
    section 2.1): 4 m^2 n + 2 m^3 FLOP. Ranks that share the optimizer's state divide the matrices;
    every tensor-parallel rank has whole ones (Megatron-LM, `--muon-tp-mode duplicated`).
    """
    flops = 0.0
    for gemm in layer.trained:
        if gemm.split != "vocabulary":
            short, long = sorted((gemm.in_features, gemm.out_features))
            flops += 5.0 * short**2 * (4.0 * long + 2.0 * short)
    rate = stage.device.half_flops * stage.device.gemm_efficiency
    shards = torch.where(stage.choices.zero_stage >= 1, stage.choices.shards, 1.0)
    return flops / (rate * shards)


def _owned_parameters(stage: StageContext, part: ShardGroup) -> Tensor:
    """Return the parameters whose optimizer state a rank holds, `(C,)`."""
    return part.parameters / torch.where(stage.choices.zero_stage >= 1, part.shards, 1.0)


def _stored_bytes(
    stage: StageContext,
    layer: LayerSpec,
    shards: Sequence[ShardGroup],
    added: Mapping[CostTerm, Contribution],
) -> Tensors:
    """Return the bytes of a layer on one device by the fields of `LayerCosts`, each `(O, C)`."""
    choices = stage.choices
    zero = choices.zero_stage
    by_recomputation = _activations(stage, layer, added)
    whole = by_recomputation["none"]
    saved = torch.stack([by_recomputation[kind] for kind in RECOMPUTE])
    activation = saved.gather(0, choices.recompute.expand(1, *whole.shape)).squeeze(0)
    static = torch.zeros_like(whole)
    optimizer_state = step = static
    software = stage.software
    gradients = software.eager_blocks * mlp_bytes(layer, choices.tp, 1.0)
    working = whole - activation + choices.tokens * stage.width / 2.0 * gradients
    for part in shards:
        per_parameter = part.held(stage.state)
        owned = _owned_parameters(stage, part)
        optimizer_state = optimizer_state + owned * per_parameter.optimizer
        static = static + static_bytes(part.parameters, part.shards, zero, per_parameter)
        updated = _held_at_once(stage, part, software.sub_group_parameters, part.shards)
        step = step + SUB_GROUP_BYTES * (part.frozen is None) * updated
        buffered = _held_at_once(stage, part, software.buffered_parameters, 1.0)
        static = static + BUFFERED_BYTES * (part.shards > 1) * buffered
        working = working + gathered_bytes(part.parameters, zero, per_parameter)
        copies = _narrow_copies(stage, layer, part)
        freed = (zero == 3) & software.narrow_copies_freed
        static = static + copies * ~freed
        working = working + copies * freed
    needed = weight_gradient_bytes(stage, layer)
    for own in added.values():
        needed = needed + own.kept
        working = working + own.working
    if choices.cp > 1:
        # two parts of the sequence's keys and values: one in use, one in transfer
        working = working + 2.0 * key_value_bytes(stage, layer)
    needed = stage.device.activation_factor * needed
    factor = stage.device.state_factor
    # the step begins when backward has freed what was kept
    at_peak = torch.maximum(activation, factor * step)
    return dict(
        static=factor * static,
        state=factor * optimizer_state,
        activation=at_peak,
        for_weights=between_passes(layer, needed, whole, activation),
        working=working,
    )


def _narrow_copies(stage: StageContext, layer: LayerSpec, part: ShardGroup) -> Tensor:
    """Return the bytes of the trained weights of a block in their narrow copies, `(C,)`."""
    in_block = part.frozen is None and any(gemm.split in IN_BLOCKS for gemm in layer.gemms)
    return in_block * NARROW_COPIES.get(stage.training.precision, 0.0) * part.parameters


def _held_at_once(stage: StageContext, part: ShardGroup, most: float, ranks: Scalar) -> Tensor:
    """Return the layer's share, by its size, of parameters that ZeRO-3 holds apart, `(C,)`.

    Args:
        most: Most parameters of a rank that are held at once.
        ranks: Ranks over which they are divided, next to tensor parallelism.
    """
    if not most:
        return torch.zeros_like(part.shards)
    share = (most * stage.choices.tp * ranks / stage.model.num_parameters).clamp(max=1.0)
    return (stage.choices.zero_stage == 3) * share * part.parameters / ranks


def _half(own: LayerCosts, other: LayerCosts, whole: LayerCosts) -> LayerCosts:
    """Return the costs of half a block: its share of the whole block's costs.

    The whole is divided in proportion to what the halves cost alone. A cut inside a block therefore
    adds no launch and no kept input of full recomputation. Working memory is the whole block's:
    only the largest layer of a stage counts.
    """
    parts = {}
    for entry in fields(whole):
        if entry.name not in ("terms", "working"):
            mine, rest, both = (getattr(costs, entry.name) for costs in (own, other, whole))
            parts[entry.name] = _share(mine, rest, both)
    terms = {}
    for name, both in whole.terms.items():
        terms[name] = _share(own.terms[name], other.terms[name], both)
    # forward and backward are divided in proportions of their own: the difference is compute's
    difference = parts["forward"] + parts["backward"] - sum(terms.values())
    terms["compute"] = terms["compute"] + difference
    return LayerCosts(**parts, terms=terms, working=whole.working)


def _share(mine: Tensor, rest: Tensor, both: Tensor) -> Tensor:
    """Return the part of `both` in proportion to `mine` of `mine + rest`; half where both are 0."""
    none = mine + rest == 0
    return both * torch.where(none, 0.5, mine / torch.where(none, 1.0, mine + rest))


def shard_groups(stage: StageContext, layer: LayerSpec, *, counts_table: bool) -> list[ShardGroup]:
    """Return the parameters of `layer` on a rank: one group, and a group for each term with its own replicas.

    Args:
        counts_table: False where another layer on the same device has the vocabulary table.
    """
    spec = layer if counts_table else replace(layer, vocabulary_parameters=0)
    parameters = parameters_per_rank(spec, stage.model.config.vocab_size, stage.choices.tp)
    groups = [layer_shards(stage, parameters, frozen_bytes(stage, layer))]
    for term in terms_of(layer):
        groups += term.shard_groups(stage, layer)
    return groups


def state_by_kind(
    stage: StageContext, layer: LayerSpec, state: StateBytes, *, counts_table: bool
) -> Amounts:
    """Return the bytes of `layer` on a rank: parameters, gradients, and optimizer state, by these words.

    Args:
        stage: With one strategy.
        state: Bytes per parameter.
        counts_table: As in `shard_groups`.
    """
    kinds = {
        "parameters": StateBytes(state.parameter, 0.0, 0.0),
        "gradients": StateBytes(0.0, state.gradient, 0.0),
        "optimizer state": StateBytes(0.0, 0.0, state.optimizer),
    }
    found = dict.fromkeys(kinds, 0.0)
    for group in shard_groups(stage, layer, counts_table=counts_table):
        owners = (group.parameters, group.shards, stage.choices.zero_stage)
        for kind, part in kinds.items():
            found[kind] += float(static_bytes(*owners, group.held(part)))
    return found


def _micro_batch_seconds(
    stage: StageContext, layer: LayerSpec, added: Mapping[CostTerm, Contribution]
) -> tuple[Tensor, Tensor, Tensor, Tensors]:
    """Price kernels, recomputation and messages inside the layer.

    Returns:
        Seconds of a micro-batch without data-parallel communication, each `(O, C)`: forward, backward, the
        part of it that is gradients of weights, and forward + backward by cause.
    """
    modules = stage.training.recompute_modules
    kernels = computation_seconds(stage, layer)
    forward = kernels.forward
    backward = kernels.backward
    of_weights = kernels.weight_gradient
    selected = recomputed_seconds(stage, layer)
    if "core_attn" in modules:
        selected = selected + kernels.attention
    for own in added.values():
        forward = forward + own.forward
        backward = backward + own.backward
        of_weights = of_weights + own.weight_gradient
        selected = selected + own.recomputed
    messages = _messages(stage, layer, added, kernels.attention, (forward, backward))
    share_of_weights = of_weights / backward
    # measured times hold the launch overhead already
    forward = stage.measured_figure(layer, "forward", forward)
    backward = stage.measured_figure(layer, "backward", backward)
    of_weights = share_of_weights * backward
    whole, parts = _repeated(stage, layer)
    none = torch.zeros_like(kernels.attention)
    again = whole * (forward - unread_seconds(stage, layer)) + parts * selected
    forward_tp, backward_tp = _tensor_parallel_seconds(stage, layer, whole)
    terms = dict.fromkeys(TIME_TERMS[:-1], none)
    terms["compute"] = forward + backward
    terms["recompute"] = again
    terms["tensor_parallel"] = forward_tp + backward_tp
    forward = forward + forward_tp
    backward = backward + again + backward_tp
    for sent in messages:
        repeated = whole + parts if sent.module in modules else whole
        in_backward = sent.backward + repeated * sent.forward
        forward = forward + sent.forward
        backward = backward + in_backward
        terms[sent.name] = terms[sent.name] + (sent.forward + in_backward)
    return forward, backward, of_weights, terms


def _repeated(stage: StageContext, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    """Return the shares of the whole layer and of the job's modules that backward repeats, `(C,)` each."""
    kinds = [stage.choices.recompute == RECOMPUTE.index(kind) for kind in ("full", "selective")]
    full, selective = ((kind & layer.recomputable).double() for kind in kinds)
    if stage.software.alternate_products and layer.experts is None:
        return full + selective / 2.0, torch.zeros_like(full)
    return full, selective


@dataclass(frozen=True)
class _Message:
    """Seconds by which messages lengthen forward and backward, each `(O, C)`."""

    name: str
    """Name under which they are charged."""
    module: str
    """Module whose selective recomputation repeats the messages of forward."""
    forward: Tensor
    backward: Tensor


def _messages(
    stage: StageContext,
    layer: LayerSpec,
    added: Mapping[CostTerm, Contribution],
    attention: Tensor,
    compute: BothPasses,
) -> list[_Message]:
    """Return the messages of context parallelism and of the layer's terms.

    With context parallelism every rank needs all keys and values of the sequence for its own
    queries: `cp - 1` of `cp` parts come from the other ranks, as an all-gather (Llama 3, Dubey et
    al. 2024, arXiv 2407.21783, section 3.3.2) or step by step around a ring (Ring Attention, Liu et
    al. 2023, arXiv 2310.01889; Megatron-LM), which moves the same bytes. Backward fetches them
    again and reduce-scatters their gradients. Grouped-query attention sends its few KV heads only.
    The messages run next to the attention core, which cp balances.

    Args:
        attention: Seconds of the attention core forward.
        compute: Seconds of all kernels of the layer in forward and in backward.
    """
    messages = []
    if stage.choices.cp > 1 and layer.cores:
        gather = context_gather(stage, stage.choices.cp * key_value_bytes(stage, layer))
        exponent = stage.device.overlap_exponent
        forward = exposed(attention, gather, exponent)
        backward = exposed(BACKWARD_FACTOR * attention, 2.0 * gather, exponent)
        messages = [_Message(CONTEXT, "core_attn", forward, backward)]
    for term in added:
        if term.message:
            seconds = term.message_seconds(stage, layer, compute)
            messages.append(_Message(term.message, term.repeated_with, *seconds))
    return messages


def _tensor_parallel_seconds(stage: StageContext, layer: LayerSpec, repeated: Tensor) -> BothPasses:
    """Return the exposed seconds of tensor-parallel collectives in forward and backward, `(O, C)`.

    Args:
        repeated: Share of the layer that backward computes again, `(C,)`.
    """
    sent = wire_bytes(stage.width, stage.choices.tp_comm_bits, stage.lossy_block)
    exact = torch.full_like(sent, stage.width)
    shown = 1.0 - stage.device.tp_hidden_share
    reduced = layer.tp_collectives * _hidden_reduced(stage, layer, sent)
    forward = shown * stage.measured_figure(layer, "tp_forward", reduced)
    # only the forward sums are rounded: those of backward are gradients of the straight-through estimate
    reduced = layer.tp_collectives_backward * _hidden_reduced(stage, layer, exact)
    backward = shown * stage.measured_figure(layer, "tp_backward", reduced)
    return forward, backward + repeated * forward


def _hidden_reduced(stage: StageContext, layer: LayerSpec, width: Tensor) -> Tensor:
    """Return the seconds to all-reduce the hidden state over the tensor-parallel ranks, `(O, C)`.

    Inputs of products in 8 bits are cast before sequence parallelism gathers them: half of the
    all-reduce then moves a byte an element (Transformer Engine, pytorch/module/layernorm_linear.py:
    ln_out).

    Args:
        width: Bytes on the wire per element, `(C,)`.
    """
    choices = stage.choices
    elements = choices.tokens * stage.model.config.hidden_size
    eight_bit = stage.device.eight_bit and any(gemm.split in IN_BLOCKS for gemm in layer.gemms)
    cast = (choices.sequence_shards > 1) & eight_bit
    half_cast = (width + width.clamp(max=1.0)) / 2.0
    size = torch.where(cast, half_cast, width) * elements
    start = (choices.tp > 1).double() * stage.device.collective_start
    return all_reduce(size, stage.tensor_ring) + start


def _activations(
    stage: StageContext, layer: LayerSpec, added: Mapping[CostTerm, Contribution]
) -> Tensors:
    """Return the bytes that the layer keeps for backward, by recomputation."""
    factor = stage.device.activation_factor
    stored = activation_bytes(stage, layer)
    for own in added.values():
        stored["none"] = stored["none"] + own.kept
        stored["selective"] = stored["selective"] + own.kept - own.dropped
    stored["none"] = factor * stored["none"]
    stored["selective"] = factor * stored["selective"]
    if not layer.recomputable:
        # a block's input, which full recomputation keeps, is one tensor whatever the framework
        stored["full"] = factor * stored["full"]
    stored["none"] = stage.measured_figure(layer, "saved", stored["none"])
    if layer.captured:
        stored["none"] = factor * stored["none"]
        stored["selective"] = stored["none"]
    elif stage.software.alternate_products and layer.experts is None:
        stored["selective"] = (stored["none"] + stored["full"]) / 2.0
    return stored
