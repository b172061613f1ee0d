"""Relaxed plans to hard ones: argmax strategies, rounded boundaries, strategies exchanged to fit.

Equal layers of a stage have equal weights, so that an argmax gives all of them one strategy, where
the relaxed plan meant a mixture. So plans that do not fit are repaired, and memory that is left is
filled: exchanges by seconds per byte, the greedy rule of the multiple-choice knapsack that a stage is
(Sinha and Zoltners 1979). They read the table's costs of single layers and price no plan: that is
left to polishing.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost import (
    Array,
    BatchCost,
    Bools,
    CostTable,
    HardPlans,
    Index,
    compared_costs,
    evaluate_batch,
    flatnonzero,
    kept_bytes,
    round_edges,
    unit_starts,
)

PRICE_RANGE = 12.0
"""Largest logarithm of the price of a device's whole memory, in its seconds; the least is minus it."""
BISECTIONS = 11
"""Bisections of the prices; the last step is a share of `PRICE_RANGE / 2 ** BISECTIONS`."""
TINY = 1e-9
"""Weight that a strategy keeps, above rounding errors of sums."""
LEAST_REMAINDER = 1e-6
"""Layers by which a strategy's expected count exceeds a whole number, so that it may be rounded up."""
LEAST_SAVING = 1e-9
"""Share of a layer's seconds that a strategy must save to be faster."""
LEAST_LOSS = 1e-12
"""Seconds that an exchange costs at least, so that seconds per byte stay finite."""
OTHER_LAYOUT = 1e-3
"""Factor on the gain of an exchange that changes the layout: it adds resharding, which is not priced
here, so it is taken only where nothing else helps."""


def harden(
    choice_weights: Tensor,
    edges: Tensor,
    table: CostTable,
) -> HardPlans:
    """Return the argmax plan of every relaxed plan.

    Args:
        choice_weights: Shape `(O, R, L, C)`.
        edges: Inner stage boundaries in units, shape `(O, R, K - 1)`.

    Returns:
        O * R plans, pipeline configuration by configuration.
    """
    outer, restarts = choice_weights.shape[:2]
    count = outer * restarts
    units = unit_starts(table.fused_to_previous)
    rounded = round_edges(edges.reshape(count, -1), len(units))
    starts = units[rounded]
    return HardPlans(
        outer=torch.arange(outer).repeat_interleave(restarts),
        choices=choice_weights.argmax(-1).reshape(count, -1),
        first_layers=starts,
    )


def round_counts(
    weights: Tensor,
    plans: HardPlans,
    table: CostTable,
) -> HardPlans:
    """Choose strategies so that equal layers of a stage share their expected counts.

    Weights of 60 and 40 % become 5 and 3 of 8 layers, by the largest remainder. Recomputed layers
    come first in a stage, then layers of equal layout.

    Args:
        weights: Weights of every layer's strategies, `(B, L, C)`.
        plans: Their stages, B plans.
    """
    groups, expected = _expected_counts(weights, plans, table)
    count, choices = expected.shape[1:]
    index = groups.unsqueeze(-1).expand(-1, -1, choices)
    sizes = torch.nn.functional.one_hot(groups, count).sum(1)
    whole = (expected + TINY).floor()
    missing = sizes.unsqueeze(-1) - whole.sum(-1, keepdim=True)
    by_remainder = (whole - expected).argsort(dim=-1, stable=True)
    rank = by_remainder.argsort(-1)
    order = torch.tensor(_placing(table))
    ends = (whole + (rank < missing))[..., order].cumsum(-1)
    # place of every layer among the layers of its group
    by_group = groups.argsort(dim=1, stable=True)
    in_order = groups.gather(1, by_group)
    before = sizes.cumsum(1) - sizes
    first = before.gather(1, in_order)
    layers = torch.arange(table.num_layers)
    places = torch.empty_like(groups)
    places.scatter_(1, by_group, layers - first)
    passed = ends.gather(1, index) <= places.unsqueeze(-1)
    return replace(plans, choices=order[passed.sum(-1)])


