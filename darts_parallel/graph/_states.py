"""States of tensors on the axes of a mesh.

A state is a placement of a tensor and a placement of its gradient, on one axis:

    S0, S1, ...  both split in a dimension (DTensor's `Shard`)
    R            both whole (`Replicate`)
    R*           the tensor is whole, and every rank has a part of the sum that is its gradient (`Partial`)
    R*S          like `R*`; backward keeps a slice of the tensor and gathers it again
    P            the tensor is a sum over the ranks (`Partial`), and its gradient is whole
    P4, P8       like `P`; the sum is reduced with 4 or 8 bits
"""

REPLICATED, VARYING, SLICED, PARTIAL = "R", "R*", "R*S", "P"
State = tuple[str, ...]
"""A state on every axis of the mesh."""
Shape = tuple[int, ...]
Ranks = tuple[int, ...]
"""Ranks on every axis of the mesh."""
ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
REDUCE_SCATTER, ALL_TO_ALL = "reduce_scatter", "all_to_all"


def shard(dim: int) -> str:
    """Return the state of a tensor that is split in a dimension."""
    return f"S{dim}"


def is_split(placement: str) -> bool:
    """Return whether every rank of an axis has its part of a dimension."""
    return placement.startswith("S")


def is_sum(placement: str) -> bool:
    """Return whether the tensor is a sum over the ranks of an axis."""
    return placement.startswith(PARTIAL)


def forward_state(state: State) -> State:
    """Return the placements of a tensor on all axes: `S0`, `R` or `P`."""
    return tuple(REPLICATED if one.startswith(VARYING) else one for one in state)


def gradient_state(state: State) -> State:
    """Return the placements of the gradient of a tensor on all axes."""
    found = []
    for one in state:
        whole = REPLICATED if one.startswith(PARTIAL) else one
        found.append(PARTIAL if one.startswith(VARYING) else whole)
    return tuple(found)


def collective(source: str, target: str) -> str | None:
    """Return the collective from one placement to another; None where every rank has what it needs."""
    if source in (target, REPLICATED):
        return None
    if is_sum(source):
        return REDUCE_SCATTER if is_split(target) else ALL_REDUCE
    if target == PARTIAL:  # the rank's part is its share of the sum
        return None
    return ALL_GATHER if target == REPLICATED else ALL_TO_ALL


def local_shape(
    shape: Shape,
    state: State,
    ranks: Ranks,
) -> Shape:
    """Return the shape of a rank's part of a tensor."""
    sizes = list(shape)
    for one, count in zip(state, ranks, strict=True):
        if is_split(one):
            sizes[int(one[1:])] //= count
    return tuple(sizes)


def local_share(state: State, ranks: Ranks) -> float:
    """Return the share of a tensor that a rank keeps for backward."""
    parts = 1
    for one, count in zip(state, ranks, strict=True):
        if is_split(one) or one == SLICED:
            parts *= count
    return 1.0 / parts


def divides(
    shape: Shape,
    state: State,
    ranks: Ranks,
) -> bool:
    """Return whether the axes that split a dimension divide it evenly, all of them together.

    A tensor that lacks the dimension is not divided.
    """
    parts = dict.fromkeys(filter(is_split, state), 1)
    for one, count in zip(state, ranks, strict=True):
        if one in parts:
            parts[one] *= count
    for one, count in parts.items():
        dim = int(one[1:])
        if dim >= len(shape) or shape[dim] % count:
            return False
    return True


def axis_moves(source: State, target: State) -> list[tuple[int, str, str]]:
    """Return the moves from one placement to another, axis by axis: axis, old and new placement.

    Where two axes split one dimension, the later axis splits the parts of the earlier one, which may
    not change meanwhile. Where neither order of two axes avoids that, an axis is made whole first.
    """
    axes = [axis for axis, old in enumerate(source) if old != target[axis]]
    for order in (axes, axes[::-1]):
        now = list(source)
        moves = []
        for axis in order:
            old = now[axis]
            new = target[axis]
            now[axis] = new
            moves.append((axis, old, new))
            # it may not change what a later axis splits
            touched = {old, new}.intersection(now[axis + 1 :])
            if any(one.startswith("S") for one in touched):
                break
        else:
            return moves
    distinct = len({source[axis] for axis in axes[:2]}) > 1
    first = axes[0] if distinct else len(source) - 1
    middle = list(source)
    middle[first] = REPLICATED
    moves = axis_moves(tuple(middle), target)
    return [(first, source[first], REPLICATED), *moves]
