"""Strategies of one stage whose layers, memory and neighbours are given, by dynamic programming.

A label-setting program over the layers of the stage: labels are (weighted seconds, bytes) of a prefix,
kept apart by activation layout and pruned by dominance. A first pass with few labels finds a good
answer; a second one drops every label whose lower bound (memory priced by Lagrange multipliers) exceeds
it. The largest working memory of the stage is taken care of by trying its possible values as limits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost.table import CostTable
from darts_parallel.exact.bounds import OuterCosts, equal_rows

Array = NDArray[np.float64]
COARSE_LABELS = 12
"""Labels of one layout in the first pass; thinned evenly in memory beyond that."""
FINE_LABELS = 400
"""The same in the second pass, after pruning by bounds."""
COARSE_LIMITS = 4
"""Values of the working memory, of the smallest lower bounds, that the first pass tries."""
CHAIN_LABELS = 64
"""Labels of one layout where the best of every last layout is wanted."""
MAX_LIMITS = 128
"""Values of the working memory that all stages together try; thinned evenly beyond that."""
MIN_LIMITS = 16
"""What one stage tries at least."""
CLOSE = 1.0 - 1e-12
"""A second answer must be cheaper by more than rounding."""
PRICES = 16
"""Prices of memory, in seconds per byte, whose best lower bound is used."""


Key = tuple[int, int, int, int, int]
"""A stage, its first layer and end, and the layouts of its neighbours (-1 where there is none)."""


@dataclass(frozen=True)
class _LayerCosts:
    """Useful strategies of one class of layers."""

    choices: NDArray[np.int64]
    seconds: Array
    """Weighted."""
    need: Array
    """Bytes."""
    rates: Array
    """Positive exchange rates of seconds for bytes between two of them."""


@dataclass(frozen=True)
class _Costs:
    """Weighted seconds and bytes of the useful strategies of every layer of a stage."""

    choices: Sequence[NDArray[np.int64]]
    seconds: Sequence[Array]
    need: Sequence[Array]
    capacity: float
    prices: Array
    rest: Array
    """Smallest priced seconds of the layers from each on, shape `(prices, layers + 1)`."""

    def lower_bound(self, done: int, cost: Array, memory: Array) -> Array:
        """Bound on the seconds of any completion after `done` layers, shape of `cost`."""
        priced = self.rest[:, done, None] - self.prices[:, None] * (self.capacity - memory)[None, :]
        return np.asarray(cost + priced.max(0))


@dataclass(frozen=True)
class _Labels:
    """Prefixes of the stage: weighted seconds, bytes, layout, last choice, and the prefix before."""

    cost: Array
    memory: Array
    layout: NDArray[np.int64]
    choice: NDArray[np.int64]
    previous: NDArray[np.int64]


class StageSolver:
    """Solves stages of one outer choice of a table.

    Answers are remembered by what they depend on: stages of one kind that hold equal layers share them.
    """

    def __init__(self, table: CostTable, outer: int) -> None:
        self.table, self.outer = table, outer
        self.costs = OuterCosts.whole(table, outer)
        self.layout, self.layer_class = self.costs.layout, self.costs.layer_class
        every, kinds = torch.arange(len(table.choices)), table.stage_kind.unsqueeze(1)
        runs = table.allowed[outer] & table.runs(kinds, every.expand(table.num_stages, -1))
        self.allowed = [np.flatnonzero(row) for row in runs.numpy()]
        pairs = np.concatenate([self.costs.reshard, self.costs.p2p])
        self.pair_class = equal_rows(pairs.transpose(1, 0, 2, 3))
        self.signature = self._signatures()
        self.known: dict[tuple[int | bytes, ...], list[list[int]]] = {}
        self.layers: dict[tuple[float, ...], _LayerCosts] = {}

    def _signatures(self) -> list[int]:
        """Number of the kind of every stage, its micro-batches in flight, bytes and boundaries."""
        table = self.table
        borders = [-1, *table.boundary_kind.tolist(), -1]
        columns = (table.stage_kind, table.in_flight[self.outer], table.stage_capacity)
        keys = zip(*(column.tolist() for column in columns), borders[:-1], borders[1:], strict=True)
        number: dict[tuple[float, ...], int] = {}
        return [number.setdefault(key, len(number)) for key in keys]

    def _shared(self, key: Key) -> tuple[int | bytes, ...]:
        """What the answer for a stage depends on."""
        stage, first, end, before, after = key
        layers = self.layer_class[first:end].tobytes()
        pairs = self.pair_class[max(first - 1, 0) : end - 1 + (after >= 0)].tobytes()
        return self.signature[stage], layers, pairs, int(first == 0), before, after

    def solve(
        self, stage: int, first: int, end: int, before: int, after: int, *, weights: int = 3
    ) -> list[list[int]]:
        """Strategies of layers `first` to `end - 1` on `stage`, for several weights of its seconds.

        Args:
            before, after: Layouts of the neighbouring layers, -1 where there is none.
            weights: How many weights are tried: the slowest stage's with and without its
                synchronisation, and that of any other stage.

        Returns:
            Distinct candidates, each of `end - first` strategies; empty where none fits.
        """
        key = (stage, first, end, before, after)
        shared = (*self._shared(key), weights)
        if shared not in self.known:
            count = float(self.table.num_micro_batches[self.outer])
            limits = self._limits(stage, first, end)
            some = ((count, 1.0), (count, 0.0), (1.0, 1.0))[:weights]
            answers = [self._best(key, limits, *weight) for weight in some]
            distinct = dict.fromkeys(tuple(answer) for answer in answers if answer)
            self.known[shared] = [list(choices) for choices in distinct]
        return self.known[shared]

    def solve_by_layout(self, stage: int, first: int, end: int, before: int) -> list[list[int]]:
        """The best strategies for every layout that the stage may end in (`solve` for a chain of stages).

        The way into the next stage is not counted: the caller knows what follows.
        """
        key = (stage, first, end, before, -1)
        shared = (*self._shared(key), 0)
        if shared not in self.known:
            count = float(self.table.num_micro_batches[self.outer])
            distinct: dict[tuple[int, ...], None] = {}
            for weights in ((count, 1.0), (count, 0.0), (1.0, 1.0)):
                best: dict[int, tuple[float, list[int]]] = {}
                for limit in self._limits(stage, first, end):
                    costs = self._costs(key, limit, *weights)
                    for labels, trail in self._labels(key, costs, weights[0], np.inf, CHAIN_LABELS):
                        for layout in np.unique(labels.layout).tolist():
                            mine = np.flatnonzero(labels.layout == layout)
                            last = int(mine[labels.cost[mine].argmin()])
                            if labels.cost[last] < best.get(layout, (np.inf, []))[0]:
                                best[layout] = (float(labels.cost[last]), _trace(trail, last))
                distinct |= dict.fromkeys(tuple(answer) for _, answer in best.values())
            self.known[shared] = [list(choices) for choices in distinct]
        return self.known[shared]

    def _limits(self, stage: int, first: int, end: int) -> list[float]:
        """Values that the largest working memory may take; the largest alone where all fits anyway."""
        allowed = self.allowed[stage]
        if not len(allowed):
            return []
        working = self.costs.working[first:end][:, allowed]
        in_flight = float(self.table.in_flight[self.outer, stage])
        kept = (self.costs.static + in_flight * self.costs.activation)[first:end][:, allowed]
        values = np.unique(working)
        values = values[values >= working.min(1).max()]
        values = values[kept.min(1).sum() + values <= float(self.table.stage_capacity[stage])]
        if not len(values):
            return []
        if kept.max(1).sum() + values[-1] <= float(self.table.stage_capacity[stage]):
            return [float(values[-1])]
        most = max(MAX_LIMITS // self.table.pp, MIN_LIMITS)
        if len(values) > most:
            values = values[np.linspace(0, len(values) - 1, most).round().astype(int)]
        return [float(value) for value in values]

    def _best(self, key: Key, limits: list[float], per_time: float, per_sync: float) -> list[int] | None:
        """The best strategies over all limits of the working memory."""
        best, answer = np.inf, None
        empty = np.zeros(1)
        every = [self._costs(key, limit, per_time, per_sync) for limit in limits]
        bounds = [float(costs.lower_bound(0, empty, empty)[0]) for costs in every]
        order = sorted(range(len(limits)), key=bounds.__getitem__)
        for most, tried in ((COARSE_LABELS, order[:COARSE_LIMITS]), (FINE_LABELS, order)):
            for index in tried:
                if bounds[index] >= best * CLOSE:
                    break
                found, choices = self._pass(key, every[index], per_time, best, most)
                if found < best:
                    best, answer = found, choices
        return answer

    def _costs(self, key: Key, limit: float, per_time: float, per_sync: float) -> _Costs:
        stage, first, end = key[:3]
        classes = self.layer_class[first:end].tolist()
        weights = (limit, per_time, per_sync)
        members = {n: self._layer(stage, first + classes.index(n), *weights) for n in set(classes)}
        own = [members[n] for n in classes]
        prices = _prices([layer.rates for layer in own])
        least = {n: (one.seconds + prices[:, None] * one.need).min(axis=1) for n, one in members.items()}
        rest = np.zeros((len(prices), end - first + 1))
        rest[:, :-1] = np.stack([least[n] for n in classes], axis=1)[:, ::-1].cumsum(1)[:, ::-1]
        room = float(self.table.stage_capacity[stage]) - limit
        choices, seconds, need = zip(*((x.choices, x.seconds, x.need) for x in own), strict=True)
        return _Costs(choices, seconds, need, room, prices, rest)

    def _layer(self, stage: int, layer: int, limit: float, per_time: float, per_sync: float) -> _LayerCosts:
        """Useful strategies of a layer on a stage, within a limit of the working bytes."""
        key = (self.signature[stage], int(self.layer_class[layer]), limit, per_time, per_sync)
        if key not in self.layers:
            kind, allowed = int(self.table.stage_kind[stage]), self.allowed[stage]
            in_flight = float(self.table.in_flight[self.outer, stage])
            legal = allowed[self.costs.working[layer, allowed] <= limit]
            cost = (
                per_time * self.costs.time[kind, layer, legal]
                + per_sync * self.costs.sync[kind, layer, legal]
            )
            cost = cost + self.costs.per_iteration[layer, legal]
            need = self.costs.static[layer, legal] + in_flight * self.costs.activation[layer, legal]
            useful = _undominated(cost, need, self.layout[legal])
            cost, need = cost[useful], need[useful]
            faster, smaller = cost[None, :] - cost[:, None], need[:, None] - need[None, :]
            rates = (faster / np.where(smaller > 0, smaller, np.inf))[(smaller > 0) & (faster > 0)]
            self.layers[key] = _LayerCosts(legal[useful], cost, need, rates)
        return self.layers[key]

    def _pass(
        self, key: Key, costs: _Costs, per_time: float, best: float, most: int
    ) -> tuple[float, list[int] | None]:
        """The cheapest strategies of one label-setting pass, if cheaper than `best`."""
        for labels, trail in self._labels(key, costs, per_time, best, most):
            final = labels.cost + per_time * self._leave(key[0], key[2], labels.layout, key[4])
            return float(final.min()), _trace(trail, int(final.argmin()))
        return np.inf, None

    def _labels(
        self, key: Key, costs: _Costs, per_time: float, best: float, most: int
    ) -> Iterator[tuple[_Labels, list[_Labels]]]:
        """The labels of the whole stage and how they came about; nothing where none fits below `best`."""
        stage, first, _, before = key[:4]
        kind = int(self.table.stage_kind[stage])
        trail: list[_Labels] = []
        labels = _Labels(np.zeros(1), np.zeros(1), np.full(1, before), np.zeros(1, int), np.zeros(1, int))
        for index, choices in enumerate(costs.choices):
            held = self.layout[choices]
            change = self._change(stage, kind, first + index, labels.layout, held, index == 0)
            cost = (labels.cost[:, None] + costs.seconds[index] + per_time * change).ravel()
            memory = (labels.memory[:, None] + costs.need[index]).ravel()
            kept = np.flatnonzero(memory <= costs.capacity)
            kept = kept[costs.lower_bound(index + 1, cost[kept], memory[kept]) < best * CLOSE]
            column = kept % max(len(choices), 1)
            chosen = _undominated(cost[kept], memory[kept], held[column], most)
            kept, column = kept[chosen], column[chosen]
            if not len(kept):
                return
            labels = _Labels(cost[kept], memory[kept], held[column], choices[column], kept // len(choices))
            trail.append(labels)
        yield labels, trail

    def _change(
        self,
        stage: int,
        kind: int,
        layer: int,
        held: NDArray[np.int64],
        wanted: NDArray[np.int64],
        entry: bool,
    ) -> Array:
        """Seconds of resharding, or of p2p at the stage's entry, for labels x choices."""
        if layer == 0:
            return np.zeros((len(held), len(wanted)))
        if entry:
            border = int(self.table.boundary_kind[stage - 1])
            return np.asarray(self.costs.p2p[border, layer - 1][held[:, None], wanted])
        return np.asarray(self.costs.reshard[kind, layer - 1][held[:, None], wanted])

    def _leave(self, stage: int, end: int, held: NDArray[np.int64], after: int) -> Array:
        """Seconds of p2p into the next stage."""
        if after < 0:
            return np.zeros(len(held))
        border = int(self.table.boundary_kind[stage])
        return np.asarray(self.costs.p2p[border, end - 1][held, after])


