"""The order of passes as the variable: annealed along its longest path, and the layers of stages with it.

Any order is a start: those of all rules with the same placement, and a heuristic's. A pass of the longest
path changes places with another one of its device; a stage of the path loses a layer, or changes a strategy.
`_order_kernel` is compiled where it is used, so that other searches start without the compiler.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.config import SPACES, SearchConfig
from darts_parallel.cost import CostTable, HardPlans
from darts_parallel.gradient.pool import PlanPool, TablePlans
from darts_parallel.schedules import NAMES, PLACEMENTS, Operation, find, order_code

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
State = NDArray[np.uint64]
KINDS = "FIW"
KINDS_OF = ({"F": (0,), "B": (1,)}, {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)})
"""Kinds of the passes that a letter stands for, with whole and with split backward passes."""
HALVINGS = 4
"""Times that the worse half of the starts is left, with as many moves for all that stay."""
HEAT = 3e-3
"""First temperature of annealing, as a share of the seconds."""
MOVE = 100
"""Passes that are timed while a move is made."""
LAYERS = 0.15
"""Share of moves that are of layers."""


@dataclass(frozen=True)
class Order:
    """An order of passes, the stages of its plan, and the seconds of an iteration."""

    words: Indices
    """Symbols of the passes of every device, `(P, N)` (`_order_kernel`)."""
    lengths: Indices
    """Passes of every device, `(P,)`."""
    first: Indices
    """First layer of every stage, and L, `(S + 1,)`."""
    choices: Indices
    """Strategies of layers, `(L,)`."""
    split: bool
    """Backward passes are in two parts."""
    seconds: float
    """Infinite where it does not fit or waits for itself."""


@dataclass(frozen=True)
class OrderProblem:
    """Which order is fastest, on the stages of which layers, for one outer choice of a table."""

    table: CostTable
    outer: int
    space_kind: str

    @cached_property
    def kernel(self) -> Any:
        """Return the compiled programmes."""
        return import_module("darts_parallel.gradient._order_kernel")

    @cached_property
    def figures(self) -> tuple[Any, Any]:
        """Return the costs as the programmes read them, of whole and of split backward passes."""
        table, number, at = self.table, np.arange(self.table.num_stages), self.outer
        assert table.before is not None
        none = torch.zeros_like(table.static)
        whole = [
            table.forward,
            table.backward,
            torch.zeros_like(table.backward),
            table.sync,
            table.per_iteration,
            table.static,
            table.before if self.free else none,
            none,
            table.working,
            table.activation,
            table.reshard,
            table.p2p,
        ]
        split = list(whole)
        split[2], split[7] = table.weight_gradient, table.for_weights if self.free else none
        legal = table.allowed[at].expand(table.forward.shape[1], -1)
        legal = legal if table.kind_allowed is None else legal & table.kind_allowed
        rest = [legal, table.layout, table.fused_to_previous, table.capacity, table.stage_kind]
        rest += [table.boundary_kind, table.stage_device, table.in_flight[at] * (not self.free)]
        stages, last = len(number), number == len(number) - 1
        backward = np.where(last, number, stages + number + 1)
        found = [
            self.kernel.Figures(
                *(np.ascontiguousarray(v.numpy()) for v in [v[at].detach() for v in layers] + rest),
                sources=np.concatenate([number - 1, backward, stages + number]),
                batches=int(table.num_micro_batches[at]),
                blocking=table.pipeline.blocking,
                space=SPACES.index(self.space_kind),
            )
            for layers in (whole, split)
        ]
        return found[0], found[1]

    @property
    def free(self) -> bool:
        """Whether the order may change; else stages hold what the schedule's rule says."""
        return self.table.pipeline.free

    @property
    def work(self) -> int:
        """Passes that take as long to time as one move, with what it costs besides."""
        batches = int(self.table.num_micro_batches[self.outer])
        return 3 * (self.table.num_stages * batches + self.table.num_layers) + MOVE

    def timed(
        self, words: Indices, lengths: Indices, first: Indices, choices: Indices, split: bool
    ) -> Order:
        """Return the order with its seconds."""
        order = Order(words, lengths, first, choices, split, np.inf)
        seconds, _ = self.run(order)
        return replace(order, seconds=seconds) if seconds < self.kernel.NEVER else order

    def run(self, order: Order) -> tuple[float, Array]:
        """Return the seconds of an order, and those at which its passes end, `(3 S, m)`."""
        figures, (stages, once) = self.figures[order.split], self.stages(order)
        end = np.zeros((len(figures.sources), figures.batches))
        return self.kernel.timed(figures, order.words, order.lengths, stages, once, end), end

    def stages(self, order: Order) -> tuple[Any, float]:
        """Return the figures of an order's stages, and the seconds that are paid once."""
        stages = self.kernel.Stages.empty(self.table.num_stages, self.table.pp)
        return stages, self.kernel.price(
            self.figures[order.split], order.first, order.choices, stages
        )

    def order(
        self, passes: Sequence[Sequence[Operation]], first: Indices, choices: Indices, split: bool
    ) -> Order:
        """Return the passes of devices as words, those of a stage and kind in the order of micro-batches."""
        rows = [
            [
                kind * self.table.num_stages + stage
                for name, stage, _ in row
                for kind in KINDS_OF[split][name]
            ]
            for row in passes
        ]
        words = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for word, row in zip(words, rows, strict=True):
            word[: len(row)] = row
        return self.timed(words, np.array([len(row) for row in rows]), first, choices, split)

    def starts(self, plan: HardPlans) -> list[Order]:
        """Return the orders of all rules of the placement that fit, split and whole, and the heuristic's.

        Where the order stays it is the only one.
        """
        table, chunks = self.table, self.table.virtual_stages
        pp, count = table.pp, self.figures[0].batches
        stages = np.append(plan.first_layers[0].numpy(), table.num_layers), plan.choices[0].numpy()
        found = self.heuristic(*stages) if self.free else []
        for rule in map(find, NAMES if self.free else [table.pipeline.schedule]):
            placed = rule.devices(pp, table.num_stages) == tuple(table.stage_device.tolist())
            if (
                placed
                and rule.chunk_refusal(chunks) is None
                and rule.count_refusal(pp, count) is None
            ):
                passes = find(rule.code(pp, count, chunks)).orders(pp, count, chunks)
                found.append(self.order(passes, *stages, rule.split))
                found += (
                    [self.leaner(found[-1])] if self.free and found[-1].seconds == np.inf else []
                )
                found += [self.order(passes, *stages, True)] if self.free else []
        return sorted(
            (order for order in found if order.seconds < np.inf), key=attrgetter("seconds")
        )

    def leaner(self, order: Order) -> Order:
        """Return an order with strategies that keep less, layer by layer of full devices, until it fits."""
        f, choices, numbers = (
            self.figures[1],
            order.choices.copy(),
            np.arange(self.table.num_layers),
        )
        devices = f.devices[np.searchsorted(order.first, numbers, side="right") - 1]
        kept = np.where(f.legal.all(0), f.before + f.between, np.inf)
        for _ in range(len(choices) if self.space_kind == "layerwise" else 0):
            stages, _ = self.stages(replace(order, choices=choices))
            held = enumerate(zip(order.words, order.lengths, stages.room, strict=True))
            full = [
                d
                for d, (word, n, room) in held
                if not self.kernel.fits(word[:n], stages.more, room)
            ]
            saved = (kept[numbers, choices] - kept.min(1)) * np.isin(devices, full[:1])
            if not full or saved.max() <= 0:
                break
            choices[saved.argmax()] = kept[saved.argmax()].argmin()
        return self.timed(order.words, order.lengths, order.first, choices, order.split)

    def heuristic(self, first: Indices, choices: Indices) -> list[Order]:
        """Return the orders of `_order_kernel.dispatch` under its parameters."""
        ways = product((0, 1, 2), (0.0, 0.5, 1.0), (False, True))
        found = [self.dispatched(first, choices, np.zeros((0, 0)), way) for way in ways]
        return [order for order in found if order.seconds < np.inf]

    def dispatched(
        self,
        first: Indices,
        choices: Indices,
        keys: Array,
        way: tuple[int, float, bool] = (0, 0.0, False),
    ) -> Order:
        """Return the order of `_order_kernel.dispatch`, `way` and `keys` as there."""
        none = np.zeros((0, 0), dtype=np.int64)
        stages, _ = self.stages(Order(none, none, first, choices, True, np.inf))
        words, lengths = self.kernel.dispatch(self.figures[1], stages, *way, keys)
        found = self.timed(words, lengths, first, choices, True)
        return found if lengths.all() else replace(found, seconds=np.inf)

    def annealed(
        self,
        order: Order,
        moves: int,
        state: State,
        *,
        blind: bool = False,
        share: float | None = None,
    ) -> Order:
        """Return the best order that moves lead to.

        Args:
            order: Where they begin.
            moves: Orders that are timed.
            state: Of the random numbers, `(1,)`; moves on.
            blind: Move any pass and stage, not those of the longest path.
            share: Share of moves that are of layers; None: `LAYERS`, all where the order stays.
        """
        share = (LAYERS if self.free else 1.0) if share is None else share
        words, first, choices = order.words.copy(), order.first.copy(), order.choices.copy()
        sizes = (self.table.num_stages, self.table.pp)
        work = [self.kernel.Stages.empty(*sizes) for _ in range(2)]
        found = self.kernel.anneal(
            self.figures[order.split],
            words,
            order.lengths,
            first,
            choices,
            *work,
            moves,
            HEAT,
            share,
            blind,
            state,
        )
        return Order(words, order.lengths, first, choices, order.split, float(found))

    def code(self, order: Order) -> str:
        """Return the code of an order (`schedules.Searched`)."""
        rows, kinds = [], KINDS if order.split else "FB"
        for word, length in zip(order.words.tolist(), order.lengths.tolist(), strict=True):
            ran, texts = Counter[int](), []
            for symbol in word[:length]:
                kind, stage = divmod(symbol, self.table.num_stages)
                texts.append(f"{stage}{kinds[kind]}{ran[symbol]}")
                ran[symbol] += 1
            rows.append(texts)
        return order_code(PLACEMENTS[find(self.table.pipeline.schedule).folded], rows)


