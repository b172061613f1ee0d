"""The true cost: reads a cost table for hard plans, one or thousands at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.layer_costs import CONTEXT, MESSAGES, TIME_TERMS
from darts_parallel.cost.pipeline import pipeline_seconds, summed
from darts_parallel.cost.searcher import SearcherModel
from darts_parallel.cost.simulation import Criticalities, PassSeconds, simulated_seconds
from darts_parallel.cost.stage_costs import device_bytes, kept_bytes
from darts_parallel.cost.table import build_tables
from darts_parallel.cost.terms import plan_contributions, terms_of
from darts_parallel.cost.tolerances import PLAN_MEMORY_TOLERANCE
from darts_parallel.plans import Plan, plan_space
from darts_parallel.plans import check_plan as check_plan
from darts_parallel.problem import Model, Problem

REMEMBERED = 64
"""Plans whose tables a problem keeps."""


@dataclass(frozen=True)
class BatchCost:
    """Costs of B hard plans; seconds and bytes."""

    iteration_time: Tensor
    """Shape `(B,)`."""
    stage_seconds: Tensor
    """One micro-batch on every device of the pipeline, all its stages together, `(B, pp)`."""
    sync_seconds: Tensor
    """Gradient synchronisation and optimizer, `(B, pp)`."""
    pipeline_end: Tensor
    """Seconds until the last backward pass that the iteration waits for, `(B, pp)`."""
    memory: Tensor
    """Peak bytes, reserve excluded, `(B, pp)`."""
    feasible: Tensor
    """Fits the memory, legal strategies and stages, `(B,)` bool."""


@dataclass(frozen=True)
class TableReading:
    """Seconds and bytes of B hard plans before their passes are put in order."""

    stage_seconds: Tensor
    """One micro-batch on every stage, what blocks it included, `(B, K)`."""
    sync: Tensor
    """Gradient synchronisation and optimizer, `(B, pp)`."""
    per_iteration: Tensor
    """Paid once an iteration, `(B,)`."""
    memory: Tensor
    """Peak bytes, reserve excluded, `(B, pp)`."""
    feasible: Tensor
    """Fits the memory, legal strategies and stages, `(B,)` bool."""
    between: tuple[Tensor, Tensor]
    """Results of `neighbour_seconds`."""


def table_reading(table: CostTable, plans: HardPlans) -> TableReading:
    """Read hard plans from their table; arguments as in `evaluate_batch`."""
    stages = plans.stages()
    outer, layers = plans.outer.unsqueeze(1), torch.arange(table.num_layers)
    kinds = table.stage_kind[stages]
    # places in the figures by outer choice, and by kind of stage: several indices take five times as long
    chosen = (outer * table.num_layers + layers) * len(table.choices) + plans.choices
    by_kind, size = chosen, table.num_layers * len(table.choices)
    if table.time.shape[1] > 1:
        by_kind = chosen + (outer * (table.time.shape[1] - 1) + kinds) * size
    seconds, sync = table.time.take(by_kind), table.sync.take(by_kind)
    inside, across = neighbour_seconds(table, plans, stages)
    stage_seconds = summed(seconds, stages, table.num_stages) + inside
    if table.pipeline.blocking:
        stage_seconds = stage_seconds + torch.nn.functional.pad(across, (1, 0))
    devices = table.stage_device[stages]
    sync_seconds = summed(sync, devices, table.pp)
    per_iteration = table.per_iteration.take(chosen).sum(1)
    static, activation = table.static.take(chosen), table.activation.take(chosen)
    working = table.working.take(chosen)
    if table.moments is None:
        kept = kept_bytes(static, activation, table.in_flight[outer, stages])
        memory = device_bytes(kept, working, devices, table.pp)
    else:
        parts = (activation, table.for_weights.take(chosen))
        held = torch.cat([summed(part, stages, table.num_stages) for part in parts], 1)
        memory = device_bytes(static, working, devices, table.pp)
        memory = memory + (held @ table.moments.transpose(1, 2)).amax(-1).T
    for own in plan_contributions(table, plans):
        stage_seconds = stage_seconds + (own.forward + own.backward)
        sync_seconds, memory = sync_seconds + own.per_iteration, memory + own.memory
    legal = table.allowed[outer, plans.choices].all(1) & ~(
        table.fused_to_previous[plans.first_layers].any(1)
    )
    if table.kind_allowed is not None:
        legal &= table.runs(kinds, plans.choices).all(1)
    fits = legal & (memory <= table.capacity * (1 + PLAN_MEMORY_TOLERANCE)).all(1)
    return TableReading(stage_seconds, sync_seconds, per_iteration, memory, fits, (inside, across))


def held_at_most(table: CostTable, plan: HardPlans) -> tuple[Tensor, Tensor]:
    """Return the micro-batches that stages hold when their device holds most, under a searched order.

    Returns:
        Before their backward and between its two parts, each `(K,)`.
    """
    assert table.moments is not None
    stages, chosen = plan.stages(), (plan.outer[0], torch.arange(table.num_layers), plan.choices[0])
    parts = (table.activation[chosen], table.for_weights[chosen])
    held = torch.cat([summed(part[None], stages, table.num_stages)[0] for part in parts])
    most = (table.moments @ held).argmax(1)
    before, between = table.moments[torch.arange(table.pp), most].sum(0).chunk(2)
    return before, between


def evaluate_batch(table: CostTable, plans: HardPlans, *, linear: bool = False) -> BatchCost:
    """Price hard plans, vectorised.

    Args:
        plans: B plans. Where they may offload they do so by the given shares, or by the least that fit.
        linear: Whether seconds have second derivatives: simulated ones are then sums along a longest path,
            and `pipeline_end` is not known.
    """
    reading = table_reading(table, plans)
    stage_seconds, sync_seconds = reading.stage_seconds, reading.sync
    device_seconds = table.by_device(stage_seconds)
    counts = table.num_micro_batches[plans.outer]
    if table.pipeline.simulated:
        passes = pass_seconds(table, plans, reading.between)
        if linear:
            path = Criticalities.of(passes, sync_seconds, counts, table.pp, table.pipeline)
            total = path.seconds(passes, sync_seconds)
            ends = total.unsqueeze(1).expand_as(device_seconds)
        else:
            total, ends = simulated_seconds(passes, sync_seconds, counts, table.pp, table.pipeline)
    else:
        end = pipeline_seconds(stage_seconds, counts)
        total, ends = end + sync_seconds.amax(1), end.unsqueeze(1).expand_as(device_seconds)
    total = total + reading.per_iteration
    return BatchCost(total, device_seconds, sync_seconds, ends, reading.memory, reading.feasible)


def pass_seconds(
    table: CostTable, plans: HardPlans, between: tuple[Tensor, Tensor] | None = None
) -> PassSeconds:
    """Return the passes of every stage; resharding in a stage is half forward, half backward.

    Args:
        plans: B plans.
        between: What `neighbour_seconds` gives of them, where it is known.
    """
    stages = plans.stages()
    outer, layers = plans.outer.unsqueeze(1), torch.arange(table.num_layers)
    forward, backward, weight = (
        summed(
            values[outer, table.stage_kind[stages], layers, plans.choices], stages, table.num_stages
        )
        for values in (table.forward, table.backward, table.weight_gradient)
    )
    for own in plan_contributions(table, plans):
        forward, backward = forward + own.forward, backward + own.backward
    inside, across = neighbour_seconds(table, plans, stages) if between is None else between
    return PassSeconds(forward + inside / 2, backward + inside / 2, weight, across / 2)


def neighbour_seconds(table: CostTable, plans: HardPlans, stages: Tensor) -> tuple[Tensor, Tensor]:
    """Return resharding inside stages `(B, K)`, and p2p across their boundaries `(B, K - 1)`, both ways."""
    later, pairs = stages[:, 1:], torch.arange(table.num_layers - 1)
    outer = plans.outer.unsqueeze(1)
    count, between = table.num_layouts, pairs.unsqueeze(0)
    if count > 1:
        held = table.layout[plans.choices]
        between = (pairs * count + held[:, :-1]) * count + held[:, 1:]
    cut = later != stages[:, :-1]

    def of_kind(values: Tensor, kind: Tensor) -> Tensor:
        return values.take((outer * values.shape[1] + kind) * (len(pairs) * count**2) + between)

    inside = of_kind(table.reshard, table.stage_kind[later])
    if table.pp == 1:
        return summed(inside, later, 1), inside[:, :0]
    boundary = table.boundary_kind[(later - 1).clamp(min=0)]
    across = of_kind(table.p2p, boundary)
    none = torch.zeros_like(inside)
    parts = (torch.where(cut, none, inside), torch.where(cut, across, none))
    within, crossing = (summed(part, later, table.num_stages) for part in parts)
    return within, crossing[:, 1:]


@dataclass(frozen=True)
class CostBreakdown:
    """The true cost of one plan."""

    iteration_time_s: float
    memory_bytes: tuple[float, ...]
    """Peak bytes of a device of every stage, the framework's reserve included."""
    capacity_bytes: tuple[float, ...]
    """All bytes of the device, `space.memory_margin` included."""
    feasible: bool
    """Whether every peak leaves the margin of its device free."""
    breakdown_s: dict[str, float]
    """Seconds per iteration by cause; they sum to `iteration_time_s`."""
    stage_times_s: tuple[float, ...]
    """Seconds of one micro-batch, forward and backward, by stage (all its chunks together); none where the
    model knows no stages (`cost=searcher`)."""
    tokens_per_s: float
    mfu: float
    """Model FLOP (no recomputation) over the peak of all devices."""


