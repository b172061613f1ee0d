"""The true cost of hard plans, one or thousands at a time, read from a cost table."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from darts_parallel.cost.choices import Tensors, float_tensor
from darts_parallel.cost.cost_table import CostTable, Tables
from darts_parallel.cost.hard_plans import HardPlans, PricedPlan
from darts_parallel.cost.layer_costs import CONTEXT, MESSAGES, TIME_TERMS
from darts_parallel.cost.own_terms import COMPUTE, lengthened, stage_part
from darts_parallel.cost.pipeline import pipeline_seconds, summed
from darts_parallel.cost.plan_places import PlanPlaces
from darts_parallel.cost.rows import flatnonzero
from darts_parallel.cost.searcher import SearcherModel
from darts_parallel.cost.simulation import Criticalities, PassSeconds, simulated_seconds
from darts_parallel.cost.stage_costs import device_bytes, kept_bytes
from darts_parallel.cost.table import build_tables, with_memory
from darts_parallel.cost.terms import plan_contributions, terms_of
from darts_parallel.cost.tolerances import BOUND_TOLERANCE, PLAN_MEMORY_TOLERANCE
from darts_parallel.errors import Amounts, ConfigError, PlanError
from darts_parallel.plans import Plan, plan_space
from darts_parallel.plans import check_plan as check_plan
from darts_parallel.problem import Cluster, Model, Problem

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

    @property
    def fitting_seconds(self) -> Tensor:
        """Return the seconds of the plans, infinite where they do not fit, `(B,)`."""
        return self.iteration_time.detach().masked_fill(~self.feasible, torch.inf)


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
    own: Tensors
    """Seconds of the user's own terms, included above, `(B, K)` or `(B,)`."""


def _places(table: CostTable, plans: HardPlans) -> PlanPlaces:
    return PlanPlaces(table, plans.outer, plans.choices, plans.stages())


def table_reading(table: CostTable, plans: HardPlans) -> TableReading:
    """Read hard plans from their table; arguments as in `evaluate_batch`."""
    places = _places(table, plans)
    inside, across = neighbour_seconds(table, plans, places.stages)
    stage_seconds = places.by_stage(places.read_by_kind(table.time)) + inside
    if table.pipeline.blocking:
        stage_seconds = stage_seconds + pad(across, (1, 0))
    sync = places.by_device(places.read_by_kind(table.sync))
    memory = _memory(places)
    for own in plan_contributions(table, plans):
        stage_seconds = stage_seconds + (own.forward + own.backward)
        sync = sync + own.per_iteration
        memory = memory + sum(own.memory.values())
    fits = (memory <= table.capacity * (1 + PLAN_MEMORY_TOLERANCE)).all(1)
    feasible = _legal(places, plans.first_layers) & fits
    per_iteration = places.read(table.per_iteration).sum(1)
    own_seconds: Tensors = {}
    if table.own is not None:
        own_seconds = _own_seconds(places, stage_seconds, sync, memory)
    for seconds in own_seconds.values():
        if seconds.dim() == 1:
            per_iteration = per_iteration + seconds
        else:
            stage_seconds = stage_seconds + seconds
    return TableReading(
        stage_seconds=stage_seconds,
        sync=sync,
        per_iteration=per_iteration,
        memory=memory,
        feasible=feasible,
        between=(inside, across),
        own=own_seconds,
    )


def _own_seconds(
    places: PlanPlaces, stage_seconds: Tensor, sync: Tensor, memory: Tensor
) -> Tensors:
    """Return the seconds of the user's own terms, `(B, K)` or `(B,)`."""
    table = places.table
    parts = [places.read_by_kind(table.terms[name]) for name in COMPUTE]
    compute = places.by_stage(torch.stack(parts).sum(0))
    communication = (stage_seconds - compute).clamp(min=0.0)  # below 0 by rounding
    counts = table.num_micro_batches[places.outer].double()
    stages = one_hot(places.stages, table.num_stages).double()
    layers = one_hot(places.choices, len(table.choices)).double()
    return table.own_seconds(
        stage_compute_s=compute,
        stage_communication_s=communication,
        num_micro_batches=counts,
        device_memory_bytes=memory,
        sync_s=sync,
        stage_weights=stages,
        layer_weights=layers,
    )


def _memory(places: PlanPlaces) -> Tensor:
    """Return the peak bytes of every device without offloading, `(B, pp)`."""
    table = places.table
    static = places.read(table.static)
    working = places.read(table.working)
    if table.moments is None:
        kept = kept_bytes(static, places.read(table.activation), places.in_flight)
        return device_bytes(kept, working, places.devices, table.pp)
    in_order = (_stage_bytes(places) @ table.moments.transpose(1, 2)).amax(-1).T
    return device_bytes(static, working, places.devices, table.pp) + in_order