def round_to_fit(
    weights: Tensor,
    plans: HardPlans,
    table: CostTable,
) -> HardPlans:
    """Round as `round_counts`; where a device is overfull, other expected counts are rounded up.

    A layer passes from a strategy that was rounded up to one that was rounded down, the cheapest seconds
    per byte first. So each strategy keeps its expected count, rounded up or down.
    """
    plans = round_counts(weights, plans, table)
    groups, expected = _expected_counts(weights, plans, table)
    index = groups.unsqueeze(-1).expand(-1, -1, expected.shape[-1])
    exchanges = _Exchanges(table, plans)
    legal = exchanges.legal
    for _ in range(table.num_layers):
        choices = exchanges.plan_choices
        chosen = torch.nn.functional.one_hot(choices, expected.shape[-1])
        counts = torch.zeros_like(expected)
        counts = counts.scatter_add(1, index, chosen.double())
        above = (counts - expected).gather(1, index)
        own = above.gather(2, choices.unsqueeze(-1))
        up = own > TINY
        down = above < -LEAST_REMAINDER
        allowed = (up & down).flatten(0, 1)
        exchanges.legal = legal & allowed.numpy()
        if not exchanges.repair_once():
            break
    return replace(plans, choices=exchanges.plan_choices)


def _expected_counts(weights: Tensor, plans: HardPlans, table: CostTable) -> tuple[Tensor, Tensor]:
    """Return the group of every layer `(B, L)`, and the expected layers of its strategies, `(B, G, C)`.

    Equal layers of a stage are one group.
    """
    kinds = layer_kinds(table)
    stages = plans.stages()
    legal = _legal(table, plans, stages)
    possible = weights.clamp(min=TINY) * legal
    total = possible.sum(-1, keepdim=True)
    possible = possible / total
    groups = stages * (int(kinds.max()) + 1) + kinds
    count = int(groups.max()) + 1
    index = groups.unsqueeze(-1).expand_as(possible)
    expected = torch.zeros(len(plans), count, weights.shape[-1], dtype=weights.dtype)
    return groups, expected.scatter_add(1, index, possible)


def layer_kinds(table: CostTable) -> Tensor:
    """Return a number for every layer, `(L,)`, equal where all costs of the layers are equal."""
    rows = []
    for values in compared_costs(table):
        by_layer = values.movedim(-2, 0)
        rows.append(by_layer.flatten(1))
    kinds: Tensor = torch.unique(torch.cat(rows, dim=1), dim=0, return_inverse=True)[1]
    return kinds


def _placing(table: CostTable) -> list[int]:
    """List the strategies in the order in which a stage has them."""
    rank = {"full": 0, "selective": 1, "none": 2}

    def key(choice: int) -> tuple[int, int]:
        return rank[table.choices[choice].recompute], int(table.layout[choice])

    return sorted(range(len(table.choices)), key=key)


def repair(
    table: CostTable,
    plans: HardPlans,
    limit: float,
) -> tuple[HardPlans, BatchCost]:
    """Make plans fit: exchange strategies in overfull stages, the cheapest seconds per byte first.

    Each round exchanges one layer of every overfull stage. A plan that cannot be saved stays
    infeasible, and one that takes `limit` seconds from the start is left as it is.
    """
    cost = evaluate_batch(table, plans)
    # a plan that offloads may fill its devices, and rounding puts it above them
    full = (cost.memory > table.capacity).any(1) & ~cost.feasible
    rows = flatnonzero(full & (cost.iteration_time < limit))
    if not len(rows):
        return plans, cost
    exchanges = _Exchanges(table, plans[rows])
    for _ in range(table.num_layers):
        if not exchanges.repair_once():
            break
    choices = plans.choices.clone()
    choices[rows] = exchanges.plan_choices
    plans = replace(plans, choices=choices)
    return plans, evaluate_batch(table, plans)


def moved_boundaries(places: Tensor, num_units: int, most: float = torch.inf) -> Tensor:
    """Return the first units of stages with neighbouring boundaries moved by one unit together.

    The stages between the moved boundaries pass a unit on, so that it can reach a stage that has room.

    Args:
        places: First unit of every stage, rising from 0, `(K,)`.
        most: Moves above which only single boundaries are moved.

    Returns:
        One row a move, `(B, K)`; every stage keeps at least one unit.
    """
    # the first stage begins at the first layer
    inner = len(places) - 1
    first, last = 1 + torch.triu_indices(inner, inner)
    number = torch.arange(len(places))
    if 2 * len(first) > most:
        first = last = number[1:]
    inside = (number >= first.unsqueeze(1)) & (number <= last.unsqueeze(1))
    steps = inside.long()
    moved = places + torch.cat([steps, -steps])
    ends = torch.full((len(moved), 1), num_units)
    sizes = torch.diff(moved, append=ends)
    return moved[(sizes > 0).all(1)]


