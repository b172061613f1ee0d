"""The pass order as the variable: annealed along its longest path, with the layers of its stages.

Any order is a start: those of all rules with the same placement, and a heuristic's. A pass of the
longest path changes places with another one of its device; a stage of the path loses a layer, or
changes a strategy. `_order_kernel` is compiled on first use, so that other searches start without
the compiler.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.config import SPACES, SearchConfig
from darts_parallel.cost import GAIN_TOLERANCE, CostTable, HardPlans, Index, PricedPlan
from darts_parallel.exact import unknown_costs
from darts_parallel.gradient.pool import PlanPool
from darts_parallel.schedules import NAMES, Operation, Schedule, find, order_code

State = NDArray[np.uint64]
LETTERS = "FIW"
"""Letters of the kinds of passes, in the order of the kernel's codes."""
WHOLE = {"F": (0,), "B": (1,)}
"""Kinds of the passes that a letter stands for, with whole backward passes."""
SPLIT = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
"""Kinds of the passes that a letter stands for, with split backward passes."""
GAPS = (0.0, 0.5, 1.0)
"""Values of `Policy.gap` that the heuristic tries."""
HALVINGS = 4
"""Rounds of successive halving; all rounds have as many moves together."""
HEAT = 3e-3
"""First temperature of annealing, as a share of the seconds."""
MOVE_PASSES = 100
"""Passes that could be timed while a move is made and undone."""
LAYER_SHARE = 0.15
"""Share of moves that are of layers."""


@dataclass(frozen=True)
class Order:
    """A pass order, the stages of its plan, and the seconds of an iteration."""

    problem: "OrderProblem"
    words: Index
    """Symbols of the passes of every device, `(P, N)` (`_order_kernel`)."""
    lengths: Index
    """Passes of every device, `(P,)`."""
    first: Index
    """First layer of every stage, and L, `(S + 1,)`."""
    choices: Index
    """Strategies of layers, `(L,)`."""
    split: bool
    """Backward passes are in two parts."""
    seconds: float = np.inf
    """Infinite where it deadlocks or does not fit."""


by_seconds = attrgetter("seconds")


def fastest(orders: Iterable[Order]) -> list[Order]:
    """Return the orders that can run, fastest first."""
    return sorted((order for order in orders if order.seconds < np.inf), key=by_seconds)


