"""An order of passes that no rule writes: a search found it, and its code names every pass.

A code is `searched:`, the placement of the stages (`loop` or `v`) and the passes of every device as PyTorch's
CSV spells them, stage, kind and micro-batch: `searched:loop;0F0 0B0;1F0 1I0 1W0`. Kinds: `F`, the whole
backward `B`, or its two parts: `I`, the gradient of the input, and `W`, that of the weights.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from darts_parallel.errors import PlanError
from darts_parallel.schedules._schedule import SEARCHED, Operation, Schedule

CHANGES = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
"""Micro-batches more that a stage holds before its backward, and between its two parts, after a pass."""


class Searched(Schedule):
    """The order of a code; it holds for its own numbers of devices, stages and micro-batches alone."""

    name, kinds, split, repeats = SEARCHED, "FIWB", True, False

    def __init__(self, code: str) -> None:
        head, *self.texts = code.removeprefix(f"{SEARCHED}:").split(";")
        self.folded = head == "v"
        self.rows = tuple(tuple(map(_read, text.split())) for text in self.texts)
        every = [entry for row in self.rows for entry in row]
        self.num_stages = max((entry.stage for entry in every), default=0) + 1
        self.count = max((entry.micro_batch for entry in every), default=0) + 1
        self.chunks = max(self.num_stages // len(self.rows), 1)

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
        """Yield the passes that the code names."""
        yield from self.rows[device]

    @property
    def splits(self) -> bool:
        """Whether some backward pass comes in two parts."""
        return any(entry.kind == "I" for row in self.rows for entry in row)

    def count_rule(self, pp: int, count: int) -> tuple[str, int]:
        """Demand its own number."""
        return f"the {self.count} of its order of passes", self.count

    def in_flight(self, pp: int, count: int, chunks: int) -> tuple[int, ...]:
        """Count, where a device holds the most micro-batches, those of each of its stages."""
        held = np.array([max(row.tolist(), key=sum) for row in self.moments()], dtype=np.int64).sum(
            0
        )
        return tuple(held.reshape(2, -1).sum(0).tolist())

    def moments(self) -> list[NDArray[np.int64]]:
        """Return what stages hold at the moments that no other one of a device exceeds.

        Returns:
            Of every device micro-batches before their backward, then those between its parts, `(M, 2 K)`.
        """
        result = []
        for row in self.rows:
            steps = np.zeros((len(row) + 1, 2, self.num_stages), dtype=np.int64)
            for step, (kind, stage, _) in zip(steps[1:], row, strict=True):
                step[:, stage] = CHANGES[kind]
            seen = np.unique(steps.cumsum(0).reshape(len(steps), -1), axis=0)
            above = (seen[None] >= seen[:, None]).all(-1).sum(1) > 1
            result.append(seen[~above])
        return result

    @lru_cache(maxsize=64)  # noqa: B019  (orders are few and remembered themselves)
    def refusal(self, pp: int, num_stages: int, count: int) -> str | None:
        """Say in one sentence why the order is none of these numbers, or waits for itself; None where not."""
        if len(self.rows) != pp:
            return f"order lists {len(self.rows)} devices, which must be all pp={pp}; try {pp}"
        places = self.devices(pp, num_stages)
        for device, row in enumerate(self.rows):
            mine = product(
                "FIW", (s for s in range(num_stages) if places[s] == device), range(count)
            )
            left = set(mine)
            for entry in row:
                parts = {
                    entry._replace(kind=part)
                    for part in ("IW" if entry.kind == "B" else entry.kind)
                }
                if not parts <= left:
                    rule = f"be a pass of its stages and {count} micro-batches that was not before"
                    closest = _text(min(left)) if left else "none"
                    return f"order[{device}] has {_text(entry)}, which must {rule}; try {closest}"
                left -= parts
            if left:
                missing = _text(min(left))
                return (
                    f"order[{device}] must have every pass once, and lacks {missing}; try {missing}"
                )
        return self._waiting(num_stages)

    def _waiting(self, num_stages: int) -> str | None:
        """Name a pass that waits for one behind it; None where all run."""
        done: set[tuple[str, int, int] | None] = {None}
        rows, before = [deque(row) for row in self.rows], 0
        while before != len(done):
            before = len(done)
            for row in rows:
                while row and source(*row[0], num_stages) in done:
                    entry = row.popleft()
                    gives = "IB" if entry.kind in "IB" else entry.kind
                    done |= {entry._replace(kind=kind) for kind in gives}
        for device, row in enumerate(rows):
            if row and (awaited := source(*row[0], num_stages)):
                here, first = _text(row[0]), _text(awaited)
                return f"order[{device}] has {here} where it waits for ever; try {first} before"
        return None


def source(kind: str, stage: int, batch: int, num_stages: int) -> tuple[str, int, int] | None:
    """Return the pass that gives a pass its input; None: it needs none."""
    if kind == "F":
        return ("F", stage - 1, batch) if stage else None
    if kind == "W":
        return "I", stage, batch
    return ("F", stage, batch) if stage == num_stages - 1 else ("I", stage + 1, batch)


def _text(entry: Operation | tuple[str, int, int]) -> str:
    kind, stage, batch = entry
    return f"{stage}{kind}{batch}"


def _read(text: str) -> Operation:
    found = re.fullmatch(r"(\d{1,6})([FIWB])(\d{1,6})", text)
    if found is None:
        raise PlanError(
            f"plan: order has {text!r}, which must be stage, F, I, W or B, micro-batch; try 0F0."
        )
    return Operation(found[2], int(found[1]), int(found[3]))


def order_code(placement: str, rows: Sequence[Sequence[str]]) -> str:
    """Return the code of an order: the passes of every device as PyTorch's CSV spells them."""
    return f"{SEARCHED}:" + ";".join([placement, *(" ".join(row) for row in rows)])


@lru_cache(maxsize=256)
def searched(code: str) -> Searched:
    """Read a code.

    Errors:
        PlanError: it holds what is no pass.
    """
    return Searched(code)