def with_moved_boundaries(table: CostTable, plan: HardPlans, most: float = torch.inf) -> HardPlans:
    """Return a plan with neighbouring stage boundaries moved by one unit together, `(B,)` plans.

    Args:
        most: As of `moved_boundaries`.
    """
    units = unit_starts(table.fused_to_previous)
    places = torch.searchsorted(units, plan.first_layers[0].contiguous())
    moved = moved_boundaries(places, len(units), most)
    return replace(plan.repeated(len(moved)), first_layers=units[moved])


def fit(table: CostTable, plans: HardPlans) -> HardPlans:
    """Re-select strategies by Lagrangian relaxation of the memory limit, layouts fixed."""
    if not len(plans):
        return plans
    exchanges = _Exchanges(table, plans)
    exchanges.fit_prices()
    return replace(plans, choices=exchanges.plan_choices)


def fill(table: CostTable, plans: HardPlans) -> HardPlans:
    """Spend memory that is left: faster strategies of equal layout, most seconds per byte first.

    Each round exchanges one layer of every stage that a faster strategy still fits into. Plans that
    do not fit change only in stages that do.
    """
    if not len(plans):
        return plans
    exchanges = _Exchanges(table, plans)
    for _ in range(2 * table.num_layers):
        if not exchanges.fill_once():
            break
    return replace(plans, choices=exchanges.plan_choices)