@dataclass(frozen=True)
class OrderProblem:
    """Which order is fastest, on the stages of which layers, for one row of a table."""

    table: CostTable
    outer: int
    space_kind: str
    number: int = 0
    """Index in the pool of the table."""

    @cached_property
    def kernel(self) -> Any:
        """Return the compiled functions."""
        return import_module("darts_parallel.gradient._order_kernel")

    @cached_property
    def figures(self) -> tuple[Any, Any]:
        """Return the costs as the kernel reads them, of whole and of split backward passes."""
        return self._figures(split=False), self._figures(split=True)

    def _figures(self, *, split: bool) -> Any:
        table = self.table
        number = table.num_stages
        stages = np.arange(number)
        last = stages == number - 1
        next_backward = np.where(last, stages, number + stages + 1)
        # a forward pass waits for the stage before, a backward one for the stage after
        sources = np.concatenate([stages - 1, next_backward, number + stages])
        arrays = {"legal": contiguous(self._legal()), "sources": sources}
        for name in self.kernel.Figures._fields:
            values = getattr(table, name, None)
            if isinstance(values, Tensor):
                # costs of layers have an axis of outer choices; facts of strategies and stages have none
                own = values[self.outer] if values.dim() > 1 else values
                arrays[name] = contiguous(own)
        if not split:
            for name in ("weight_gradient", "for_weights"):
                arrays[name] = np.zeros_like(arrays[name])
        batches = int(table.num_micro_batches[self.outer])
        return self.kernel.Figures(
            **arrays,
            batches=batches,
            blocking=table.pipeline.blocking,
            space=SPACES.index(self.space_kind),
        )

    def _legal(self) -> Tensor:
        """Return whether a kind of stage runs a strategy, `(Q, C)`."""
        table = self.table
        kinds = table.forward.shape[1]
        legal = table.allowed[self.outer].expand(kinds, -1)
        return legal if table.kind_allowed is None else legal & table.kind_allowed

    @property
    def work(self) -> int:
        """Passes that take as long to time as one move."""
        batches = int(self.table.num_micro_batches[self.outer])
        passes = self.table.num_stages * batches
        return 3 * (passes + self.table.num_layers) + MOVE_PASSES

    def timed(self, order: Order) -> Order:
        """Return the order with its seconds."""
        figures = self.figures[order.split]
        stages, once = self.stages(order)
        end = np.zeros((len(figures.sources), figures.batches))
        seconds = self.kernel.timed(figures, order.words, order.lengths, stages, once, end)
        return replace(order, seconds=seconds) if seconds < self.kernel.NEVER else order

    def stages(self, order: Order) -> tuple[Any, float]:
        """Return the costs of an order's stages, and the seconds that are paid once."""
        stages = self.kernel.Stages.empty(self.table.num_stages, self.table.pp)
        figures = self.figures[order.split]
        return stages, self.kernel.price(figures, order.first, order.choices, stages)

    def order(
        self, passes: Sequence[Sequence[Operation]], first: Index, choices: Index, split: bool
    ) -> Order:
        """Encode each device's passes as integers, micro-batches in order within (stage, kind)."""
        kinds_of = SPLIT if split else WHOLE
        rows = []
        for row in passes:
            symbols: list[int] = []
            for name, stage, _ in row:
                symbols += [kind * self.table.num_stages + stage for kind in kinds_of[name]]
            rows.append(symbols)
        words = np.array(rows)  # devices have equally many
        lengths = np.full(len(rows), words.shape[1])
        return self.timed(Order(self, words, lengths, first, choices, split))

    def starts(self, plan: HardPlans) -> list[Order]:
        """Return the orders of all rules of the placement that fit, and the heuristic's."""
        first = np.append(plan.first_layers[0].numpy(), self.table.num_layers)
        choices = plan.choices[0].numpy()
        found = self.heuristic(first, choices)
        for name in NAMES:
            found += self._rule_orders(name, first, choices)
        return fastest(found)

    def _rule_orders(self, name: str, first: Index, choices: Index) -> list[Order]:
        """Return a rule's order, as it is and with split backward passes, each made to fit."""
        rule = find(name)
        if not self._applies(rule):
            return []
        chunks = self.table.virtual_stages
        pp = self.table.pp
        count = self.figures[0].batches
        code = rule.code(pp, count, chunks)
        passes = find(code).orders(pp, count, chunks)
        found = []
        for split in (rule.split, True):
            order = self.order(passes, first, choices, split)
            found.append(order if order.seconds < np.inf else self._made_to_fit(order))
        return found

    def _applies(self, rule: Schedule) -> bool:
        """Return whether a rule has the table's placement, chunks and micro-batches."""
        table = self.table
        placement = tuple(table.stage_device.tolist())
        if rule.devices(table.pp, table.num_stages) != placement:
            return False
        chunks_refused = rule.chunk_refusal(table.virtual_stages)
        count_refused = rule.count_refusal(table.pp, self.figures[0].batches)
        return chunks_refused is None and count_refused is None

    def _made_to_fit(self, order: Order) -> Order:
        """Return the order where layers of full devices take strategies that hold fewer bytes.

        One layer changes at a time, the one that saves most. Where no layer of a full device saves
        anything, the order stays as it is and does not fit.
        """
        if self.space_kind != "layerwise":
            return order
        figures = self.figures[order.split]
        layers = np.arange(self.table.num_layers)
        stage = np.searchsorted(order.first, layers, side="right") - 1
        device = figures.stage_device[stage]
        legal = figures.legal[figures.stage_kind[stage]]
        held = np.where(legal, figures.before + figures.for_weights, np.inf)
        lightest = held.argmin(1)
        choices = order.choices.copy()
        lighter = replace(order, choices=choices)
        while True:
            full = self._full_device(lighter)
            if full is None:
                return self.timed(lighter)
            saved = held[layers, choices] - held[layers, lightest]
            saved[device != full] = 0.0
            layer = saved.argmax()
            if saved[layer] <= 0.0:
                return order
            choices[layer] = lightest[layer]

    def _full_device(self, order: Order) -> int | None:
        """Return the first device without room for an order; None where all have it."""
        stages, _ = self.stages(order)
        for device, length in enumerate(order.lengths):
            word = order.words[device, :length]
            if not self.kernel.fits(word, stages.more, stages.room[device]):
                return device
        return None

    def heuristic(self, first: Index, choices: Index) -> list[Order]:
        """Return the orders of `_order_kernel.dispatch` under all its policies that can run."""
        none = np.zeros((0, 0), dtype=np.int64)
        unordered = Order(self, none, none, first, choices, True)
        stages, _ = self.stages(unordered)
        found = []
        for values in product(range(3), GAPS, (False, True)):
            policy = self.kernel.Policy(*values)
            words, lengths = self.kernel.dispatch(self.figures[1], stages, policy)
            if lengths.all():
                found.append(self.timed(replace(unordered, words=words, lengths=lengths)))
        return fastest(found)

    def annealed(self, order: Order, moves: int, state: State) -> Order:
        """Return the best order that moves lead to.

        Args:
            order: Where they begin.
            moves: Orders that are timed.
            state: Of the random numbers, `(1,)`; moves on.
        """
        words = order.words.copy()
        first = order.first.copy()
        choices = order.choices.copy()
        empty = self.kernel.Stages.empty
        current = empty(self.table.num_stages, self.table.pp)
        trial = empty(self.table.num_stages, self.table.pp)
        figures = self.figures[order.split]
        of_order = (figures, words, order.lengths, first, choices, current, trial)
        found = self.kernel.anneal(*of_order, moves, HEAT, LAYER_SHARE, state)
        return Order(self, words, order.lengths, first, choices, order.split, float(found))

    def code(self, order: Order) -> str:
        """Return the code of an order (`schedules.Searched`)."""
        letters = LETTERS if order.split else "FB"
        rows = []
        for word, length in zip(order.words.tolist(), order.lengths.tolist(), strict=True):
            ran = Counter[int]()
            texts = []
            for symbol in word[:length]:
                kind, stage = divmod(symbol, self.table.num_stages)
                texts.append(f"{stage}{letters[kind]}{ran[symbol]}")
                ran[symbol] += 1
            rows.append(texts)
        return order_code(self.table.rule.placement, rows)


