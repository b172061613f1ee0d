"""The uniform space by enumeration: one strategy for all layers, any split into stages.

Every configuration (stages, micro-batches, strategy) is bounded at once, its bottleneck by bisection
over a greedy split; those below the best plans found so far are then solved exactly, cheapest first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import PricedPlan, even_uniform_plans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.bounds import outer_lower_bounds, spread_bounds
from darts_parallel.exact.outer_choice import AGREEMENT, OuterChoiceSolver
from darts_parallel.exact.result import (
    OFFLOADING,
    Check,
    DeadlineError,
    TableResult,
    deadline_check,
)

FIRST_MARGIN = 0.002
"""A configuration is first searched for splits this close to its bound, relative."""
EVEN_ONLY = "optimal but for interleaved plans of uneven stages, which are bounded only"
TOLERANCE = 1e-12
"""Relative; rounding of prefix sums must not exclude a plan."""


def find_uniform_plan(
    tables: Sequence[CostTable],
    incumbent: float = float("inf"),
    deadline: float | None = None,
    *,
    count: int = 1,
) -> TableResult:
    """Return the optimal uniform plan over all tables, and the best of the next configurations.

    Args:
        tables: One for each pipeline degree.
        incumbent: Cost of a known plan, seconds; plans above it are not looked for.
        deadline: `time.monotonic()` at which to stop without a proof.
        count: Configurations (stages, micro-batches, strategy) to rank; each with its best split.

    Returns:
        The best plan; `alternatives` holds the `count` best configurations, the best plan first.
    """
    if any(table.offload for table in tables):
        lowest = min(float(outer_lower_bounds(table, "uniform").min()) for table in tables)
        return TableResult(None, lowest, False, 0, note=OFFLOADING)
    check = deadline_check(deadline)
    queue = _ranked(tables, min(_even_seconds(tables, count), incumbent) * (1 + AGREEMENT))
    found, interleaved_floor = _even_interleaved(tables, incumbent, count)
    effort, reached, proven = len(queue), 0.0, True
    interleaved = any(table.virtual_stages > 1 for table in tables)
    try:
        for bound, number, outer, choice in queue:
            reached = bound
            limit = found[count - 1].time if len(found) >= count else incumbent * (1 + AGREEMENT)
            if bound > limit or bound == np.inf:
                break
            case = OuterChoiceSolver(tables[number], number, outer, bound, np.array([choice]))
            plan = _best_split(case, limit, check)
            effort += case.labels
            if plan is not None:
                found = sorted([*found, plan], key=lambda candidate: candidate.time)[:count]
    except DeadlineError:
        proven = False
    best = found[0] if found else None
    cost = best.time if best else (np.inf if incumbent == np.inf else incumbent * (1 + AGREEMENT))
    floor = min(cost if proven else min(cost, reached), interleaved_floor)
    note = EVEN_ONLY if proven and interleaved else ""
    return TableResult(best, float(floor), proven and not interleaved, effort, tuple(found), note)


def _even_interleaved(
    tables: Sequence[CostTable], incumbent: float, count: int
) -> tuple[list[PricedPlan], float]:
    """Return the `count` best interleaved plans of even stages, and a bound on all interleaved ones."""
    found, floor = list[PricedPlan](), float("inf")
    for number, table in enumerate(tables):
        if table.virtual_stages == 1:
            continue
        floor = min(floor, float(outer_lower_bounds(table).min()))
        plans = even_uniform_plans(table)
        cost = evaluate_batch(table, plans)
        times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        for index in times.argsort(stable=True)[:count].tolist():
            if float(times[index]) <= incumbent * (1 + AGREEMENT) and bool(cost.feasible[index]):
                found.append(PricedPlan(number, plans[index : index + 1], float(times[index])))
    return sorted(found, key=lambda candidate: candidate.time)[:count], floor


def _best_split(case: OuterChoiceSolver, limit: float, check: Check) -> PricedPlan | None:
    """Return the best split of one configuration within `limit`, by a rising limit of its own."""
    lowest, margin, limit = case.bound, FIRST_MARGIN, min(limit, case.most_expensive())
    while case.bound <= limit:
        check()
        plan = case.attempt("stagewise", min(lowest * (1 + margin), limit), check)
        if plan is not None:
            return plan
        margin *= 4
    return None


def _even_seconds(tables: Sequence[CostTable], count: int) -> float:
    """Return the seconds of the `count`-th best plan of even stages; infinite where there are not as many."""
    seconds = [torch.full((count,), torch.inf, dtype=torch.float64)]
    for table in tables:
        if table.virtual_stages == 1:
            cost = evaluate_batch(table, even_uniform_plans(table))
            seconds.append(cost.iteration_time[cost.feasible].detach())
    return float(torch.cat(seconds).sort().values[count - 1])


def _ranked(tables: Sequence[CostTable], known: float) -> list[tuple[float, int, int, int]]:
    """Bound, table, outer choice and strategy of every configuration, cheapest bound first.

    What a quick look already excludes, because it costs more than `known` seconds, gets that looser bound.
    """
    result = []
    for number, table in enumerate(tables):
        if table.virtual_stages > 1:
            continue
        everywhere = table.runs(
            table.stage_kind.unsqueeze(1), torch.arange(len(table.choices)).expand(table.num_stages, -1)
        )
        outer, choice = torch.nonzero(table.allowed & everywhere.all(0), as_tuple=True)
        bounds = _quick_bounds(table, outer, choice)
        still = torch.nonzero(bounds <= known).squeeze(1)
        bounds[still] = uniform_bounds(table, outer[still], choice[still])
        rows = zip(bounds.tolist(), outer.tolist(), choice.tolist(), strict=True)
        result += [(bound, number, o, c) for bound, o, c in rows]
    return sorted(result)


def _quick_bounds(table: CostTable, outer: Tensor, choice: Tensor) -> Tensor:
    """Lower bounds of configurations as of `uniform_bounds`, without memory and boundaries, `(B,)`."""
    seconds, sync = (_by_kind(x, outer, choice).amin(1) for x in (table.time, table.sync))
    per_iteration = _rows(table.per_iteration, outer, choice)
    return spread_bounds(seconds, sync, per_iteration, table.num_micro_batches[outer], table.pp)


def uniform_bounds(table: CostTable, outer: Tensor, choice: Tensor) -> Tensor:
    """Lower bounds on the iteration time of uniform configurations over all splits.

    Args:
        table: Costs of one pipeline degree.
        outer: Outer choice of every configuration, `(B,)`.
        choice: Strategy of every configuration, `(B,)`.

    Returns:
        Seconds, `(B,)`; infinite where no split fits the memory.
    """
    rest = table.num_micro_batches[outer] - 1.0
    seconds, sync = (_by_kind(x, outer, choice) for x in (table.time, table.sync))
    layout = table.layout[choice]
    if table.pp > 1:
        across = table.p2p[outer, :, :, layout, layout].detach()[..., ~table.fused_to_previous[1:]].amin(-1)
        boundary = torch.nn.functional.pad(across[:, table.boundary_kind], (1, 0))
    else:
        boundary = torch.zeros(len(outer), 1, dtype=torch.float64)
    # three questions at once: on so few configurations an operation costs what it costs to call it
    both = rest.view(-1, 1, 1) * seconds + sync
    edges = torch.cat([boundary, torch.zeros_like(boundary), rest.unsqueeze(1) * boundary])
    greedy = _Greedy.build(table, outer.repeat(3), choice.repeat(3))
    found = greedy.bottleneck(torch.cat([seconds, sync, both]), edges)
    slowest, largest_sync, joint = found.view(3, len(outer))
    per_iteration = _rows(table.per_iteration, outer, choice).sum(1)
    # without a feasible split both bottlenecks are infinite, and rest may be 0
    apart = _sum_and_bottleneck(table, seconds, slowest, rest) + largest_sync
    least = seconds[:, torch.unique(table.stage_kind)].amin(1).sum(1)
    return (torch.maximum(apart, least + joint) + boundary.sum(1) + per_iteration) * (1 - TOLERANCE)


def _rows(values: Tensor, outer: Tensor, choice: Tensor) -> Tensor:
    """Return values `(O, L, C)` of the configurations, `(B, L)`."""
    return values.detach()[outer, :, choice]


def _by_kind(values: Tensor, outer: Tensor, choice: Tensor) -> Tensor:
    """Return values `(O, Q, L, C)` of the configurations, `(B, Q, L)`."""
    return values.detach()[outer, :, :, choice]


def _sum_and_bottleneck(table: CostTable, seconds: Tensor, slowest: Tensor, rest: Tensor) -> Tensor:
    """Bound on the sum of stage seconds plus `rest` times their maximum, boundaries left out, `(B,)`.

    A kind of stage saves at most its largest ratio of saved to spent seconds times what its stages spend,
    which is their number times the maximum: the bound is linear in the maximum until every layer lies on
    its fastest kind, so that one of the two ends is the smallest.
    """
    kinds, counts = torch.unique(table.stage_kind, return_counts=True)
    used = seconds[:, kinds]
    expensive, cheap = used.amax(1), used.amin(1).sum(1)
    ratio = ((expensive.unsqueeze(1) - used) / used.clamp(min=1e-300)).amax(-1)
    slope = (ratio * counts).sum(1)
    most = expensive.sum(1)
    # with one kind nothing is saved, and the two ends are one
    far = torch.where(slope > 0, (most - cheap) / slope.clamp(min=1e-300), 0.0)
    ends = []
    for bottleneck in (slowest, torch.maximum(slowest, far)):
        saved = torch.minimum(slope * bottleneck.nan_to_num(posinf=0.0), most - cheap)
        ends.append(most - saved + (rest * bottleneck).nan_to_num(nan=torch.inf, posinf=torch.inf))
    return torch.minimum(*ends)


@dataclass(frozen=True)
class _Greedy:
    """Splits of B configurations that fill every stage as far as a limit allows."""

    memory: Tensor
    """Prefix sums of bytes by stage, `(K, B, L + 1)`."""
    room: Tensor
    """Bytes of every stage, `(K, B)`."""
    start: Tensor
    """Closest valid first layer of a stage at or before a layer, `(L + 1,)`."""
    kinds: list[int]
    """Kind of every stage, `(K,)`."""

    @staticmethod
    def build(table: CostTable, outer: Tensor, choice: Tensor) -> "_Greedy":
        columns = (table.static, table.activation, table.working)
        static, activation, working = (_rows(column, outer, choice) for column in columns)
        in_flight = table.in_flight[outer].T.unsqueeze(-1)
        memory = _prefix(static + in_flight * activation)
        room = table.capacity.detach().unsqueeze(1) * (1 + TOLERANCE) - working.amin(1)
        legal = torch.cat([~table.fused_to_previous, torch.ones(1, dtype=torch.bool)])
        positions = torch.arange(len(legal))
        start = torch.where(legal, positions, 0).cummax(0).values
        return _Greedy(memory, room, start, table.stage_kind.tolist())

    def bottleneck(self, values: Tensor, boundary: Tensor, iterations: int = 16) -> Tensor:
        """Return the least possible maximum over stages of the sums of `values`, from below.

        Args:
            values: Nonnegative, of every kind of stage, `(B, Q, L)`.
            boundary: Added to every stage, `(B, K)`.
            iterations: Halvings of the interval.

        Returns:
            Shape `(B,)`; infinite where memory admits no split.
        """
        used = values[:, sorted(set(self.kinds))]
        least, most, edge = used.amin(1), used.amax(1), boundary.amax(1)
        prefix = _prefix(values.transpose(0, 1))
        low = torch.maximum(least.amax(1), least.sum(1) / len(self.kinds))
        high = most.sum(1) + edge
        impossible = ~self._reaches(prefix, boundary, high)
        near = torch.minimum(low + most.amax(1) + edge, high)
        high = torch.where(self._reaches(prefix, boundary, near), near, high)
        reached = self._reaches(prefix, boundary, low)
        for _ in range(iterations):
            middle = (low + high) / 2
            fits = self._reaches(prefix, boundary, middle)
            low, high = torch.where(fits | reached, low, middle), torch.where(fits, middle, high)
        return low.masked_fill(impossible, torch.inf)

    def _reaches(self, prefix: Tensor, boundary: Tensor, limit: Tensor) -> Tensor:
        """Return whether stages of at most `limit`, `(B,)`, hold all layers; `prefix` is `(Q, B, L + 1)`."""
        end = torch.zeros(len(limit), 1, dtype=torch.long)
        for stage, (memory, room) in enumerate(zip(self.memory, self.room, strict=True)):
            allowed = (limit - boundary[:, stage]) * (1 + TOLERANCE)
            own = prefix[self.kinds[stage]]
            target = own.gather(1, end) + allowed.unsqueeze(1)
            full = memory.gather(1, end) + room.unsqueeze(1)
            by_time = torch.searchsorted(own, target, right=True) - 1
            by_memory = torch.searchsorted(memory, full, right=True) - 1
            end = torch.maximum(self.start[torch.minimum(by_time, by_memory).clamp(min=0)], end)
        return end[:, 0] == prefix.shape[-1] - 1


def _prefix(values: Tensor) -> Tensor:
    """Return the prefix sums along the last axis, from 0."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0)).contiguous()
