"""The search space: legal outer choices `(pp, num_micro_batches)` and legal strategies of a layer.

Illegal products never enter: `tp * dp * pp` is the number of devices by construction, and
`global_batch_size` is a multiple of `dp * num_micro_batches`. Pinned values are refused with the closest
valid one where they leave no plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from darts_parallel.config import (
    COMM_BITS,
    OFFLOADS,
    RECOMPUTE,
    Config,
    SpaceConfig,
    TrainingConfig,
)
from darts_parallel.errors import ConfigError, closest
from darts_parallel.plans._expert_degrees import expert_degrees, require_expert_pins
from darts_parallel.plans.degrees import (
    context_degrees,
    divisors,
    legal_pipeline_degrees,
    node_sizes,
    pipeline_units,
    refused_pin,
    tensor_degrees,
    virtual_stage_counts,
    widest_tensor_degree,
)
from darts_parallel.plans.legality import refuse_model
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.plans.trainers import job_facts, lacking, trainer_parts, trainer_runs
from darts_parallel.problem import (
    Cluster,
    MeasuredTimes,
    Model,
    Problem,
    node_orders,
    orders_are_all,
)
from darts_parallel.schedules import CLOSED_FORM, SEARCHED, find, usual_schedule

KEYS = ("pp", "virtual_stages", "tp", "cp", "dp", "num_micro_batches", "micro_batch_size")
USUALLY_ONE = ("virtual_stages", "cp")
Combination = dict[str, int]
Degrees = tuple[int, int, int, int, int]
"""`(pp, virtual_stages, tp, cp, dp)`."""


def require_legal_pins(
    space: SpaceConfig,
    model: Model,
    cluster: Cluster,
    training: TrainingConfig,
    tensor: Sequence[int],
) -> None:
    """Check every pinned value alone, then all of them together.

    Args:
        tensor: Tensor-parallel degrees to try.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    devices, batch = cluster.num_devices, training.global_batch_size
    degrees = list(_degrees(space, model, cluster, training.seq_len, tensor))
    filled = (
        f"{'dp * tp * pp' if space.pinned('cp') == (1,) else 'dp * cp * tp * pp'} = {devices} GPUs"
    )
    legal = list(_combinations(degrees, batch))
    if not legal:
        raise ConfigError(
            f"training.global_batch_size={batch} must be a multiple of some dp with {filled}; "
            f"try {_nearest_batch(degrees, batch, {})}."
        )
    pins = {key: values for key in KEYS if (values := space.pinned(key)) is not None}
    for key in USUALLY_ONE:
        if pins.get(key) == (1,):  # the default: not worth a word
            del pins[key]
    rules = _rules(pipeline_units(model), devices, training, filled)
    for key, values in pins.items():
        members = sorted({combination[key] for combination in legal})
        # a list allows values, and the illegal ones among them never enter; one legal value is enough
        if not set(values) & set(members):
            raise refused_pin(key, values[0], rules[key], members)
    if not any(_agrees(combination, pins) for combination in legal):
        near = _nearest_batch(degrees, batch, pins)
        raise ConfigError(
            _contradiction(pins, legal, filled.replace("=", "must be the"), batch, near)
        )


def _rules(units: int, devices: int, training: TrainingConfig, filled: str) -> dict[str, str]:
    """Return what a pinned degree must do, by its key."""
    batch = f"divide training.global_batch_size={training.global_batch_size}"
    return {
        "pp": f"divide the {devices} GPUs and leave every stage one of the {units} layers",
        "tp": f"divide the heads, the KV heads, the GPUs of a node and the {devices} GPUs",
        "virtual_stages": f"leave each of pp * virtual_stages stages one of the {units} layers, with pp > 1 "
        "and num_micro_batches a multiple of pp",
        "cp": f"divide the {devices} GPUs and, twice where attention is causal, training.seq_len="
        f"{training.seq_len}",
        "dp": f"{batch} and make {filled}",
        "num_micro_batches": batch,
        "micro_batch_size": batch,
    }


