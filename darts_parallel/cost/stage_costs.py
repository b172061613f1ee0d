"""The rule of a stage: what its layers cost in bytes and in seconds. Written once, read everywhere.

Bytes. A device holds, over the layers of all its stages,

    peak = sum(static + in_flight * activation) + max(working)

`static` are weights, gradients and optimizer state. `in_flight` counts the micro-batches whose
activations the layer's stage keeps. `working` exists only while a layer is computed, so only the
largest counts. `kept_bytes` is the summand. `device_bytes` reads plans of a table (torch);
`SegmentSums` reads every possible stage of an outer choice (numpy). `peak` fits a device within a
tolerance of `tolerances.py`.

Seconds. A stage needs for one micro-batch the `time` of its layers and the resharding between
neighbours in it. The message from the stage before is not part of it: only some schedules wait for
it.

Prefix sums make the sum over layers [i, j) a difference of two numbers.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.pipeline import summed
from darts_parallel.errors import Entries

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Index = NDArray[np.int64]
Numbers = TypeVar("Numbers", Array, Tensor)

COSTS_BY_CHOICE = ("time", "sync", "per_iteration", "static", "activation", "working")
"""Fields of `OuterCosts` that depend on the strategy of a layer."""


def kept_bytes(static: Numbers, activation: Numbers, in_flight: Numbers) -> Numbers:
    """Return the bytes that add up over the layers of a device; shapes broadcast.

    Args:
        static: Bytes whatever is in flight.
        activation: Bytes per micro-batch in flight.
        in_flight: Micro-batches that the layer's stage holds.
    """
    return static + in_flight * activation


def device_bytes(
    kept: Tensor,
    working: Tensor,
    devices: Tensor,
    pp: int,
) -> Tensor:
    """Return the peak bytes of every device of B plans, `(B, pp)`.

    Args:
        kept: `kept_bytes` of every layer, `(B, L)`.
        working: Working bytes of every layer, `(B, L)`.
        devices: Device of every layer, `(B, L)`.
    """
    return summed(kept, devices, pp) + largest_by_device(working, devices, pp)


def largest_by_device(working: Tensor, devices: Tensor, pp: int) -> Tensor:
    """Return the largest value of every device's layers, `(B, L)` to `(B, pp)`; 0 without a layer."""
    return working.new_zeros(len(working), pp).scatter_reduce(1, devices, working, "amax")


def prefix_sums(values: Array, zeros: int = 1) -> Array:
    """Return sums of the first values along the last axis, from 0: `(..., L)` to `(..., L + 1)`.

    The sum over layers [i, j) is the difference of the entries j and i. Of values between neighbours,
    with two zeros, `(..., L - 1)` to `(..., L + 1)`: the sum over the pairs inside layers [i, j) is the
    difference of the entries j and i + 1.
    """
    result = np.zeros((*values.shape[:-1], zeros + values.shape[-1]))
    np.cumsum(values, axis=-1, out=result[..., zeros:])
    return result


def segment_max(values: Array) -> Array:
    """Return maxima over layers [i, j): `(L, ...)` to `(L + 1, L + 1, ...)`; 0 where i >= j."""
    size = len(values)
    result = np.zeros((size + 1, size + 1, *values.shape[1:]))
    for i in range(size):
        np.maximum.accumulate(values[i:], axis=0, out=result[i, i + 1 :])
    return result


def equal_rows(features: Array) -> Index:
    """Return the class of every row, `(N,)`; rows of one class are equal bit by bit."""
    known: dict[bytes, int] = {}
    rows = np.ascontiguousarray(features)
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows])