def evaluate(plan: Plan, problem: Problem) -> CostBreakdown:
    """Price a hard plan.

    Errors:
        PlanError: the plan does not fit the problem (layers, devices, batch, heads).
    """
    table, hard, cost = hard_plan(plan, problem)
    cluster = problem.cluster.arranged(plan.node_order)
    if problem.config.cost.knows_stages:
        parts = _breakdown(table, hard, cost, _time_terms(problem.model, plan.cp))
        seconds = float(cost.iteration_time[0])
        stage_times = tuple(cost.stage_seconds[0].tolist())
    else:
        # the analytic seconds of the stages would contradict its total
        parts = SearcherModel.of(problem.model, cluster, problem.training).breakdown(plan)
        seconds, stage_times = sum(parts.values()), ()
    devices = [cluster.stage_group(k, plan.pp).device for k in range(plan.pp)]
    reserved = torch.tensor([device.reserved for device in devices], dtype=torch.float64)
    memory = torch.tensor([device.memory for device in devices], dtype=torch.float64)
    peak = sum(g.count * g.gpus * float(g.device.peak_flops) for g in problem.cluster.groups)
    flops = problem.model.flops_per_token(problem.training.seq_len) * problem.tokens_per_iteration
    return CostBreakdown(
        iteration_time_s=seconds,
        memory_bytes=tuple((cost.memory[0] + reserved).tolist()),
        capacity_bytes=tuple((table.capacity + reserved + problem.margin * memory).tolist()),
        feasible=bool(cost.feasible[0]),
        breakdown_s=parts,
        stage_times_s=stage_times,
        tokens_per_s=problem.tokens_per_iteration / seconds,
        mfu=flops / (seconds * peak),
    )