class _Exchanges:
    """Exchange strategies of B plans; arrays, because a round is many operations on little data.

    N = B L layers of all plans, one plan after the other, on B pp devices.

    Attributes:
        choices: Strategy of every layer, `(N,)`.
        device: Device of every layer among those of all plans, `(N,)`.
        capacity: Bytes of every device, `(B * pp,)`.
        kept: Bytes that add up over a device, `(N, C)`.
        working: Bytes of which a device needs the largest, `(N, C)`.
        seconds: Seconds per iteration of every layer alone, `(N, C)`.
        legal: Whether a layer may take a strategy, `(N, C)`.
        every: Numbers of all layers, `(N,)`.
    """

    def __init__(self, table: CostTable, plans: HardPlans) -> None:
        stages = plans.stages()
        outer = plans.outer
        self.size = (len(plans), table.num_layers)
        self.layout = table.layout.numpy()
        self.choices: Index = plans.choices.numpy().flatten()
        first_device = table.pp * torch.arange(len(plans)).unsqueeze(1)
        device = table.stage_device[stages] + first_device
        self.device: Index = device.flatten().numpy()
        self.capacity: Array = table.capacity.repeat(len(plans)).numpy()
        in_flight = table.in_flight[outer.unsqueeze(1), stages]
        in_flight = in_flight.unsqueeze(-1)
        activation = table.activation[outer]
        kept = kept_bytes(table.static[outer], activation, in_flight)
        self.kept = _by_layer(kept)
        self.working = _by_layer(table.working[outer])
        self.seconds = _by_layer(_iteration_seconds(table, plans, stages))
        self.legal = _by_layer(_legal(table, plans, stages))
        self.every: Index = np.arange(len(self.choices))

    @property
    def plan_choices(self) -> Tensor:
        """Return strategies of every layer, `(B, L)`."""
        return torch.from_numpy(self.choices.reshape(self.size))

    def repair_once(self) -> bool:
        """Exchange once in every overfull stage; return whether any plan changed."""
        excess = self._excess()[self.device]
        rows = np.flatnonzero(excess > 0)
        if not len(rows):
            return False
        before = self._chosen(self.kept, rows) + self._chosen(self.working, rows)
        after = self.kept[rows] + self.working[rows]
        saved = before - after
        loss = self.seconds[rows] - self._chosen(self.seconds, rows)
        needed = np.minimum(saved, excess[rows, None])
        gain = needed / loss.clip(min=LEAST_LOSS)
        factor = np.where(self._same_layout(rows), 1.0, OTHER_LAYOUT)
        gain = gain * factor
        useful = self.legal[rows] & (saved > 0)
        return self._exchange(rows, np.where(useful, gain, -1.0))

    def fill_once(self) -> bool:
        """Take one faster strategy in every stage that has room; return whether any plan changed."""
        room = -self._excess()[self.device, None]
        more_working = self.working - self._largest_working()[self.device, None]
        more = self.kept - self._chosen(self.kept, self.every)
        more = more + more_working.clip(min=0.0)
        seconds = self._chosen(self.seconds, self.every)
        saved = seconds - self.seconds
        useful = self.legal & self._same_layout(self.every)
        useful &= saved > LEAST_SAVING * seconds
        useful &= more <= room
        some = np.flatnonzero(useful.any(1))
        if not len(some):
            return False
        gain = saved[some] / more[some].clip(min=1.0)
        gain = np.where(useful[some], gain, -1.0)
        return self._exchange(some, gain)

    def fit_prices(self) -> None:
        """Take the best strategies under the lowest price of every device's bytes at which they fit.

        Bisection of the multipliers of the memory constraints; the layouts of the layers stay.
        """
        allowed = self.legal & self._same_layout(self.every)
        seconds = np.where(allowed, self.seconds, np.inf)
        now = self._chosen(self.seconds, self.every)[:, 0]
        devices = len(self.capacity)
        total = np.bincount(self.device, now, minlength=devices)
        scale = total / self.capacity
        low = np.full(len(scale), -PRICE_RANGE)
        high = np.full(len(scale), PRICE_RANGE)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            self._take_cheapest(seconds, scale * np.exp(middle))
            full = self._excess() > 0
            low = np.where(full, middle, low)
            high = np.where(full, high, middle)
        self._take_cheapest(seconds, scale * np.exp(high))

    def _take_cheapest(self, seconds: Array, prices: Array) -> None:
        """Take every layer's least sum of seconds `(N, C)` and of bytes at its device's price."""
        priced = seconds + prices[self.device, None] * self.kept
        self.choices = priced.argmin(-1)

    def _same_layout(self, rows: Index) -> Bools:
        """Return strategies of the layout that each of some layers has, `(n, C)`."""
        present = self.layout[self.choices[rows], None]
        return np.asarray(present == self.layout)

    def _chosen(self, values: Array, rows: Index) -> Array:
        """Read values `(N, C)` of some layers under their present strategies, `(n, 1)`."""
        return values[rows, self.choices[rows]][:, None]

    def _exchange(self, rows: Index, gain: Array) -> bool:
        """Make the exchange of the largest positive gain `(n, C)` in every device of layers `rows`."""
        choice = gain.argmax(-1)
        device = self.device[rows]
        best = gain[np.arange(len(rows)), choice]
        # the best layer of every device: the first of its group in falling order
        order = np.lexsort((-best, device))
        begins = np.diff(device[order], prepend=-1)
        first = order[np.flatnonzero(begins)]
        first = first[best[first] > 0]
        self.choices[rows[first]] = choice[first]
        return len(first) > 0

    def _largest_working(self) -> Array:
        """Return the largest working bytes of every device, `(B * pp,)`."""
        largest = np.zeros(len(self.capacity))
        working = self._chosen(self.working, self.every)[:, 0]
        np.maximum.at(largest, self.device, working)
        return largest

    def _excess(self) -> Array:
        """Return bytes of every device above its capacity, `(B * pp,)`."""
        largest = self._largest_working()
        kept = self._chosen(self.kept, self.every)[:, 0]
        total = np.bincount(self.device, kept, minlength=len(largest))
        return total + largest - self.capacity


def _by_layer(values: Tensor) -> NDArray[Any]:
    """Return values `(B, L, C)` as an array `(N, C)`."""
    array: NDArray[Any] = values.flatten(0, 1).numpy()
    return array


def _iteration_seconds(table: CostTable, plans: HardPlans, stages: Tensor) -> Tensor:
    """Return seconds per iteration of every layer alone under every strategy, `(B, L, C)`."""
    outer = plans.outer.unsqueeze(1)
    kinds = table.stage_kind[stages]
    layers = torch.arange(table.num_layers)
    count = table.num_micro_batches[plans.outer]
    count = count.view(-1, 1, 1)
    seconds = count * table.time[outer, kinds, layers]
    seconds = seconds + table.sync[outer, kinds, layers]
    return seconds + table.per_iteration[plans.outer]


def _legal(table: CostTable, plans: HardPlans, stages: Tensor) -> Tensor:
    """Return whether each layer may take each strategy, `(B, L, C)`."""
    kinds = table.stage_kind[stages].unsqueeze(-1)
    every = torch.arange(len(table.choices))
    runs = table.runs(kinds, every.expand(*stages.shape, -1))
    return table.allowed[plans.outer].unsqueeze(1) & runs
