"""Routed experts: seconds, messages and bytes on one device, for all strategies at once.

Tokens leave the attention's layout sequence-parallel, `tokens / tp` a rank, `top_k` copies each. With the
same ranks folded into `etp * ep * edp` (MoE Parallel Folding, arXiv 2504.14960, section 3.2), an all-to-all
over `ep` ranks brings every copy to its expert, an all-gather over `etp` ranks completes the rows of a split
expert, the grouped products run, and a reduce-scatter and a second all-to-all bring the results back.
"""

from typing import ClassVar

import torch
from torch import Tensor

from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.collectives import reduce_scatter, split_group
from darts_parallel.cost.compute import (
    BACKWARD_FACTOR,
    exposed,
    gemm_seconds,
    launch_gap,
    products_seconds,
    stream_seconds,
)
from darts_parallel.cost.sharding import ShardGroup, ring_group
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import Contribution, CostTerm
from darts_parallel.problem import Experts, Gemm, LayerSpec

PERMUTED = {"alltoall": 8.0, "flex": 4.0}
"""Elements per routed row and hidden feature that permutation moves in one pass: into the order of the ranks,
into that of the local experts, and both back, each read and written; DeepEP and HybridEP do it in two."""
ROUTER_PASSES = 12.0
"""Elements per token and expert of softmax, top-k, mask and balance loss, in float32."""
FLOAT32 = 4.0
ROUTER_KEPT = 8.0
"""Bytes per token and expert that the router keeps for backward: logits and probabilities in float32."""
MAP_BYTES = 8.0
"""Bytes per routed row of the map that undoes the permutation."""
USUAL_LOCAL = 16.0
"""Experts of a rank at which half of the launches are of a layer (router, permutation, dispatch) and half one
by one of its experts; `expert_overhead_us` is the time of both there."""
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
        "expert_parallel": ("dispatch and combine: bytes of top_k copies / bandwidth", SOURCE),
    }

    def present(self, layer: LayerSpec) -> bool:
        """Return whether the layer has routed experts."""
        return layer.experts is not None

    def layer_cost(self, stage: StageContext, layer: LayerSpec) -> Contribution:
        """Price the experts' kernels and tensors; frozen ones have the gradients of their inputs alone."""
        experts, training, device, width = (
            _experts(layer),
            stage.training,
            stage.device,
            stage.width,
        )
        tokens, etp = _tokens(stage), stage.choices.etp
        load = experts.capacity_factor or training.moe_load_imbalance
        copies = tokens * experts.top_k
        rows = load * copies * etp
        h, inner = experts.hidden, (experts.inputs + experts.width) / etp
        router = gemm_seconds(
            Gemm(experts.count, h, "replicated"),
            tokens,
            torch.ones_like(stage.choices.tp),
            device,
            width,
        ) + stream_seconds(ROUTER_PASSES * FLOAT32 * tokens * experts.count, device)
        touched = PERMUTED[training.moe_token_dispatcher_type] * width * load * copies * h
        permutation = stream_seconds(touched, device)
        routing = device.permutation_factor * (router + permutation)
        activation = device.streaming_factor * stream_seconds(width * rows * inner, device)
        products = _grouped_seconds(stage, experts, rows)
        kept = (
            width * rows * h
            + width * rows * inner
            + MAP_BYTES * rows
            + ROUTER_KEPT * tokens * experts.count
        )
        forward = routing + activation + products
        # a whole expert layer holds its activation function; its exchange is charged with the others
        modules, none = training.recompute_modules, torch.zeros_like(kept)
        again = {
            "moe": (forward, kept),
            "moe_act": (activation, width * rows * experts.width / etp),
        }
        recomputed, dropped = next((again[m] for m in again if m in modules), (none, none))
        return Contribution(
            forward=forward,
            backward=BACKWARD_FACTOR * (forward - routing)
            + device.permutation_factor * (2.0 * router + permutation)
            - layer.frozen * products,
            weight_gradient=(not layer.frozen) * products,
            recomputed=recomputed,
            kept=kept,
            dropped=dropped,
            working=BUFFERS * width * rows * h,
        )

    def message_seconds(
        self, stage: StageContext, layer: LayerSpec, compute: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the seconds by which dispatch, combine and launches lengthen forward and backward.

        Beside the exchange runs the other micro-batch's pass (1F1B with merged forward and backward,
        Megatron-LM; DualPipe, arXiv 2412.19437, section 3.2.1), or the shared experts, or nothing, as the job
        says.
        """
        training, device, sent = stage.training, stage.device, exchange_seconds(stage, layer)
        shared = [part for part in layer.parts if part.module == "shared_experts"]
        shown, exponent = (sent, sent), device.overlap_exponent
        if training.overlap_moe_expert_parallel_comm:
            shown = (exposed(compute[1], sent, exponent), exposed(compute[0], sent, exponent))
        elif training.moe_shared_expert_overlap and shared:
            choices = stage.choices
            hidden_by = products_seconds(
                shared[0].gemms, choices.tokens, choices.tp, device, stage.width
            )
            shown = (
                exposed(hidden_by, sent, exponent),
                exposed(BACKWARD_FACTOR * hidden_by, sent, exponent),
            )
        if stage.measured is not None:  # measured times hold the launches already
            return shown
        local = _experts(layer).count / stage.choices.ep
        launches = (
            stage.training.launches * device.expert_overhead * (1.0 + local / USUAL_LOCAL) / 2.0
        )
        forward, backward = compute[0] + shown[0], compute[1] + shown[1]
        gaps = launch_gap(forward, launches), launch_gap(backward, BACKWARD_FACTOR * launches)
        return shown[0] + gaps[0], shown[1] + gaps[1]

    def shard_groups(self, stage: StageContext, layer: LayerSpec) -> list[ShardGroup]:
        """Return the experts' weights on a rank, which `edp` ranks hold."""
        choices, topology = stage.choices, stage.topology
        degrees = choices.ep * choices.etp
        whole = ring_group(
            [topology.data_parallel(int(degree)) for degree in degrees.tolist()], topology
        )
        replicas = choices.expert_replicas
        inner, across = split_group(whole, replicas, replicas)
        return [
            ShardGroup(_experts(layer).parameters / degrees, replicas, inner, across, layer.frozen)
        ]


