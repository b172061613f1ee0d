"""An order of passes that a search found. Its code names every pass.

A code is `searched:`, the placement of the stages (`loop` or `v`) and the passes of every device. A
pass is stage, kind and micro-batch, as in PyTorch's CSV: `searched:loop;0F0 0B0;1F0 1I0 1W0`.
Kinds: `F`, the whole backward `B`, or its two parts: `I`, the gradient of the input, and `W`, of
the weights.
"""

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from darts_parallel.errors import PlanError, require_listed
from darts_parallel.schedules._schedule import (
    PLACEMENTS,
    SEARCHED,
    Operation,
    Passes,
    PerStage,
    Schedule,
)

PARTS = {"F": "F", "B": "IW", "I": "I", "W": "W"}
"""Smallest parts of a kind of pass: a whole backward is the gradients of input and weights."""
CHANGES = {
    "F": (1, 0),
    "B": (-1, 0),
    "I": (-1, 1),
    "W": (0, -1),
}
"""Change by a pass of the micro-batches before backward, and of the micro-batches inside
backward."""
Numbers = NDArray[np.int64]
Row = Sequence[Operation]
"""Passes of a device in order."""
Pass = tuple[str, int, int]
"""Kind, stage and micro-batch; the kind is one of the smallest parts."""


class Searched(Schedule):
    """The order of a code, for its own numbers of devices, stages and micro-batches alone."""

    name = SEARCHED
    kinds = "FIWB"
    split = True

    def __init__(self, code: str) -> None:
        head, *texts = code.removeprefix(f"{SEARCHED}:").split(";")
        rule = f"plan: placement={head!r} must be {' or '.join(PLACEMENTS)}"
        require_listed(head, PLACEMENTS, rule, PlanError)
        self.folded = head == "v"
        self.rows = tuple(tuple(map(_read, text.split())) for text in texts)
        every = [entry for row in self.rows for entry in row]
        self.num_stages = max((entry.stage for entry in every), default=0) + 1
        self.count = max((entry.micro_batch for entry in every), default=0) + 1
        self.chunks = max(self.num_stages // (len(self.rows) or 1), 1)

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Yield the passes that the code names."""
        yield from self.rows[device]

    @property
    def splits(self) -> bool:
        """Whether some backward pass comes in two parts."""
        return any(entry.kind == "I" for row in self.rows for entry in row)

    def count_rule(self, pp: int, count: int) -> tuple[str, int]:
        """Demand its own number."""
        return f"the {self.count} of its order of passes", self.count

    def in_flight(self, pp: int, count: int, chunks: int) -> PerStage:
        """Count by stage at the moment when its device holds most."""
        held = np.zeros(2 * self.num_stages, dtype=np.int64)
        for states in self.moments():
            held += max(states.tolist(), key=sum)
        by_stage = held.reshape(2, -1).sum(axis=0)
        return tuple(by_stage.tolist())

    def moments(self) -> list[Numbers]:
        """Return what stages hold at the moments that no other moment of a device exceeds.

        Returns:
            By device: micro-batches before their backward, then between its parts, `(M, 2 K)`.
        """
        return [_largest(self._states(row)) for row in self.rows]

    def _states(self, row: Row) -> Numbers:
        """Count what stages hold before, between and after the passes of a device, `(M, 2 K)`."""
        shape = (len(row) + 1, 2, self.num_stages)
        steps = np.zeros(shape, dtype=np.int64)
        for index, entry in enumerate(row, start=1):
            steps[index, :, entry.stage] = CHANGES[entry.kind]
        return steps.cumsum(axis=0).reshape(len(steps), -1)

    @lru_cache(maxsize=64)  # noqa: B019  (orders are few and remembered themselves)
    def refusal(self, pp: int, num_stages: int, count: int) -> str | None:
        """Say in one sentence why the order does not run with these numbers; None where it does."""
        if len(self.rows) != pp:
            return f"order lists {len(self.rows)} devices, which must be all pp={pp}; try {pp}"
        places = self.devices(pp, num_stages)
        for device, row in enumerate(self.rows):
            stages = [stage for stage, place in enumerate(places) if place == device]
            batches = range(count)
            wanted = set(product("FIW", stages, batches))
            if sentence := _incomplete(row, wanted, count):
                return f"order[{device}] {sentence}"
        return self._deadlock(num_stages)

    def _deadlock(self, num_stages: int) -> str | None:
        """Name a pass that waits for a later one of its device; None where all run."""
        rows = [deque(row) for row in self.rows]
        done: set[Pass | None] = {None}
        before = 0
        while before != len(done):
            before = len(done)
            for row in rows:
                while row and source(*row[0], num_stages) in done:
                    done |= _parts(row.popleft())
        for device, row in enumerate(rows):
            if not row:
                continue
            here = row[0].text
            if awaited := source(*row[0], num_stages):
                first = Operation(*awaited).text
                return f"order[{device}]: {here} deadlocks here; put {first} first"
        return None


def _largest(states: Numbers) -> Numbers:
    """Keep the states that no other state exceeds in every number."""
    unique = np.unique(states, axis=0)
    at_least = (unique[None] >= unique[:, None]).all(axis=-1)
    largest: Numbers = unique[at_least.sum(axis=1) == 1]
    return largest


def _parts(entry: Operation) -> set[Pass]:
    """Split a pass into its smallest parts."""
    kind, stage, batch = entry
    return {(part, stage, batch) for part in PARTS[kind]}


def _incomplete(row: Row, wanted: set[Pass], count: int) -> str | None:
    """Say which pass of a device is wrong or missing; None where each of `wanted` is there once."""
    left = set(wanted)
    for entry in row:
        parts = _parts(entry)
        if not parts <= left:
            rule = f"be a pass of its stages and {count} micro-batches that was not before"
            closest = Operation(*min(left)).text if left else "none"
            return f"has {entry.text}, which must {rule}; try {closest}"
        left -= parts
    if left:
        missing = Operation(*min(left)).text
        return f"must have every pass once, and lacks {missing}; try {missing}"
    return None


def source(kind: str, stage: int, batch: int, num_stages: int, backward: str = "I") -> Pass | None:
    """Return the pass that gives a pass its input; None: it needs none.

    Args:
        backward: Name of the backward passes without the gradient of the weights.
    """
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    if kind == "W":
        return backward, stage, batch
    if stage == num_stages - 1:
        return "F", stage, batch
    return backward, stage + 1, batch


def _read(text: str) -> Operation:
    found = re.fullmatch(r"(\d{1,6})([FIWB])(\d{1,6})", text)
    if found is None:
        raise PlanError(
            f"plan: order has {text!r}, which must be stage, F, I, W or B, micro-batch; try 0F0."
        )
    stage, kind, batch = found.groups()
    return Operation(kind, int(stage), int(batch))


@lru_cache(maxsize=256)
def searched(code: str) -> Searched:
    """Read a code.

    Errors:
        PlanError: it holds what is no pass.
    """
    return Searched(code)
