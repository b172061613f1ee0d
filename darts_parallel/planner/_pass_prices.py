"""Seconds and bytes of plans whose micro-batches hold any lengths on any context-parallel degree.

A pass over tokens of one length is priced at several numbers of tokens and several lengths, and
interpolated between them: piecewise linear in the tokens, and in the length, since attention costs
the square of every sequence. A pack costs the mean of what its tokens would cost if all sequences
were as long as each.

A step is the longest path through 1F1B. Where ranks wait for each other in every pass, a pass lasts
as long as on the slowest rank of its micro-batch. Gradients and optimizer come on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    CostTable,
    HardPlans,
    build_tables,
    compiled,
    evaluate_batch,
    even_uniform_plans,
    pass_ends,
    pass_seconds,
)
from darts_parallel.planner._length_draws import Draws, Floats, Integers, Load, weights_between
from darts_parallel.plans import LayerStrategy, OuterSpace, Plan
from darts_parallel.problem import Problem

KNOTS = 9
"""Numbers of tokens that are priced, each twice the one before."""


class _Prices(NamedTuple):
    """Costs of P plans at K numbers of tokens and G lengths, at one context-parallel degree."""

    passes: Floats
    """Seconds of passes forward and backward, `(P, K * G, 2 * stages)`."""
    once: Floats
    """Seconds once an iteration, `(P, K * G, 1)`."""
    memory: Floats
    """Bytes at the longest length, `(P, K, stages)`."""


@dataclass(frozen=True)
class SharedStrategies:
    """SharedStrategies of the plans of one pipeline degree and order of the nodes."""

    problem: Problem
    draws: Draws
    space: OuterSpace
    """SharedStrategies as without context parallelism: `dp` counts all ranks that share gradients."""
    degrees: Mapping[LayerStrategy, Sequence[int]]
    """Context-parallel degrees that the space allows with each of them."""

    @property
    def knots(self) -> Integers:
        """Priced tokens of a micro-batch on all ranks together, rising, `(K,)`."""
        devices = self.problem.cluster.num_devices // self.space.pp
        most = 2 * int(self.draws.grid[-1]) * devices
        return np.array([most >> k for k in reversed(range(KNOTS))])

    def table(self, cp: int, length: int) -> CostTable:
        """Return the costs at a context-parallel degree, a length and all knots, the last one first."""
        most = int(self.knots[-1])
        counts = tuple(length << k for k in range(KNOTS))
        choices = tuple(replace(own, dp=max(own.dp // cp, 1)) for own in self.space.choices)
        own = changed(self.problem, seq_len=length, global_batch_size=most, lengths=None)
        space = replace(self.space, num_micro_batches=counts, choices=choices, cp=cp)
        (table,) = build_tables(own, [space])
        return table

    def even_plans(self, table: CostTable) -> HardPlans:
        """Return the even uniform plans that the devices can run."""
        free = replace(table, allowed=torch.ones_like(table.allowed))
        first = replace(free, allowed=free.allowed[:1])
        plans = even_uniform_plans(first)
        endless = torch.full_like(table.capacity, torch.inf)
        roomy = replace(free, capacity=endless)
        cost = evaluate_batch(roomy, plans)
        return plans[cost.feasible]

    def hard(self, plan: Plan) -> HardPlans:
        """Return a plan of these strategies."""
        layers = [whole(layer, plan.cp) for layer in plan.layers]
        places = [self.space.choices.index(layer) for layer in layers]
        outer = torch.zeros(1, dtype=torch.long)
        choices = torch.tensor([places])
        starts = torch.tensor([plan.boundaries[:-1]])
        return HardPlans(outer, choices, starts)


@dataclass(frozen=True)
class PlanPrices:
    """Prices of P plans of the same strategies."""

    strategies: SharedStrategies
    plans: HardPlans
    """The even uniform ones, then the given ones."""
    given: Sequence[Plan]
    limit: Floats
    """Bytes of a device, `(stages,)`."""
    known: dict[int, _Prices] = field(default_factory=dict)
    """Prices by context-parallel degree."""

    @staticmethod
    def of(strategies: SharedStrategies, given: Sequence[Plan]) -> "PlanPrices":
        """Price the even uniform plans, and the given plans behind them."""
        longest = int(strategies.draws.grid[-1])
        table = strategies.table(1, longest)
        rows = [strategies.even_plans(table), *map(strategies.hard, given)]
        plans = HardPlans.concatenate(rows)
        limit = table.capacity.numpy() * (1.0 + PLAN_MEMORY_TOLERANCE)
        return PlanPrices(strategies, plans, given, limit)

    def at(self, cp: int) -> _Prices:
        """Return the prices at a context-parallel degree."""
        if cp not in self.known:
            self.known[cp] = self._priced(cp)
        return self.known[cp]

    def _priced(self, cp: int) -> _Prices:
        # every plan at every knot: the first outer choice has the most tokens
        count = len(self.plans)
        outer = torch.arange(KNOTS).flip(0).repeat_interleave(count)
        rows = torch.arange(count).repeat(KNOTS)
        plans = replace(self.plans[rows], outer=outer)
        passes = []
        once = []
        for length in self.strategies.draws.grid.tolist():
            table = self.strategies.table(cp, length)
            cost = evaluate_batch(table, plans)
            blocking = pass_seconds(table, plans).blocking()
            both = torch.cat([blocking.forward, blocking.backward], 1)
            passes.append(both)
            rest = cost.iteration_time - cost.pipeline_end[:, 0]
            once.append(rest.unsqueeze(1))
        by_knot = cost.memory.reshape(KNOTS, count, -1)
        memory = by_knot.transpose(0, 1).numpy()
        return _Prices(_by_plan(passes), _by_plan(once), memory)


def _by_plan(by_length: Sequence[Tensor]) -> Floats:
    """Return figures of P plans, `(P, K * G, columns)`, from those by length, each `(K * P, columns)`."""
    stacked = torch.stack(list(by_length), 1)
    by_knot = stacked.reshape(KNOTS, -1, *stacked.shape[1:])
    by_plan = by_knot.transpose(0, 1)
    result: Floats = by_plan.flatten(1, 2).numpy()
    return result


def changed(problem: Problem, **training: Any) -> Problem:
    """Return the job with other values of `training`, and as much memory left free."""
    own = replace(problem.training, **training)
    config = replace(problem.config, training=own)
    return replace(Problem.from_config(config), headroom=problem.headroom)


def whole(strategy: LayerStrategy, cp: int) -> LayerStrategy:
    """Return a strategy as without context parallelism: `dp` counts all ranks that share gradients."""
    return replace(strategy, dp=strategy.dp * cp)


@dataclass(frozen=True)
class PlanAtLengths:
    """One plan of `PlanPrices`."""

    prices: PlanPrices
    number: int

    @property
    def given(self) -> Plan | None:
        """The plan of the main search that it is; None: an even uniform one."""
        given = self.prices.given
        place = self.number - len(self.prices.plans)
        return given[place] if place >= -len(given) else None

    @cached_property
    def layers(self) -> tuple[LayerStrategy, ...]:
        """Strategy of every layer, as without context parallelism."""
        choices = self.prices.plans.choices[self.number].tolist()
        return tuple(self.prices.strategies.space.choices[choice] for choice in choices)

    @property
    def ranks(self) -> int:
        """Data-parallel times context-parallel ranks of the first layer."""
        return self.layers[0].dp

    @property
    def mixed(self) -> bool:
        """Whether layers differ in their ranks."""
        return len({own.dp for own in self.layers}) > 1

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other in every pass."""
        layers = set(self.layers)
        sharded = any(own.zero_stage >= 2 for own in layers)
        return self.mixed or sharded or any(own.ep > 1 for own in layers)

    @property
    def degrees(self) -> Sequence[int]:
        """Context-parallel degrees that it may have for all sequences."""
        given = self.given
        if given is not None:
            return [given.cp]
        degrees = self.prices.strategies.degrees
        return degrees[self.layers[0]]

    def to_plan(self, cp: int, num_micro_batches: int) -> Plan:
        """Return it at a context-parallel degree."""
        layers = tuple(replace(own, dp=own.dp // cp) for own in self.layers)
        starts = self.prices.plans.first_layers[self.number].tolist()
        boundaries = (*starts, len(layers))
        order = self.prices.strategies.space.node_order
        return Plan(num_micro_batches, boundaries, layers, cp=cp, node_order=order)

    def memory(self, cp: int, tokens: float) -> Floats:
        """Return the bytes of every stage with so many tokens of a rank in each micro-batch."""
        weights = self._by_knot(tokens)
        known = self.prices.at(cp).memory
        return np.asarray(weights @ known[self.number])

    def fits(self, cp: int, tokens: float) -> bool:
        """Return whether so many tokens of a rank fit the memory."""
        needed = self.memory(cp, tokens)
        return bool((needed <= self.prices.limit).all())

    def _by_knot(self, tokens: float) -> Floats:
        """Return the weights of the knots at some tokens of a rank, `(K,)`."""
        every = np.array([tokens * self.ranks])
        weights = weights_between(every, self.prices.strategies.knots)
        return np.asarray(weights[0])

    def seconds(self, load: Load, *, waits: bool) -> Floats:
        """Return the seconds of every draw, `(D,)`.

        Args:
            waits: Whether all ranks wait in every pass, and not at the end alone; else every
                micro-batch has as many groups.
        """
        return self.pipeline_seconds(load, waits=waits) + self._once(load)

    def pipeline_seconds(self, load: Load, *, waits: bool) -> Floats:
        """Return the part of `seconds` until the last backward pass, `(D,)`."""
        passes = self._by_group(load, "passes")
        if waits:
            passes = np.maximum.reduceat(passes, load.waves)
        stages = len(self.prices.limit)
        by_wave = passes.reshape(len(load.waves), -1, 2, stages)
        return path_seconds(by_wave, load.counts)

    def _once(self, load: Load) -> Floats:
        """Return the seconds of gradients and optimizer, of the mean group of every draw, `(D,)`."""
        once = self._by_group(load, "once")[:, 0]
        first = np.cumsum(load.counts) - load.counts
        starts = load.waves[first]
        groups = np.diff(starts, append=len(once))
        total = np.add.reduceat(once, starts)
        return np.asarray(total / groups)

    def _by_group(self, load: Load, field: str) -> Floats:
        """Return a field of the prices for every group, `(M, columns)`."""
        every = load.tokens * self.ranks
        by_knot = weights_between(every, self.prices.strategies.knots)
        both = by_knot[:, :, None] * load.mix[:, None, :]
        weights = both.reshape(len(both), -1)
        width = getattr(self.prices.at(1), field).shape[2]
        result = np.empty((len(weights), width))
        for cp in np.unique(load.ranks).tolist():
            own = load.ranks == cp
            known = getattr(self.prices.at(cp), field)
            result[own] = weights[own] @ known[self.number]
        return result

    def least_seconds(self, tokens: float) -> float:
        """Return seconds that no packing into micro-batches of up to so many tokens of a rank beats.

        The ranks share all work evenly, in the fullest micro-batches and without messages of
        context parallelism; gradients and optimizer follow.
        """
        prices = self.prices.at(1)
        draws = self.prices.strategies.draws
        stages = len(self.prices.limit)
        passes = prices.passes[self.number]
        passes = passes.reshape(KNOTS, len(draws.grid), 2, stages)
        by_length = np.tensordot(self._by_knot(tokens), passes.sum(2), 1)
        work = draws.mean_tokens @ by_length
        seconds = work / (tokens * self.ranks)
        once = prices.once[self.number]
        return float(seconds.max() + once.min())


def path_seconds(passes: Floats, counts: Integers) -> Floats:
    """Return the seconds of 1F1B on the slowest rank of every draw, `(D,)`.

    Args:
        passes: Seconds forward and backward of every micro-batch, `(W, ranks, 2, stages)`.
        counts: Micro-batches of every draw, `(D,)`.
    """
    ends = np.cumsum(counts)
    _, ranks, _, stages = passes.shape
    starts = ends - counts
    if stages == 1:
        work = np.add.reduceat(passes.sum((2, 3)), starts)
        return np.asarray(work.max(1))
    result = np.empty(len(counts))
    for count in np.unique(counts).tolist():
        draws = np.flatnonzero(counts == count)
        rows = starts[draws] + np.arange(count)[:, None]
        graph = compiled("1f1b", stages, count, 1)
        kind, stage, batch = graph.operations.T
        durations = passes[rows[batch], :, kind[:, None], stage[:, None]]
        durations = durations.reshape(len(graph), len(draws) * ranks)
        times = pass_ends(graph, durations, np.zeros_like(durations))
        last = times.end[graph.last].max(0)
        by_rank = last.reshape(len(draws), ranks)
        result[draws] = by_rank.max(1)
    return result
