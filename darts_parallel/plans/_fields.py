"""The fields of a `plan.json`, each read with a check of its own."""

from collections import Counter
from itertools import groupby, islice, pairwise
from typing import Any, NamedTuple

from darts_parallel.config import OFFLOADS, Share, Shares
from darts_parallel.errors import Entries, PlanError
from darts_parallel.problem import NodeOrder

_KINDS: dict[type, tuple[str, str]] = {
    int: ("a whole number", "1"),
    str: ("text", '"none"'),
    bool: ("true or false", "false"),
    list: ("a list", "[...]"),
}
LARGEST = 2**31 - 1
"""Upper limit of any number in a plan, beyond any number of devices or micro-batches."""
LARGEST_GROUP = 2**20
"""GPUs of a node group up to which ranks are read."""
MOST_SHOWN = 40
"""Characters of a wrong value that a message shows."""


class Fields(NamedTuple):
    """Fields of an object of a plan file."""

    data: Entries
    place: str = ""
    """Where the object stands in the file, for messages."""

    def read(self, key: str, kind: Any, minimum: int | None = None, default: Any = None) -> Any:
        """Read a field, checked.

        A missing field has the value `default`: older files lack the fields that have one.
        """
        name = f"{self.place}{key}"
        if key not in self.data:
            if default is not None:
                return default
            raise PlanError(
                f"plan: the field {name} is missing; try a plan.json as the command writes it."
            )
        value = self.data[key]
        boolean = isinstance(value, bool)
        if not isinstance(value, kind) or boolean != (kind is bool):
            rule, near = _KINDS[kind]
            raise PlanError(f"plan: {name}={_shortened(value)} must be {rule}; try {near}.")
        if kind is int and isinstance(value, int):
            _check_range(name, value, minimum)
        return value


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _check_range(name: str, value: int, minimum: int | None) -> None:
    if value > LARGEST:
        raise PlanError(f"plan: {name}={value} must be at most {LARGEST}; try {LARGEST}.")
    if minimum is not None and value < minimum:
        raise PlanError(f"plan: {name}={value} must be at least {minimum}; try {minimum}.")


def read_boundaries(data: Entries) -> tuple[int, ...]:
    """Return the first layer of every stage, and the end of the last stage."""
    spans = [_span(stage, index) for index, stage in enumerate(Fields(data).read("stages", list))]
    if not spans:
        raise PlanError("plan: stages=[] must list at least one stage; try one of all layers.")
    for (_, end), (first, _) in pairwise(spans):
        if end != first:
            raise PlanError(
                f"plan: a stage begins at layer {first}, which must be {end}; try {end}."
            )
    return (spans[0][0], *(end for _, end in spans))


def _span(stage: Any, index: int) -> tuple[int, int]:
    """Return the first layer of a stage and the one after its last."""
    span = stage.get("layers") if isinstance(stage, dict) else None
    numbers = [x for x in span if type(x) is int] if isinstance(span, list) else []
    if len(numbers) != 2 or numbers != span:
        raise PlanError(
            f"plan: stages[{index}].layers must be [first, end), got {span!r}; try [0, 1]."
        )
    return numbers[0], numbers[1]


def offload_of(stages: list[Entries], devices: tuple[int, ...]) -> Shares:
    """Read the shares in host memory of every device; empty where no stage of the file names one.

    Args:
        stages: Of the file; all stages of one device name equal shares.
        devices: Device of every stage.
    """
    found: dict[int, Share] = {}
    for index, (stage, device) in enumerate(zip(stages, devices, strict=True)):
        shares = stage.get("offload", {})
        if not isinstance(shares, dict):
            raise PlanError(
                f"plan: stages[{index}].offload={shares!r} must be an object; try "
                '{"activation": 0.0, "optimizer": 0.0}.'
            )
        own = (_share(shares, OFFLOADS[0], index), _share(shares, OFFLOADS[1], index))
        if found.setdefault(device, own) != own:
            near = dict(zip(OFFLOADS, found[device], strict=True))
            raise PlanError(
                f"plan: stages[{index}].offload={shares} must equal that of the other stages on "
                f"its device; try {near}."
            )
    given = tuple(found[device] for device in sorted(found))
    return given if any(map(any, given)) else ()


def _share(shares: Entries, kind: str, index: int) -> float:
    """Read the share of a kind of tensors that a stage keeps in host memory."""
    value = shares.get(kind, 0.0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= value <= 1.0:
        near = 1.0 if number and value > 1.0 else 0.0
        raise PlanError(
            f"plan: stages[{index}].offload.{kind}={value!r} must lie between 0 and 1; try {near}."
        )
    return float(value)


def node_order_of(data: Entries) -> NodeOrder:
    """Return the order of the nodes that the ranks of stages imply; empty for rank order.

    The sizes of the nodes stand in the file's `cluster`. A node whose ranks do not follow each other,
    or lie in unequal parts, makes no order: the check of the ranks refuses it. Chunks after the first
    of an interleaved stage repeat its ranks.
    """
    ranks: list[Any] = []
    for stage in data["stages"]:
        own = stage.get("ranks") if isinstance(stage, dict) else None
        if isinstance(own, list) and not stage.get("chunk"):
            ranks += own
    nodes = _ranks_of_nodes(data.get("cluster"))
    node_of = [number for number, own in enumerate(nodes) for _ in own]
    if not all(type(rank) is int and 0 <= rank < len(node_of) for rank in ranks):
        return ()
    order = [number for number, _ in groupby(node_of[rank] for rank in ranks)]
    places = Counter(order)
    left = [iter(own) for own in nodes]
    implied: list[int] = []
    for node in order:
        implied += islice(left[node], len(nodes[node]) // places[node])
    equal = implied == ranks and len(set(places.values())) <= 1
    return tuple(order) if equal and order != list(range(len(order))) else ()


def _ranks_of_nodes(cluster: Any) -> list[range]:
    """Return the ranks of every node; empty where the file does not say."""
    groups = cluster.get("nodes") if isinstance(cluster, dict) else None
    nodes: list[range] = []
    first = 0
    for group in groups if isinstance(groups, list) else []:
        count, gpus = _size_of(group)
        if not 0 < count * gpus <= LARGEST_GROUP:
            return []
        for _ in range(count):
            nodes.append(range(first, first + gpus))
            first += gpus
    return nodes


def _size_of(group: Any) -> tuple[int, int]:
    """Return nodes and GPUs per node of a node group of a file; zeros if they are no numbers."""
    if not isinstance(group, dict):
        return 0, 0
    count = group.get("count")
    gpus = group.get("gpus")
    if type(count) is not int or type(gpus) is not int:
        return 0, 0
    return count, gpus
