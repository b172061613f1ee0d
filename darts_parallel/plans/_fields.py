"""The fields of a `plan.json`, each read with a check of its own."""

from typing import Any

from darts_parallel.config import COMM_BITS, OFFLOADS
from darts_parallel.errors import PlanError

_KINDS: dict[type, tuple[str, str]] = {
    int: ("a whole number", "1"),
    str: ("text", '"none"'),
    bool: ("true or false", "false"),
    list: ("a list", "[...]"),
}
LARGEST = 2**31 - 1
"""Upper limit of any number in a plan: more devices or micro-batches than there can be."""


def field(
    data: dict[str, Any],
    key: str,
    kind: type,
    minimum: int | None = None,
    place: str = "",
    default: int | None = None,
) -> Any:
    """Read field `key` of `data`, which stands at `place` of the file, checked.

    A missing one takes `default`: older files lack the fields that have one.
    """
    name = f"{place}{key}"
    if key not in data and default is not None:
        return default
    if key not in data:
        raise PlanError(
            f"plan: the field {name} is missing; try a plan.json as the command writes it."
        )
    value = data[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        text = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
        rule, near = _KINDS[kind]
        raise PlanError(f"plan: {name}={text} must be {rule}; try {near}.")
    if type(value) is int and value > LARGEST:
        raise PlanError(f"plan: {name}={value} must be at most {LARGEST}; try {LARGEST}.")
    if minimum is not None and type(value) is int and value < minimum:
        raise PlanError(f"plan: {name}={value} must be at least {minimum}; try {minimum}.")
    return value


def stage_span(stage: Any, index: int) -> tuple[int, int]:
    """Return the first layer of a stage and the one after its last."""
    span = stage.get("layers") if isinstance(stage, dict) else None
    if not isinstance(span, list) or len(span) != 2 or not all(type(x) is int for x in span):
        raise PlanError(
            f"plan: stages[{index}].layers must be [first, end), got {span!r}; try [0, 1]."
        )
    return span[0], span[1]


def comm_bits(layer: dict[str, Any], key: str, place: str) -> int:
    """Return the bits of a collective of the layer at `place`; older files have none."""
    bits = int(field(layer, key, int, place=place, default=max(COMM_BITS)))
    if bits not in COMM_BITS:
        near = min(COMM_BITS, key=lambda legal: abs(legal - bits))
        legal = ", ".join(map(str, COMM_BITS))
        raise PlanError(f"plan: {place}{key}={bits} must be one of {legal}; try {near}.")
    return bits


def offload_of(
    stages: list[dict[str, Any]], devices: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Read the shares in host memory of every device; empty where no stage of the file names one.

    Args:
        stages: Of the file; those of one device name equal shares.
    """
    found: dict[int, tuple[float, float]] = {}
    for index, (stage, device) in enumerate(zip(stages, devices, strict=True)):
        shares = stage.get("offload", {})
        if not isinstance(shares, dict):
            raise PlanError(
                f"plan: stages[{index}].offload={shares!r} must be an object; try "
                '{"activation": 0.0, "optimizer": 0.0}.'
            )
        values = [shares.get(kind, 0.0) for kind in OFFLOADS]
        for kind, value in zip(OFFLOADS, values, strict=True):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0.0 <= value <= 1.0
            ):
                near = min(max(value, 0.0), 1.0) if isinstance(value, int | float) else 0.0
                raise PlanError(
                    f"plan: stages[{index}].offload.{kind}={value!r} must lie between 0 and 1; try "
                    f"{near if near == near else 0.0}."
                )
        own = (float(values[0]), float(values[1]))
        if found.setdefault(device, own) != own:
            raise PlanError(
                f"plan: stages[{index}].offload={shares} must equal that of the other stages on its device; "
                f"try {dict(zip(OFFLOADS, found[device], strict=True))}."
            )
    given = tuple(found[device] for device in sorted(found))
    return given if any(value > 0 for pair in given for value in pair) else ()


LARGEST_NODE = 2**20
"""GPUs of a plan file's cluster up to which its ranks are read."""


def node_order_of(data: dict[str, Any]) -> tuple[int, ...]:
    """Return the order of the nodes that the ranks of a plan file's stages imply; empty for rank order.

    The sizes of the nodes stand in the file's `cluster`. Ranks that tear a node apart are no order: they
    are left to the check of the ranks. Chunks after the first of an interleaved stage repeat its ranks.
    """
    first_lap = [s for s in data["stages"] if isinstance(s, dict) and not s.get("chunk")]
    lists = [stage.get("ranks") for stage in first_lap]
    ranks = [rank for own in lists if isinstance(own, list) for rank in own]
    nodes = _first_ranks(data.get("cluster"))
    order: list[int] = []
    position = 0
    while nodes and position < len(ranks):
        node, gpus = (
            nodes.get(ranks[position], (-1, 0)) if type(ranks[position]) is int else (-1, 0)
        )
        if node < 0 or ranks[position : position + gpus] != [
            ranks[position] + i for i in range(gpus)
        ]:
            return ()
        order.append(node)
        position += gpus
    return () if order == list(range(len(order))) else tuple(order)


def _first_ranks(cluster: Any) -> dict[int, tuple[int, int]]:
    """Return the number and GPUs of every node by its first rank; empty where the file does not say."""
    groups = cluster.get("nodes") if isinstance(cluster, dict) else None
    nodes: dict[int, tuple[int, int]] = {}
    first = 0
    for group in groups if isinstance(groups, list) else []:
        count, gpus = (
            group.get(key) if isinstance(group, dict) else None for key in ("count", "gpus")
        )
        if type(count) is not int or type(gpus) is not int or not 0 < count * gpus <= LARGEST_NODE:
            return {}
        for _ in range(count):
            nodes[first] = (len(nodes), gpus)
            first += gpus
    return nodes