def hard_plan(plan: Plan, problem: Problem) -> tuple[CostTable, HardPlans, BatchCost]:
    """Return the smallest table that holds a plan, the plan as its only row, and its cost.

    The report, its intervals and its alternatives ask for the same plans: a problem remembers the last ones.

    Errors:
        PlanError: the plan does not fit the problem (layers, devices, batch, heads).
    """
    known: dict[Plan, tuple[CostTable, HardPlans, BatchCost]] = problem.priced
    if plan not in known:
        check_plan(plan, problem.model, problem.cluster, problem.training, problem.measured)
        (table,) = build_tables(problem, [plan_space(plan)])
        index = {choice: c for c, choice in enumerate(table.choices)}
        hard = HardPlans(
            outer=torch.zeros(1, dtype=torch.long),
            choices=torch.tensor([[index[layer] for layer in plan.layers]]),
            first_layers=torch.tensor([plan.boundaries[:-1]]),
        )
        found = table, hard, evaluate_batch(table, hard)
        if found[2].iteration_time.requires_grad:
            # a graph can be walked once only
            return found
        if len(known) >= REMEMBERED:
            known.pop(next(iter(known)))
        known[plan] = found
    return known[plan]


def _time_terms(model: Model, cp: int) -> list[str]:
    """Return the causes that a model can have at a context-parallel degree."""
    sent = {term.message for layer in model.kinds[0] for term in terms_of(layer)}
    present = (sent - {CONTEXT}) | ({CONTEXT} if cp > 1 else set())
    return [name for name in TIME_TERMS if name in present or name not in MESSAGES]


def _breakdown(
    table: CostTable, plans: HardPlans, cost: BatchCost, names: list[str]
) -> dict[str, float]:
    """Return the seconds per iteration by cause: one stage's micro-batches, the bubble, the rest.

    The stage is the slowest, or by simulation the one that the iteration waits for.
    """
    stages = table.stage_device[plans.stages()[0]]
    simulated = table.pipeline.simulated and not table.pipeline.together
    awaited = int((cost.pipeline_end + cost.sync_seconds)[0].argmax())
    slowest = awaited if simulated else int(cost.stage_seconds[0].argmax())
    mine = stages == slowest
    count = int(table.num_micro_batches[plans.outer[0]])
    layers = torch.arange(table.num_layers)

    def term(name: str, stage: int) -> float:
        kind = int(table.stage_kind[stage])
        values = table.terms[name][plans.outer[0], kind, layers, plans.choices[0]]
        return float(values[stages == stage].sum())

    parts = {name: count * term(name, slowest) for name in names}
    seconds = cost.stage_seconds[0]
    updated = torch.zeros(table.pp)
    for own in plan_contributions(table, plans):
        extra_seconds = table.by_device(own.forward + own.backward)
        parts[own.name] = count * float(extra_seconds[0, slowest])
        updated = updated + own.per_iteration[0]
    parts["p2p_and_resharding"] = count * float(seconds[slowest]) - sum(parts.values())
    if abs(parts["p2p_and_resharding"]) < 1e-12 * float(seconds.sum()) or not mine.any():
        parts["p2p_and_resharding"] = 0.0
    if table.pipeline.simulated:
        idle = float(cost.pipeline_end[0, slowest] - count * seconds[slowest])
        parts["pipeline_bubble"] = max(idle, 0.0)  # above 0 but for rounding
    else:
        parts["pipeline_bubble"] = float(seconds.sum() - seconds[slowest])
    last = awaited if simulated else int(cost.sync_seconds[0].argmax())
    parts["gradient_sync"] = term("gradient_sync", last)
    parts["optimizer"] = term("optimizer", last) + float(updated[last])
    parts["tied_embedding_sync"] = float(
        table.per_iteration[plans.outer[0], layers, plans.choices[0]].sum()
    )
    return parts
