"""Orders of the nodes along the pipeline, such that no stage mixes node types.

Nodes move in blocks: the fewest equal nodes that hold whole stages. Equal blocks are
interchangeable, so
that an order is a sequence of types. FASOP (HPDC'24) tries the circular shifts of equal nodes side
by side; where there are few distinct orders, all of them are tried here.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, permutations
from math import factorial, lcm, prod

from darts_parallel.errors import ConfigError
from darts_parallel.problem.cluster import Cluster, NodeOrder, Types

MOST_ORDERS = 24
"""Distinct orders up to which `auto` tries all of them; above, only blocks and their circular
shifts."""
MOST_ALL = 1024
"""Distinct orders up to which `all` is served: every one makes a cost table of its own."""
MOST_BLOCK_ORDERS = 24
"""Orders of whole types that are tried; there are as many as permutations of the types."""
Counts = dict[int, int]
"""Nodes or blocks by node type."""


def node_orders(cluster: Cluster, pp: int, mode: str) -> list[NodeOrder]:
    """Return the orders of the nodes for `pp` equal stages; the empty one stands for rank order.

    Args:
        mode: `all` distinct orders; `shifts`: equal nodes side by side, types in all orders, and
            their circular shifts; `adjacent`: without the shifts; `auto`: `all` where there are
            few, else `shifts`; `given`: rank order alone.

    Returns:
        Distinct orders without a mixed stage; none where there is no such order.

    Errors:
        ConfigError: `all` of more than `MOST_ALL`.
    """
    if cluster.homogeneous:
        return [()]
    if mode == "given":
        return [()] if cluster.stages_are_pure(pp) else []
    blocks = _blocks(cluster, pp)
    if blocks is None:
        return []
    size, counts = blocks
    distinct = _number_of_orders(counts)
    if mode == "all" and distinct > MOST_ALL:
        raise ConfigError(
            f"space.node_orders=all means {distinct:,} orders at pp={pp}, and must mean at most "
            f"{MOST_ALL:,}; try space.node_orders=auto."
        )
    if mode == "all" or (mode == "auto" and distinct <= MOST_ORDERS):
        sequences = list(_arrangements(counts))
    else:
        sequences = _side_by_side(counts, shifts=mode != "adjacent")
    return [_nodes(cluster, sequence, size) for sequence in sequences]


def order_inside_nodes(cluster: Cluster, pp: int) -> NodeOrder:
    """Return the order that gives every stage an equal part of each node; empty where there is none.

    Stages then send inside a node, and replicas lie on different nodes.
    """
    gpus = cluster.groups[0].gpus
    if pp == 1 or gpus % pp or cluster.one_domain or not cluster.homogeneous:
        return ()
    return tuple(range(len(cluster.node_types))) * pp


def lies_inside_nodes(order: NodeOrder) -> bool:
    """Return whether every stage has part of each node, as by `order_inside_nodes`."""
    return len(set(order)) < len(order)


def orders_are_all(cluster: Cluster, pp: int, mode: str) -> bool:
    """Return whether `node_orders` returns every distinct order, where nobody asked for fewer."""
    if cluster.homogeneous or mode != "auto":
        return True
    blocks = _blocks(cluster, pp)
    return blocks is None or _number_of_orders(blocks[1]) <= MOST_ORDERS


def _number_of_orders(counts: Counts) -> int:
    return factorial(sum(counts.values())) // prod(factorial(n) for n in counts.values())


def order_label(cluster: Cluster) -> str:
    """Return the nodes along the pipeline, e.g. `a100_40 × 1, a10 × 3`; empty for equal nodes."""
    if cluster.homogeneous:
        return ""
    types = cluster.node_types
    order = cluster.node_order or range(len(types))
    runs = [(kind, len(list(run))) for kind, run in groupby(types[node] for node in order)]
    return ", ".join(f"{cluster.groups[kind].device.name} × {count}" for kind, count in runs)


def _blocks(cluster: Cluster, pp: int) -> tuple[Counts, Counts] | None:
    """Return nodes per block and number of blocks by type; None if a block would be split."""
    stage = cluster.num_devices // pp
    nodes = Counter(cluster.node_types)
    size = {}
    for kind in cluster.types:
        gpus = cluster.groups[kind].gpus
        size[kind] = lcm(stage, gpus) // gpus
        if nodes[kind] % size[kind]:
            return None
    return size, {kind: nodes[kind] // size[kind] for kind in cluster.types}


def _arrangements(counts: Counts) -> Iterator[Types]:
    """Yield every distinct sequence of types with these counts, in lexicographic order."""
    if not any(counts.values()):
        yield ()
    for kind, count in counts.items():
        if count:
            for rest in _arrangements({**counts, kind: count - 1}):
                yield (kind, *rest)


def _side_by_side(counts: Counts, *, shifts: bool) -> list[Types]:
    """Return types in all orders, equal blocks side by side, and their circular shifts."""
    found: dict[Types, None] = {}
    for order in islice(permutations(counts), MOST_BLOCK_ORDERS):
        line = tuple(kind for kind in order for _ in range(counts[kind]))
        for first in range(len(line) if shifts else 1):
            found[line[first:] + line[:first]] = None
    return list(found)


def _nodes(cluster: Cluster, sequence: Sequence[int], size: Counts) -> NodeOrder:
    """Return the nodes in the order of a sequence of blocks; a type keeps its rank order."""
    left = {
        kind: iter([n for n, t in enumerate(cluster.node_types) if t == kind])
        for kind in cluster.types
    }
    order = tuple(next(left[kind]) for kind in sequence for _ in range(size[kind]))
    return () if order == tuple(range(len(order))) else order