def _stage_bytes(places: PlanPlaces) -> Tensor:
    """Return bytes of stages before their backward and between its two parts, `(B, 2 K)`."""
    parts = (places.table.activation, places.table.for_weights)
    return torch.cat([places.by_stage(places.read(values)) for values in parts], 1)


def _legal(places: PlanPlaces, first_layers: Tensor) -> Tensor:
    """Return whether the strategies and stages of plans are legal, `(B,)`.

    Args:
        first_layers: Of every stage, `(B, K)`.
    """
    table = places.table
    rows = places.outer.unsqueeze(1) * len(table.choices)
    allowed = table.allowed.take(rows + places.choices).all(1)
    cut_fused = table.fused_to_previous[first_layers].any(1)
    runs = table.runs(places.kinds, places.choices).all(1)
    return allowed & ~cut_fused & runs


def static_bytes_of(table: CostTable, plans: HardPlans) -> Tensor:
    """Return the bytes of every device that are there whatever is in flight, `(B, pp)`."""
    places = _places(table, plans)
    return places.by_device(places.read(table.static))


def held_at_most(table: CostTable, plan: HardPlans) -> tuple[Tensor, Tensor]:
    """Return the micro-batches that stages hold when their device holds most.

    Under a searched order this moment depends on the plan; otherwise it is `table.in_flight`.

    Returns:
        Before their backward and between its two parts, each `(K,)`.
    """
    if table.moments is None:
        in_flight = table.in_flight[int(plan.outer[0])]
        return in_flight, torch.zeros_like(in_flight)
    held = _stage_bytes(_places(table, plan))[0]
    fullest = (table.moments @ held).argmax(1)
    moments = table.moments[torch.arange(table.pp), fullest].sum(0)
    before, after = moments.chunk(2)
    return before, after


def evaluate_batch(table: CostTable, plans: HardPlans, *, linear: bool = False) -> BatchCost:
    """Price hard plans, vectorised.

    Args:
        plans: B plans. Plans that may offload do so by the given shares, or by the least that fit.
        linear: Whether seconds have second derivatives. Simulated ones are then sums along a longest
            path, and `pipeline_end` is not known.
    """
    reading = table_reading(table, plans)
    stage_seconds = reading.stage_seconds
    sync_seconds = reading.sync
    device_seconds = table.by_device(stage_seconds)
    counts = table.num_micro_batches[plans.outer]
    if table.simulated:
        passes = pass_seconds(table, plans, reading.between)
        if linear:
            path = Criticalities.of(passes, sync_seconds, counts, table.pipeline)
            total = path.seconds(passes, sync_seconds)
            ends = total.unsqueeze(1).expand_as(device_seconds)
        else:
            total, ends = simulated_seconds(passes, sync_seconds, counts, table.pipeline)
    else:
        end = pipeline_seconds(stage_seconds, counts)
        total = end + sync_seconds.amax(1)
        ends = end.unsqueeze(1).expand_as(device_seconds)
    return BatchCost(
        iteration_time=total + reading.per_iteration,
        stage_seconds=device_seconds,
        sync_seconds=sync_seconds,
        pipeline_end=ends,
        memory=reading.memory,
        feasible=reading.feasible,
    )


def fastest(number: int, table: CostTable, plans: HardPlans) -> PricedPlan:
    """Return the fastest of some plans of a table; its seconds are infinite where none fits.

    Args:
        number: Of the table.
    """
    seconds = evaluate_batch(table, plans).fitting_seconds
    row = int(seconds.argmin())
    plan = plans[row : row + 1]
    return PricedPlan(number, plan, float(seconds[row]))


def pass_seconds(
    table: CostTable, plans: HardPlans, between: tuple[Tensor, Tensor] | None = None
) -> PassSeconds:
    """Return the passes of every stage; resharding in a stage is half forward, half backward.

    The user's own terms lengthen both passes in proportion.

    Args:
        plans: B plans.
        between: Result of `neighbour_seconds`; None: it is computed here.
    """
    places = _places(table, plans)

    def by_stage(values: Tensor) -> Tensor:
        return places.by_stage(places.read_by_kind(values))

    forward = by_stage(table.forward)
    backward = by_stage(table.backward)
    for own in plan_contributions(table, plans):
        forward = forward + own.forward
        backward = backward + own.backward
    if table.own is not None:
        added = stage_part(table_reading(table, plans).own, forward)
        forward, backward = lengthened(forward, backward, added)
    inside, across = neighbour_seconds(table, plans, places.stages) if between is None else between
    return PassSeconds(
        forward=forward + inside / 2,
        backward=backward + inside / 2,
        weight_gradient=by_stage(table.weight_gradient),
        message=across / 2,
    )


