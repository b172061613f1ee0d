"""Relaxed plans to hard ones: argmax strategies, rounded edges, strategies exchanged until memory is met.

Equal layers of a stage have equal weights, so that an argmax gives all of them one strategy, where the
relaxed plan meant a mixture. What does not fit is repaired, then, and what leaves memory free is filled:
exchanges by seconds per byte, the greedy rule of the multiple-choice knapsack that a stage is (Sinha and
Zoltners 1979). They read the table's figures of single layers and price no plan: that is left to polishing.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost.evaluation import BatchCost, evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, round_edges, unit_starts
from darts_parallel.cost.table import CostTable

Array = NDArray[np.float64]
Index = NDArray[np.int64]
PRICE_RANGE = 12.0
"""Logarithm of the most that a device's memory is worth, in its seconds; also of the least, with a minus."""
BISECTIONS = 11
"""Of the prices; the last step is a share of `PRICE_RANGE / 2 ** BISECTIONS`."""
LEAST_SAVING = 1e-9
"""Share of a layer's seconds that a strategy must save to be faster."""


def harden(choice_weights: Tensor, edges: Tensor, table: CostTable) -> HardPlans:
    """The argmax plan of every relaxed plan.

    Args:
        choice_weights: Shape `(O, R, L, C)`.
        edges: Inner stage edges in units, shape `(O, R, K - 1)`.

    Returns:
        O * R plans, outer choice by outer choice.
    """
    outer, restarts = choice_weights.shape[:2]
    units = unit_starts(table.fused_to_previous)
    starts = units[round_edges(edges.reshape(outer * restarts, -1), len(units))]
    return HardPlans(
        outer=torch.arange(outer).repeat_interleave(restarts),
        choices=choice_weights.argmax(-1).reshape(outer * restarts, -1),
        first_layers=starts,
    )


def repair(table: CostTable, plans: HardPlans, limit: float) -> tuple[HardPlans, BatchCost]:
    """Make plans fit: exchange strategies in overfull stages, the cheapest seconds per byte first.

    Each round exchanges one layer of every overfull stage. A plan that cannot be saved stays
    infeasible, and one that takes `limit` seconds from the start is left as it is.
    """
    cost = evaluate_batch(table, plans)
    rows = torch.nonzero((cost.memory > table.capacity).any(1) & (cost.iteration_time < limit)).squeeze(1)
    if not len(rows):
        return plans, cost
    exchanges = _Exchanges.of(table, plans[rows])
    for _ in range(table.num_layers):
        if not exchanges.one_round():
            break
    choices = plans.choices.clone()
    choices[rows] = torch.from_numpy(exchanges.choices)
    plans = replace(plans, choices=choices)
    return plans, evaluate_batch(table, plans)


def fit(table: CostTable, plans: HardPlans) -> HardPlans:
    """Choose all strategies anew within the layouts: the best under prices of bytes at which they fit."""
    if not len(plans):
        return plans
    exchanges = _Exchanges.of(table, plans)
    exchanges.fit_prices()
    return replace(plans, choices=torch.from_numpy(exchanges.choices))


def fill(table: CostTable, plans: HardPlans) -> HardPlans:
    """Spend memory that is left: faster strategies of equal layout, the most seconds per byte first.

    Each round exchanges one layer of every stage that a faster strategy still fits into. Plans that do not
    fit change only in stages that do.
    """
    if not len(plans):
        return plans
    exchanges = _Exchanges.of(table, plans)
    for _ in range(2 * table.num_layers):
        if not exchanges.one_filling():
            break
    return replace(plans, choices=torch.from_numpy(exchanges.choices))


