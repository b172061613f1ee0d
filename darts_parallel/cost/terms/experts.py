"""Routed experts: seconds, messages and bytes on one device, for all strategies at once.

Tokens leave the attention's layout sequence-parallel, `tokens / tp` a rank, `top_k` copies each.
With the same ranks folded into `etp * ep * edp` (MoE Parallel Folding, arXiv 2504.14960, section
3.2), an all-to-all over `ep` ranks brings every copy to its expert, an all-gather over `etp` ranks
completes the rows of a split expert, the grouped products run, and a reduce-scatter and a second
all-to-all bring the results back.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from darts_parallel.cost.choices import BothPasses, float_tensor
from darts_parallel.cost.collectives import RingGroup, all_to_all, reduce_scatter
from darts_parallel.cost.compute import (
    BACKWARD_FACTOR,
    CAST_BYTES,
    exposed,
    gemm_seconds,
    launch_gap,
    products_seconds,
    stream_seconds,
)
from darts_parallel.cost.sharding import ShardGroup, frozen_bytes
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import Contribution, CostTerm
from darts_parallel.errors import UnsupportedError
from darts_parallel.problem import Experts, Gemm, LayerSpec, Link

PERMUTED = {"alltoall": 8.0, "flex": 4.0}
"""Elements per routed row and hidden feature that permutation moves in one pass. A plain
all-to-all permutes into the order of the ranks, into the order of the local experts, and both
back, each read and written. DeepEP and HybridEP permute in two steps."""
ROUTER_PASSES = 12.0
"""Elements per token and expert of softmax, top-k, mask and balance loss, in float32."""
FLOAT32 = 4.0
ROUTER_KEPT = 8.0
"""Bytes per token and expert that the router keeps for backward: logits and probabilities in
float32."""
MAP_BYTES = 8.0
"""Bytes per routed row of the map that undoes the permutation."""
BIAS_BYTES = (28.0, 40.0)
"""Bytes per routed row and hidden feature, forward and backward, where experts have biases. Megatron-Core
adds bias times probability to the rows of one expert at a time in float32, joins them and casts (TEGroupedMLP
of Megatron-LM d98e8a64)."""
USUAL_LOCAL = 16.0
"""Experts of a rank with as many launches of the layer (router, permutation, dispatch) as of its
experts; `expert_overhead_us` is the time of both."""
NARROW_LAUNCHES = (2.0, 1.5)
"""Launches of an expert below 16 bits, per those in 16 bits, forward and backward. Transformer Engine casts
the rows of every expert by a kernel of its own (split_quantize of d0067d0d): an expert has 4 instead of 2
kernels forward, and 6 instead of 4 backward. FP8 with delayed scaling casts all at once; few runs have it."""
BUFFERS = 2.0
"""Copies of the routed rows that the dispatcher holds while it works: sent and received."""
SOURCE = "arXiv 2504.14960, section 3"


class ExpertTerm(CostTerm):
    """Router, permutation, grouped products, dispatch and combine; weights with replicas of their own."""

    name = "experts"
    message = "expert_parallel"
    repeated_with = "moe"
    formulas: ClassVar = {
        "experts": ("router, permutation, grouped products: forward + backward", SOURCE),
        "expert_parallel": (
            "dispatch, combine: bytes of top_k copies / bandwidth; launches",
            SOURCE,
        ),
    }

    def present(self, layer: LayerSpec) -> bool:
        """Return whether the layer has routed experts."""
        return layer.experts is not None

    def layer_cost(self, stage: StageContext, layer: LayerSpec) -> Contribution:
        """Price the experts' kernels and tensors; frozen experts have the gradients of their inputs alone."""
        experts = _experts(layer)
        training = stage.training
        device = stage.device
        width = stage.width
        hidden = experts.hidden
        sent = _load(stage, experts) * (_tokens(stage) * experts.top_k)
        rows = sent * stage.choices.etp  # that the busiest rank's experts compute
        router = _router_seconds(stage, experts)
        permuted = PERMUTED[training.moe_token_dispatcher_type] * width * sent * hidden
        permutation = stream_seconds(permuted, device)
        biased = experts.bias * rows * hidden
        bias, bias_backward = (stream_seconds(size * biased, device) for size in BIAS_BYTES)
        routing = device.permutation_factor * (router + permutation) + bias
        inner = (experts.inputs + experts.width) / stage.choices.etp
        activation_bytes = width * rows * inner
        apart = not _one_kernel(stage, experts)
        activation = apart * device.streaming_factor * stream_seconds(activation_bytes, device)
        products = _grouped_seconds(stage, experts, rows)
        forward = routing + activation + products
        routing_backward = device.permutation_factor * (2.0 * router + permutation) + bias_backward
        backward = BACKWARD_FACTOR * (forward - routing) + routing_backward
        inputs = width * rows * hidden
        kept = inputs + activation_bytes + MAP_BYTES * rows
        kept = kept + ROUTER_KEPT * _tokens(stage) * experts.count
        recomputed = dropped = torch.zeros_like(kept)
        # a whole expert layer holds its activation function; its exchange is charged with the others
        if "moe" in training.recompute_modules:
            recomputed = forward
            dropped = kept
        elif "moe_act" in training.recompute_modules:
            recomputed = activation
            dropped = width * rows * experts.width / stage.choices.etp
        timed = Contribution(
            forward=forward,
            backward=backward - layer.frozen * products,
            weight_gradient=(not layer.frozen) * products,
            recomputed=recomputed,
        )
        return replace(timed, kept=kept, dropped=dropped, working=BUFFERS * inputs)

    def message_seconds(
        self, stage: StageContext, layer: LayerSpec, compute: BothPasses
    ) -> BothPasses:
        """Return the seconds by which dispatch, combine and launches lengthen forward and backward."""
        forward, backward = _exposed_exchange(stage, layer, compute)
        if stage.measured is not None:  # measured times hold the launches already
            return forward, backward
        local = _experts(layer).count / stage.choices.ep
        layer_launches = stage.training.expert_launches * stage.device.expert_overhead
        more = NARROW_LAUNCHES if stage.device.eight_bit else (1.0, 1.0)
        ahead, back = (layer_launches * (1.0 + n * local / USUAL_LOCAL) / 2.0 for n in more)
        forward_gap = launch_gap(compute[0] + forward, ahead)
        backward_gap = launch_gap(compute[1] + backward, BACKWARD_FACTOR * back)
        return forward + forward_gap, backward + backward_gap

    def shard_groups(self, stage: StageContext, layer: LayerSpec) -> list[ShardGroup]:
        """Return the experts' weights on a rank, which `edp` ranks hold."""
        degrees = stage.choices.ep * stage.choices.etp
        replicas = stage.choices.expert_replicas
        inner, across = stage.sharded(stage.data_parallel(degrees), replicas, replicas)
        experts = _experts(layer)
        parameters = experts.parameters / degrees
        matrices = experts.count * (1 + experts.inputs / experts.width) / stage.choices.ep
        frozen = frozen_bytes(stage, layer)
        return [ShardGroup(parameters, replicas, inner, across, frozen, matrices)]


