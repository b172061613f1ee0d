"""The surrogate: the cost table read with softmax weights, differentiable in them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.cost.compute import lengthening
from darts_parallel.cost.critical_paths import PathMemory
from darts_parallel.cost.offload.transfers import ACTIVATION, OPTIMIZER
from darts_parallel.cost.pipeline import pipeline_seconds
from darts_parallel.cost.simulation import PassSeconds, simulated_seconds
from darts_parallel.cost.table import CostTable
from darts_parallel.gradient.relaxation import smooth_max


@dataclass(frozen=True)
class NodeOrderTables:
    """What tables differ in, N orders."""

    tables: tuple[int, ...]
    """Number of every order's table."""
    stage_kind: Tensor
    """Kind of every stage, shape `(N, K)`."""
    boundary_kind: Tensor
    """Kind of every boundary, shape `(N, K - 1)`."""
    capacity: Tensor
    """Bytes, shape `(N, pp)`."""
    per_iteration: Tensor
    """Seconds per iteration whatever the stage, shape `(N, O, L, C)`."""

    @staticmethod
    def stack(tables: Sequence[CostTable], numbers: Sequence[int]) -> "NodeOrderTables":
        """The orders of the tables `numbers`, which share everything else."""
        own = [tables[number] for number in numbers]
        return NodeOrderTables(
            tables=tuple(numbers),
            stage_kind=torch.stack([table.stage_kind for table in own]),
            boundary_kind=torch.stack([table.boundary_kind for table in own]),
            capacity=torch.stack([table.capacity for table in own]),
            per_iteration=torch.stack([table.per_iteration for table in own]),
        )

    def select(self, outer: Tensor) -> "NodeOrderTables":
        """Keep some outer choices."""
        return replace(self, per_iteration=self.per_iteration[:, outer])


@dataclass(frozen=True)
class NodeOrderWeights:
    """Weights of node orders for R relaxed plans of O outer choices."""

    weights: Tensor
    """Summing to 1 over the orders, shape `(O, R, N)`."""
    orders: NodeOrderTables

    def stage_kinds(self, count: int) -> Tensor:
        """Weight of every kind for every stage, shape `(O, R, K, count)`."""
        kinds = torch.nn.functional.one_hot(self.orders.stage_kind, count).to(self.weights.dtype)
        return torch.einsum("orn,nkq->orkq", self.weights, kinds)

    def boundary_kinds(self, count: int) -> Tensor:
        """Weight of every kind for every boundary, shape `(O, R, K - 1, count)`."""
        kinds = torch.nn.functional.one_hot(self.orders.boundary_kind, count).to(self.weights.dtype)
        return torch.einsum("orn,nkp->orkp", self.weights, kinds)

    def capacity(self) -> Tensor:
        """Expected bytes of a device of every stage, shape `(O, R, pp)`."""
        return self.weights @ self.orders.capacity

    def per_iteration(self, choices: Tensor) -> Tensor:
        """Expected seconds that are paid once, shape `(O, R)`, for weights `(O, R, L, C)` of the choices."""
        return torch.einsum("orlc,nolc,orn->or", choices, self.orders.per_iteration, self.weights)


def on_stages(values: Tensor, kinds: Tensor) -> Tensor:
    """Values by kind, read at the kinds of the stages: `(O, R, L, Q)` to `(O, R, L, K)`.

    Args:
        kinds: Kind of every stage, `(K,)`, or weights of the kinds, `(O, R, K, Q)`.
    """
    if kinds.dim() == 1:
        return values[..., kinds]
    return torch.einsum("orlq,orkq->orlk", values.expand(*kinds.shape[:2], -1, -1), kinds)