def _prices(rates: list[Array]) -> Array:
    """Memory prices between the smallest and largest exchange rate of seconds for bytes, and 0."""
    positive = np.concatenate(rates)
    if not len(positive):
        return np.zeros(1)
    return np.concatenate([[0.0], np.quantile(positive, np.linspace(0.0, 1.0, PRICES - 1))])


def _undominated(
    costs: Array, sizes: Array, layouts: NDArray[np.int64], most: int | None = None
) -> NDArray[np.int64]:
    """Indices that no other of their layout beats in both figures, at most `most` of a layout."""
    if not len(costs):
        return np.zeros(0, int)
    order = np.lexsort((costs, sizes, layouts))
    group = np.concatenate([[0], np.cumsum(np.diff(layouts[order]) != 0)])
    # every group is shifted below the one before, so that the running minimum starts anew in it
    shifted = costs[order] - group * (2.0 * np.abs(costs).max() + 1.0)
    first = np.ones(len(order), bool)
    first[1:] = shifted[1:] < np.minimum.accumulate(shifted)[:-1]
    kept, group = order[first], group[first]
    if most is None or len(kept) <= most:
        return kept
    parts = [kept[group == g] for g in np.unique(group)]
    return np.concatenate(
        [p[np.linspace(0, len(p) - 1, most).round().astype(int)] if len(p) > most else p for p in parts]
    )


def _trace(trail: list[_Labels], last: int) -> list[int]:
    result = []
    for labels in reversed(trail):
        result.append(int(labels.choice[last]))
        last = int(labels.previous[last])
    return result[::-1]