def neighbour_seconds(table: CostTable, plans: HardPlans, stages: Tensor) -> tuple[Tensor, Tensor]:
    """Return resharding inside stages `(B, K)`, and p2p across their boundaries `(B, K - 1)`, both ways."""
    outer = plans.outer.unsqueeze(1)
    later = stages[:, 1:]
    pairs = torch.arange(table.num_layers - 1)
    count = table.num_layouts
    layout = table.layout[plans.choices]
    # flat index of a pair of layers and of layouts
    between = (pairs * count + layout[:, :-1]) * count + layout[:, 1:]

    def of_kind(values: Tensor, kind: Tensor, places: Tensor) -> Tensor:
        size = len(pairs) * count**2
        return values.take((outer * values.shape[1] + kind) * size + places)

    cut = plans.first_layers[:, 1:] - 1
    across = of_kind(table.p2p, table.boundary_kind, between.gather(1, cut))
    inside = of_kind(table.reshard, table.stage_kind[later], between)
    return summed(inside.scatter(1, cut, 0.0), later, table.num_stages), across


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
    breakdown_s: Amounts
    """Seconds per iteration by cause; they sum to `iteration_time_s`."""
    stage_times_s: tuple[float, ...]
    """Seconds of one micro-batch, forward and backward, by stage (all its chunks together); none
    where the model knows no stages (`cost=searcher`)."""
    tokens_per_s: float
    mfu: float
    """Model FLOP (no recomputation) over the peak of all devices."""

    @property
    def fullness(self) -> list[float]:
        """Return the share of its memory that each stage uses."""
        pairs = zip(self.memory_bytes, self.capacity_bytes, strict=True)
        return [used / most for used, most in pairs]