def require_pure_stages(model: Model, cluster: Cluster) -> None:
    """Refuse a cluster whose nodes cannot be ordered into equal stages of one node type each.

    Errors:
        ConfigError: names the GPUs of the node types and the closest valid number of nodes.
    """
    if legal_pipeline_degrees(model, cluster):
        return
    sizes = [
        f"{n} x {cluster.groups[kind].device.name}" for kind, n in cluster.type_devices.items()
    ]
    raise ConfigError(
        f"cluster.nodes of {cluster.name} ({', '.join(sizes)}) must divide into equal stages of one node "
        f"type each, at most {pipeline_units(model)} for model={model.config.name}; "
        f"try {_nearest_nodes(model, cluster)}."
    )


def _nearest_nodes(model: Model, cluster: Cluster) -> str:
    """Return the smallest change of one node group that gives a legal pipeline degree."""
    groups = cluster.groups
    places = ((change, i) for i in range(len(groups)) for change in range(-64, 65) if change)
    changes = sorted(places, key=lambda place: abs(place[0]))
    for change, index in changes:
        count = groups[index].count + change
        if count < 1:
            continue
        changed = (*groups[:index], replace(groups[index], count=count), *groups[index + 1 :])
        if legal_pipeline_degrees(model, replace(cluster, groups=changed)):
            return f"cluster.nodes[{index}].count={count}"
    return "node groups of equal numbers of GPUs"


