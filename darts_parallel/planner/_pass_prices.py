"""Seconds and bytes of plans whose micro-batches hold any lengths on any context-parallel degree.

A pass over tokens of one length is priced at several numbers of tokens and several lengths, and
interpolated between them: piecewise linear in the tokens, and in the length, since attention costs
the square of every sequence. A pack costs the mean of what its tokens would cost if all sequences
were as long as each.

A step is the longest path through 1F1B. Where ranks wait for each other in every pass, a pass lasts
as long as on the slowest rank of its micro-batch. Gradients and optimizer come on top.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    Array,
    CostTable,
    HardPlans,
    Index,
    build_tables,
    compiled,
    evaluate_batch,
    even_uniform_plans,
    pass_ends,
    pass_seconds,
)
from darts_parallel.errors import remembered
from darts_parallel.planner._length_draws import Draws, Load, weights_between
from darts_parallel.plans import LayerStrategy, OuterSpace, Plan, Strategies, divisors
from darts_parallel.problem import Problem

KNOTS = 15
"""Numbers of tokens that are priced: two in each factor of 2."""
SHARES = [(2 + k % 2) << k // 2 for k in range(KNOTS)]
"""2, 3, 4, 6, 8, ...: micro-batches that share the most tokens, times pipeline stages."""


class _Costs(NamedTuple):
    """Costs of P plans at K numbers of tokens, at one context-parallel degree and length."""

    seconds: Tensor
    """Seconds of passes forward and backward, and of the rest of an iteration, `(K * P, 2 * stages + 1)`."""
    memory: Array
    """Bytes, `(P, K, stages)`."""


@dataclass(frozen=True)
class PlanPrices:
    """Prices of P plans of one pipeline degree and order of the nodes."""

    draws: Draws
    job_at: Callable[[int], Problem]
    """Returns the job with sequences of one length."""
    most: int
    """Priced tokens of two micro-batches in all stages of the job together, at most."""
    space: OuterSpace
    """Strategies as without context parallelism: `dp` counts all ranks that share gradients."""
    degrees: Mapping[LayerStrategy, Sequence[int]]
    """Context-parallel degrees that the space allows with each of them."""
    given: Sequence[Plan]

    @property
    def knots(self) -> Array:
        """Priced tokens of a micro-batch on all ranks together, rising, `(K,)`."""
        shares = self.space.pp * np.array(SHARES[::-1], dtype=np.float64)
        return self.most / shares

    def table(self, cp: int, length: int) -> CostTable:
        """Return the costs at a context-parallel degree, a length and all knots, the last one first."""
        job = self.job_at(length)
        tokens = job.training.global_batch_size * length
        times = max(1, round(tokens / self.most))
        first = self.space.pp * times
        counts = tuple(first * share for share in SHARES)
        choices = []
        for own in self.space.choices:
            dp = max(own.dp // cp, 1)
            choices.append(replace(own, dp=dp))
        space = replace(
            self.space,
            num_micro_batches=counts,
            choices=tuple(choices),
            cp=cp,
        )
        (table,) = build_tables(job, [space])
        return table

    def _even_plans(self) -> HardPlans:
        """Return the even uniform plans that the devices can run."""
        table = self._longest
        free = replace(table, allowed=torch.ones_like(table.allowed))
        first = replace(free, allowed=free.allowed[:1])
        plans = even_uniform_plans(first)
        endless = torch.full_like(table.capacity, torch.inf)
        roomy = replace(free, capacity=endless)
        cost = evaluate_batch(roomy, plans)
        return plans[cost.feasible]

    def _hard(self, plan: Plan) -> HardPlans:
        """Return a plan of these strategies."""
        layers = [whole(layer, plan.cp) for layer in plan.layers]
        places = [self.space.choices.index(layer) for layer in layers]
        return HardPlans.one(0, places, plan.boundaries[:-1])

    @cached_property
    def _longest(self) -> CostTable:
        """Costs of the longest sequences without context parallelism."""
        return self.table(1, self.draws.longest_length)

    @cached_property
    def plans(self) -> HardPlans:
        """The even uniform plans, then the given ones."""
        return HardPlans.concatenate([self._even_plans(), *map(self._hard, self.given)])

    @cached_property
    def limit(self) -> Array:
        """Bytes of a device, `(stages,)`."""
        capacity = self._longest.capacity.numpy()
        return capacity * (1.0 + PLAN_MEMORY_TOLERANCE)

    @remembered
    def at(self, cp: int) -> Array:
        """Return the seconds at a context-parallel degree and G lengths, `(P, K * G, 2 * stages + 1)`.

        The columns are the forward and backward passes of every stage, then the seconds once an iteration.
        """
        grid = self.draws.grid.tolist()
        costs = [self.costs(cp, length) for length in grid]
        by_length = torch.stack([own.seconds for own in costs], 1)
        by_knot = by_length.reshape(KNOTS, -1, *by_length.shape[1:])
        by_plan = by_knot.transpose(0, 1)
        return by_plan.flatten(1, 2).numpy()

    @remembered
    def costs(self, cp: int, length: int) -> _Costs:
        """Return the costs at a context-parallel degree and a length."""
        # every plan at every knot: the first outer choice has the most tokens
        count = len(self.plans)
        knots = torch.arange(KNOTS).flip(0)
        outer = knots.repeat_interleave(count)
        rows = torch.arange(count).repeat(KNOTS)
        plans = replace(self.plans[rows], outer=outer)
        table = self.table(cp, length)
        cost = evaluate_batch(table, plans)
        blocking = pass_seconds(table, plans).blocking()
        once = cost.iteration_time - cost.pipeline_end[:, 0]
        columns = [blocking.forward, blocking.backward, once.unsqueeze(1)]
        seconds = torch.cat(columns, 1)
        by_knot = cost.memory.reshape(KNOTS, count, -1)
        memory = by_knot.transpose(0, 1)
        return _Costs(seconds, memory.numpy())

    @cached_property
    def work(self) -> Array:
        """Seconds forward and backward without messages, `(P, K, G, stages)`."""
        passes = self.at(1)[:, :, :-1]
        shape = (len(passes), KNOTS, -1, 2, len(self.limit))
        return passes.reshape(shape).sum(3)

    @cached_property
    def longest_alone(self) -> Array:
        """Seconds of every draw's longest sequence on all ranks, through all stages, `(P, D)`."""
        draws = self.draws
        tokens = draws.lengths[draws.longest]
        by_knot = weights_between(tokens, self.knots)
        by_length = draws.hat[draws.longest]
        seconds = np.einsum("dk,dg,pkgs->pd", by_knot, by_length, self.work)
        return seconds

    def given_plan(self, plan: Plan) -> "PlanAtLengths":
        """Return a given plan."""
        first = len(self.plans) - len(self.given)
        place = self.given.index(plan)
        return PlanAtLengths(self, [first + place])

    @property
    def uniform(self) -> "list[PlansAtLengths]":
        """The even uniform plans, those of one tensor-parallel degree together."""
        count = len(self.plans) - len(self.given)
        choices = self.plans.choices[:count, 0].tolist()
        by_degree: dict[int, list[int]] = defaultdict(list)
        for number, choice in enumerate(choices):
            strategy = self.space.choices[choice]
            by_degree[strategy.tp].append(number)
        return [PlansAtLengths(self, numbers) for numbers in by_degree.values()]