def evaluate(plan: Plan, problem: Problem) -> CostBreakdown:
    """Price a hard plan.

    Errors:
        PlanError: it is no plan, or does not fit the problem (layers, devices, batch, heads).
        ConfigError: the user's own terms leave seconds below 0.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"evaluate({type(plan).__name__}, ...) must get a Plan; try evaluate(planned.plan, problem)."
        )
    table, hard, cost = hard_plan(plan, problem)
    cluster = problem.cluster.arranged(plan.node_order)
    if problem.config.cost.knows_stages:
        parts = _breakdown(table, hard, cost, _time_terms(problem.model, plan.cp))
        seconds = float(cost.iteration_time[0])
        stage_times = tuple(cost.stage_seconds[0].tolist())
        if min(seconds, *stage_times) < 0.0:  # the user's own terms alone are below 0
            raise ConfigError(
                f"cost.term takes more than all other seconds: of a step {seconds:.3g} s are left, of "
                f"the stages {min(stage_times):.3g} s; try terms with non_negative = True."
            )
    else:
        # the analytic seconds of the stages would contradict its total
        parts = SearcherModel.of(problem.model, cluster, problem.training).breakdown(plan)
        seconds = sum(parts.values())
        stage_times = ()
    devices = cluster.stage_devices(plan.pp)
    reserved = float_tensor([device.reserved for device in devices])
    whole = float_tensor([device.memory for device in devices])
    memory = cost.memory[0] + reserved
    capacity = table.capacity + reserved + problem.margin * whole
    tokens = problem.tokens_per_iteration
    flops = problem.model.flops_per_token(problem.training.seq_len) * tokens
    mfu = flops / (seconds * _peak_flops(problem.cluster))
    memory_bytes = tuple(memory.tolist())
    capacity_bytes = tuple(capacity.tolist())
    feasible = bool(cost.feasible[0])
    return CostBreakdown(
        iteration_time_s=seconds,
        memory_bytes=memory_bytes,
        capacity_bytes=capacity_bytes,
        feasible=feasible,
        breakdown_s=parts,
        stage_times_s=stage_times,
        tokens_per_s=tokens / seconds,
        mfu=mfu,
    )


def _peak_flops(cluster: Cluster) -> float:
    """Return the floating-point operations per second of all devices."""
    return sum(
        group.count * group.gpus * float(group.device.peak_flops) for group in cluster.groups
    )


def hard_plan(plan: Plan, problem: Problem) -> tuple[CostTable, HardPlans, BatchCost]:
    """Return the smallest table that holds a plan, the plan as its only row, and its cost.

    The report, its intervals and its alternatives ask for the same plans: a problem remembers the
    last ones.

    Errors:
        PlanError: the plan does not fit the problem (layers, devices, batch, heads).
    """
    known: dict[Plan, tuple[CostTable, HardPlans, BatchCost]] = problem.priced
    if plan in known:
        return known[plan]
    check_plan(plan, problem.model, problem.cluster, problem.training, problem.measured)
    known_table = _part_for(plan, problem.tables)
    if known_table is None:
        (table,) = build_tables(problem, [plan_space(plan)])
    else:
        table = with_memory(known_table, problem.cluster, problem.margin)
    index = {choice: c for c, choice in enumerate(table.choices)}
    choices = [index[layer] for layer in plan.layers]
    first_layers = plan.boundaries[:-1]
    hard = HardPlans.one(0, choices, first_layers)
    cost = evaluate_batch(table, hard)
    # a graph of gradients can be walked once only
    if not cost.iteration_time.requires_grad:
        if len(known) >= REMEMBERED:
            known.pop(next(iter(known)))
        known[plan] = table, hard, cost
    return table, hard, cost


def _part_for(plan: Plan, tables: Tables) -> CostTable | None:
    """Return the part for one plan of the table that holds it; None where none does.

    Simulated plans name an order of passes, which a table of a space may leave open.
    """
    used = tuple(dict.fromkeys(plan.layers))
    for table in tables if plan.schedule is None else ():
        place = (table.pp, table.cp, table.virtual_stages, table.node_order)
        other = place != (plan.pp, plan.cp, plan.virtual_stages, plan.node_order)
        if other or table.simulated or table.host is not None:
            continue
        rows = flatnonzero(table.num_micro_batches == plan.num_micro_batches)
        if len(rows) and set(used) <= set(table.choices):
            return table.select(rows).keep_choices([table.choices.index(own) for own in used])
    return None


def _time_terms(model: Model, cp: int) -> list[str]:
    """Return the causes that a model can have at a context-parallel degree."""
    sent = {term.message for layer in model.kinds[0] for term in terms_of(layer)}
    present = (sent - {CONTEXT}) | ({CONTEXT} if cp > 1 else set())
    return [name for name in TIME_TERMS if name in present or name not in MESSAGES]


def _breakdown(
    table: CostTable,
    plans: HardPlans,
    cost: BatchCost,
    names: list[str],
) -> Amounts:
    """Return the seconds per iteration by cause: one stage's micro-batches, the bubble, the rest.

    The stage is the slowest, or by simulation the one that the iteration waits for.
    """
    layers = torch.arange(table.num_layers)
    outer = plans.outer[0]
    choices = plans.choices[0]
    stages = table.stage_device[plans.stages()[0]]
    seconds = cost.stage_seconds[0]
    count = int(table.num_micro_batches[outer])
    slowest = int(seconds.argmax())
    last = int(cost.sync_seconds[0].argmax())
    if table.simulated and not table.pipeline.together:
        last = int((cost.pipeline_end + cost.sync_seconds)[0].argmax())
        slowest = last

    def term(name: str, stage: int) -> float:
        kind = int(table.stage_kind[stage])
        values = table.terms[name][outer, kind, layers, choices]
        return float(values[stages == stage].sum())

    parts = {name: count * term(name, slowest) for name in names}
    updated = torch.zeros(table.pp)
    for extra in plan_contributions(table, plans):
        extra_seconds = table.by_device(extra.forward + extra.backward)
        parts[extra.name] = count * float(extra_seconds[0, slowest])
        updated = updated + extra.per_iteration[0]
    added = {} if table.own is None else table_reading(table, plans).own
    of_iteration = {name: float(own[0]) for name, own in added.items() if own.dim() == 1}
    for name, own in added.items():
        if name not in of_iteration:
            parts[name] = count * float(table.by_device(own)[0, slowest])
    between = count * float(seconds[slowest]) - sum(parts.values())
    empty = not (stages == slowest).any()
    rounding = BOUND_TOLERANCE * float(seconds.sum())
    parts["p2p_and_resharding"] = 0.0 if empty or abs(between) < rounding else between
    idle = float(cost.pipeline_end[0, slowest] - count * seconds[slowest])
    parts["pipeline_bubble"] = max(idle, 0.0)  # below 0 by rounding alone
    parts["gradient_sync"] = term("gradient_sync", last)
    parts["optimizer"] = term("optimizer", last) + float(updated[last])
    tied = table.per_iteration[outer, layers, choices]
    parts["tied_embedding_sync"] = float(tied.sum())
    return parts | of_iteration