def _experts(layer: LayerSpec) -> Experts:
    if layer.experts is None:
        raise UnsupportedError(f"model: layer {layer.kind} has no experts; try model=toy_moe.")
    return layer.experts


def _exposed_exchange(stage: StageContext, layer: LayerSpec, compute: BothPasses) -> BothPasses:
    """Return the seconds by which the exchange lengthens forward and backward, each `(O, C)`.

    Next to the exchange runs, as the job says, the other micro-batch's pass (1F1B with merged
    forward and backward, Megatron-LM; DualPipe, arXiv 2412.19437, section 3.2.1), or the shared
    experts, or nothing.
    """
    training = stage.training
    sent = exchange_seconds(stage, layer)
    exponent = stage.device.overlap_exponent
    shared = [part for part in layer.parts if part.module == "shared_experts"]
    if training.overlap_moe_expert_parallel_comm:
        return exposed(compute[1], sent, exponent), exposed(compute[0], sent, exponent)
    if training.moe_shared_expert_overlap and shared:
        choices = stage.choices
        hidden_by = products_seconds(
            shared[0].gemms, choices.tokens, choices.tp, stage.device, stage.width
        )
        backward = BACKWARD_FACTOR * hidden_by
        return exposed(hidden_by, sent, exponent), exposed(backward, sent, exponent)
    return sent, sent


def _one_kernel(stage: StageContext, experts: Experts) -> bool:
    """Return whether the first product applies the activation and casts its result.

    A graph of an iteration can hold experts that are not padded only if their kernels read the numbers of
    rows on the device (Megatron-Bridge 067f987d, its page on MoE optimization). Its MXFP8 recipes take
    kernels that fuse both (cutedsl_fused_grouped_mlp; grouped_mlp of Transformer Engine d0067d0d).
    """
    training = stage.training
    recorded = not training.expert_launches and training.precision == "mxfp8"
    return recorded and experts.capacity_factor is None


def _load(stage: StageContext, experts: Experts) -> float:
    """Return the load of the busiest rank, relative to the mean."""
    return experts.capacity_factor or stage.training.moe_load_imbalance


