"""Pinned values of the search space: refused with the closest valid one where they leave no plan."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from darts_parallel.errors import ConfigError
from darts_parallel.plan.degrees import (
    context_degrees,
    divisors,
    legal_pipeline_degrees,
    pipeline_units,
    tensor_degrees,
    virtual_stage_counts,
)
from darts_parallel.problem import Problem

KEYS = ("pp", "virtual_stages", "tp", "cp", "dp", "num_micro_batches", "micro_batch_size")
USUALLY_ONE = ("virtual_stages", "cp")
Combination = dict[str, int]


def require_legal_pins(problem: Problem) -> None:
    """Check every pinned value alone, then all of them together.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    space, batch = problem.config.space, problem.training.global_batch_size
    legal = list(_combinations(problem, batch))
    if not legal:
        near = _nearest_batch(problem, batch, {})
        raise ConfigError(
            f"training.global_batch_size={batch} must be a multiple of some dp with {_product(problem)} = "
            f"{problem.cluster.num_devices} GPUs; try {near}."
        )
    pins = {key: values for key in KEYS if (values := space.pinned(key)) is not None}
    for key in USUALLY_ONE:
        if pins.get(key) == (1,):  # the default: not worth a word
            del pins[key]
    for key, values in pins.items():
        members = sorted({combination[key] for combination in legal})
        # a list allows values, and the illegal ones among them never enter; one legal value is enough
        if not set(values) & set(members):
            raise ConfigError(_one_pin(problem, key, values[0], members))
    if not any(_agrees(combination, pins) for combination in legal):
        raise ConfigError(_contradiction(problem, pins, legal))


def require_pure_stages(problem: Problem) -> None:
    """Refuse a cluster whose nodes cannot be ordered into equal stages of one node type each.

    Errors:
        ConfigError: names the GPUs of the node types and the closest valid number of nodes.
    """
    cluster, units = problem.cluster, pipeline_units(problem)
    if legal_pipeline_degrees(problem):
        return
    sizes = [f"{n} x {cluster.groups[kind].device.name}" for kind, n in cluster.type_devices.items()]
    raise ConfigError(
        f"cluster.nodes of {cluster.name} ({', '.join(sizes)}) must divide into equal stages of one node "
        f"type each, at most {units} for model={problem.model.config.name}; try {_nearest_nodes(problem)}."
    )


def _nearest_nodes(problem: Problem) -> str:
    """Return the smallest change of one node group that gives a legal pipeline degree."""
    groups, cluster = problem.cluster.groups, problem.cluster
    changes = sorted(
        ((d, i) for i in range(len(groups)) for d in range(-64, 65) if d), key=lambda x: abs(x[0])
    )
    for change, index in changes:
        count = groups[index].count + change
        if count < 1:
            continue
        changed = (*groups[:index], replace(groups[index], count=count), *groups[index + 1 :])
        if legal_pipeline_degrees(replace(problem, cluster=replace(cluster, groups=changed))):
            return f"cluster.nodes[{index}].count={count}"
    return "node groups of equal numbers of GPUs"


