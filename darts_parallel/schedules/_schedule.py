"""A schedule: its name, the place of its stages, and the passes of every device in order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from darts_parallel.errors import UnsupportedError

FILLS = 3
"""Micro-batches per device after which no device holds more."""
BEFORE_BACKWARD = {"F": 1, "B": -1, "W": 0}
"""Change by kind of pass of the micro-batches between their forward and backward pass."""
BEFORE_WEIGHTS = {"F": 0, "B": 1, "W": -1}
"""Change by kind of pass of the micro-batches between backward pass and gradient of the weights."""


class Moment(NamedTuple):
    """Content of a stage: counts of micro-batches, or shares of a device's largest count."""

    before_backward: float
    before_weights: float


SEARCHED = "searched"
"""Name of the orders that no rule writes."""
PLACEMENTS = ("loop", "v")


class Operation(NamedTuple):
    """One pass of one micro-batch through one stage; `Schedule.devices` names its device."""

    kind: str
    """`F` forward, `B` backward (in a split schedule of the input alone), `W` gradient of
    weights."""
    stage: int
    """In the order of layers, from 0 to `pp * chunks - 1`."""
    micro_batch: int

    @property
    def text(self) -> str:
        """The pass as PyTorch's CSV spells it."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


Passes = Iterator[Operation]
Orders = tuple[tuple[Operation, ...], ...]
"""Passes by device."""
PerStage = tuple[int, ...]
Moments = tuple[Moment, ...]


Answer = TypeVar("Answer")
Method = Callable[["Schedule", int, int, int], Answer]


def _after_three_fills(method: Method[Answer]) -> Method[Answer]:
    """Remember the answers of a method, which `FILLS` micro-batches a device decide."""
    known = lru_cache(maxsize=256)(method)

    def answer(schedule: "Schedule", pp: int, count: int, chunks: int) -> Answer:
        return known(schedule, pp, min(count, FILLS * pp), chunks)

    return answer


class Schedule(ABC):
    """The order of the passes of a pipeline. Equal arguments give equal passes."""

    name: str
    aliases: tuple[str, ...] = ()
    pytorch: str | None = None
    """Name of its class for torch's `get_schedule_class`; None: PyTorch runs the CSV of its
    passes."""
    chunks: int | None = 1
    """Stages of a device; None: any number above 1."""
    kinds = "FBW"
    """Its kinds of passes; whole backward passes next to split ones come last."""
    split = False
    """Backward passes leave the gradient of the weights to a pass of its own."""
    folded = False
    """Stages lie as a V: device k holds the stages k and `2 * pp - 1 - k`."""
    starts_search = False
    """A search of orders begins here if the space lists no schedule of this placement. One schedule
    of each placement has this mark."""

    @abstractmethod
    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Yield the passes of a device in the order in which it runs them.

        Args:
            device: From 0 to `pp - 1`.
            pp: Devices in the pipeline.
            count: Micro-batches.
            chunks: Stages of each device.
        """

    def devices(self, pp: int, num_stages: int) -> PerStage:
        """Return the device of every stage: in turn, or down and up a V."""
        if self.folded:
            return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
        return tuple(stage % pp for stage in range(num_stages))

    def count_rule(self, pp: int, count: int) -> tuple[str, int]:
        """Return what a number of micro-batches must be, in words, and the closest valid number."""
        return "at least 1", max(count, 1)

    @_after_three_fills
    def in_flight(self, pp: int, count: int, chunks: int) -> PerStage:
        """Return the micro-batches whose activations stages hold when their device holds most.

        They are held from a forward pass to the micro-batch's last backward pass.
        """
        result = [0] * (pp * chunks)
        last = "W" if self.split else "B"
        devices = self.devices(pp, pp * chunks)
        for device, order in enumerate(self.orders(pp, count, chunks)):
            stages = [stage for stage, place in enumerate(devices) if place == device]
            held = dict.fromkeys(stages, 0)
            # ties go to the moment with more of the earlier stages, which hold them longer
            most = (0, *held.values())
            for kind, stage, _ in order:
                held[stage] += (kind == "F") - (kind == last)
                now = held.values()
                most = max(most, (sum(now), *now))
            for stage, number in zip(stages, most[1:], strict=True):
                result[stage] = number
        return tuple(result)

    @_after_three_fills
    def last_stage_moments(self, pp: int, count: int, chunks: int) -> Moments:
        """Return every moment at which the last stage may hold most."""
        last = pp * chunks - 1
        device = self.devices(pp, pp * chunks)[last]
        now = Moment(0, 0)
        moments = {now}
        for kind, stage, _ in self.orders(pp, count, chunks)[device]:
            if stage == last:
                before = now.before_backward + BEFORE_BACKWARD[kind]
                now = Moment(before, now.before_weights + BEFORE_WEIGHTS[kind])
                moments.add(now)
        return tuple(sorted(moments))

    @_after_three_fills
    def fullest_moments(self, pp: int, count: int, chunks: int) -> Moments:
        """Return the moments at which a device may hold most, if passes grow with their backward.

        A moment is in shares of the largest number of micro-batches that the device holds. Moments that
        another one exceeds in all and between the passes are left out.
        """
        seen: set[tuple[float, float]] = set()
        for order in self.orders(pp, count, chunks):
            kinds = np.array([kind for kind, _, _ in order])
            forward = np.cumsum(kinds == "F")
            backward = np.cumsum(kinds == "B")
            weights = np.cumsum(kinds == "W")
            held = forward - weights
            shares = held / held.max()
            late = (backward - weights) / held.max()
            seen.update(zip(shares.tolist(), late.tolist(), strict=True))
        kept: list[Moment] = []
        for share, before_weights in sorted(seen, reverse=True):
            if not kept or before_weights > kept[-1].before_weights:
                kept.append(Moment(share - before_weights, before_weights))
        return tuple(kept)

    def pytorch_class(self, pp: int, count: int) -> str | None:
        """Return the name of PyTorch's class for these numbers; None: it has none."""
        return self.pytorch

    @property
    def placement(self) -> str:
        """Where stages lie (`PLACEMENTS`)."""
        return PLACEMENTS[self.folded]

    @property
    def splits(self) -> bool:
        """Whether some backward pass comes in two parts."""
        return self.split

    def chunk_refusal(self, chunks: int) -> str | None:
        """Say in one sentence why a device cannot hold so many stages; None where it can."""
        if chunks == self.chunks or (self.chunks is None and chunks > 1):
            return None
        return (
            f"plan: virtual_stages={chunks} must be {self.chunks or 'above 1'} with the schedule "
            f"{self.name}; try {self.chunks or 2}."
        )

    def count_refusal(self, pp: int, count: int) -> str | None:
        """Say in one sentence why the schedule is not defined for these numbers; None if it is."""
        rule, near = self.count_rule(pp, count)
        if near == count:
            return None
        return f"plan: num_micro_batches={count} must be {rule}; try {near}."

    def orders(self, pp: int, count: int, chunks: int = 1) -> Orders:
        """Return the passes of every device.

        Errors:
            UnsupportedError: the schedule is not defined for these numbers.
        """
        if sentence := self.chunk_refusal(chunks) or self.count_refusal(pp, count):
            raise UnsupportedError(sentence)
        rows = [self.passes(device, pp, count, chunks) for device in range(pp)]
        return tuple(map(tuple, rows))

    def code(self, pp: int, count: int, chunks: int = 1) -> str:
        """Return the passes as the code of a searched order (`Searched`)."""
        only_split = self.split and len(self.kinds) == 3
        rows = []
        for order in self.orders(pp, count, chunks):
            texts = [entry.text for entry in order]
            if only_split:
                texts = [text.replace("B", "I") for text in texts]
            rows.append(texts)
        return order_code(self.placement, rows)


def order_code(placement: str, rows: Iterable[Iterable[str]]) -> str:
    """Return the code of an order: the passes of every device as PyTorch's CSV spells them."""
    texts = [" ".join(row) for row in rows]
    return f"{SEARCHED}:" + ";".join([placement, *texts])
