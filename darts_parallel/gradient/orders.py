"""The order of passes as the variable: annealed along its longest path, in turn with moves of layers.

Any order is a start: those of all rules with the same placement, and a heuristic's. Stages and strategies stay
while an order is annealed; then they move by polishing's moves while the order stays.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import CostTable, HardPlans, pass_seconds, table_reading
from darts_parallel.cost.terms.offload import summed
from darts_parallel.schedules import NAMES, PLACEMENTS, Operation, find, order_code

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
ROOM = 1e-12
"""Share of a capacity by which an order may pass it: less than what a plan may, which adds bytes otherwise."""
KINDS = "FIWB"


@dataclass(frozen=True)
class Order:
    """Words of an order, as `_order_kernel` reads them, and its seconds."""

    words: Indices
    lengths: Indices
    seconds: float


@dataclass(frozen=True)
class OrderProblem:
    """Which order of passes is fastest for given stages; fields as the arguments of `_order_kernel.anneal`."""

    folded: bool
    devices: Indices
    """Device of every stage, `(S,)`."""
    count: int
    seconds: Array
    waits: Array
    sources: Indices
    after: Array
    before: Array
    between: Array
    room: Array

    @staticmethod
    def of(table: CostTable, plan: HardPlans) -> "OrderProblem":
        """Read one plan of a table, whatever the order of its schedule."""
        passes, reading = pass_seconds(table, plan), table_reading(table, plan)
        passes = passes.blocking() if table.pipeline.blocking else passes
        forward, backward, weight, message = (v[0].detach().numpy() for v in vars(passes).values())
        stages, outer, layers = plan.stages(), int(plan.outer[0]), torch.arange(table.num_layers)
        assert table.before is not None
        kept = [v[outer, layers, plan.choices[0]][None] for v in (table.before, table.for_weights, table.static)]
        devices, working = table.stage_device, table.working[outer, layers, plan.choices[0]]
        largest = working.new_zeros(table.pp).scatter_reduce(0, devices[stages[0]], working, "amax")
        held = [summed(v, stages, table.num_stages)[0].numpy() for v in kept[:2]]
        fixed = summed(kept[2], devices[stages], table.pp)[0] + largest
        return OrderProblem(
            folded=bool(find(table.pipeline.schedule).folded),
            devices=devices.numpy(),
            count=int(table.num_micro_batches[outer]),
            seconds=np.concatenate([forward, backward - weight, weight, backward]),
            waits=_waits(message),
            sources=_sources(table.num_stages),
            after=np.ascontiguousarray(reading.sync[0].detach().numpy()),
            before=held[0],
            between=held[1],
            room=(table.capacity * (1 + ROOM) - fixed).detach().numpy(),
        )

    def order(self, orders: list[list[Operation]] | tuple[tuple[Operation, ...], ...]) -> Order:
        """Return the passes of devices as words, timed; passes of a stage and kind in the order of micro-batches."""
        stages = len(self.devices)
        rows = [[KINDS.index(kind) * stages + stage for kind, stage, _ in row] for row in orders]
        words = np.zeros((len(rows), 3 * stages * self.count // len(rows)), dtype=np.int64)
        for word, row in zip(words, rows, strict=True):
            word[: len(row)] = row
        return self.timed(words, np.array([len(row) for row in rows]))

    def timed(self, words: Indices, lengths: Indices) -> Order:
        """Return the order with its seconds; infinite where it does not fit or waits for itself."""
        from darts_parallel.gradient import _order_kernel as kernel

        end = np.zeros((3 * len(self.devices), self.count))
        held = (self.before, self.between)
        fits = all(
            kernel.fits(w, n, *held, room) for w, n, room in zip(words, lengths, self.room, strict=True)
        )
        found = kernel.retime(words, lengths, *self._timing, end) if fits else kernel.NEVER
        return Order(words, lengths, found if found < kernel.NEVER else np.inf)

    @property
    def _timing(self) -> tuple[Array, Array, Indices, Array, int]:
        return self.seconds, self.waits, self.sources, self.after, self.count

    def starts(self) -> list[Order]:
        """Return the orders of all rules of the placement that fit, split and whole, and the heuristic's."""
        pp = int(self.devices.max()) + 1
        chunks, found = len(self.devices) // pp, []
        for rule in map(find, NAMES):
            own = rule.devices(pp, len(self.devices)) == tuple(self.devices.tolist())
            if own and rule.chunk_refusal(chunks) is None and rule.count_refusal(pp, self.count) is None:
                orders = find(rule.code(pp, self.count, chunks)).orders(pp, self.count, chunks)
                found.append(self.order(orders))
                found += [] if rule.split else [self.order([list(_split(row)) for row in orders])]
        found += self.heuristic()
        kept = {(order.words.tobytes(), order.lengths.tobytes()): order for order in found if order.seconds < np.inf}
        return sorted(kept.values(), key=lambda order: order.seconds)

    def heuristic(self) -> list[Order]:
        """Return the orders of `_order_kernel.dispatch` under its parameters."""
        from darts_parallel.gradient import _order_kernel as kernel

        held = (self.before, self.between, self.room)
        result = []
        for first, gap, deep in product((0, 1, 2), (0.0, 0.5, 1.0), (False, True)):
            words, lengths = kernel.dispatch(
                self.seconds, self.waits, self.sources, self.devices, self.count, *held, first, gap, deep
            )
            if lengths.all():
                result.append(self.timed(np.ascontiguousarray(words[:, : lengths.max()]), lengths))
        return result

    def annealed(self, order: Order, moves: int, state: NDArray[np.uint64], heat: float, blind: bool = False) -> Order:
        """Return the best order that moves along the longest path meet; `state` of the random numbers moves on."""
        from darts_parallel.gradient import _order_kernel as kernel

        words = order.words.copy()
        held = (self.before, self.between, self.room)
        found = kernel.anneal(words, order.lengths, *self._timing, *held, moves, heat, blind, state)
        return Order(words, order.lengths, float(found))

    def code(self, order: Order) -> str:
        """Return the code of an order (`schedules.Searched`)."""
        stages, rows = len(self.devices), []
        for word, length in zip(order.words.tolist(), order.lengths.tolist(), strict=True):
            ran = dict.fromkeys(word, 0)
            texts = []
            for symbol in word[:length]:
                kind, stage = divmod(symbol, stages)
                texts.append(f"{stage}{KINDS[kind]}{ran[symbol]}")
                ran[symbol] += 1
            rows.append(texts)
        return order_code(PLACEMENTS[self.folded], rows)