def group_by_order(tables: Sequence[CostTable]) -> list[list[int]]:
    """Numbers of the tables that differ in the order of the nodes alone, together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, table in enumerate(tables):
        counts = tuple(table.num_micro_batches.tolist())
        order = table.asynchronous or table.pipeline.schedule
        key = (table.pp, table.virtual_stages, order, table.sync_every, table.cp, counts, table.choices)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


@dataclass(frozen=True)
class RelaxedPlans:
    """R relaxed plans for each of the O outer choices of a table.

    `choices` (O, R, L, C): weights of every layer's strategies, summing to 1; `stages` (O, R, L, K):
    weights of every layer's stage, summing to 1; `placement` weighs the orders of the nodes, None where
    the table's own order is meant; `fractions` (O, R, pp, 2): shares of activations and of optimizer state in
    host memory, None where the table's plans do not offload; `pairs` (O, R, L - 1, Y, Y): weights of the
    layouts of every two neighbours together, None where they are independent.
    """

    choices: Tensor
    stages: Tensor
    placement: NodeOrderWeights | None = None
    fractions: Tensor | None = None
    pairs: Tensor | None = None


@dataclass(frozen=True)
class SurrogateCost:
    """Relaxed costs; seconds and bytes."""

    iteration_time: Tensor
    """Shape `(O, R)`."""
    stage_seconds: Tensor
    """Of every device of the pipeline, all its stages together, `(O, R, pp)`."""
    memory: Tensor
    """Shape `(O, R, pp)`."""
    sync: Tensor
    """Gradient synchronisation and optimizer step that the iteration waits for, `(O, R)`."""
    capacity: Tensor
    """Bytes that a device of every stage can give, `(pp,)` or `(O, R, pp)`."""


def surrogate(
    weights: RelaxedPlans,
    table: CostTable,
    sharpness: float | None = None,
    paths: PathMemory | None = None,
) -> SurrogateCost:
    """Expected cost of relaxed plans.

    At one-hot weights and `sharpness=None` it equals `evaluate_batch`.

    Args:
        weights: Choice and stage weights.
        table: Costs, its outer axis the one of `weights`.
        sharpness: Of the smooth maxima; None for exact ones. A simulated pipeline has exact ones whatever
            it says: its gradient is that of the critical path.
        paths: Of a simulated pipeline: critical paths that stand in for it between simulations.
    """
    choices, stages, placement = weights.choices, weights.stages, weights.placement
    kinds, borders, capacity = table.stage_kind, table.boundary_kind, table.capacity
    per_iteration = (
        torch.einsum("orlc,olc->or", choices, table.per_iteration)
        if placement is None
        else placement.per_iteration(choices)
    )
    if placement is not None:
        kinds, borders = (
            placement.stage_kinds(table.time.shape[1]),
            placement.boundary_kinds(table.p2p.shape[1]),
        )
        capacity = placement.capacity()
    stage_seconds = _by_stage_kind(choices, stages, table.time, kinds)
    inside, across = _neighbour_seconds(weights, table, kinds, borders)
    stage_seconds = stage_seconds + inside
    longer = None
    if weights.fractions is not None:
        longer = _transfers(weights, table, kinds)
        stage_seconds = stage_seconds + longer[0] + longer[1]
    if table.pipeline.blocking:
        stage_seconds = stage_seconds + torch.nn.functional.pad(across, (1, 0))
    syncs = table.by_device(_by_stage_kind(choices, stages, table.sync, kinds))
    if weights.fractions is not None and table.state_transfer is not None:
        moved = table.by_device(_by_stage_kind(choices, stages, table.state_transfer, kinds))
        syncs = syncs + weights.fractions[..., OPTIMIZER] * moved
    if table.pipeline.simulated:
        total, sync = _simulated(choices, stages, table, kinds, inside, across, syncs, paths, longer)
    else:
        sync = smooth_max(syncs, sharpness)
        count, slowest = table.num_micro_batches.unsqueeze(1), smooth_max(stage_seconds, sharpness)
        total = pipeline_seconds(stage_seconds, count, slowest) + sync
    memory = _memory(weights, table, sharpness)
    return SurrogateCost(total + per_iteration, table.by_device(stage_seconds), memory, sync, capacity)


def _simulated(
    choices: Tensor,
    stages: Tensor,
    table: CostTable,
    kinds: Tensor,
    inside: Tensor,
    across: Tensor,
    syncs: Tensor,
    paths: PathMemory | None,
    longer: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Seconds until all stages are done, and what the synchronisation adds to the pipeline, `(O, R)`."""
    forward, backward, weight = (
        _by_stage_kind(choices, stages, values, kinds).flatten(0, 1)
        for values in (table.forward, table.backward, table.weight_gradient)
    )
    if longer is not None:
        forward, backward = forward + longer[0].flatten(0, 1), backward + longer[1].flatten(0, 1)
    half = inside.flatten(0, 1) / 2
    passes = PassSeconds(forward + half, backward + half, weight, across.flatten(0, 1) / 2)
    counts = table.num_micro_batches.repeat_interleave(choices.shape[1])
    if paths is not None:
        total, awaited = paths.seconds(passes, syncs.flatten(0, 1), counts, table.pp, table.pipeline)
        return total.view(choices.shape[:2]), awaited.view(choices.shape[:2])
    total, ends = simulated_seconds(passes, syncs.flatten(0, 1), counts, table.pp, table.pipeline)
    return total.view(choices.shape[:2]), (total - ends.amax(1)).view(choices.shape[:2])


