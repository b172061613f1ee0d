"""The best order of passes for fixed stages, as a mixed-integer programme (Qi et al. 2023, arXiv 2401.10241).

Appendix G there: ends of passes are numbers, a binary says which of two passes of a device comes first, and
the makespan is made small within a number of micro-batches that each device may hold. Solved by HiGHS (scipy,
extra `rivals`), for small pipelines: it tells how far a schedule by rule is from the best order of its own
stages. Micro-batches keep their order within a kind of pass, which loses nothing, since they are equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from darts_parallel.schedules import Operation

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FixedStages:
    """One pipeline whose stages are decided; S stages, one micro-batch each."""

    forward: Floats
    """Seconds, `(S,)`."""
    backward: Floats
    """Of the gradient of the input, `(S,)`."""
    weight: Floats
    """Of the weights' gradient, `(S,)`."""
    message: Floats
    """From a stage to the next, one way, `(S - 1,)`."""
    device: tuple[int, ...]
    """Of every stage."""
    after: Floats
    """Seconds that every device needs when its passes are done, `(pp,)`."""
    held: Floats
    """What a micro-batch holds of a stage from its forward to its weights' gradient, `(S,)`."""
    room: Floats
    """Most that every device may hold, `(pp,)`."""
    num_micro_batches: int


@dataclass(frozen=True)
class BestOrder:
    """What the programme found."""

    seconds: float
    """Of the best order; infinite where none was found in time."""
    bound: float
    """No order is faster."""


def best_order(stages: FixedStages, seconds: float, known: float) -> BestOrder:
    """Return the seconds of the best order of passes.

    Args:
        stages: What is fixed.
        seconds: After which the solver stops.
        known: Seconds of an order that is known, an upper bound.
    """
    model = _Programme(stages, known)
    matrix = csr_array((model.values, (model.rows, model.columns)), shape=(len(model.lower), model.size))
    # seconds in shares of the known order, so that the solver's tolerances mean something
    found = milp(
        np.eye(1, model.size)[0],
        constraints=LinearConstraint(matrix, np.array(model.lower), np.inf),
        integrality=np.arange(model.size) > len(model.number),
        bounds=Bounds(0.0, 1.0),
        options={"time_limit": seconds, "mip_rel_gap": 1e-5},
    )
    bound = found.mip_dual_bound
    reached = known * float(found.x[0]) if found.x is not None else np.inf
    return BestOrder(reached, known * float(bound) if bound is not None else 0.0)


class _Programme:
    """Rows of `matrix @ x >= lower`; x holds the makespan, the ends of all passes, and the binaries."""

    def __init__(self, stages: FixedStages, known: float) -> None:
        self.stages = stages
        self.length = {
            kind: np.asarray(values) / known
            for kind, values in (("F", stages.forward), ("B", stages.backward), ("W", stages.weight))
        }
        self.message = np.asarray(stages.message) / known
        count = stages.num_micro_batches
        passes = [Operation(k, s, b) for k in "FBW" for s in range(len(stages.device)) for b in range(count)]
        self.number = {operation: 1 + place for place, operation in enumerate(passes)}
        self.size = 1 + len(passes)
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.lower: list[float] = []
        for operation in passes:
            self._row({self.number[operation]: 1.0}, self._seconds(operation))
            self._row({0: 1.0, self.number[operation]: -1.0},
                      float(stages.after[stages.device[operation.stage]]) / known)  # fmt: skip
            for source, message in self._sources(operation):
                self._after(operation, source, message)
        for device in range(len(stages.room)):
            self._one_at_a_time([o for o in passes if stages.device[o.stage] == device], device)

    def _seconds(self, operation: Operation) -> float:
        return float(self.length[operation.kind][operation.stage])

    def _row(self, entries: dict[int, float], lower: float) -> None:
        self.rows += [len(self.lower)] * len(entries)
        self.columns += list(entries)
        self.values += list(entries.values())
        self.lower.append(lower)

    def _after(self, later: Operation, earlier: Operation, message: float = 0.0) -> None:
        lower = self._seconds(later) + message
        self._row({self.number[later]: 1.0, self.number[earlier]: -1.0}, lower)

    def _sources(self, operation: Operation) -> Iterator[tuple[Operation, float]]:
        """The passes that give the input, with the seconds of their messages, and the one before in turn."""
        kind, stage, batch = operation
        last = len(self.stages.device) - 1
        if batch:
            yield Operation(kind, stage, batch - 1), 0.0
        if kind == "W":
            yield Operation("B", stage, batch), 0.0
        elif kind == "F" and stage:
            yield Operation("F", stage - 1, batch), float(self.message[stage - 1])
        elif kind == "B" and stage == last:
            yield Operation("F", stage, batch), 0.0
        elif kind == "B":
            yield Operation("B", stage + 1, batch), float(self.message[stage])

    def _one_at_a_time(self, passes: Sequence[Operation], device: int) -> None:
        """Of any two passes of a device one comes first; what is held before a forward fits."""
        first: dict[tuple[Operation, Operation], int] = {}
        for a, b in combinations(passes, 2):
            if a.kind == b.kind and a.stage == b.stage:
                continue
            if a.stage == b.stage and a.micro_batch <= b.micro_batch:
                continue  # kinds come as F, B, W: the order is given by the chain of the micro-batch
            first[a, b] = self.size
            # 1: a comes first
            self._row({self.number[b]: 1.0, self.number[a]: -1.0, self.size: -2.0}, self._seconds(b) - 2.0)
            self._row({self.number[a]: 1.0, self.number[b]: -1.0, self.size: 2.0}, self._seconds(a))
            self.size += 1
        for mine in (o for o in passes if o.kind == "F"):
            entries, fixed = dict[int, float](), float(self.stages.held[mine.stage])
            for other in passes:
                change = {"F": 1.0, "B": 0.0, "W": -1.0}[other.kind] * float(self.stages.held[other.stage])
                if other is mine or not change:
                    continue
                if (mine, other) in first:  # other first: 1 - x
                    entries[first[mine, other]] = change
                    fixed += change
                elif (other, mine) in first:
                    entries[first[other, mine]] = -change
                elif other.micro_batch < mine.micro_batch and other.kind == "F":
                    fixed += change
            room = float(self.stages.room[device])
            if entries:
                self._row(entries, fixed - room * (1 + 1e-9))
