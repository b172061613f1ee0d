"""The search space: legal outer choices `(pp, num_micro_batches)` and legal strategies of a layer.

Illegal products never enter: `tp * dp * pp` is the number of devices by construction, and
`global_batch_size` is a multiple of `dp * num_micro_batches`. Pinned values are refused with the
closest valid one where they leave no plan (`_pins.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from darts_parallel.config import (
    AXIS_ORDERS,
    COMM_BITS,
    LOSSLESS,
    OFFLOADS,
    PIPELINES_INSIDE,
    PIPELINES_OUTSIDE,
    RECOMPUTE,
    Config,
    Shares,
    SpaceConfig,
    Trainer,
)
from darts_parallel.errors import ConfigError, Entries, closest
from darts_parallel.plans._expert_degrees import ExpertDegrees, expert_degrees, require_expert_pins
from darts_parallel.plans._pins import require_legal_pins, require_pure_stages, splits_sequence
from darts_parallel.plans.degrees import (
    context_degrees,
    divides_nodes,
    divisors,
    legal_pipeline_degrees,
    node_sizes,
    pipeline_units,
    tensor_degrees,
    virtual_stage_counts,
    wider_batch,
    widest_tensor_degree,
)
from darts_parallel.plans.legality import refuse_model
from darts_parallel.plans.own_stages import own_cuts
from darts_parallel.plans.strategy import LayerStrategy, Plan, Strategies
from darts_parallel.plans.trainers import (
    job_facts,
    lacking,
    rules_of_job,
    trainer_parts,
    trainer_runs,
)
from darts_parallel.problem import (
    Cluster,
    MeasuredTimes,
    Model,
    NodeOrder,
    Problem,
    node_orders,
    order_inside_nodes,
    orders_are_all,
)
from darts_parallel.schedules import (
    CLOSED_FORM,
    PLACEMENTS,
    SEARCHED,
    Schedule,
    find,
    search_start,
    usual_schedule,
)

Runs = Callable[[int, int, str, LayerStrategy], bool]
"""Whether a trainer runs a strategy under `pp`, `cp` and a schedule."""


Pinned = tuple[int, ...] | None
"""Values to which the user limits a key; None: all."""


class StageDegrees(NamedTuple):
    """Degrees of a layer, whose product is the GPUs of a stage."""

    tp: int
    cp: int
    dp: int

    @property
    def ranks(self) -> int:
        """Ranks that synchronise gradients."""
        return self.dp * self.cp


class ScheduleChoice(NamedTuple):
    """A schedule and the stages that a device holds under it."""

    virtual_stages: int
    schedule: str | None
    """None: the usual one for this number of stages."""


@dataclass(frozen=True)
class OuterSpace:
    """All outer choices that share `pp` and the order of the nodes, and the strategies of layers."""

    pp: int
    num_micro_batches: tuple[int, ...]
    choices: Strategies
    cp: int = 1
    """Context-parallel degree."""
    virtual_stages: int = 1
    """Model chunks of a stage."""
    node_order: NodeOrder = ()
    """Nodes along the pipeline; empty: in rank order."""
    schedule: str | None = None
    """Pipeline schedule; None: `cost.schedule`, or `interleaved` where a device holds several
    stages."""
    offload: tuple[str, ...] = ()
    """Tensors of which a share may lie in host memory (`OFFLOADS`)."""
    shares: Shares = ()
    """Given shares in host memory by device; empty: the smallest shares that fit."""
    cuts: tuple[int, ...] = ()
    """First layers of all stages but the first, where the trainer cuts them itself; else empty."""


def plan_space(plan: Plan) -> OuterSpace:
    """Return the smallest space that holds a plan: its own strategies."""
    choices = tuple(dict.fromkeys(plan.layers))
    counts = (plan.num_micro_batches,)
    space = OuterSpace(plan.pp, counts, choices, plan.cp, plan.virtual_stages)
    return replace(
        space,
        node_order=plan.node_order,
        schedule=plan.schedule,
        offload=OFFLOADS if plan.offload else (),
        shares=plan.offload,
    )


def outer_spaces(problem: Problem) -> list[OuterSpace]:
    """Return all legal outer choices: pp, cp, stages per device, schedule and order of the nodes.

    Interleaved stages need a number of micro-batches that pp divides (Megatron-LM's rule).

    Errors:
        ConfigError: the pins leave no legal product; names the key and the closest valid value.
        UnsupportedError: `space.executable` holds for a model that cannot run.
    """
    config = problem.config
    space = config.space
    model = problem.model
    cluster = problem.cluster
    training = problem.training
    if space.executable:
        refuse_model(model, training)
    require_pure_stages(model, cluster)
    tensor = tensor_degrees(space, model, cluster, problem.measured).tried
    if splits_sequence(space, model):
        tensor = [tp for tp in tensor if training.seq_len % tp == 0]
    require_legal_pins(space, model, cluster, training, tensor)
    require_expert_pins(space, model, cluster)
    _, offloaded = space.shares or (0.0, 0.0)
    job = job_facts(model, training, problem.software, offloaded)
    rules = config.abilities(space.trainer) if space.trainer else None
    runs = partial(trainer_runs, rules_of_job(rules, job), job) if rules else None
    result: list[OuterSpace] = []
    for whole in _whole_spaces(space, model, cluster, training.seq_len, tensor):
        outer = _legal_part(whole, space, training.global_batch_size, node_sizes(cluster), runs)
        if outer is not None and rules and rules.own_stages and outer.pp > 1:
            outer = _with_own_stages(outer, model)
        if outer is not None:
            orders = [outer.node_order]
            if not outer.node_order:
                orders = node_orders(cluster, outer.pp, space.node_orders)
            for choices, order in product(trainer_parts(config, outer.choices), orders):
                result.append(replace(outer, choices=choices, node_order=order))
    if not result and space.pinned("axis_order") == (PIPELINES_INSIDE,):
        raise ConfigError(
            f"space.axis_order={PIPELINES_INSIDE} must have several equal nodes whose GPUs tp · cp · pp "
            "divides, and layers without experts; try space.axis_order=null."
        )
    if not result and model.has_experts and space.trainer is None:
        raise ConfigError(
            f"space.ep={space.ep} and space.etp={space.etp} must have a product that divides the GPUs "
            "of a stage that the other pins allow, with sequence parallelism where tp is above 1 and "
            "shard_size=0; try space.ep=null."
        )
    _require_shard_sizes(space.pinned("shard_size"), result)
    if not result:
        raise _no_plan(config, cluster.num_devices, rules, job)
    return result


def _no_plan(config: Config, devices: int, rules: Trainer | None, job: Entries) -> ConfigError:
    """Return the error for a trainer, or for schedules, that run no plan of the space."""
    space = config.space
    near = "fewer pins"
    if rules is None:
        key = "schedules"
        value = str(space.schedules)
        why = ""
    else:
        key = "trainer"
        value = str(space.trainer)
        free = Problem.from_config(config.with_space(trainer=None))
        why = lacking(rules, job, outer_spaces(free))
        near = _batch_that_helps(config, devices) or near
    return ConfigError(
        f"space.{key}={value} runs no plan of this job and its pins on {devices} GPUs{why}; "
        f"try space.{key}=null, or {near}."
    )


def _batch_that_helps(config: Config, devices: int) -> str:
    """Return a batch that more GPUs divide and with which some plan is legal, as typed; or nothing."""
    batch = config.training.global_batch_size
    wider, _ = wider_batch(devices, batch)
    if wider == batch:
        return ""
    training = replace(config.training, global_batch_size=wider)
    with suppress(ConfigError):
        outer_spaces(Problem.from_config(replace(config, training=training)))
        return f"training.global_batch_size={wider}"
    return ""


def _require_shard_sizes(pinned: Pinned, spaces: list[OuterSpace]) -> None:
    """Refuse sharding groups that no choice of `spaces` has; only ZeRO 0 would be left."""
    if pinned is None or 0 in pinned:
        return
    legal: set[int] = set()
    for ranks in {choice.dp * space.cp for space in spaces for choice in space.choices}:
        legal.update(divisors(ranks)[1:])
    if legal & set(pinned):
        return
    other = f", or {closest(pinned[0], legal)}" if legal else ""
    given = pinned[0] if len(pinned) == 1 else list(pinned)
    raise ConfigError(
        f"space.shard_size={given} must be above 1 and divide a data-parallel degree that the "
        f"other pins allow; try 0, which shards over all its ranks{other}."
    )


def left_out(
    config: Config, model: Model, cluster: Cluster, measured: MeasuredTimes | None
) -> tuple[str, ...]:
    """Name in clauses what a search without pins keeps fixed, or does not try.

    A claim over the space holds within these limits.
    """
    space = config.space
    found = []
    several = space.pinned("virtual_stages") != (1,)
    degrees = pipeline_degrees(space, model, cluster)
    if space.pinned("cp") == (1,) and cluster.num_devices > 1:
        found.append("cp 1")
    if not several and space.schedules is None and max(degrees, default=1) > 1:
        found.append("vpp 1")
    if tensor_degrees(space, model, cluster, measured).left_out:
        found.append(f"tp ≤ {widest_tensor_degree(cluster)}")
    if not all(orders_are_all(cluster, pp, space.node_orders) for pp in degrees):
        found.append("no node orders that mix the types (space.node_orders)")
    if config.search.method == "exact" and space.kind == "uniform" and several:
        found.append("no unequal chunks of interleaved stages")
    return tuple(found)


def pipeline_degrees(space: SpaceConfig, model: Model, cluster: Cluster) -> list[int]:
    """Return the pipeline degrees that the pins allow."""
    return space.only("pp", legal_pipeline_degrees(model, cluster))


def schedule_choices(space: SpaceConfig, model: Model, pp: int) -> list[ScheduleChoice]:
    """Return schedules, and stages a device, that a pipeline of `pp` devices may have."""
    named = space.pinned("schedules")
    counts = virtual_stage_counts(space, model, pp)
    if named is None:
        return [ScheduleChoice(count, None) for count in space.only("virtual_stages", counts)]
    schedules = _named_schedules(named, pp)
    if pp == 1:
        return [ScheduleChoice(1, own.name) for own in _of_one_device(schedules)]
    several = [count for count in counts if count > 1]
    if space.pinned("virtual_stages") != (1,):  # the default leaves named interleaved stages free
        several = space.only("virtual_stages", several)
    result = []
    for own in sorted(schedules, key=lambda own: own.chunks != 1):
        fixed = [own.chunks] if own.chunks else several
        possible = [count for count in fixed if count * pp <= pipeline_units(model)]
        result += [ScheduleChoice(count, own.name) for count in possible]
    return result


def _named_schedules(named: Sequence[str], pp: int) -> list[Schedule]:
    """Return named schedules; of a search of orders, one of each placement where it begins."""
    listed = [find(name) for name in named if name != SEARCHED]
    if SEARCHED not in named:
        return listed
    starts = [find(CLOSED_FORM)]
    if pp > 1:
        starts = [search_start(placement) for placement in PLACEMENTS]
    known = {(own.chunks, own.folded) for own in listed}
    return listed + [own for own in starts if (own.chunks, own.folded) not in known]


def _of_one_device(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Return the schedules with one stage a device that hold the fewest micro-batches.

    A single device takes equally long whatever the order of passes. A split schedule holds more of
    each micro-batch, so it is listed only if it holds fewer. Of equal schedules the first is
    listed.
    """

    def held(schedule: Schedule) -> int:
        return schedule.in_flight(1, 2, 1)[0]

    chosen: list[Schedule] = []
    for split in (False, True):
        alike = [own for own in schedules if own.chunks == 1 and own.split is split]
        best = min(alike, key=held, default=None)
        if best is not None and (not chosen or held(best) < held(chosen[0])):
            chosen.append(best)
    return chosen


def _whole_spaces(
    space: SpaceConfig, model: Model, cluster: Cluster, seq_len: int, tensor: Sequence[int]
) -> Iterator[OuterSpace]:
    """Yield the outer choices that the pins allow, with all strategies of their layers."""
    offload = tuple(space.pinned("offload") or ())
    contexts = context_degrees(model, cluster.num_devices, seq_len)
    contexts = space.only("cp", contexts)
    for pp, cp in product(pipeline_degrees(space, model, cluster), contexts):
        size = cluster.num_devices // pp
        fitting = [tp for tp in tensor if size % (tp * cp) == 0]
        degrees = [StageDegrees(tp, cp, size // (tp * cp)) for tp in fitting]
        experts = expert_degrees(space, model, cluster, size)
        choices = tuple(layer_choices(space, model, seq_len, degrees, experts))
        schedules_of_pp = schedule_choices(space, model, pp)
        for order, (virtual_stages, schedule) in product(
            _axis_orders(space, model, cluster, pp), schedules_of_pp
        ):
            kept = choices
            if order:
                gpus = cluster.groups[0].gpus // pp
                kept = tuple(choice for choice in choices if gpus % (choice.tp * cp) == 0)
            outer = OuterSpace(pp, (), kept, cp, virtual_stages, order, schedule)
            yield replace(
                outer, offload=offload, shares=(space.shares,) * pp if space.shares else ()
            )


def _axis_orders(
    space: SpaceConfig, model: Model, cluster: Cluster, pp: int
) -> Iterator[NodeOrder]:
    """Yield an empty order for stages on nodes of their own, and that of stages on parts of each node.

    Experts stay out of the latter: Megatron-LM asserts that their data-parallel degree is that of
    other layers.
    """
    wanted = space.pinned("axis_order") or AXIS_ORDERS
    if PIPELINES_OUTSIDE in wanted or pp == 1:
        yield ()
    order = order_inside_nodes(cluster, pp)
    if order and PIPELINES_INSIDE in wanted and not model.has_experts:
        yield order


def _legal_part(
    outer: OuterSpace, space: SpaceConfig, batch: int, nodes: Sequence[int], runs: Runs | None
) -> OuterSpace | None:
    """Return the part of an outer choice that is legal and that `runs`; None if there is none.

    Args:
        nodes: GPUs of the nodes, every type of which must run some strategy.
    """
    name = outer.schedule or usual_schedule(outer.virtual_stages)
    schedule = find(name)
    named = space.schedules or [name]
    choices = outer.choices
    if runs is not None:
        asked = name if name in named else SEARCHED
        choices = tuple(c for c in choices if runs(outer.pp, outer.cp, asked, c))
    splits = outer.pp > 1 and (schedule.split or SEARCHED in named)
    if space.executable and splits:  # as `refuse_unexecutable` says of split backward passes
        choices = tuple(c for c in choices if c.zero_stage <= 1)
    degrees = {choice.tp for choice in choices}
    if not all(any(divides_nodes(tp, gpus) for tp in degrees) for gpus in nodes):
        return None
    counts = []
    for count in space.only("num_micro_batches", divisors(batch)):
        divides = any(micro_batch_legal(space, batch, count, c) for c in choices)
        if divides and schedule.count_refusal(outer.pp, count) is None:
            counts.append(count)
    if not counts:
        return None
    return replace(outer, num_micro_batches=tuple(counts), choices=choices)


def _with_own_stages(outer: OuterSpace, model: Model) -> OuterSpace | None:
    """Return the part of an outer choice that a trainer with stages of its own runs, or None.

    nanotron's 1F1B asserts at least pp - 1 micro-batches.
    """
    counts = tuple(count for count in outer.num_micro_batches if count >= outer.pp - 1)
    cuts = own_cuts(model.config, outer.pp)
    return replace(outer, num_micro_batches=counts, cuts=cuts) if counts and cuts else None


def layer_choices(
    space: SpaceConfig,
    model: Model,
    seq_len: int,
    stages: Sequence[StageDegrees],
    experts: Sequence[ExpertDegrees],
) -> Iterator[LayerStrategy]:
    """Yield strategies of a layer with these degrees, without those that change nothing.

    A ZeRO stage above 0 and gradient bits need `dp * cp > 1`, sequence parallelism and
    tensor-parallel bits need `tp > 1`: otherwise they are other names of the same strategy.
    """
    for degrees in stages:
        if not space.only("tp", [degrees.tp]) or not space.only("dp", [degrees.dp]):
            continue
        shards = shard_sizes(space.pinned("shard_size"), degrees.ranks)
        options = _options(space, model, seq_len, degrees)
        for values in product(*options.values()):
            named = dict(zip(options, values, strict=True))
            for shard in shards if named["zero_stage"] else [0]:
                if shard and model.has_experts:
                    continue
                for ep, etp in experts:
                    yield LayerStrategy(
                        degrees.tp, degrees.dp, shard_size=shard, ep=ep, etp=etp, **named
                    )


def _options(
    space: SpaceConfig, model: Model, seq_len: int, degrees: StageDegrees
) -> dict[str, Sequence[Any]]:
    """Return the values of every field of a strategy that the degrees leave free."""
    # experts have replicas of their own: the ZeRO stages mean nothing where neither has any
    replicated = degrees.ranks > 1 or (degrees.tp > 1 and model.has_experts)
    stages = space.pinned("zero_stage") or (0, 1, 2, 3)
    if not replicated:
        stages = (0,)
    sequence_parallel = [False]
    if degrees.tp > 1:
        divides = seq_len % (degrees.tp * degrees.cp) == 0
        sequence_parallel = _sequence_parallel(space, model, divides)
    options: dict[str, Sequence[Any]] = {"zero_stage": stages}
    options["recompute"] = space.pinned("recompute") or RECOMPUTE
    options["sequence_parallel"] = sequence_parallel
    options["tp_comm_bits"] = _bits(space.pinned("tp_comm_bits"), degrees.tp)
    options["grad_comm_bits"] = _bits(space.pinned("grad_comm_bits"), degrees.ranks)
    return options


def _sequence_parallel(space: SpaceConfig, model: Model, divides: bool) -> list[bool]:
    """Return the values of sequence parallelism that tensor-parallel layers may have.

    Args:
        divides: The tensor-parallel ranks have equal parts of the sequence, as Megatron-LM asserts.
    """
    pinned = space.pinned("sequence_parallel") or (False, True)
    if model.has_experts:  # Megatron-LM's rule: experts take tokens that are split over tp
        return [own for own in pinned if own and divides]
    return [own for own in pinned if divides or not own]


def _bits(pinned: Pinned, ranks: int) -> Sequence[int]:
    """Return the bits of a collective; one rank alone has none, so that the default is left."""
    if ranks == 1:
        return (LOSSLESS,)
    return pinned or COMM_BITS


def shard_sizes(pinned: Pinned, ranks: int) -> list[int]:
    """Return the groups over which ZeRO states of `ranks` ranks may be sharded; 0 means all."""
    legal = [0, *divisors(ranks)[1:-1]]
    if pinned is None:
        return legal
    # the whole group by its number is another name of 0
    return [size for size in legal if size in pinned or (size == 0 and ranks in pinned)]


def micro_batch_legal(
    space: SpaceConfig, batch: int, num_micro_batches: int, choice: LayerStrategy
) -> bool:
    """Return whether the global batch divides into whole micro-batches of an allowed size."""
    size, rest = divmod(batch, num_micro_batches * choice.dp)
    return not rest and bool(space.only("micro_batch_size", [size]))