@dataclass(frozen=True)
class OuterCosts:
    """One outer choice of a table as numpy arrays, with all strategies or a selection.

    Axes as in `CostTable`, without O; C counts the selected strategies.
    """

    num_micro_batches: int
    choices: Index
    """Index of every strategy in the table, `(C,)`."""
    layout: Index
    """Activation layout of every strategy, `(C,)`."""
    time: Array
    """Seconds of one micro-batch, `(Q, L, C)`."""
    sync: Array
    per_iteration: Array
    static: Array
    activation: Array
    working: Array
    reshard: Array
    p2p: Array
    capacity: Array
    """Bytes of every stage, `(K,)` (`CostTable.stage_capacity`)."""
    in_flight: Array
    """Micro-batches, `(K,)`."""
    stage_kind: Index
    boundary_kind: Index
    fused_to_previous: Bools
    kind_allowed: Bools
    """Strategies that each kind of stage can run, `(Q, C)`."""

    @property
    def pp(self) -> int:
        """Stages, K."""
        return len(self.stage_kind)

    @property
    def num_layers(self) -> int:
        """Layers, L."""
        return int(self.time.shape[1])

    @staticmethod
    def read(table: CostTable, outer: int, choices: Index | None = None) -> "OuterCosts":
        """Copy the legal strategies of outer choice `outer`; `choices` restricts them further."""
        allowed = np.flatnonzero(table.allowed[outer].numpy())
        if choices is not None:
            allowed = np.intersect1d(allowed, choices)
        whole = OuterCosts.whole(table, outer)
        names = (*COSTS_BY_CHOICE, "kind_allowed")
        rows = {name: getattr(whole, name)[..., allowed] for name in names}
        return replace(whole, choices=allowed, layout=whole.layout[allowed], **rows)

    @staticmethod
    def whole(table: CostTable, outer: int) -> "OuterCosts":
        """View outer choice `outer` with all strategies, legal or not; nothing is copied."""
        fields: Entries = {}
        for name in (*COSTS_BY_CHOICE, "reshard", "p2p", "in_flight"):
            fields[name] = getattr(table, name)[outer].detach().numpy()
        for name in ("layout", "stage_kind", "boundary_kind", "fused_to_previous"):
            fields[name] = getattr(table, name).numpy()
        if table.kind_allowed is None:
            shape = (table.forward.shape[1], len(table.choices))
            fields["kind_allowed"] = np.ones(shape, dtype=bool)
        else:
            fields["kind_allowed"] = table.kind_allowed.numpy()
        capacity = table.stage_capacity.detach().numpy()
        return OuterCosts(
            num_micro_batches=int(table.num_micro_batches[outer]),
            choices=np.arange(len(table.choices)),
            capacity=capacity,
            **fields,
        )

    @cached_property
    def layer_class(self) -> Index:
        """Class of every layer, `(L,)`: layers of a class cost the same under every strategy."""
        costs = [getattr(self, name) for name in COSTS_BY_CHOICE]
        features = np.concatenate([cost.reshape(-1, *cost.shape[-2:]) for cost in costs])
        return equal_rows(features.transpose(1, 0, 2))

    @cached_property
    def stage_signatures(self) -> tuple[list[tuple[int, float, float]], Index]:
        """Distinct (kind, micro-batches in flight, capacity), and the number of every stage's, `(K,)`."""
        columns = (self.stage_kind, self.in_flight, self.capacity)
        number: dict[tuple[int, float, float], int] = {}
        keys = zip(*(column.tolist() for column in columns), strict=True)
        of_stage = np.array([number.setdefault(key, len(number)) for key in keys])
        return list(number), of_stage


class SegmentSums:
    """Costs of stages of layers [i, j) of an outer choice, for X assignments of strategies to layers.

    Stages and layers are integers or arrays `(N,)`; answers have the shape `(X,)` or `(X, N)`.
    """

    def __init__(self, costs: OuterCosts, choices: Index) -> None:
        """Add up.

        Args:
            choices: Strategy of every layer, `(X, L)`; or `(X, 1)`, one strategy for all layers.
        """
        self.costs = costs
        layers = np.arange(costs.num_layers)
        layout = np.broadcast_to(costs.layout[choices], (len(choices), len(layers)))
        self._inside = prefix_sums(costs.reshard[:, layers[:-1], layout[:, :-1], layout[:, 1:]], 2)
        self._time = prefix_sums(costs.time[:, layers, choices])
        self._sync = prefix_sums(costs.sync[:, layers, choices])
        self._per_iteration = prefix_sums(costs.per_iteration[layers, choices])
        self._static = prefix_sums(costs.static[layers, choices])
        self._activation = prefix_sums(costs.activation[layers, choices])
        self._working = segment_max(costs.working[layers, choices].T)

    def seconds(self, stage: int | Index, first: int | Index, end: int | Index) -> Array:
        """Return the seconds of one micro-batch without the message from the stage before."""
        kind = self.costs.stage_kind[stage]
        layers = self._time[kind, :, end] - self._time[kind, :, first]
        inside = self._inside[kind, :, end] - self._inside[kind, :, first + 1]
        return (layers + inside).T

    def sync(self, stage: int | Index, first: int | Index, end: int | Index) -> Array:
        """Return the seconds of gradient synchronisation and optimizer."""
        kind = self.costs.stage_kind[stage]
        return (self._sync[kind, :, end] - self._sync[kind, :, first]).T

    def per_iteration(self, first: int | Index, end: int | Index) -> Array:
        """Return the seconds that are paid once an iteration."""
        return self._per_iteration[:, end] - self._per_iteration[:, first]

    def peak_bytes(self, stage: int | Index, first: int | Index, end: int | Index) -> Array:
        """Return the peak bytes of the stage alone on its device."""
        static = self._static[:, end] - self._static[:, first]
        activation = self._activation[:, end] - self._activation[:, first]
        kept = kept_bytes(static, activation, self.costs.in_flight[stage])
        return kept + self._working[first, end].T
