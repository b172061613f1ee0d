"""The true cost: reads a cost table for hard plans, one or thousands at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cluster import Device
from darts_parallel.errors import PlanError, UnsupportedError
from darts_parallel.pipeline import pipeline_seconds
from darts_parallel.problem import Problem
from darts_parallel.searcher import searcher_breakdown
from darts_parallel.space import divisors, tensor_degrees
from darts_parallel.strategy import LayerStrategy, Plan, degrees
from darts_parallel.table import CostTable, build_table, plan_space


@dataclass(frozen=True)
class HardPlans:
    """B hard plans of one table.

    `outer` (B,): outer choice; `choices` (B, L): strategy of every layer; `starts` (B, K): first
    layer of every stage, rising from 0. All integer.
    """

    outer: Tensor
    choices: Tensor
    starts: Tensor

    def __getitem__(self, index: Tensor | slice) -> "HardPlans":
        return HardPlans(self.outer[index], self.choices[index], self.starts[index])

    def __len__(self) -> int:
        return len(self.outer)

    @staticmethod
    def concatenate(parts: list["HardPlans"]) -> "HardPlans":
        """All plans of `parts`, in order."""
        return HardPlans(
            torch.cat([p.outer for p in parts]),
            torch.cat([p.choices for p in parts]),
            torch.cat([p.starts for p in parts]),
        )

    def stages(self) -> Tensor:
        """Stage of every layer, shape `(B, L)`."""
        positions = torch.arange(self.choices.shape[1]).expand_as(self.choices).contiguous()
        return torch.searchsorted(self.starts.contiguous(), positions, right=True) - 1

    def to_plan(self, index: int, table: CostTable) -> Plan:
        """Plan number `index` in words."""
        starts, choices = self.starts[index].tolist(), self.choices[index].tolist()
        return Plan(
            num_micro_batches=int(table.num_micro_batches[self.outer[index]]),
            boundaries=(*starts, len(choices)),
            layers=tuple(table.choices[c] for c in choices),
        )


@dataclass(frozen=True)
class BatchCost:
    """Costs of B hard plans; seconds and bytes."""

    iteration_time: Tensor
    """Shape `(B,)`."""
    stage_seconds: Tensor
    """One micro-batch, `(B, K)`."""
    sync_seconds: Tensor
    """Gradient synchronisation and optimizer of every stage, `(B, K)`."""
    memory: Tensor
    """Peak bytes of a device of every stage, reserve excluded, `(B, K)`."""
    feasible: Tensor
    """Fits the memory, legal strategies and stages, `(B,)` bool."""


def evaluate_batch(table: CostTable, plans: HardPlans) -> BatchCost:
    """Costs of hard plans, vectorised.

    Args:
        table: Costs of their pipeline degree.
        plans: B plans.
    """
    stages = plans.stages()
    outer, layers = plans.outer.unsqueeze(1), torch.arange(table.num_layers)
    kinds = table.stage_kind[stages]
    seconds = table.time[outer, kinds, layers, plans.choices]
    sync = table.sync[outer, kinds, layers, plans.choices]
    stage_seconds = _per_stage(seconds, stages, table.pp) + _neighbour_seconds(table, plans, stages)
    sync_seconds = _per_stage(sync, stages, table.pp)
    once = table.once[outer, layers, plans.choices].sum(1)
    flight = table.in_flight[outer, stages]
    kept = (
        table.static[outer, layers, plans.choices] + flight * table.activation[outer, layers, plans.choices]
    )
    working = table.working[outer, layers, plans.choices]
    largest = torch.zeros_like(stage_seconds).scatter_reduce(1, stages, working, "amax")
    memory = _per_stage(kept, stages, table.pp) + largest
    legal = table.allowed[outer, plans.choices].all(1) & ~(table.joined[plans.starts].any(1))
    total = (
        pipeline_seconds(stage_seconds, table.num_micro_batches[plans.outer]) + sync_seconds.amax(1) + once
    )
    return BatchCost(total, stage_seconds, sync_seconds, memory, legal & (memory <= table.capacity).all(1))


def _per_stage(values: Tensor, stages: Tensor, pp: int) -> Tensor:
    zeros = torch.zeros(len(values), pp, dtype=values.dtype)
    return zeros.scatter_add(1, stages, values)


def _neighbour_seconds(table: CostTable, plans: HardPlans, stages: Tensor) -> Tensor:
    """Resharding inside stages and p2p across their boundaries, charged to the later layer's stage."""
    later, pairs = stages[:, 1:], torch.arange(table.num_layers - 1)
    outer = plans.outer.unsqueeze(1)
    before, after = table.layout[plans.choices[:, :-1]], table.layout[plans.choices[:, 1:]]
    cut = later != stages[:, :-1]
    inside = table.reshard[outer, table.stage_kind[later], pairs, before, after]
    if table.pp == 1:
        return _per_stage(inside, later, 1)
    border = table.boundary_kind[(later - 1).clamp(min=0)]
    across = table.p2p[outer, border, pairs, before, after]
    return _per_stage(torch.where(cut, across, inside), later, table.pp)


