"""Seconds between neighbouring layers: a change of layout inside a stage, a message between stages."""

import torch
from torch import Tensor

from darts_parallel.cluster import BoundaryTopology, StageTopology
from darts_parallel.comm import p2p
from darts_parallel.layer_costs import ChoiceTensors, element_bytes
from darts_parallel.problem import Problem
from darts_parallel.space import OuterSpace
from darts_parallel.strategy import LayerStrategy


def _held_bytes(problem: Problem, space: OuterSpace, layouts: list[LayerStrategy]) -> Tensor:
    """Bytes of each layer's output on one device under each layout, `(O, L - 1, Y)`."""
    tokens = ChoiceTensors.build(problem, space.num_micro_batches, tuple(layouts), space.cp).tokens
    layers = problem.model.layers[:-1]
    elements = torch.tensor([float(layer.output_elements) for layer in layers], dtype=torch.float64)
    # logits are divided by tp whatever the layout of the hidden state
    shards = [
        [c.tp if c.sequence_parallel or layer.kind == "head" else 1 for c in layouts] for layer in layers
    ]
    per_rank = elements.unsqueeze(1) / torch.tensor(shards, dtype=torch.float64)
    return tokens.unsqueeze(1) * per_rank * element_bytes(problem)


def _missing_share(a: LayerStrategy, b: LayerStrategy) -> float:
    """Share of what a device needs under layout b that it does not hold under layout a.

    Ranks of a stage are numbered with tp fastest, so tensor-parallel groups of a power-of-two ratio
    nest; batch slices and sequence slices count as independent, and so do context-parallel ones.
    """
    if a.layout == b.layout:
        return 0.0
    batch = min(a.tp / b.tp, 1.0)
    sequence = 1.0 / a.tp if a.sequence_parallel else 1.0
    return 1.0 - batch * sequence


def reshard_seconds(
    problem: Problem, kinds: list[StageTopology], space: OuterSpace, layouts: list[LayerStrategy]
) -> Tensor:
    """Seconds to change layout between neighbours, forward and backward, `(O, Q, L - 1, Y, Y)`."""
    held = _held_bytes(problem, space, layouts)
    missing = torch.tensor([[_missing_share(a, b) for b in layouts] for a in layouts], dtype=torch.float64)
    peers = torch.tensor([[max(a.tp, b.tp) - 1.0 for b in layouts] for a in layouts], dtype=torch.float64)
    per_kind = []
    for kind in kinds:
        link = problem.cluster.groups[kind.group].intra_node
        sharing = max(kind.counts) if link.shared else 1
        received = held.unsqueeze(-2) * missing
        one_way = received * sharing / link.bandwidth + peers * (missing > 0) * link.latency
        per_kind.append(one_way + one_way.transpose(-1, -2))
    return torch.stack(per_kind, dim=1)


def boundary_seconds(
    problem: Problem,
    borders: list[BoundaryTopology],
    kind: StageTopology,
    space: OuterSpace,
    layouts: list[LayerStrategy],
) -> Tensor:
    """Seconds of activation and gradient across a stage boundary, `(O, P, L - 1, Y, Y)`.

    Every tensor-parallel rank sends its copy; with sequence parallelism its slice. Where the layouts
    differ, the larger of the two travels and the receiving stage reshards it.
    """
    held = _held_bytes(problem, space, layouts)
    size = torch.maximum(held.unsqueeze(-1), held.unsqueeze(-2))
    cluster = problem.cluster
    rows = []
    for border in borders:
        link = cluster.groups[border.group].intra_node if border.inside_node else cluster.inter_node
        rows.append(2.0 * p2p(size, border.senders, link, inside_node=border.inside_node))
    if not rows:
        return torch.zeros(len(space.num_micro_batches), 1, *size.shape[1:], dtype=torch.float64)
    return torch.stack(rows, dim=1) + reshard_seconds(problem, [kind], space, layouts)