def _transfers(weights: RelaxedPlans, table: CostTable, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Seconds by which activations on their way to the host lengthen forward and backward, `(O, R, K)`."""
    assert weights.fractions is not None
    assert table.host_transfer is not None
    assert table.overlap is not None
    sums = [
        _by_stage_kind(weights.choices, weights.stages, values, kinds)
        for values in (table.host_transfer, table.forward, table.backward)
    ]
    sent = weights.fractions[..., ACTIVATION][..., table.stage_device] * sums[0]
    exponent = table.overlap[kinds] if kinds.dim() == 1 else kinds @ table.overlap
    # a stage that no layer has any weight in divides nothing by zero
    forward, backward = (seconds.clamp(min=1e-30) for seconds in sums[1:])
    return lengthening(forward, sent, exponent), lengthening(backward, sent, exponent)


def _by_stage_kind(choices: Tensor, stages: Tensor, values: Tensor, kinds: Tensor) -> Tensor:
    """Sum over layers and strategies of `values` (O, Q, L, C), by stage, `(O, R, K)`."""
    if values.shape[1] == 1:
        per_layer = torch.einsum("orlc,olc->orl", choices, values[:, 0])
        return torch.einsum("orlk,orl->ork", stages, per_layer)
    per_kind = torch.einsum("orlc,oqlc->orlq", choices, values)
    return (stages * on_stages(per_kind, kinds)).sum(-2)


def _neighbour_seconds(
    weights: RelaxedPlans, table: CostTable, kinds: Tensor, borders: Tensor
) -> tuple[Tensor, Tensor]:
    """Resharding inside stages `(O, R, K)`, and p2p between them `(O, R, K - 1)`, both ways."""
    choices, stages = weights.choices, weights.stages
    before, after = stages[..., :-1, :], stages[..., 1:, :]
    inside = torch.zeros_like(stages[..., 0, :])
    if table.num_layouts > 1:
        if weights.pairs is None:
            layouts = torch.nn.functional.one_hot(table.layout, table.num_layouts).to(choices.dtype)
            reshard, across = _between_layouts(choices @ layouts, table)
        else:
            reshard = torch.einsum("orlyz,oqlyz->orlq", weights.pairs, table.reshard)
            across = torch.einsum("orlyz,oplyz->orlp", weights.pairs, table.p2p)
        inside = (before * after * on_stages(reshard, kinds)).sum(-2)
    else:
        across = table.p2p[..., 0, 0].transpose(1, 2).unsqueeze(1)
    if table.pp == 1:
        return inside, inside[..., :0]
    crossing = before[..., :-1] * after[..., 1:] * on_stages(across, borders)
    return inside, crossing.sum(-2)


def _between_layouts(held: Tensor, table: CostTable) -> tuple[Tensor, Tensor]:
    """Expected seconds from every layer's layout to the next one's, by kind of stage and of boundary.

    Args:
        held: Weights of every layer's layouts, `(O, R, L, Y)`.
        table: Costs.

    Returns:
        Resharding, `(O, R, L - 1, Q)`, and p2p, `(O, R, L - 1, P)`.
    """
    # both forms are bilinear: one matrix product for the layouts before, without a tensor of all pairs
    seconds = torch.cat([table.reshard, table.p2p], dim=1).permute(0, 2, 3, 1, 4)
    outer, pairs, layouts, kinds, _ = seconds.shape
    before, after = held[..., :-1, :].transpose(1, 2), held[..., 1:, :].transpose(1, 2)
    reached = before @ seconds.reshape(outer, pairs, layouts, kinds * layouts)
    expected = (
        (reached.reshape(*reached.shape[:-1], kinds, layouts) * after.unsqueeze(-2)).sum(-1).transpose(1, 2)
    )
    within = table.reshard.shape[1]
    return expected[..., :within], expected[..., within:]


def _memory(weights: RelaxedPlans, table: CostTable, sharpness: float | None) -> Tensor:
    choices, stages = weights.choices, weights.stages
    static = torch.einsum("orlc,olc->orl", choices, table.static)
    activation = torch.einsum("orlc,olc->orl", choices, table.activation)
    working = torch.einsum("orlc,olc->orl", choices, table.working).unsqueeze(-1)
    kept = torch.einsum("orlk,orl->ork", stages, static)
    flying = table.in_flight.unsqueeze(1) * torch.einsum("orlk,orl->ork", stages, activation)
    away = torch.zeros_like(kept[..., : table.pp])
    if weights.fractions is not None and table.state is not None:
        sent = weights.fractions[..., ACTIVATION]
        state = torch.einsum("orlc,olc->orl", choices, table.state)
        away = weights.fractions[..., OPTIMIZER] * table.by_device(
            torch.einsum("orlk,orl->ork", stages, state)
        )
        flying = (1.0 - sent[..., table.stage_device]) * flying
        # the largest layer's activations are still on their way
        working = working + sent.unsqueeze(-2) * activation.unsqueeze(-1)
    at_work = table.by_device(stages) * working
    return table.by_device(kept + flying) - away + smooth_max(at_work, sharpness, dim=-2)