@dataclass(frozen=True)
class CostBreakdown:
    """The true cost of one plan."""

    iteration_time_s: float
    memory_bytes: tuple[float, ...]
    """Peak bytes of a device of every stage, the framework's reserve included."""
    capacity_bytes: tuple[float, ...]
    feasible: bool
    breakdown_s: dict[str, float]
    """Seconds per iteration by cause; they sum to `iteration_time_s`."""
    stage_times_s: tuple[float, ...]
    """Seconds of one micro-batch, forward and backward, by stage."""
    tokens_per_s: float
    mfu: float
    """Model FLOP (no recomputation) over the peak of all devices."""


def evaluate(plan: Plan, problem: Problem) -> CostBreakdown:
    """True cost of a hard plan.

    Errors:
        PlanError: the plan does not fit the problem (layers, devices, batch, heads).
    """
    check_plan(plan, problem)
    table = build_table(problem, plan_space(problem, plan.pp, plan.num_micro_batches, plan.layers))
    index = {choice: c for c, choice in enumerate(table.choices)}
    hard = HardPlans(
        outer=torch.zeros(1, dtype=torch.long),
        choices=torch.tensor([[index[layer] for layer in plan.layers]]),
        starts=torch.tensor([plan.boundaries[:-1]]),
    )
    cost = evaluate_batch(table, hard)
    if problem.config.cost.name == "searcher":
        parts = searcher_breakdown(problem, plan)
    else:
        parts = _breakdown(table, hard, cost)
    reserved = torch.tensor(
        [_device(problem, plan.pp, k).reserved for k in range(plan.pp)], dtype=torch.float64
    )
    seconds = sum(parts.values()) if problem.config.cost.name == "searcher" else float(cost.iteration_time[0])
    peak = sum(g.count * g.gpus * float(g.device.peak_flops) for g in problem.cluster.groups)
    flops = problem.model.flops_per_token(problem.training.seq_len) * problem.tokens_per_iteration
    return CostBreakdown(
        iteration_time_s=seconds,
        memory_bytes=tuple((cost.memory[0] + reserved).tolist()),
        capacity_bytes=tuple((table.capacity + reserved).tolist()),
        feasible=bool(cost.feasible[0]),
        breakdown_s=parts,
        stage_times_s=tuple(cost.stage_seconds[0].tolist()),
        tokens_per_s=problem.tokens_per_iteration / seconds,
        mfu=flops / (seconds * peak),
    )


def _device(problem: Problem, pp: int, stage: int) -> Device:
    return problem.cluster.groups[problem.cluster.stage_topology(stage, pp).group].device