def _combinations(degrees: Sequence[Degrees], batch: int) -> Iterator[Combination]:
    """Yield every legal combination of the outer degrees, pins left aside."""
    for (pp, virtual_stage, tp, cp, dp), m in product(degrees, divisors(batch)):
        if batch % (dp * m) == 0 and (virtual_stage == 1 or m % pp == 0):
            yield dict(
                zip(KEYS, (pp, virtual_stage, tp, cp, dp, m, batch // (dp * m)), strict=True)
            )


def _degrees(
    space: SpaceConfig, model: Model, cluster: Cluster, seq_len: int, tensor: Sequence[int]
) -> Iterator[Degrees]:
    """Yield all degrees that fill the devices; rare ones if asked for."""
    all_cp = space.pinned("cp") != (1,)
    contexts = context_degrees(model, cluster.num_devices, seq_len) if all_cp else [1]
    for pp, tp, cp in product(legal_pipeline_degrees(model, cluster), tensor, contexts):
        dp, rest = divmod(cluster.num_devices // pp, tp * cp)
        if dp and not rest:
            several = space.pinned("virtual_stages") != (1,)
            stages = virtual_stage_counts(space, model, pp) if several else [1]
            yield from ((pp, v, tp, cp, dp) for v in stages)


def _agrees(combination: Combination, pins: dict[str, Any], besides: str = "") -> bool:
    return all(combination[key] in values for key, values in pins.items() if key != besides)


def _contradiction(
    pins: dict[str, Any], legal: list[Combination], filled: str, batch: int, near: int | None
) -> str:
    """Name the single change of a pin, or of the batch (to `near`), that helps pins which are legal alone."""
    ways = []
    for key, values in pins.items():
        members = sorted({c[key] for c in legal if _agrees(c, pins, besides=key)})
        if members:
            ways.append(f"space.{key}={closest(values[0], members)}")
    if near is not None:
        ways.append(f"training.global_batch_size={near}")
    names = ", ".join(f"space.{key}={_show(values)}" for key, values in pins.items())
    return (
        f"{names} contradict each other: {filled} and "
        f"dp * num_micro_batches * micro_batch_size must be training.global_batch_size={batch}; "
        f"try {' or '.join(ways) or 'pin fewer of them'}."
    )


def _show(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else f"[{','.join(map(str, values))}]"


def _nearest_batch(filling: Sequence[Degrees], batch: int, pins: dict[str, Any]) -> int | None:
    """Return the closest global batch size that the pins allow; None where no batch helps."""
    nearest = []
    for pp, virtual_stage, tp, cp, dp in filling:
        degrees = {"pp": pp, "virtual_stages": virtual_stage, "tp": tp, "cp": cp, "dp": dp}
        if not all(degrees[key] in pins[key] for key in degrees if key in pins):
            continue
        counts, sizes = (
            pins.get("num_micro_batches", (None,)),
            pins.get("micro_batch_size", (None,)),
        )
        for m, size in product(counts, sizes):
            if virtual_stage > 1 and (m or pp) % pp:
                continue
            unit = dp * (m or (pp if virtual_stage > 1 else 1)) * (size or 1)
            nearest.append(unit if m and size else max(round(batch / unit), 1) * unit)
    return closest(batch, nearest) if nearest else None


STARTS = ("zero_bubble_h1", "zero_bubble_v")
"""Schedules of every placement, whose plans a search of orders changes where the space lists none alike."""


@dataclass(frozen=True)
class OuterSpace:
    """All outer choices that share `pp` and the nodes' order, and the strategies that a layer may take."""

    pp: int
    num_micro_batches: tuple[int, ...]
    choices: tuple[LayerStrategy, ...]
    cp: int = 1
    """Context-parallel degree."""
    virtual_stages: int = 1
    """Model chunks of a stage."""
    node_order: tuple[int, ...] = ()
    """Nodes along the pipeline; empty: in rank order."""
    schedule: str | None = None
    """Pipeline schedule; None: `cost.schedule`, or `interleaved` where a device holds several stages."""
    offload: tuple[str, ...] = ()
    """Tensors of which a share may lie in host memory (`OFFLOADS`)."""
    shares: tuple[tuple[float, float], ...] = ()
    """Those shares on every device where they are given; empty: the least that fit."""


def plan_space(plan: Plan) -> OuterSpace:
    """Return the smallest space that holds a plan: its own strategies."""
    choices = tuple(dict.fromkeys(plan.layers))
    return OuterSpace(
        plan.pp,
        (plan.num_micro_batches,),
        choices,
        plan.cp,
        plan.virtual_stages,
        node_order=plan.node_order,
        schedule=plan.schedule,
        offload=OFFLOADS if plan.offload else (),
        shares=plan.offload,
    )


def outer_spaces(problem: Problem) -> list[OuterSpace]:
    """Return all legal outer choices: pipeline and context-parallel degree, stages a device, nodes' order.

    Interleaved stages need a number of micro-batches that pp divides (Megatron-LM's rule).

    Errors:
        ConfigError: the pins leave no legal product; names the key and the nearest value.
        UnsupportedError: `space.executable` holds for a model that cannot run.
    """
    config, model, cluster, training = (
        problem.config,
        problem.model,
        problem.cluster,
        problem.training,
    )
    space = config.space
    if space.executable:
        refuse_model(model, training)
    require_pure_stages(model, cluster)
    tensor, _ = tensor_degrees(space, model, cluster, problem.measured)
    require_legal_pins(space, model, cluster, training, tensor)
    require_expert_pins(space, model, cluster)
    result, job = list[OuterSpace](), job_facts(model, training, problem.software)
    rules = config.abilities(space.trainer) if space.trainer else None
    runs = partial(trainer_runs, rules, job) if rules else None
    for whole in _whole_spaces(space, model, cluster, training.seq_len, tensor):
        outer = _legal_part(whole, space, training.global_batch_size, node_sizes(cluster), runs)
        if outer is not None:
            orders = node_orders(cluster, outer.pp, space.node_orders)
            parts = trainer_parts(config, outer.choices)
            result += [replace(outer, choices=c, node_order=o) for c in parts for o in orders]
    if not result and model.has_experts and space.trainer is None:
        raise ConfigError(
            f"space.ep={space.ep} and space.etp={space.etp} must have a product that divides the GPUs of a "
            "stage that the other pins allow, with sequence parallelism where tp is above 1 and shard_size=0;"
            " try space.ep=null."
        )
    _require_shard_sizes(space.pinned("shard_size"), result)
    if not result:
        pin, why = f"schedules={space.schedules}", ""
        if rules:
            free = Problem.from_config(replace(config, space=replace(space, trainer=None)))
            pin, why = f"trainer={space.trainer}", lacking(rules, job, outer_spaces(free))
        raise ConfigError(
            f"space.{pin} runs no plan that the other pins of the space allow on "
            f"{cluster.num_devices} GPUs{why}; try space.{pin.partition('=')[0]}=null, or fewer pins."
        )
    return result


def _require_shard_sizes(pinned: tuple[int, ...] | None, spaces: list[OuterSpace]) -> None:
    """Refuse sharding groups that no choice of `spaces` has, next to which only ZeRO 0 would be left."""
    if pinned is None or 0 in pinned:
        return
    ranks = {choice.dp * space.cp for space in spaces for choice in space.choices}
    if any(1 < size <= number and number % size == 0 for size in pinned for number in ranks):
        return
    legal = sorted({size for number in ranks for size in divisors(number) if size > 1})
    other = f", or {closest(pinned[0], legal)}" if legal else ""
    raise ConfigError(
        f"space.shard_size={pinned[0] if len(pinned) == 1 else list(pinned)} must divide a data-parallel "
        f"degree that the other pins allow; try 0, which shards over all its ranks{other}."
    )


def left_out(
    config: Config, model: Model, cluster: Cluster, measured: MeasuredTimes | None
) -> tuple[str, ...]:
    """Name in clauses what a search without pins does not try although it is valid.

    A claim over the space holds without it.
    """
    found, space = [], config.space
    if tensor_degrees(space, model, cluster, measured)[1]:
        found.append(f"tp above {widest_tensor_degree(cluster)} (space.tp)")
    degrees = pipeline_degrees(space, model, cluster)
    if not all(orders_are_all(cluster, pp, space.node_orders) for pp in degrees):
        found.append("node orders that mix the types (space.node_orders)")
    if (
        config.search.method == "exact"
        and space.kind == "uniform"
        and space.pinned("virtual_stages") != (1,)
    ):
        found.append("unequal chunks of interleaved stages")
    return tuple(found)


def pipeline_degrees(space: SpaceConfig, model: Model, cluster: Cluster) -> list[int]:
    """Return the pipeline degrees that the pins allow."""
    return [pp for pp in legal_pipeline_degrees(model, cluster) if _allowed(space.pinned("pp"), pp)]


def schedule_choices(space: SpaceConfig, model: Model, pp: int) -> list[tuple[int, str | None]]:
    """Return stages a device and schedules that a pipeline of `pp` devices may have.

    A single device takes equally long whatever the order of passes: it has the schedule of one stage a device
    that holds the fewest micro-batches, of equals the first listed; a split one holds more of each.
    """
    pinned, named = space.pinned("virtual_stages"), space.pinned("schedules")
    if named is not None and SEARCHED in named:
        # a table of each placement, where the search of orders begins
        listed = [name for name in named if name != SEARCHED]
        first = STARTS if pp > 1 else (CLOSED_FORM,)
        like = {(find(name).chunks, find(name).folded) for name in listed}
        named = (
            *listed,
            *(name for name in first if (find(name).chunks, find(name).folded) not in like),
        )
    counts = virtual_stage_counts(space, model, pp)
    if named is None:
        return [
            (virtual_stage, None) for virtual_stage in counts if _allowed(pinned, virtual_stage)
        ]
    plain = [name for name in named if find(name).chunks == 1]
    if pp == 1:
        held = {name: find(name).in_flight(1, 2, 1)[0] for name in plain}
        whole, split = ([n for n in plain if find(n).split is kind] for kind in (False, True))
        least = [min(names, key=held.__getitem__) for names in (whole, split) if names]
        return [(1, name) for name in least if name == least[0] or held[name] < held[least[0]]]
    result: list[tuple[int, str | None]] = [(1, name) for name in plain]
    several = None if pinned == (1,) else pinned
    for name in named:
        fixed = find(name).chunks
        if fixed is None:
            result += [(count, name) for count in counts if count > 1 and _allowed(several, count)]
        elif fixed > 1 and pipeline_units(model) >= fixed * pp:
            result.append((fixed, name))
    return result


def _whole_spaces(
    space: SpaceConfig, model: Model, cluster: Cluster, seq_len: int, tensor: Sequence[int]
) -> Iterator[OuterSpace]:
    """Yield the outer choices that the pins allow, with all strategies of their layers."""
    offload = tuple(space.pinned("offload") or ())
    legal_cp = context_degrees(model, cluster.num_devices, seq_len)
    context = [cp for cp in legal_cp if _allowed(space.pinned("cp"), cp)]
    for pp, cp in product(pipeline_degrees(space, model, cluster), context):
        size = cluster.num_devices // pp
        degrees = [(tp, size // (tp * cp)) for tp in tensor if size % (tp * cp) == 0]
        experts = expert_degrees(space, model, cluster, size)
        choices = tuple(layer_choices(space, model, seq_len, degrees, experts, cp))
        for virtual_stages, schedule in schedule_choices(space, model, pp):
            yield OuterSpace(
                pp, (), choices, cp, virtual_stages, schedule=schedule, offload=offload
            )


def _legal_part(
    outer: OuterSpace,
    space: SpaceConfig,
    batch: int,
    nodes: Sequence[int],
    runs: Callable[[int, int, str, LayerStrategy], bool] | None,
) -> OuterSpace | None:
    """Return an outer choice with its strategies that `runs` and numbers of micro-batches; None without any.

    Args:
        nodes: GPUs of the nodes, every type of which must run some strategy.
    """
    name, pp = outer.schedule or usual_schedule(outer.virtual_stages), outer.pp
    order, pinned = find(name), space.pinned("num_micro_batches")
    listed = name if name in (space.schedules or [name]) else SEARCHED
    # what `refuse_unexecutable` says of split backward passes
    split = space.executable and pp > 1 and (order.split or SEARCHED in (space.schedules or ()))
    choices = tuple(
        choice
        for choice in outer.choices
        if (runs is None or runs(pp, outer.cp, listed, choice))
        and not (split and choice.zero_stage > 1)
    )
    if not all(any(admits(gpus, c) for c in choices) for gpus in nodes):
        return None
    counts = tuple(
        m
        for m in divisors(batch)
        if (pinned is None or m in pinned)
        and order.count_refusal(pp, m) is None
        and any(micro_batch_legal(space, batch, m, c) for c in choices)
    )
    return replace(outer, num_micro_batches=counts, choices=choices) if counts else None


def layer_choices(
    space: SpaceConfig,
    model: Model,
    seq_len: int,
    degrees: Sequence[tuple[int, int]],
    experts: Sequence[tuple[int, int]],
    cp: int,
) -> Iterator[LayerStrategy]:
    """Yield strategies of a layer with these `(tp, dp)` and `(ep, etp)`, without those that change nothing.

    A ZeRO stage above 0 and gradient bits need `dp * cp > 1`, sequence parallelism and tensor-parallel
    bits need `tp > 1`: otherwise they are other names of the same strategy.
    """
    stages = space.pinned("zero_stage") or (0, 1, 2, 3)
    recompute = space.pinned("recompute") or RECOMPUTE
    parallel = space.pinned("sequence_parallel") or (False, True)
    for tp, dp in degrees:
        if not (_allowed(space.pinned("tp"), tp) and _allowed(space.pinned("dp"), dp)):
            continue
        ranks = dp * cp
        # experts have replicas of their own, edp of them: the stages mean nothing where neither has any
        zero = [z for z in stages if ranks > 1 or (tp > 1 and model.has_experts) or z == 0] or [0]
        divides = tp > 1 and (not space.executable or seq_len % tp == 0)
        sequence = [s for s in parallel if divides or not s] or [False]
        if model.has_experts:  # Megatron-LM's rule: experts take tokens that are split over tp
            sequence = [s for s in sequence if s == (tp > 1)]
        tp_bits = (space.pinned("tp_comm_bits") or COMM_BITS) if tp > 1 else COMM_BITS[:1]
        grad_bits = (space.pinned("grad_comm_bits") or COMM_BITS) if ranks > 1 else COMM_BITS[:1]
        for z, r, s, b, g in product(zero, recompute, sequence, tp_bits, grad_bits):
            for shard in shard_sizes(space.pinned("shard_size"), ranks) if z else (0,):
                for ep, etp in experts if not shard or not model.has_experts else ():
                    yield LayerStrategy(tp, dp, z, r, s, b, g, shard, ep, etp)


def shard_sizes(pinned: tuple[int, ...] | None, ranks: int) -> list[int]:
    """Return the groups over which ZeRO states of `ranks` ranks may be sharded; 0 is all of them."""
    legal = [0, *(size for size in divisors(ranks) if 1 < size < ranks)]
    if pinned is None:
        return legal
    # the whole group by its number is another name of 0
    return [size for size in legal if size in pinned or (size == 0 and ranks in pinned)]


def micro_batch_legal(
    space: SpaceConfig, batch: int, num_micro_batches: int, choice: LayerStrategy
) -> bool:
    """Return whether the global batch divides into whole micro-batches of an allowed size."""
    size, rest = divmod(batch, num_micro_batches * choice.dp)
    return not rest and _allowed(space.pinned("micro_batch_size"), size)


def admits(gpus: int, choice: LayerStrategy) -> bool:
    """Return whether nodes of `gpus` GPUs run `choice`: tensor-parallel groups divide nodes or join them."""
    return gpus % choice.tp == 0 or choice.tp % gpus == 0


def _allowed(pinned: tuple[int, ...] | None, value: int) -> bool:
    return pinned is None or value in pinned
