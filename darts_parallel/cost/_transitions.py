"""Seconds between layers: a change of layout inside a stage, a message between stages, tied tables."""

from collections.abc import Sequence

import torch
from torch import Tensor

from darts_parallel.cost.collectives import p2p
from darts_parallel.cost.memory import padded_vocabulary
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.plans import LayerStrategy
from darts_parallel.problem import BoundaryTopology, Cluster, LayerSpec, StageTopology


def stored_bytes(
    layers: Sequence[LayerSpec], layouts: list[LayerStrategy], tokens: Tensor, width: int
) -> Tensor:
    """Return the bytes of each layer's output on one device under each layout, `(O, L - 1, Y)`.

    Args:
        tokens: Tokens of a micro-batch on one rank under each layout, `(O, Y)`.
        width: Bytes of one element.
    """
    elements = torch.tensor(
        [float(layer.output_elements) for layer in layers[:-1]], dtype=torch.float64
    )
    # logits are divided by tp whatever the layout of the hidden state
    shards = [
        [c.tp if c.sequence_parallel or own.kind == "head" else 1 for c in layouts]
        for own in layers[:-1]
    ]
    per_rank = elements.unsqueeze(1) / torch.tensor(shards, dtype=torch.float64)
    return tokens.unsqueeze(1) * per_rank * width


def _missing_share(a: LayerStrategy, b: LayerStrategy) -> float:
    """Return the share of what a device needs under layout b that it does not hold under layout a.

    Ranks of a stage are numbered with tp fastest, so tensor-parallel groups of a power-of-two ratio
    nest; batch slices and sequence slices count as independent, and so do context-parallel ones.
    """
    if a.layout == b.layout:
        return 0.0
    batch = min(a.tp / b.tp, 1.0)
    sequence = 1.0 / a.tp if a.sequence_parallel else 1.0
    return 1.0 - batch * sequence


def reshard_seconds(
    cluster: Cluster, places: list[tuple[int, int]], stored: Tensor, layouts: list[LayerStrategy]
) -> Tensor:
    """Return the seconds to change layout between neighbours, forward and backward, `(O, Q, L - 1, Y, Y)`.

    Args:
        places: Node group of every kind of stage, and most GPUs of it on one node, Q of them.
    """
    missing = torch.tensor(
        [[_missing_share(a, b) for b in layouts] for a in layouts], dtype=torch.float64
    )
    peers = torch.tensor(
        [[max(a.tp, b.tp) - 1.0 for b in layouts] for a in layouts], dtype=torch.float64
    )
    per_kind = []
    for group, most in places:
        link = cluster.groups[group].intra_node
        sharing = most if link.shared else 1
        received = stored.unsqueeze(-2) * missing
        one_way = received * sharing / link.towards(peers) + peers * (missing > 0) * link.latency
        per_kind.append(one_way + one_way.transpose(-1, -2))
    return torch.stack(per_kind, dim=1)


def boundary_seconds(
    cluster: Cluster,
    boundaries: list[BoundaryTopology],
    stored: Tensor,
    layouts: list[LayerStrategy],
) -> Tensor:
    """Return the seconds of activation and gradient across a stage boundary, `(O, P, L - 1, Y, Y)`.

    Every tensor-parallel rank sends a slice of the hidden state, which without sequence parallelism the
    receiving ranks gather inside their node (Narayanan et al. 2021, arXiv 2104.04473, section 4.1).
    Where the layouts differ, the larger of the two travels and the receiving stage reshards it. Between
    nodes the slower of the two ends decides, each shared by the GPUs of its node.
    """
    parts = torch.tensor(
        [1.0 if c.sequence_parallel else c.tp for c in layouts], dtype=torch.float64
    )
    size = torch.maximum((stored / parts).unsqueeze(-1), (stored / parts).unsqueeze(-2))
    rows = []
    for boundary in boundaries:
        if boundary.inside_node:
            link = cluster.groups[boundary.group].intra_node
            rows.append(2.0 * p2p(size, boundary.senders, link, inside_node=True))
            continue
        ends = ((boundary.group, boundary.senders), (boundary.next_group, boundary.receivers))
        out, into = (
            p2p(size, sharing, cluster.nic(group), inside_node=False) for group, sharing in ends
        )
        rows.append(2.0 * torch.maximum(out, into))
    if not rows:
        return torch.zeros(len(stored), 1, *size.shape[1:], dtype=torch.float64)
    receiving = [(boundary.next_group, boundary.receivers) for boundary in boundaries]
    gathered = torch.stack([_gather_seconds(cluster, at, stored, parts) for at in receiving], dim=1)
    return (
        torch.stack(rows, dim=1) + gathered + reshard_seconds(cluster, receiving, stored, layouts)
    )


def _gather_seconds(cluster: Cluster, at: tuple[int, int], stored: Tensor, parts: Tensor) -> Tensor:
    """Return the seconds to gather `parts` slices of `stored` bytes in a node, both ways, `(O, L - 1, Y, Y)`.

    Args:
        at: Group of the receiving stage, and its GPUs on one node.
    """
    group, sharing = at
    link = cluster.groups[group].intra_node
    rings = sharing if link.shared else 1
    seconds = (parts - 1) / parts * stored * rings / link.towards(parts - 1) + (
        parts - 1
    ) * link.latency
    return 2.0 * torch.maximum(seconds.unsqueeze(-1), seconds.unsqueeze(-2))


def tied_seconds(
    context: StageContext, cluster: Cluster, stages: Sequence[StageTopology]
) -> Tensor:
    """Return the seconds to all-reduce the gradient of tied tables between their stages, `(O, L, C)`.

    A ring over the stages that hold a copy (Megatron-LM's embedding group), charged to the first
    layer; at most one copy a stage. The slowest end decides: of the first and the last stage, or of all
    where copies lie in between.
    """
    model, choices = context.model, context.choices
    layers = model.layers
    result = torch.zeros(len(choices.tokens), len(layers), len(choices.tp), dtype=torch.float64)
    copies = min(sum(layer.tied for layer in layers), len(stages))
    if copies < 2 or model.lora_rank:  # frozen tables have no gradient
        return result
    inside = cluster.one_domain
    rows = padded_vocabulary(model.config.vocab_size, choices.tp)
    size = rows * model.config.hidden_size * context.state.gradient / copies
    steps = []
    for stage in dict.fromkeys((stages[0], stages[-1]) if copies == 2 else stages):
        link = cluster.groups[stage.group].intra_node if inside else cluster.nic(stage.group)
        steps.append(p2p(size, max(stage.counts), link, inside_node=inside))
    embedding = torch.zeros(len(layers), 1, dtype=torch.float64)
    embedding[0] = 1.0
    return result + embedding * 2 * (copies - 1) * torch.stack(steps).amax(0)