def _breakdown(table: CostTable, plans: HardPlans, cost: BatchCost) -> dict[str, float]:
    """Seconds per iteration by cause: the slowest stage's micro-batches, the bubble, the rest."""
    stages = plans.stages()[0]
    slowest = int(cost.stage_seconds[0].argmax())
    mine = stages == slowest
    count = int(table.num_micro_batches[plans.outer[0]])
    layers = torch.arange(table.num_layers)

    def term(name: str, stage: int) -> float:
        kind = int(table.stage_kind[stage])
        values = table.terms[name][plans.outer[0], kind, layers, plans.choices[0]]
        return float(values[stages == stage].sum())

    parts = {
        name: count * term(name, slowest) for name in ("compute", "recompute", "tensor_parallel", "sharding")
    }
    seconds = cost.stage_seconds[0]
    parts["p2p_and_resharding"] = count * float(seconds[slowest]) - sum(parts.values())
    if abs(parts["p2p_and_resharding"]) < 1e-12 * float(seconds.sum()) or not mine.any():
        parts["p2p_and_resharding"] = 0.0
    parts["pipeline_bubble"] = float(seconds.sum() - seconds[slowest])
    last = int(cost.sync_seconds[0].argmax())
    parts["gradient_sync"] = term("gradient_sync", last)
    parts["optimizer"] = term("optimizer", last)
    parts["tied_embedding_sync"] = float(table.once[plans.outer[0], layers, plans.choices[0]].sum())
    return parts


def check_plan(plan: Plan, problem: Problem) -> None:
    """Refuse a plan that does not belong to `problem`, with one sentence.

    Errors:
        PlanError: names the field, its value, the rule and the nearest legal value.
    """
    devices, layers = problem.cluster.num_devices, problem.model.layers
    if len(plan.layers) != len(layers):
        raise PlanError(
            f"plan: it has {len(plan.layers)} layers but model={problem.model.config.name} has {len(layers)} "
            "(embedding, blocks, head and loss)."
        )
    if plan.cp > 1 or plan.virtual_stages > 1:
        raise UnsupportedError(
            f"plan: cp={plan.cp} and virtual_stages={plan.virtual_stages} cannot be priced yet; "
            "nearest legal: 1 and 1."
        )
    if devices % plan.pp:
        near = min(divisors(devices), key=lambda d: abs(d - plan.pp))
        raise PlanError(f"plan: pp={plan.pp} must divide the {devices} GPUs; nearest legal: {near}.")
    for first in plan.boundaries[1:-1]:
        if layers[first].joined:
            raise PlanError(
                f"plan: a stage begins at layer {first} ({layers[first].name}), which must stay with "
                f"{layers[first - 1].name}; nearest legal: {first - 1}."
            )
    for spec, strategy in zip(layers, plan.layers, strict=True):
        _check_strategy(spec.name, strategy, plan, problem)


def _check_strategy(name: str, strategy: LayerStrategy, plan: Plan, problem: Problem) -> None:
    size, batch = problem.cluster.num_devices // plan.pp, problem.training.global_batch_size
    ranks = strategy.tp * plan.cp * strategy.dp
    if ranks != size:
        raise PlanError(
            f"plan: {name} has {degrees(strategy, plan.cp)} = {ranks}, but a stage has {size} GPUs; "
            f"nearest legal: dp={max(size // (strategy.tp * plan.cp), 1)}."
        )
    if strategy.shard_size and (strategy.dp * plan.cp) % strategy.shard_size:
        legal_sizes = divisors(strategy.dp * plan.cp)
        near = min(legal_sizes, key=lambda size: abs(size - strategy.shard_size))
        raise PlanError(
            f"plan: {name} has shard_size={strategy.shard_size}, which must divide its "
            f"{strategy.dp * plan.cp} data-parallel ranks; nearest legal: {near}."
        )
    legal = tensor_degrees(problem)
    if strategy.tp not in legal:
        near = min(legal, key=lambda tp: abs(tp - strategy.tp))
        raise PlanError(
            f"plan: {name} has tp={strategy.tp}, which must divide the heads, the KV heads and the GPUs "
            f"of a node; nearest legal: {near}."
        )
    if batch % (strategy.dp * plan.num_micro_batches):
        near = max((m for m in divisors(batch) if batch % (m * strategy.dp) == 0),
                   key=lambda m: -abs(m - plan.num_micro_batches), default=1)  # fmt: skip
        raise PlanError(
            f"plan: dp({strategy.dp}) * num_micro_batches({plan.num_micro_batches}) of {name} must divide "
            f"training.global_batch_size={batch}; nearest legal num_micro_batches: {near}."
        )
