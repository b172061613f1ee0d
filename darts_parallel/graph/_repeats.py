"""Blocks that repeat: their equal operators choose together."""

from collections import Counter, defaultdict

from darts_parallel.graph.operators import (
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    ModuleGraph,
)

SMALLEST_BLOCK = 4
"""Operators from which on equal neighbours count as repeated blocks."""
Path = tuple[str, ...]


def repeated_keys(graph: ModuleGraph) -> dict[str, str]:
    """Return a name for every operator, equal for equal operators of blocks that repeat.

    Blocks repeat where modules that differ in an index of their path (`layers.0`, `layers.1`) run equal
    operators on equal shapes in equal order.
    """
    leaders = _leaders(graph)
    keys: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for op in graph.operators:
        counts[op.owner, op.op] += 1
        if op.op == PARAMETER:
            name = op.target.rpartition(".")[2]
        elif op.op in (CONSTANT, INPUT, OUTPUT):
            name = op.target
        else:
            name = str(counts[op.owner, op.op])
        path = tuple(op.owner.split("."))
        # with the indices of the first equal blocks
        owner = ".".join(leaders.get(path[:k], part) for k, part in enumerate(path, 1))
        keys[op.name] = f"{owner}:{op.op}:{name}"
    return keys


def _leaders(graph: ModuleGraph) -> dict[Path, str]:
    """Return the index of the first block that is equal to a block, by the block's path."""
    bodies: dict[Path, list[object]] = defaultdict(list)
    for op in graph.operators:
        if op.op == RELAY:  # the last block's output has one consumer less
            continue
        path = tuple(op.owner.split("."))
        shapes = tuple(graph.shapes(op.tensors))
        for k, part in enumerate(path, 1):
            if part.isdigit():
                own = path[k:], op.op, shapes
                bodies[path[:k]].append(own)
    first: dict[tuple[Path, str], str] = {}
    leaders: dict[Path, str] = {}
    for path, body in bodies.items():
        if len(body) >= SMALLEST_BLOCK:
            key = path[:-1], str(body)
            leaders[path] = first.setdefault(key, path[-1])
    return leaders