@dataclass(frozen=True)
class PlansAtLengths:
    """V plans of `PlanPrices` on equal ranks."""

    prices: PlanPrices
    numbers: Sequence[int]

    @property
    def plans(self) -> "list[PlanAtLengths]":
        """The plans, one by one."""
        return [PlanAtLengths(self.prices, [number]) for number in self.numbers]

    @property
    def ranks(self) -> int:
        """Data-parallel times context-parallel ranks of the first layer."""
        return self.plans[0].ranks

    def memory(self, cp: int, tokens: float) -> Array:
        """Return the bytes of every stage, `(V, stages)`.

        Args:
            tokens: Of a rank in each micro-batch.
        """
        longest = self.prices.draws.longest_length
        known = self.prices.costs(cp, longest).memory
        weights = self._by_knot(tokens)
        return np.tensordot(known[self.numbers], weights, (1, 0))

    def _by_knot(self, tokens: float) -> Array:
        """Return the weights of the knots at some tokens of a rank, `(K,)`."""
        every = np.array([tokens * self.ranks])
        weights = weights_between(every, self.prices.knots)
        return weights[0]

    def fits(self, cp: int, tokens: float) -> list[bool]:
        """Return whether the memory of each plan holds so many tokens of a rank."""
        needed = self.memory(cp, tokens)
        fitting: list[bool] = np.all(needed <= self.prices.limit, 1).tolist()
        return fitting

    def least_seconds(self, tokens: float) -> Array:
        """Return seconds of every draw that no packing on these ranks beats, `(V, D)`.

        The ranks share all work evenly, in the fullest micro-batches and without messages of
        context parallelism. A step also lasts as long as its longest sequence on all ranks, through
        all stages. Gradients and optimizer follow.

        Args:
            tokens: Of a rank in the fullest micro-batch.
        """
        draws = self.prices.draws
        work = self.prices.work[self.numbers]
        weights = self._by_knot(tokens)
        by_length = np.tensordot(work, weights, (1, 0))
        by_stage = draws.tokens @ by_length
        shared = by_stage.max(2) / (tokens * self.ranks)
        alone = self.prices.longest_alone[self.numbers]
        once = self.prices.at(1)[self.numbers, :, -1]
        least = np.maximum(shared, alone)
        return least + once.min(1, keepdims=True)


def whole(strategy: LayerStrategy, cp: int) -> LayerStrategy:
    """Return a strategy as without context parallelism: `dp` counts all ranks that share gradients."""
    return replace(strategy, dp=strategy.dp * cp)


