"""Seconds between layers: a change of layout inside a stage, a message between stages, tied tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from darts_parallel.cost.choices import filled, float_tensor
from darts_parallel.cost.collectives import p2p
from darts_parallel.cost.memory import padded_vocabulary
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.plans import LayerStrategy
from darts_parallel.problem import BoundaryTopology, Cluster, LayerSpec, StageTopology


def stored_bytes(
    layers: Sequence[LayerSpec],
    layouts: list[LayerStrategy],
    tokens: Tensor,
    width: int,
) -> Tensor:
    """Return the bytes of each layer's output on one device under each layout, `(O, L - 1, Y)`.

    Args:
        tokens: Tokens of a micro-batch on one rank under each layout, `(O, Y)`.
        width: Bytes of one element.
    """
    elements = float_tensor([layer.output_elements for layer in layers[:-1]])
    # logits are divided by tp whatever the layout of the hidden state
    heads = torch.tensor([layer.kind == "head" for layer in layers[:-1]], dtype=torch.bool)
    split = torch.tensor([layout.sequence_parallel for layout in layouts])
    tp = float_tensor([layout.tp for layout in layouts])
    shards = torch.where(heads.unsqueeze(1) | split, tp, 1.0)
    return tokens.unsqueeze(1) * (elements.unsqueeze(1) / shards) * width


def _missing_share(a: LayerStrategy, b: LayerStrategy) -> float:
    """Return the share of a device's data under layout b that it does not hold under layout a.

    Ranks of a stage are numbered with tp fastest, so tensor-parallel groups of a power-of-two ratio
    nest. Batch slices and sequence slices count as independent, and so do context-parallel ones.
    """
    if a.layout == b.layout:
        return 0.0
    batch = min(a.tp / b.tp, 1.0)
    sequence = 1.0 / a.tp if a.sequence_parallel else 1.0
    return 1.0 - batch * sequence


def reshard_seconds(
    cluster: Cluster,
    places: list[tuple[int, int]],
    stored: Tensor,
    layouts: list[LayerStrategy],
) -> Tensor:
    """Return the seconds to change layout between neighbours, forward and backward, `(O, Q, L - 1, Y, Y)`.

    Args:
        places: Node group of every kind of stage, and most GPUs of it on one node, Q of them.
    """
    missing = torch.stack([float_tensor([_missing_share(a, b) for b in layouts]) for a in layouts])
    tp = float_tensor([layout.tp for layout in layouts])
    peers = torch.maximum(tp.unsqueeze(1), tp) - 1.0
    per_kind = []
    for group, most in places:
        link = cluster.groups[group].intra_node
        sharing = most if link.shared else 1
        received = stored.unsqueeze(-2) * missing
        latency = peers * (missing > 0) * link.latency
        one_way = received * sharing / link.towards(peers) + latency
        per_kind.append(one_way + one_way.transpose(-1, -2))
    return torch.stack(per_kind, dim=1)


def boundary_seconds(
    cluster: Cluster,
    boundaries: list[BoundaryTopology],
    stored: Tensor,
    layouts: list[LayerStrategy],
) -> Tensor:
    """Return the seconds of activation and gradient across a stage boundary, `(O, P, L - 1, Y, Y)`.

    Every tensor-parallel rank sends a slice of the hidden state, which without sequence parallelism
    the receiving ranks gather inside their node (Narayanan et al. 2021, arXiv 2104.04473, section
    4.1). Where the layouts differ, the larger of the two travels and the receiving stage reshards
    it. Between nodes the slower of the two ends decides, each shared by the GPUs of its node.
    """
    parts = float_tensor([1.0 if layout.sequence_parallel else layout.tp for layout in layouts])
    own = stored / parts
    size = torch.maximum(own.unsqueeze(-1), own.unsqueeze(-2))
    if not boundaries:
        return filled(0.0, len(stored), 1, *size.shape[1:])
    messages = []
    for boundary in boundaries:
        if boundary.inside_node:
            link = cluster.groups[boundary.group].intra_node
            seconds = p2p(size, boundary.senders, link, inside_node=True)
        else:
            nic = cluster.nic(boundary.group)
            sent = p2p(size, boundary.senders, nic, inside_node=False)
            nic = cluster.nic(boundary.next_group)
            received = p2p(size, boundary.receivers, nic, inside_node=False)
            seconds = torch.maximum(sent, received)
        messages.append(2.0 * seconds)  # both ways
    receiving = [(boundary.next_group, boundary.receivers) for boundary in boundaries]
    others = parts - 1
    gathered = []
    for group, gpus in receiving:
        link = cluster.groups[group].intra_node
        sharing = gpus if link.shared else 1
        transfer = others / parts * stored * sharing / link.towards(others)
        seconds = transfer + others * link.latency
        largest = torch.maximum(seconds.unsqueeze(-1), seconds.unsqueeze(-2))
        gathered.append(2.0 * largest)  # both ways
    resharded = reshard_seconds(cluster, receiving, stored, layouts)
    return torch.stack(messages, 1) + torch.stack(gathered, 1) + resharded


def tied_seconds(
    context: StageContext, cluster: Cluster, stages: Sequence[StageTopology]
) -> Tensor:
    """Return the seconds to all-reduce the gradient of tied tables between their stages, `(O, L, C)`.

    A ring over the stages that hold a copy (Megatron-LM's embedding group), charged to the first
    layer; at most one copy a stage. The slowest end decides: the first or the last stage, or any
    stage where copies lie in between.
    """
    model = context.model
    choices = context.choices
    num_layers = len(model.layers)
    result = filled(0.0, len(choices.tokens), num_layers, len(choices.tp))
    copies = min(sum(layer.tied for layer in model.layers), len(stages))
    if copies < 2 or model.lora_rank:  # frozen tables have no gradient
        return result
    inside = cluster.one_domain or cluster.visits > 1
    rows = padded_vocabulary(model.config.vocab_size, choices.tp)
    size = rows * model.config.hidden_size * context.state.gradient / copies
    ends = (stages[0], stages[-1]) if copies == 2 else stages
    steps = []
    for stage in dict.fromkeys(ends):
        link = cluster.groups[stage.group].intra_node if inside else cluster.nic(stage.group)
        steps.append(p2p(size, max(stage.counts), link, inside_node=inside))
    result[:, 0] = 2 * (copies - 1) * torch.stack(steps).amax(0)
    return result
