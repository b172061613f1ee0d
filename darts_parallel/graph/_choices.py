"""The choices of one operator on a mesh, with their seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from darts_parallel.config import LOSSLESS
from darts_parallel.graph._mesh import DeviceMeshSpec, Step
from darts_parallel.graph._prices import KernelGroups, Prices
from darts_parallel.graph._rules import Split, splits
from darts_parallel.graph._states import (
    ALL_REDUCE,
    PARTIAL,
    REPLICATED,
    SLICED,
    VARYING,
    Shape,
    State,
    divides,
    is_split,
    local_shape,
    shard,
)
from darts_parallel.graph.operators import (
    CONSTANT,
    OUTPUT,
    PARAMETER,
    RELAY,
    GraphOperator,
    ModuleGraph,
)

INDEXED = ("vocabulary", "experts", "groups")
"""Dimensions whose parts are looked up by a rank's index along one axis."""


@dataclass(frozen=True)
class OperatorChoice:
    """One way to split an operator over the mesh."""

    labels: tuple[str, ...]
    """Named dimension that every axis splits, `none` where it splits none."""
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    seconds: float
    """Forward and backward on a rank, collectives inside the operator included."""
    inner: tuple[Step, ...] = ()
    """Collectives inside the operator; all of them are forward."""

    @property
    def states(self) -> tuple[State, ...]:
        """States of inputs, then of outputs."""
        return self.inputs + self.outputs


@dataclass
class GraphJob:
    """A graph, a mesh, and what a plan may do."""

    graph: ModuleGraph
    mesh: DeviceMeshSpec
    width: int = 2
    """Bytes of a floating element."""
    memory: float | None = None
    """Bytes that states of parameters and kept tensors may take on a rank; None: any."""
    ends: str = "replicated"
    """Placement of the module's inputs and outputs.

    `replicated`; `free`: those of one shape share one placement, which may be a split (blocks that follow
    each other); `d1` splits dimension 1 of all of them.
    """
    bits: tuple[int, ...] = (LOSSLESS,)
    """Bits that a new sum may be reduced with, forward: state P4, label inner@4."""
    sliced: bool | None = None
    """Backward keeps slices of the inputs that split columns gather; None: it may where memory is given."""
    bucketed: bool = False
    """Gradients of weights travel with those of other blocks, once an iteration: they pay no latency."""

    @cached_property
    def kernels(self) -> KernelGroups:
        """Which operators share a kernel."""
        return KernelGroups(self.graph)

    @cached_property
    def prices(self) -> Prices:
        """Seconds of operators on a rank."""
        return Prices(self.kernels, self.mesh.device, self.width)

    def local_shapes(
        self,
        names: Sequence[str],
        states: Sequence[State],
    ) -> list[Shape]:
        """Return the shapes of a rank's parts of values."""
        pairs = zip(self.graph.shapes(names), states, strict=False)
        return [local_shape(shape, state, self.mesh.ranks) for shape, state in pairs]

    def operator_seconds(
        self,
        op: GraphOperator,
        inputs: Sequence[State],
        outputs: Sequence[State],
        training: bool = True,
    ) -> float:
        """Return the seconds of an operator in some states, backward too where it is `training`."""
        given = self.local_shapes(op.inputs, inputs)
        made = self.local_shapes(op.outputs, outputs)
        return self.prices.seconds(op, given, made, training)


def operator_choices(
    job: GraphJob,
    op: GraphOperator,
) -> list[OperatorChoice]:
    """Return the choices of an operator on all axes of a mesh, each in other states."""
    known: dict[tuple[State, ...], OperatorChoice] = {}
    by_axis = [_axis_splits(job, op, ranks) for ranks in job.mesh.ranks]
    for combined in product(*by_axis):
        by_tensor = zip(*(split.states for split in combined), strict=True)
        states = tuple(by_tensor) or ((),) * len(op.tensors)
        if states in known or not _is_possible(job, op, combined, states):
            continue
        given = states[: len(op.inputs)]
        made = states[len(op.inputs) :]
        inner = tuple(_loss_steps(job, op, combined))
        seconds = job.operator_seconds(op, given, made) + sum(map(job.mesh.seconds, inner))
        if op.is_end:  # one list for both: they may choose together
            given = made = states
        labels = tuple(split.label for split in combined)
        known[states] = OperatorChoice(labels, given, made, seconds, inner)
    return list(known.values())


def _is_possible(
    job: GraphJob,
    op: GraphOperator,
    combined: Sequence[Split],
    states: Sequence[State],
) -> bool:
    """Return whether the axes together divide all tensors, and give a rank the same parts of each."""
    pairs = zip(job.graph.shapes(op.tensors), states, strict=False)
    if not all(divides(shape, state, job.mesh.ranks) for shape, state in pairs):
        return False
    if len({split.label for split in combined}) == len(combined):
        return True
    # one dimension on both axes: a tensor without the parts of the first has not those of the second
    torn = any(is_split(second) and not is_split(first) for first, second in states)
    return not torn and combined[0].label not in INDEXED