def _router_seconds(stage: StageContext, experts: Experts) -> Tensor:
    """Return the forward seconds of the router's product and of its elementwise passes, `(O, C)`."""
    device = stage.device
    tokens = _tokens(stage)
    gemm = Gemm(experts.count, experts.hidden, "replicated")
    product = gemm_seconds(gemm, tokens, torch.ones_like(stage.choices.tp), device, stage.width)
    passes = ROUTER_PASSES * FLOAT32 * tokens * experts.count
    return product + stream_seconds(passes, device)


def _tokens(stage: StageContext) -> Tensor:
    """Return the tokens of a rank before they are dispatched, `(O, C)`."""
    return stage.choices.tokens / stage.choices.sequence_shards


def _grouped_seconds(stage: StageContext, experts: Experts, rows: Tensor) -> Tensor:
    """Return the seconds of one forward pass of all products of a rank's experts.

    The tiles of all experts fill a device together, so a single product's loss by small sizes does
    not count. Kernels that group experts do not reach the speed of single ones
    (`grouped_gemm_efficiency`). A rank with one expert has nothing to group, and experts that are
    padded to their capacity are one batch of equal products.
    """
    device = replace(stage.device, gemm_half_size=0.0)
    local = experts.count / stage.choices.ep
    rows_each = rows / local
    gemms = (
        Gemm(experts.inputs, experts.hidden, "column"),
        Gemm(experts.hidden, experts.width, "row"),
    )
    one = products_seconds(gemms, rows_each, stage.choices.etp, device, stage.width)
    if _one_kernel(stage, experts):
        cast = CAST_BYTES * rows_each * experts.width / stage.choices.etp
        one = one - stream_seconds(cast, device)
    uneven = (local > 1.0) & (experts.capacity_factor is None)
    return local * one / torch.where(uneven, device.grouped_gemm_efficiency, 1.0)


def exchange_seconds(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the seconds of dispatch and combine of one pass, collectives of split experts included."""
    experts = _experts(layer)
    etp = stage.choices.etp
    size = _load(stage, experts) * stage.width * _tokens(stage) * experts.hidden
    intra, inter = _links(stage)
    ring = replace(stage.tensor_parallel(etp), intra=intra, inter=inter)
    rows = reduce_scatter(etp * size * experts.top_k, ring)
    return 2.0 * (rows + dispatch_seconds(stage, experts, size))


def dispatch_seconds(stage: StageContext, experts: Experts, size: Tensor) -> Tensor:
    """Return the seconds to bring every token to its experts' ranks, or back, shape of `size`.

    A plain all-to-all sends `top_k` copies of a token (Thakur et al. 2005: every byte travels
    once). DeepEP and HybridEP send it once to every domain that holds one of its experts, which
    passes it on (DeepSeek-V3, arXiv 2412.19437, section 3.2.2; Megatron-Core MoE, arXiv 2603.07685,
    section 4).

    Args:
        size: Bytes of one copy of all tokens of a rank, times the load of the busiest, `(O, C)`.
    """
    device = stage.device
    flex = stage.training.moe_token_dispatcher_type == "flex"
    group = _expert_group(stage)
    if flex:
        inside, across = _flex_copies(experts, group)
    else:
        ep = group.local * group.nodes
        inside = experts.top_k * (group.local - 1) / ep
        across = experts.top_k * (ep - group.local) / ep
    share = device.all_to_all_efficiency * (device.flex_gain if flex else 1.0)
    return all_to_all(size * inside, size * across, group, share)


def _links(stage: StageContext) -> tuple[Link, Link]:
    """Return the links inside and between the nodes of the group that decides the stage's speed."""
    return stage.group.intra_node, stage.cluster.nic(stage.topology.group)


def _expert_group(stage: StageContext) -> RingGroup:
    """Return the expert-parallel groups of every strategy: ranks in a domain, and domains."""
    choices = stage.choices
    inside = []
    for etp, ep in zip(choices.etp.tolist(), choices.ep.tolist(), strict=True):
        on_node, _ = stage.topology.tensor_parallel(int(etp * ep))
        inside.append(max(on_node // int(etp), 1))
    local = float_tensor(inside)
    gpus = torch.full_like(local, stage.topology.gpus_per_node)
    return RingGroup(local, choices.ep / local, gpus, *_links(stage))


def _flex_copies(experts: Experts, group: RingGroup) -> tuple[Tensor, Tensor]:
    """Return copies of a token that a rank sends to others of its domain, and to others, `(C,)`."""
    ep = group.local * group.nodes
    domains = group.nodes
    to_ranks = float_tensor([experts.distinct(int(count)) for count in ep.tolist()])
    to_domains = float_tensor([experts.distinct(int(count)) for count in domains.tolist()])
    inside = to_ranks * (group.local - 1) / group.local
    return inside, to_domains * (domains - 1) / domains


TERM = ExpertTerm()