def _split(row: tuple[Operation, ...]) -> Iterator[Operation]:
    """Yield the passes of a device with every whole backward pass in its two parts."""
    for entry in row:
        yield from [entry] if entry.kind != "B" else [entry._replace(kind="I"), entry._replace(kind="W")]


def _waits(message: Array) -> Array:
    """Return the seconds of the message that brings the input of every symbol, `(4 S,)`."""
    forward, backward = np.append(0.0, message), np.append(message, 0.0)
    return np.concatenate([forward, backward, np.zeros(len(forward)), backward])


def _sources(stages: int) -> Indices:
    """Return the symbol that gives the input of every symbol, `(4 S,)`; -1: none."""
    number = np.arange(stages)
    backward = np.where(number < stages - 1, stages + number + 1, number)
    return np.concatenate([number - 1, backward, stages + number, backward])


HALVINGS = 4
"""Times that the worse half of the orders is left, each with as many moves for those that stay."""
HEAT = 3e-3
"""First temperature of annealing, as a share of the seconds."""


def best_order(
    problem: OrderProblem,
    starts: list[Order],
    passes: int,
    state: NDArray[np.uint64],
    stop: Callable[[], bool] = lambda: False,
    *,
    blind: bool = False,
) -> Order | None:
    """Anneal orders, the best of them longer.

    Args:
        problem: Stages.
        starts: Orders to begin with.
        passes: Passes that are timed at most.
        state: Of the random numbers, `(1,)`.
        stop: Asked between orders; true ends with the best so far.
        blind: Move any pass, not those of the longest path.
    """
    left, best = starts[: 2 ** (HALVINGS - 1)], min(starts, key=lambda order: order.seconds, default=None)
    for _ in range(HALVINGS if best else 0):
        moves = max(passes // (HALVINGS * len(left) * int(left[0].lengths.sum())), 1)
        found = []
        for order in left:
            if stop():
                break
            found.append(problem.annealed(order, moves, state, HEAT, blind))
        found.sort(key=lambda order: order.seconds)
        best = min([best, *found], key=lambda order: order.seconds)  # type: ignore[type-var]
        left = found[: max(len(left) // 2, 1)]
        if not left:
            break
    return best