def _alike(
    op: GraphOperator,
    label: str,
    state: str,
) -> Split:
    """Return the split with one state for all tensors."""
    return Split(label, (state,) * len(op.tensors))


def _axis_splits(
    job: GraphJob,
    op: GraphOperator,
    ranks: int,
) -> list[Split]:
    """Return an operator's splits over one axis, with no gradient where a tensor has none."""
    found = [_alike(op, "none", REPLICATED)]
    floating = job.graph.values[op.tensors[0]].floating
    if op.is_end:
        if job.ends != "replicated":
            found += _dimension_splits(job, op, ranks)
        demanded = [split for split in found if split.label == job.ends]
        found = demanded if demanded and floating else found
    elif op.op in (PARAMETER, RELAY):
        found += _dimension_splits(job, op, ranks)
        if op.op == RELAY:
            found.append(_alike(op, VARYING, VARYING))
            found += [_alike(op, PARTIAL, PARTIAL)] * floating
    elif op.op not in (CONSTANT, OUTPUT):
        found += _with_slices(job, op, splits(op, job.graph, ranks))
        if job.graph.gradients(op.outputs):
            found.append(_alike(op, "none*", VARYING))
            found += _lossy(job, op, found)
    values = [job.graph.values[name] for name in op.tensors]
    known = []
    for split in found:
        states = []
        for value, state in zip(values, split.states, strict=True):
            # no sum of gradients that a tensor has not
            states.append(state if state != VARYING or value.needs_grad else REPLICATED)
        known.append(Split(split.label, tuple(states)))
    return known


def _dimension_splits(
    job: GraphJob,
    op: GraphOperator,
    ranks: int,
) -> Iterator[Split]:
    """Yield the dimensions of an operator's first tensor that ranks divide evenly."""
    first = op.tensors[0]
    for d, size in enumerate(job.graph.values[first].shape):
        if size and size % ranks == 0:
            yield _alike(op, f"d{d}", shard(d))


def _with_slices(
    job: GraphJob,
    op: GraphOperator,
    found: list[Split],
) -> list[Split]:
    """Add the choices that keep a slice of a gathered input; with `sliced` they alone split columns."""
    allowed = job.memory is not None if job.sliced is None else job.sliced
    if not allowed or not _gathers_a_slice(job, op):
        return found
    gathered = [split for split in found if split.label == "columns"]
    if job.sliced:
        found = [split for split in found if split not in gathered]
    return found + [Split(one.label, (SLICED, *one.states[1:])) for one in gathered]


def _gathers_a_slice(
    job: GraphJob,
    op: GraphOperator,
) -> bool:
    """Return whether a linear operator keeps its input for backward, and ranks can share that input."""
    if op.op != "linear" or not job.graph.is_parameter(op.inputs[1]):
        return False
    x = job.graph.values[op.inputs[0]]
    kept = 0 in job.kernels.uses[op.name].kept
    return kept and x.elements % prod(job.mesh.ranks) == 0 and len(x.shape) > 1


def _lossy(
    job: GraphJob,
    op: GraphOperator,
    found: Sequence[Split],
) -> Iterator[Split]:
    """Yield the splits that make a sum, which is reduced with few bits as soon as it is made."""
    if len(op.outputs) > 1 or job.graph.values[op.outputs[0]].elements == 1:
        return
    for split, bits in product(found, job.bits):
        *given, made = split.states
        if made == PARTIAL and PARTIAL not in given and bits < LOSSLESS:
            yield Split(f"{split.label}@{bits}", (*given, f"{PARTIAL}{bits}"))


def _loss_steps(
    job: GraphJob,
    op: GraphOperator,
    combined: Sequence[Split],
) -> Iterator[Step]:
    """Yield the collectives inside a cross-entropy, in float32.

    Split by vocabulary: the rows' maxima, sums of exponentials and target logits. A mean over split rows:
    the number of targets that count.
    """
    if op.op != "cross_entropy_loss":
        return
    ranks = zip(job.mesh.ranks, combined, strict=True)
    parts = prod(count for count, split in ranks if split.label == "rows")
    """Ranks that share the rows."""
    rows = job.graph.values[op.inputs[1]].elements / parts
    for axis, split in enumerate(combined):
        if split.label == "vocabulary":
            yield from [Step(axis, ALL_REDUCE, 4.0 * rows)] * 3
        elif split.label == "rows" and op.argument("reduction", 1) == 1:
            yield Step(axis, ALL_REDUCE, 4.0)
