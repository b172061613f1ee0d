"""Seconds and bytes of a layer's routed experts on one device, for all strategies at once.

Tokens leave the attention's layout sequence-parallel, `tokens / tp` a rank, `top_k` copies each. With the
same ranks folded into `etp * ep * edp` (MoE Parallel Folding, arXiv 2504.14960, section 3.2), an all-to-all
over `ep` ranks brings every copy to its expert, an all-gather over `etp` ranks completes the rows of a split
expert, the grouped products run, and a reduce-scatter and a second all-to-all bring the results back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.choices import ChoiceTensors, float_tensor
from darts_parallel.cost.collectives import RingGroup, reduce_scatter
from darts_parallel.cost.compute import BACKWARD_FACTOR, exposed, gemm_seconds, launch_gap, stream_seconds
from darts_parallel.problem.cluster import Device, Link, StageTopology
from darts_parallel.problem.experts import Experts
from darts_parallel.problem.model import Gemm, LayerSpec
from darts_parallel.problem.problem import Problem

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
BUFFERS = 2.0
"""Copies of the routed rows that the dispatcher holds while it works: sent and received."""


@dataclass(frozen=True)
class ExpertCosts:
    """Costs of the experts of one layer for one micro-batch, each of shape `(O, C)`."""

    forward: Tensor
    """Seconds of router, permutation and grouped products."""
    backward: Tensor
    """Seconds of the backward pass of the same kernels."""
    weight_gradient: Tensor
    """Seconds of the part of `backward` that only the optimizer waits for."""
    exchange: Tensor
    """Seconds of dispatch and combine in the forward pass, which backward repeats with gradients."""
    again: dict[str, Tensor]
    """Seconds to compute again what recomputation of a module threw away."""
    kept: Tensor
    """Bytes kept for backward per micro-batch in flight."""
    saved: dict[str, Tensor]
    """Bytes of `kept` that recomputation of a module does not keep."""
    buffers: Tensor
    """Bytes of the dispatcher while it works."""


def expert_costs(
    problem: Problem,
    experts: Experts,
    topology: StageTopology,
    choices: ChoiceTensors,
    width: int,
    *,
    frozen: bool = False,
) -> ExpertCosts:
    """Seconds and bytes of `experts` on a stage of `topology`.

    Args:
        width: Bytes of one activation element.
        frozen: Their weights are not trained: backward has the gradients of their inputs alone.
    """
    training, device = problem.training, problem.cluster.groups[topology.group].device
    tokens = choices.tokens / choices.sequence_shards
    load = experts.capacity_factor or training.moe_load_imbalance
    copies = tokens * experts.top_k
    rows = load * copies * choices.etp
    h, inner = experts.hidden, (experts.inputs + experts.width) / choices.etp
    router = gemm_seconds(
        Gemm(experts.count, h, "replicated"), tokens, torch.ones_like(choices.tp), device, width
    ) + stream_seconds(ROUTER_PASSES * FLOAT32 * tokens * experts.count, device)
    permutation = stream_seconds(
        PERMUTED[training.moe_token_dispatcher_type] * width * load * copies * h, device
    )
    routing = device.permutation_factor * (router + permutation)
    activation = device.streaming_factor * stream_seconds(width * rows * inner, device)
    products = _grouped_seconds(experts, rows, choices, device, width)
    fc1 = width * rows * h
    kept = fc1 + width * rows * inner + MAP_BYTES * rows + ROUTER_KEPT * tokens * experts.count
    forward = routing + activation + products
    exchange = _exchange_seconds(problem, experts, topology, choices, load * width)
    return ExpertCosts(
        forward=forward,
        backward=BACKWARD_FACTOR * (forward - routing)
        + device.permutation_factor * (2.0 * router + permutation)
        - frozen * products,
        weight_gradient=(not frozen) * products,
        exchange=exchange,
        again={"moe_act": activation, "moe": forward + exchange},
        kept=kept,
        saved={"moe_act": width * rows * experts.width / choices.etp, "moe": kept},
        buffers=BUFFERS * width * rows * h,
    )


def _grouped_seconds(
    experts: Experts, rows: Tensor, choices: ChoiceTensors, device: Device, width: int
) -> Tensor:
    """Seconds of one forward pass of all products of a rank's experts.

    Each expert multiplies its own rows, so that few rows an expert cost as small products do; kernels that
    group them do not reach the speed of single ones (`grouped_gemm_efficiency`). A rank with one expert has
    nothing to group, and experts that are padded to their capacity are one batch of equal products.
    """
    local = experts.count / choices.ep
    each = rows / local
    one = torch.zeros_like(each)
    for gemm in (Gemm(experts.inputs, experts.hidden, "column"), Gemm(experts.hidden, experts.width, "row")):
        one = one + gemm_seconds(gemm, each, choices.etp, device, width)
    uneven = (local > 1.0) & (experts.capacity_factor is None)
    return local * one / torch.where(uneven, device.grouped_gemm_efficiency, 1.0)


def _exchange_seconds(
    problem: Problem, experts: Experts, topology: StageTopology, choices: ChoiceTensors, width: float
) -> Tensor:
    """Seconds of dispatch and combine of one pass, collectives of split experts included.

    Args:
        width: Bytes an element of a routed row, times the load of the busiest rank.
    """
    group = problem.cluster.groups[topology.group]
    links = group.intra_node, problem.cluster.nic(topology.group)
    tokens = choices.tokens / choices.sequence_shards
    size = width * tokens * experts.hidden
    split = [topology.tensor_parallel(int(etp)) for etp in choices.etp.tolist()]
    ring = RingGroup(
        local=float_tensor([local for local, _ in split]),
        nodes=float_tensor([nodes for _, nodes in split]),
        gpus=torch.full_like(choices.etp, topology.gpus_per_node),
    )
    gathered = reduce_scatter(choices.etp * size * experts.top_k, ring, *links)
    flex = problem.training.moe_token_dispatcher_type == "flex"
    return 2.0 * (gathered + all_to_all(size, experts, topology, choices, links, group.device, flex=flex))


def all_to_all(
    size: Tensor,
    experts: Experts,
    topology: StageTopology,
    choices: ChoiceTensors,
    links: tuple[Link, Link],
    device: Device,
    *,
    flex: bool,
) -> Tensor:
    """Seconds to bring every token to its experts' ranks, or back, shape of `size`.

    The messages inside the NVLink domains and those between them travel at the same time. A plain all-to-all
    sends `top_k` copies of a token (Thakur et al. 2005: every byte travels once); DeepEP and HybridEP send it
    once to every domain that holds one of its experts, which passes it on (DeepSeek-V3, arXiv 2412.19437,
    section 3.2.2; Megatron-Core MoE, arXiv 2603.07685, section 4).

    Args:
        size: Bytes of one copy of all tokens of a rank, shape `(O, C)`.
        links: Inside a node, and out of it.
        flex: DeepEP or HybridEP.
    """
    intra, inter = links
    pairs = zip(choices.etp.tolist(), choices.ep.tolist(), strict=True)
    spans = [(int(etp), int(ep), topology.tensor_parallel(int(etp * ep))) for etp, ep in pairs]
    inside = float_tensor([max(local // etp, 1) for etp, _, (local, _) in spans])
    domains = choices.ep / inside
    if flex:
        out = float_tensor([experts.distinct(int(n)) for n in domains.tolist()]) * (domains - 1) / domains
        ranks = float_tensor([experts.distinct(int(ep)) for _, ep, _ in spans])
        near = ranks * (inside - 1) / inside
    else:
        out = experts.top_k * (choices.ep - inside) / choices.ep
        near = experts.top_k * (inside - 1) / choices.ep
    sharing = float(topology.gpus_per_node) if intra.shared else 1.0
    share = device.all_to_all_efficiency * (device.flex_gain if flex else 1.0)
    within = size * near * sharing / (intra.towards(inside - 1) * share) + (inside > 1) * intra.latency
    across = size * out * topology.gpus_per_node / (inter.bandwidth * share) + (domains > 1) * inter.latency
    return torch.maximum(within, across)


def exposed_exchange(
    problem: Problem,
    layer: LayerSpec,
    choices: ChoiceTensors,
    experts: ExpertCosts,
    device: Device,
    width: int,
    compute: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Seconds by which dispatch, combine and launches lengthen forward and backward, each of `(O, C)`.

    Beside the exchange runs the other micro-batch's pass (1F1B with merged forward and backward, Megatron-LM;
    DualPipe, arXiv 2412.19437, section 3.2.1), or the shared experts, or nothing, as the job says.

    Args:
        width: Bytes of one activation element.
        compute: Seconds of the layer's kernels in forward and in backward.
    """
    training, sent = problem.training, experts.exchange
    shared = [part for part in layer.parts if part.module == "shared_experts"]
    shown = (sent, sent)
    if training.overlap_moe_expert_parallel_comm:
        shown = (exposed(compute[1], sent, device), exposed(compute[0], sent, device))
    elif training.moe_shared_expert_overlap and shared:
        beside = torch.zeros_like(sent)
        for gemm in shared[0].gemms:
            beside = beside + gemm_seconds(gemm, choices.tokens, choices.tp, device, width)
        shown = (exposed(beside, sent, device), exposed(BACKWARD_FACTOR * beside, sent, device))
    if problem.measured is not None:  # measured times hold the launches already
        return shown
    launches = problem.launches * device.expert_overhead
    return (
        shown[0] + launch_gap(compute[0] + shown[0], launches),
        shown[1] + launch_gap(compute[1] + shown[1], BACKWARD_FACTOR * launches),
    )