def _experts(layer: LayerSpec) -> Experts:
    assert layer.experts is not None
    return layer.experts


def _tokens(stage: StageContext) -> Tensor:
    """Return the tokens of a rank before they are dispatched, `(O, C)`."""
    return stage.choices.tokens / stage.choices.sequence_shards


def _grouped_seconds(stage: StageContext, experts: Experts, rows: Tensor) -> Tensor:
    """Return the seconds of one forward pass of all products of a rank's experts.

    Each expert multiplies its own rows, so that few rows an expert cost as small products do; kernels that
    group them do not reach the speed of single ones (`grouped_gemm_efficiency`). A rank with one expert has
    nothing to group, and experts that are padded to their capacity are one batch of equal products.
    """
    device, choices = stage.device, stage.choices
    local = experts.count / choices.ep
    each = rows / local
    gemms = (
        Gemm(experts.inputs, experts.hidden, "column"),
        Gemm(experts.hidden, experts.width, "row"),
    )
    one = products_seconds(gemms, each, choices.etp, device, stage.width)
    uneven = (local > 1.0) & (experts.capacity_factor is None)
    return local * one / torch.where(uneven, device.grouped_gemm_efficiency, 1.0)


def exchange_seconds(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the seconds of dispatch and combine of one pass, collectives of split experts included."""
    experts, topology, etp = _experts(layer), stage.topology, stage.choices.etp
    load = experts.capacity_factor or stage.training.moe_load_imbalance
    size = load * stage.width * _tokens(stage) * experts.hidden
    ring = ring_group([topology.tensor_parallel(int(degree)) for degree in etp.tolist()], topology)
    links = stage.group.intra_node, stage.cluster.nic(topology.group)
    return 2.0 * (
        reduce_scatter(etp * size * experts.top_k, ring, *links) + all_to_all(stage, experts, size)
    )


def all_to_all(stage: StageContext, experts: Experts, size: Tensor) -> Tensor:
    """Return the seconds to bring every token to its experts' ranks, or back, shape of `size`.

    The messages inside the NVLink domains and those between them travel at the same time. A plain all-to-all
    sends `top_k` copies of a token (Thakur et al. 2005: every byte travels once); DeepEP and HybridEP send it
    once to every domain that holds one of its experts, which passes it on (DeepSeek-V3, arXiv 2412.19437,
    section 3.2.2; Megatron-Core MoE, arXiv 2603.07685, section 4).

    Args:
        size: Bytes of one copy of all tokens of a rank, times the load of the busiest, shape `(O, C)`.
    """
    topology, choices, device = stage.topology, stage.choices, stage.device
    intra, inter = stage.group.intra_node, stage.cluster.nic(topology.group)
    flex = stage.training.moe_token_dispatcher_type == "flex"
    pairs = zip(choices.etp.tolist(), choices.ep.tolist(), strict=True)
    spans = [(int(etp), int(ep), topology.tensor_parallel(int(etp * ep))) for etp, ep in pairs]
    inside = float_tensor([max(local // etp, 1) for etp, _, (local, _) in spans])
    domains = choices.ep / inside
    if flex:
        out = (
            float_tensor([experts.distinct(int(n)) for n in domains.tolist()])
            * (domains - 1)
            / domains
        )
        ranks = float_tensor([experts.distinct(int(ep)) for _, ep, _ in spans])
        near = ranks * (inside - 1) / inside
    else:
        out = experts.top_k * (choices.ep - inside) / choices.ep
        near = experts.top_k * (inside - 1) / choices.ep
    sharing = float(topology.gpus_per_node) if intra.shared else 1.0
    share = device.all_to_all_efficiency * (device.flex_gain if flex else 1.0)
    within = (
        size * near * sharing / (intra.towards(inside - 1) * share) + (inside > 1) * intra.latency
    )
    across = (
        size * out * topology.gpus_per_node / (inter.bandwidth * share)
        + (domains > 1) * inter.latency
    )
    return torch.maximum(within, across)


TERM = ExpertTerm()