BASES = 6
"""Outer choices whose best plans get orders at first, next to those of every placement."""
ANNEALED = 5
"""Best of these, whose orders are annealed."""
ROUNDS = 20
"""Times that the best orders are annealed again."""
LESS = 20
"""Share of the passes that moves of layers alone need, where no order may change."""
KEPT = 6
"""Orders that are annealed again and kept."""


@dataclass
class OrderSearch:
    """Search orders of passes, and layers of their stages, of simulated plans of a pool together.

    A rival overrides where it begins and how it goes on.
    """

    pool: PlanPool
    """Its tables get some of searched orders."""
    space_kind: str
    config: SearchConfig
    """Settings: `order_passes` are timed, fewer where no order is free."""
    seed: int
    found: list[tuple[int, OrderProblem, Order]] = field(default_factory=list, init=False)
    """The best orders with their tables, the best first."""

    def search(self) -> str | None:
        """Add the best plans to the pool; return what cut it short, `user` or `time_limit`, None: nothing."""
        try:
            self.run(self.config.order_passes)
        except KeyboardInterrupt:
            return "user"
        finally:
            self.keep()
        return "time_limit" if self.late else None

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self.pool.clock.seconds > self.config.max_seconds

    def starts(self, problem: OrderProblem, plan: HardPlans) -> list[Order]:
        """Return the orders to begin with, the best first."""
        return problem.starts(plan)

    def improved(self, problem: OrderProblem, order: Order, moves: int) -> Order:
        """Return the best order that so many moves lead to."""
        return problem.annealed(order, moves, self.state)

    @cached_property
    def state(self) -> State:
        """State of the random numbers of all moves."""
        return np.array([self.seed * 2654435761 % 2**63 + 88172645463325252], dtype=np.uint64)

    def run(self, passes: int) -> None:
        """Anneal orders of the best plans of every placement, then the best orders again and again."""
        tables, places = self.pool.tables, dict[tuple[int, int, bool], int]()
        entries = [e for e in self.pool.by_outer() if _knows(tables[e.table])]
        for place, entry in enumerate(entries):
            table = tables[entry.table]
            places.setdefault(
                (table.pp, table.num_stages, find(table.pipeline.schedule).folded), place
            )
        bases = [e for place, e in enumerate(entries) if place in places.values() or place < BASES]
        free = any(tables[e.table].pipeline.free for e in bases)
        passes = passes if free else passes // LESS
        begun: list[tuple[float, int, OrderProblem, list[Order]]] = []
        for entry in bases:
            table = tables[entry.table]
            ruled = replace(table, pipeline=replace(table.pipeline, free=False))
            for own in [table] + [ruled] * table.pipeline.free:
                problem = OrderProblem(own, entry.outer[1], self.space_kind)
                starts = self.starts(problem, entry.plan)
                self._add(entry.table, problem, starts[:1])
                begun += [(start.seconds, entry.table, problem, starts) for start in starts[:1]]
        begun = sorted(begun, key=lambda job: job[0])[:ANNEALED]
        for _, number, problem, starts in begun:
            share = passes // LESS if free > problem.free else passes * 3 // 8
            self._best(number, problem, starts, share // len(begun))
        random = np.random.default_rng(self.seed)
        for _ in range(ROUNDS if self.found else 0):
            if self.late:
                break
            place = min(int(random.geometric(0.5)) - 1, len(self.found) - 1)
            number, problem, order = self.found[place]
            moves = passes * 5 // 8 // ROUNDS // problem.work
            self._add(number, problem, [self.improved(problem, order, moves)])

    def _best(self, number: int, problem: OrderProblem, starts: list[Order], passes: int) -> None:
        """Improve orders, the best of them longer."""
        count = 2 ** (HALVINGS - 1)
        left = (starts * count)[:count]
        while left and not self.late:
            moves = max(passes // (HALVINGS * len(left) * problem.work), 1)
            left = sorted(
                (self.improved(problem, order, moves) for order in left), key=attrgetter("seconds")
            )
            self._add(number, problem, left[:2])
            left = left[: len(left) // 2]

    def _add(self, number: int, problem: OrderProblem, orders: list[Order]) -> None:
        """Keep the best orders, each time once."""
        known = {order.seconds for *_, order in self.found}
        self.found += [(number, problem, order) for order in orders if order.seconds not in known]
        self.found = sorted(self.found, key=lambda entry: entry[2].seconds)[:KEPT]
        least, curve = (
            min(known | {order.seconds for order in orders}, default=np.inf),
            self.pool.curve,
        )
        if least < (curve[-1][1] if curve else np.inf):
            curve.append((self.pool.clock.seconds, least))

    def keep(self) -> None:
        """Add plans of the orders to the pool, and their tables where they are no rule's."""
        best = {number: (problem, order) for number, problem, order in reversed(self.found)}
        for number, (problem, order) in best.items():
            outer = torch.tensor([problem.outer])
            if problem.free:
                self.pool.tables.append(
                    problem.table.with_order(problem.outer, problem.code(order))
                )
                number, outer = len(self.pool.tables) - 1, torch.zeros_like(outer)
            choices, first = (
                torch.from_numpy(order.choices)[None],
                torch.from_numpy(order.first[:-1])[None],
            )
            self.pool.add(TablePlans(number, HardPlans(outer, choices, first)))


def _knows(table: CostTable) -> bool:
    """Return whether the programmes price the plans of a table."""
    return table.pipeline.simulated and table.pp > 1 and table.host is None
