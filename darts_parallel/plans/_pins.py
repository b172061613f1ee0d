"""Refuse pinned degrees that leave no plan, and name the closest valid value."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from darts_parallel.config import SpaceConfig, TrainingConfig, as_yaml
from darts_parallel.errors import ConfigError, closest
from darts_parallel.plans.degrees import (
    context_degrees,
    divisors,
    legal_pipeline_degrees,
    pipeline_units,
    refused_pin,
    virtual_stage_counts,
)
from darts_parallel.problem import Cluster, Model

USUALLY_ONE = ("virtual_stages", "cp")
MOST_NODE_CHANGES = 64
"""Nodes more or fewer that an advice looks at."""
UNLIKE = ", whose nodes are alike: data and tensor parallelism over unlike nodes are not searched"
Pins = dict[str, tuple[int, ...]]
"""Values that the user allows, by key of `Combination`."""


class Combination(NamedTuple):
    """Degrees whose product is the number of devices, and a division of the global batch by them."""

    pp: int
    virtual_stages: int
    tp: int
    cp: int
    dp: int
    num_micro_batches: int = 0
    """0, as the next one: not known."""
    micro_batch_size: int = 0


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
    batch = training.global_batch_size
    degrees = list(_degrees(space, model, cluster, training.seq_len, tensor))
    factors = "dp * tp * pp" if space.pinned("cp") == (1,) else "dp * cp * tp * pp"
    devices = f"{cluster.num_devices} GPUs"
    legal = list(_combinations(degrees, batch))
    if not legal:
        raise ConfigError(
            f"training.global_batch_size={batch} must be a multiple of some dp with "
            f"{factors} = {devices}; try {_nearest_batch(degrees, batch, {})}."
        )
    pins = _pins(space)
    rules = _rules(pipeline_units(model), devices, training, f"{factors} = {devices}")
    if not cluster.homogeneous:
        rules["pp"] += UNLIKE
    if splits_sequence(space, model):
        rules["tp"] += f", and training.seq_len={training.seq_len} (sequence parallelism)"
    for key, values in pins.items():
        members = sorted({getattr(combination, key) for combination in legal})
        # a list may have illegal values, which never enter the space; one legal value is enough
        if not set(values) & set(members):
            possible = _possible(key, pins, legal) or members
            other = ""
            if values[0] in {getattr(own, key) for own in degrees}:
                if key != "dp":
                    rules[key] = f"leave a dp that divides training.global_batch_size={batch}"
                if near := _nearest_batch(degrees, batch, pins):
                    other = f" or training.global_batch_size={near}"
            raise refused_pin(key, values[0], rules[key], possible, other)
    if not any(_agrees(combination, pins) for combination in legal):
        ways = _ways_out(pins, legal, _nearest_batch(degrees, batch, pins))
        names = ", ".join(f"space.{key}={as_yaml(getattr(space, key))}" for key in pins)
        raise ConfigError(
            f"{names} contradict each other: {factors} must be the {devices} and "
            f"dp * num_micro_batches * micro_batch_size must be training.global_batch_size={batch} (virtual "
            f"stages want a multiple of pp micro-batches); try {ways}."
        )


def splits_sequence(space: SpaceConfig, model: Model) -> bool:
    """Return whether all tensor-parallel layers must be sequence-parallel: by a pin, or for experts."""
    return model.has_experts or space.pinned("sequence_parallel") == (True,)


def _pins(space: SpaceConfig) -> Pins:
    """Return the pinned values, without the default of degrees that are usually 1."""
    pins: Pins = {}
    for key in Combination._fields:
        values = space.pinned(key)
        unsaid = key in USUALLY_ONE and values == (1,)
        if values is not None and not unsaid:
            pins[key] = values
    return pins


def _rules(units: int, devices: str, training: TrainingConfig, filled: str) -> dict[str, str]:
    """Return the rule of every pinned degree, by its key."""
    batch = f"divide training.global_batch_size={training.global_batch_size}"
    return {
        "pp": f"divide the {devices} and leave every stage one of the {units} layers",
        "tp": f"divide the heads, the KV heads, the MLP width, the {devices}, and a node or be whole nodes",
        "virtual_stages": f"leave each of pp * virtual_stages stages one of the {units} layers, "
        "with pp > 1 and num_micro_batches a multiple of pp",
        "cp": f"divide the {devices} and, twice where attention is causal, "
        f"training.seq_len={training.seq_len}",
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
        f"{count} x {cluster.groups[kind].device.name}"
        for kind, count in cluster.type_devices.items()
    ]
    raise ConfigError(
        f"cluster.nodes of {cluster.name} ({', '.join(sizes)}) must divide into equal stages of "
        f"one node type each, at most {pipeline_units(model)} for model={model.config.name}; "
        f"try {_nearest_nodes(model, cluster)}."
    )


def _nearest_nodes(model: Model, cluster: Cluster) -> str:
    """Return the smallest change of one node group that gives a legal pipeline degree."""
    places = product(range(1, MOST_NODE_CHANGES + 1), range(len(cluster.groups)), (-1, 1))
    for change, index, sign in places:
        group = cluster.groups[index]
        count = group.count + sign * change
        if count < 1:
            continue
        groups = list(cluster.groups)
        groups[index] = replace(group, count=count)
        if legal_pipeline_degrees(model, replace(cluster, groups=tuple(groups))):
            return f"cluster.nodes[{index}].count={count}"
    return "node groups of equal numbers of GPUs"


def _combinations(degrees: Sequence[Combination], batch: int) -> Iterator[Combination]:
    """Yield every legal combination of the outer degrees, pins left aside."""
    for filling, count in product(degrees, divisors(batch)):
        size, rest = divmod(batch, filling.dp * count)
        whole_groups = filling.virtual_stages == 1 or count % filling.pp == 0
        if whole_groups and not rest:
            yield filling._replace(num_micro_batches=count, micro_batch_size=size)


def _degrees(
    space: SpaceConfig, model: Model, cluster: Cluster, seq_len: int, tensor: Sequence[int]
) -> Iterator[Combination]:
    """Yield degrees whose product is the device count."""
    contexts = [1]
    if space.pinned("cp") != (1,):
        contexts = context_degrees(model, cluster.num_devices, seq_len)
    one_chunk = space.pinned("virtual_stages") == (1,)
    for pp, tp, cp in product(legal_pipeline_degrees(model, cluster), tensor, contexts):
        dp, rest = divmod(cluster.num_devices // pp, tp * cp)
        if rest or not dp:
            continue
        counts = [1] if one_chunk else virtual_stage_counts(space, model, pp)
        for virtual_stages in counts:
            yield Combination(pp, virtual_stages, tp, cp, dp)


def _agrees(record: Combination, pins: Pins, besides: str = "") -> bool:
    """Return whether the fields of a record have pinned values, all but one key."""
    return all(getattr(record, key) in pins[key] for key in pins if key != besides)


def _possible(key: str, pins: Pins, legal: Sequence[Combination]) -> list[int]:
    """Return the values of a key in combinations that agree with the pins of all other keys."""
    return sorted({getattr(c, key) for c in legal if _agrees(c, pins, besides=key)})


def _ways_out(pins: Pins, legal: Sequence[Combination], batch: int | None) -> str:
    """Name the single changes of a pin, or of the global batch, that help pins which contradict.

    Args:
        batch: Closest global batch size that agrees with the pins; None: there is none.
    """
    ways = []
    for key, values in pins.items():
        if members := _possible(key, pins, legal):
            ways.append(f"space.{key}={closest(values[0], members)}")
    if batch is not None:
        ways.append(f"training.global_batch_size={batch}")
    return " or ".join(ways) or "pin fewer of them"


def _nearest_batch(filling: Sequence[Combination], batch: int, pins: Pins) -> int | None:
    """Return the closest global batch size that the pins allow; None where no batch helps."""
    of_degrees = dict(pins)
    counts = of_degrees.pop("num_micro_batches", (0,))
    sizes = of_degrees.pop("micro_batch_size", (0,))
    nearest = []
    for degrees, count, size in product(filling, counts, sizes):
        group = degrees.pp if degrees.virtual_stages > 1 else 1
        if not _agrees(degrees, of_degrees) or count % group:
            continue
        unit = degrees.dp * (count or group) * (size or 1)
        times = 1 if count and size else max(round(batch / unit), 1)
        nearest.append(times * unit)
    return closest(batch, nearest) if nearest else None