class PlanAtLengths(PlansAtLengths):
    """One plan of `PlanPrices`."""

    @property
    def number(self) -> int:
        """Its number among the plans."""
        return self.numbers[0]

    @property
    def given(self) -> Plan | None:
        """The plan of the main search that it is; None: an even uniform one."""
        given = self.prices.given
        place = self.number - len(self.prices.plans)
        return given[place] if place >= -len(given) else None

    @cached_property
    def layers(self) -> Strategies:
        """Strategy of every layer, as without context parallelism."""
        choices = self.prices.space.choices
        numbers = self.prices.plans.choices[self.number].tolist()
        return tuple(choices[number] for number in numbers)

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
        degrees = self.prices.degrees
        return degrees[self.layers[0]]

    def to_plan(self, cp: int, num_micro_batches: int) -> Plan:
        """Return it at a context-parallel degree."""
        layers = tuple(replace(own, dp=own.dp // cp) for own in self.layers)
        starts = self.prices.plans.first_layers[self.number].tolist()
        boundaries = (*starts, len(layers))
        order = self.prices.space.node_order
        return Plan(num_micro_batches, boundaries, layers, cp=cp, node_order=order)

    def seconds(
        self,
        load: Load,
        *,
        waits: bool,
        limit: float = inf,
    ) -> Array:
        """Return the seconds of every draw, `(D,)`.

        Args:
            waits: Whether all ranks wait in every pass, and not at the end alone; else every
                micro-batch has as many groups.
            limit: Where their mean is surely not below it, a lower bound is enough.
        """
        by_group = self._by_group(load)
        once = self._once(load, by_group)
        passes = by_group[:, :-1]
        if waits:
            passes = np.maximum.reduceat(passes, load.waves)
        stages = len(self.prices.limit)
        by_wave = passes.reshape(len(load.waves), -1, 2, stages)
        least = least_path(by_wave, load.counts)
        total = least + once
        if stages == 1 or total.mean() >= limit:
            return total
        path = path_seconds(by_wave, load.counts)
        return path + once

    def _once(self, load: Load, by_group: Array) -> Array:
        """Return the seconds of gradients and optimizer, of the mean group of every draw, `(D,)`."""
        once = by_group[:, -1]
        first = np.cumsum(load.counts) - load.counts
        starts = load.waves[first]
        groups = np.diff(starts, append=len(once))
        total = np.add.reduceat(once, starts)
        return total / groups

    def _by_group(self, load: Load) -> Array:
        """Return the seconds of every group, with columns as those of `PlanPrices.at`.

        Between the degrees that divide the ranks they are interpolated: a ring sends `cp - 1` parts.
        """
        tokens = load.tokens * self.ranks
        by_knot = weights_between(tokens, self.prices.knots)
        both = by_knot[:, :, None] * load.mix[:, None, :]
        weights = both.reshape(len(both), -1)
        degrees = np.array(divisors(self.ranks))
        by_degree = weights_between(load.ranks, degrees)
        columns = 2 * len(self.prices.limit) + 1
        result = np.zeros((len(weights), columns))
        for share, cp in zip(by_degree.T, degrees.tolist(), strict=True):
            (own,) = share.nonzero()
            if len(own):
                known = self.prices.at(cp)[self.number]
                seconds = weights[own] @ known
                result[own] += share[own, None] * seconds
        return result


def least_path(passes: Array, counts: Index) -> Array:
    """Return the seconds that 1F1B needs at least, exact for one stage; see `path_seconds`.

    A stage does all its work after the first pass has come to it. The last pass leaves from it.
    """
    ends = np.cumsum(counts)
    starts = ends - counts
    before = np.cumsum(passes, 3) - passes
    work = np.add.reduceat(passes.sum(2), starts)
    arrival = before[starts, :, 0]
    departure = before[ends - 1, :, 1]
    least = work + arrival + departure
    return least.max((1, 2))


def path_seconds(passes: Array, counts: Index) -> Array:
    """Return the seconds of 1F1B on the slowest rank of every draw, `(D,)`.

    Args:
        passes: Seconds forward and backward of every micro-batch, `(W, ranks, 2, stages)`.
        counts: Micro-batches of every draw, `(D,)`.
    """
    ends = np.cumsum(counts)
    _, ranks, _, stages = passes.shape
    starts = ends - counts
    result = np.empty(len(counts))
    for count in np.unique(counts).tolist():
        draws = np.flatnonzero(counts == count)
        places = np.arange(count)
        rows = starts[draws] + places[:, None]
        graph = compiled("1f1b", stages, count, 1)
        kind, stage, batch = graph.operations.T
        waves = rows[batch]
        durations = passes[waves, :, kind[:, None], stage[:, None]]
        durations = durations.reshape(len(graph), -1)
        times = pass_ends(graph, durations, np.zeros_like(durations))
        last = times.end[graph.last].max(0)
        by_rank = last.reshape(len(draws), ranks)
        result[draws] = by_rank.max(1)
    return result