def contiguous(values: Tensor) -> NDArray[Any]:
    """Return a tensor as an array that the kernel can read."""
    return np.ascontiguousarray(values.detach().numpy())


BASES = 6
"""Pipeline configurations whose orders are annealed first, plus one per placement."""
ANNEALED = 5
"""Best of these, whose orders are annealed."""
ROUNDS = 20
"""Times that the best orders are annealed again."""
FIRST_SHARE = 3 / 8
"""Share of the passes for the first annealing of all starts; the rest is for the best orders."""
KEPT = 6
"""Orders that are annealed again and kept."""
STALE = 3
"""Searches of free orders in a row, each with the next seed, that end the search if none gains."""


@dataclass
class OrderSearch:
    """Search pass orders, and layers of their stages, where the tables of a pool leave the order free."""

    pool: PlanPool
    """Gets tables of searched orders."""
    space_kind: str
    config: SearchConfig
    """Settings: `order_passes` are timed."""
    seed: int
    bounds: Sequence[Tensor]
    """Lower bounds of the seconds of the pool's tables under any order, `(O,)` each."""
    found: list[Order] = field(default_factory=list, init=False)
    """The best orders, fastest first."""
    settled: bool = field(default=False, init=False)
    """Whether every start of the last run ended at the same seconds from different orders."""

    def search(self) -> str | None:
        """Add the best plans to the pool; return `user` or `time_limit` where it was cut short."""
        try:
            self._compile()
            self.run(self.config.order_passes)
            self._search_again()
        except KeyboardInterrupt:
            return "user"
        finally:
            self.keep()
        return "time_limit" if self.late else None

    def _compile(self) -> None:
        """Call the kernel once before any move, so that compiling it takes none of the seconds."""
        with self.pool.clock.paused():
            for entry in self._bases()[:1]:
                problem = self._problem(entry)
                for order in problem.starts(entry.plan)[:1]:
                    problem.annealed(order, 1, np.ones(1, dtype=np.uint64))

    def _search_again(self) -> None:
        """Search again with the next seeds, until the time is over or nothing is gained."""
        stale = 0
        seed = self.seed
        while self._goes_on() and stale < STALE:
            seed += 1
            other = replace(self, seed=seed)
            before = self.found[0].seconds
            try:
                other.run(self.config.order_passes)
            finally:
                self._keep_best([*self.found, *other.found])
            gained = self.found[0].seconds < before * (1.0 - GAIN_TOLERANCE)
            stale = 0 if gained else stale + 1

    def _goes_on(self) -> bool:
        """Return whether another seed may gain: the orders are not settled, and one may win."""
        return bool(self.found) and not self.settled and not self.late and bool(self._bases())

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self.pool.clock.seconds > self.config.max_seconds

    @cached_property
    def state(self) -> State:
        """State of the random numbers of all moves: never 0, and far apart for neighbouring seeds."""
        spread = self.seed * 2654435761 % 2**63
        return np.array([spread + 88172645463325252], dtype=np.uint64)

    def run(self, passes: int) -> None:
        """Anneal orders of the best plans of every placement, then the best orders repeatedly."""
        begun = []
        for entry in self._bases():
            problem = self._problem(entry)
            orders = problem.starts(entry.plan)
            self._add(orders[:1])
            if orders:
                begun.append((problem, orders))
        begun = sorted(begun, key=lambda start: start[1][0].seconds)[:ANNEALED]
        share = int(passes * FIRST_SHARE)
        settled = [self._halve(*start, share // len(begun)) for start in begun]
        self.settled = all(settled)
        if not self.settled:
            self._anneal_again(int(passes * (1.0 - FIRST_SHARE)))

    def _bases(self) -> list[PricedPlan]:
        """Return the best plans, and the best one of every placement."""
        entries = [
            entry
            for entry in self.pool.by_outer()
            if self._is_priced(entry) and self._may_win(entry)
        ]
        placements = set()
        bases = []
        for rank, entry in enumerate(entries):
            table = self.pool.tables[entry.table]
            placement = (table.pp, table.num_stages, table.rule.folded)
            if placement not in placements or rank < BASES:
                bases.append(entry)
            placements.add(placement)
        return bases

    def _may_win(self, entry: PricedPlan) -> bool:
        """Return whether some order of an entry's configuration may be faster than the best plan."""
        number, outer = entry.outer
        least = min([self.pool.best_time, *(found.seconds for found in self.found)])
        return float(self.bounds[number][outer]) < least * (1.0 - GAIN_TOLERANCE)

    def _is_priced(self, entry: PricedPlan) -> bool:
        """Return whether the order of an entry's passes is free, and the kernel prices its plans."""
        table = self.pool.tables[entry.table]
        return table.pipeline.free and table.pp > 1 and not unknown_costs([table])

    def _problem(self, entry: PricedPlan) -> OrderProblem:
        number, outer = entry.outer
        return OrderProblem(self.pool.tables[number], outer, self.space_kind, number)

    def _halve(self, problem: OrderProblem, orders: list[Order], passes: int) -> bool:
        """Improve orders by successive halving, the best of them longest.

        Returns:
            Whether half of the first round gained the same seconds: there is nothing left to gain.
        """
        count = 2 ** (HALVINGS - 1)
        left = (orders * count)[:count]
        started = min((order.seconds for order in left), default=0.0)
        first = True
        while left and not self.late:
            moves = max(passes // (HALVINGS * len(left) * problem.work), 1)
            improved = [problem.annealed(order, moves, self.state) for order in left]
            left = sorted(improved, key=by_seconds)
            self._add(left[:2])
            best = left[0].seconds
            alike = left[len(left) // 2 - 1].seconds
            gained = best < started * (1.0 - GAIN_TOLERANCE)
            if first and gained and alike <= best * (1.0 + GAIN_TOLERANCE):
                return True
            first = False
            left = left[: len(left) // 2]
        return False

    def _anneal_again(self, passes: int) -> None:
        """Anneal one of the best orders at a time, the best most often."""
        random = np.random.default_rng(self.seed)
        for _ in range(ROUNDS if self.found else 0):
            if self.late:
                break
            place = int(random.geometric(0.5)) - 1
            chosen = self.found[min(place, len(self.found) - 1)]
            moves = passes // ROUNDS // chosen.problem.work
            improved = chosen.problem.annealed(chosen, moves, self.state)
            self._add([improved])

    def _add(self, orders: list[Order]) -> None:
        """Keep the best orders, each time once."""
        known = {found.seconds for found in self.found}
        new = [order for order in orders if order.seconds not in known]
        self._keep_best(self.found + new)

    def _keep_best(self, found: list[Order]) -> None:
        """Keep the fastest of some orders."""
        self.found = sorted(found, key=by_seconds)[:KEPT]

    def keep(self) -> None:
        """Add the best order's plan of every table to the pool, with a table of that order."""
        best = {found.problem.number: found for found in reversed(self.found)}
        for found in best.values():
            problem = found.problem
            code = problem.code(found)
            self.pool.tables.append(problem.table.with_order(problem.outer, code))
            number = len(self.pool.tables) - 1
            outer = torch.zeros(1, dtype=torch.long)
            choices = torch.from_numpy(found.choices)[None]
            first = torch.from_numpy(found.first[:-1])[None]
            self.pool.add(number, HardPlans(outer, choices, first))