def _combinations(problem: Problem, batch: int) -> Iterator[Combination]:
    """Yield every legal combination of the outer degrees, pins left aside."""
    counts = divisors(batch)
    for pp, virtual_stage, tp, cp, dp in _degrees(problem):
        for m in counts:
            if batch % (dp * m) == 0 and (virtual_stage == 1 or m % pp == 0):
                yield dict(zip(KEYS, (pp, virtual_stage, tp, cp, dp, m, batch // (dp * m)), strict=True))


def _degrees(problem: Problem) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield every `(pp, virtual_stages, tp, cp, dp)` that fills the devices; rare ones if asked for."""
    space = problem.config.space
    contexts = [1] if space.pinned("cp") == (1,) else context_degrees(problem)
    for pp, tp, cp in product(legal_pipeline_degrees(problem), tensor_degrees(problem), contexts):
        dp, rest = divmod(problem.cluster.num_devices // pp, tp * cp)
        if dp and not rest:
            virtual_stage = (
                [1] if space.pinned("virtual_stages") == (1,) else virtual_stage_counts(problem, pp)
            )
            yield from ((pp, v, tp, cp, dp) for v in virtual_stage)


def _product(problem: Problem) -> str:
    """Return the product of the degrees, for messages."""
    return "dp * tp * pp" if problem.config.space.pinned("cp") == (1,) else "dp * cp * tp * pp"


def _agrees(combination: Combination, pins: dict[str, Any], besides: str = "") -> bool:
    return all(combination[key] in values for key, values in pins.items() if key != besides)


def _nearest(value: int, members: list[int]) -> int:
    return min(members, key=lambda member: (abs(member - value), member))


def _one_pin(problem: Problem, key: str, value: int, members: list[int]) -> str:
    devices, batch = problem.cluster.num_devices, problem.training.global_batch_size
    rules = {
        "pp": f"divide the {devices} GPUs and leave every stage one of the {pipeline_units(problem)} layers",
        "tp": f"divide the heads, the KV heads, the GPUs of a node and the {devices} GPUs",
        "virtual_stages": f"leave each of pp * virtual_stages stages one of the {pipeline_units(problem)} "
        "layers, with pp > 1 and num_micro_batches a multiple of pp",
        "cp": f"divide the {devices} GPUs and, twice where attention is causal, training.seq_len="
        f"{problem.training.seq_len}",
        "dp": f"divide training.global_batch_size={batch} and make {_product(problem)} = {devices} GPUs",
        "num_micro_batches": f"divide training.global_batch_size={batch}",
        "micro_batch_size": f"divide training.global_batch_size={batch}",
    }
    names = ", ".join(map(str, members[:12])) + (", ..." if len(members) > 12 else "")
    near = _nearest(value, members)
    return f"space.{key}={value} must {rules[key]} (legal: {names}); try {near}."


def _contradiction(problem: Problem, pins: dict[str, Any], legal: list[Combination]) -> str:
    """Name the single change of a pin, or of the batch, that helps pins which are legal alone."""
    devices, batch = problem.cluster.num_devices, problem.training.global_batch_size
    ways = []
    for key, values in pins.items():
        members = sorted({c[key] for c in legal if _agrees(c, pins, besides=key)})
        if members:
            ways.append(f"space.{key}={_nearest(values[0], members)}")
    near = _nearest_batch(problem, batch, pins)
    if near is not None:
        ways.append(f"training.global_batch_size={near}")
    names = ", ".join(f"space.{key}={_show(values)}" for key, values in pins.items())
    return (
        f"{names} contradict each other: {_product(problem)} must be the {devices} GPUs and "
        f"dp * num_micro_batches * micro_batch_size must be training.global_batch_size={batch}; "
        f"try {' or '.join(ways) or 'pin fewer of them'}."
    )


def _show(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else f"[{','.join(map(str, values))}]"


def _nearest_batch(problem: Problem, batch: int, pins: dict[str, Any]) -> int | None:
    """Return the closest global batch size that the pins allow; None where no batch helps."""
    nearest = []
    for pp, virtual_stage, tp, cp, dp in _degrees(problem):
        degrees = {"pp": pp, "virtual_stages": virtual_stage, "tp": tp, "cp": cp, "dp": dp}
        if not all(degrees[key] in pins[key] for key in degrees if key in pins):
            continue
        counts, sizes = pins.get("num_micro_batches", (None,)), pins.get("micro_batch_size", (None,))
        for m, size in product(counts, sizes):
            if virtual_stage > 1 and (m or pp) % pp:
                continue
            unit = dp * (m or (pp if virtual_stage > 1 else 1)) * (size or 1)
            nearest.append(unit if m and size else max(round(batch / unit), 1) * unit)
    return _nearest(batch, nearest) if nearest else None