@dataclass
class _Exchanges:
    """B plans on their way into memory; arrays, because a round is many operations on little data."""

    choices: Index
    """Shape `(B, L)`."""
    devices: Index
    """Device of every layer, `(B, L)`."""
    layout: Index
    """Shape `(C,)`."""
    capacity: Array
    """Shape `(pp,)`."""
    kept: Array
    """Bytes that add up over a device, `(B, L, C)`."""
    working: Array
    """Bytes of which a device needs the largest, the same shape."""
    seconds: Array
    """Seconds per iteration of every layer alone, the same shape."""
    legal: NDArray[np.bool_]
    """The same shape."""

    @staticmethod
    def of(table: CostTable, plans: HardPlans) -> "_Exchanges":
        """Read what the layers of the plans cost on their stages under every strategy."""
        stages, outer = plans.stages(), plans.outer
        rows, layers, kinds = outer.unsqueeze(1), torch.arange(table.num_layers), table.stage_kind[stages]
        flight = table.in_flight[rows, stages].unsqueeze(-1)
        count = table.num_micro_batches[outer].view(-1, 1, 1)
        seconds = count * table.time[rows, kinds, layers] + table.sync[rows, kinds, layers]
        seconds = seconds + table.per_iteration[outer]
        every = torch.arange(len(table.choices)).expand_as(seconds)
        legal = table.allowed[outer].unsqueeze(1) & table.runs(kinds.unsqueeze(-1), every)
        return _Exchanges(
            choices=plans.choices.numpy().copy(),
            devices=table.stage_device[stages].numpy(),
            layout=table.layout.numpy(),
            capacity=table.capacity.numpy(),
            kept=(table.static[outer] + flight * table.activation[outer]).numpy(),
            working=table.working[outer].numpy(),
            seconds=seconds.numpy(),
            legal=legal.numpy(),
        )

    def one_round(self) -> bool:
        """One exchange in every overfull stage; whether any plan changed."""
        kept, working, seconds = self._current()
        over = self._over(kept[..., 0], working[..., 0])
        active = np.flatnonzero((over > 0).any(1))
        if not len(active):
            return False
        need = np.take_along_axis(over, self.devices, 1)[active, :, None]
        saved = (kept + working)[active] - (self.kept + self.working)[active]
        loss = (self.seconds[active] - seconds[active]).clip(min=1e-12)
        # a change of layout also costs resharding: only where nothing else helps
        same = self.layout[self.choices[active]][..., None] == self.layout
        gain = np.minimum(saved, need) / loss * np.where(same, 1.0, 1e-3)
        return self._exchange(active, np.where(self.legal[active] & (saved > 0) & (need > 0), gain, -1.0))

    def one_filling(self) -> bool:
        """One faster strategy in every stage that one fits into; whether any plan changed."""
        kept, working, seconds = self._current()
        over = self._over(kept[..., 0], working[..., 0])
        largest = self._largest(working[..., 0])
        room = -np.take_along_axis(over, self.devices, 1)[..., None]
        highest = np.take_along_axis(largest, self.devices, 1)[..., None]
        more = self.kept - kept + (self.working - highest).clip(min=0.0)
        saved = seconds - self.seconds
        same = self.layout[self.choices][..., None] == self.layout
        useful = self.legal & same & (saved > LEAST_SAVING * seconds) & (more <= room)
        gain = np.where(useful, saved / more.clip(min=1.0), -1.0)
        active = np.flatnonzero(useful.any((1, 2)))
        return bool(len(active)) and self._exchange(active, gain[active])

    def fit_prices(self) -> None:
        """The best strategies under a price of every device's bytes, the lowest at which they fit.

        Bisection of the multipliers of the memory constraints; the layouts of the layers stay.
        """
        size = self.kept.shape[:1] + self.capacity.shape
        group = np.arange(size[0])[:, None] * size[1] + self.devices
        same = self.legal & (self.layout[self.choices][..., None] == self.layout)
        seconds = np.where(same, self.seconds, np.inf)
        current = np.take_along_axis(self.seconds, self.choices[..., None], -1)[..., 0]
        total = np.bincount(group.ravel(), current.ravel(), minlength=size[0] * size[1])
        scale = total.reshape(size) / self.capacity
        low, high = np.full(size, -PRICE_RANGE), np.full(size, PRICE_RANGE)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            self._take_cheapest(seconds, scale * np.exp(middle))
            kept, working, _ = self._current()
            over = self._over(kept[..., 0], working[..., 0]) > 0
            low, high = np.where(over, middle, low), np.where(over, high, middle)
        self._take_cheapest(seconds, scale * np.exp(high))

    def _take_cheapest(self, seconds: Array, prices: Array) -> None:
        """Every layer's least sum of seconds `(B, L, C)` and of bytes at the prices `(B, pp)`."""
        own = np.take_along_axis(prices, self.devices, 1)[..., None]
        self.choices = (seconds + own * self.kept).argmin(-1)

    def _current(self) -> tuple[Array, Array, Array]:
        """Bytes that add up, bytes at work and seconds of every layer as it is, `(B, L, 1)` each."""
        current = self.choices[..., None]
        kept, working, seconds = (
            np.take_along_axis(values, current, -1) for values in (self.kept, self.working, self.seconds)
        )
        return kept, working, seconds

    def _exchange(self, active: Index, gain: Array) -> bool:
        """The exchange of the largest gain `(A, L, C)` in every device of the plans `active`, if above 0."""
        choice = gain.argmax(-1)
        best = np.take_along_axis(gain, choice[..., None], -1)[..., 0]
        # the best layer of every device of every plan: the first of its group in falling order
        group = np.arange(len(active))[:, None] * len(self.capacity) + self.devices[active]
        order = np.lexsort((-best.ravel(), group.ravel()))
        first = order[np.unique(group.ravel()[order], return_index=True)[1]]
        first = first[best.ravel()[first] > 0]
        row, layer = np.divmod(first, best.shape[1])
        self.choices[active[row], layer] = choice[row, layer]
        return len(first) > 0

    def _largest(self, working: Array) -> Array:
        """Largest bytes at work of every device, `(B, pp)`, from those of the layers `(B, L)`."""
        size = (len(working), len(self.capacity))
        group = (np.arange(len(working))[:, None] * size[1] + self.devices).ravel()
        largest = np.zeros(size[0] * size[1])
        np.maximum.at(largest, group, working.ravel())
        return largest.reshape(size)

    def _over(self, kept: Array, working: Array) -> Array:
        """Bytes of every device above its capacity, `(B, pp)`, from those of the layers `(B, L)`."""
        size = (len(kept), len(self.capacity))
        group = (np.arange(len(kept))[:, None] * size[1] + self.devices).ravel()
        held = np.bincount(group, kept.ravel(), minlength=size[0] * size[1]).reshape(size)
        return np.asarray(held + self._largest(working) - self.capacity)
