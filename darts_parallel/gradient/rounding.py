"""Relaxed plans to hard ones: argmax strategies, rounded edges, strategies exchanged until memory is met.

Equal layers of a stage have equal weights, so that an argmax gives all of them one strategy, where the
relaxed plan meant a mixture. What does not fit is repaired, then, and what leaves memory free is filled:
exchanges by seconds per byte, the greedy rule of the multiple-choice knapsack that a stage is (Sinha and
Zoltners 1979). They read the table's figures of single layers and price no plan: that is left to polishing.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost import (
    BatchCost,
    CostTable,
    HardPlans,
    evaluate_batch,
    round_edges,
    unit_starts,
)

Array = NDArray[np.float64]
Index = NDArray[np.int64]
PRICE_RANGE = 12.0
"""Logarithm of the most that a device's memory is worth, in its seconds; also of the least, with a minus."""
BISECTIONS = 11
"""Bisections of the prices; the last step is a share of `PRICE_RANGE / 2 ** BISECTIONS`."""
LEAST_SAVING = 1e-9
"""Share of a layer's seconds that a strategy must save to be faster."""


def harden(choice_weights: Tensor, edges: Tensor, table: CostTable) -> HardPlans:
    """Return the argmax plan of every relaxed plan.

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
    rows = torch.nonzero(
        (cost.memory > table.capacity).any(1) & (cost.iteration_time < limit)
    ).squeeze(1)
    if not len(rows):
        return plans, cost
    exchanges = _Exchanges.of(table, plans[rows])
    for _ in range(table.num_layers):
        if not exchanges.one_round():
            break
    choices = plans.choices.clone()
    choices[rows] = exchanges.plan_choices
    plans = replace(plans, choices=choices)
    return plans, evaluate_batch(table, plans)


def fit(table: CostTable, plans: HardPlans) -> HardPlans:
    """Choose all strategies anew within the layouts: the best under prices of bytes at which they fit."""
    if not len(plans):
        return plans
    exchanges = _Exchanges.of(table, plans)
    exchanges.fit_prices()
    return replace(plans, choices=exchanges.plan_choices)


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
    return replace(plans, choices=exchanges.plan_choices)


@dataclass
class _Exchanges:
    """Bring B plans into memory; arrays, because a round is many operations on little data.

    N = B L layers of all plans, one plan after the other, on B pp devices.
    """

    size: tuple[int, int]
    """B and L."""
    choices: Index
    """Shape `(N,)`."""
    device: Index
    """Device of every layer among those of all plans, `(N,)`."""
    layout: Index
    """Shape `(C,)`."""
    capacity: Array
    """Shape `(B * pp,)`."""
    kept: Array
    """Bytes that add up over a device, `(N, C)`."""
    working: Array
    """Bytes of which a device needs the largest, the same shape."""
    seconds: Array
    """Seconds per iteration of every layer alone, the same shape."""
    legal: NDArray[np.bool_]
    """Whether a layer may take a strategy, `(N, C)`."""
    live: Index = field(init=False)
    """Layers of the devices that the last round changed, rising: the others stay as they are for good."""

    def __post_init__(self) -> None:
        self.live = np.arange(len(self.choices))

    @staticmethod
    def of(table: CostTable, plans: HardPlans) -> "_Exchanges":
        """Read what the layers of the plans cost on their stages under every strategy."""
        stages, outer = plans.stages(), plans.outer
        rows, layers, kinds = (
            outer.unsqueeze(1),
            torch.arange(table.num_layers),
            table.stage_kind[stages],
        )
        flight = table.in_flight[rows, stages].unsqueeze(-1)
        count = table.num_micro_batches[outer].view(-1, 1, 1)
        seconds = count * table.time[rows, kinds, layers] + table.sync[rows, kinds, layers]
        seconds = seconds + table.per_iteration[outer]
        every = torch.arange(len(table.choices)).expand_as(seconds)
        legal = table.allowed[outer].unsqueeze(1) & table.runs(kinds.unsqueeze(-1), every)
        return _Exchanges(
            size=(len(plans), table.num_layers),
            choices=plans.choices.numpy().flatten(),
            device=(table.stage_device[stages] + table.pp * torch.arange(len(plans)).unsqueeze(1))
            .flatten()
            .numpy(),
            layout=table.layout.numpy(),
            capacity=table.capacity.repeat(len(plans)).numpy(),
            kept=(table.static[outer] + flight * table.activation[outer]).flatten(0, 1).numpy(),
            working=table.working[outer].flatten(0, 1).numpy(),
            seconds=seconds.flatten(0, 1).numpy(),
            legal=legal.flatten(0, 1).numpy(),
        )

    @property
    def plan_choices(self) -> Tensor:
        """Return strategies of every layer, `(B, L)`."""
        return torch.from_numpy(self.choices.reshape(self.size))

    def one_round(self) -> bool:
        """Exchange once in every overfull stage; return whether any plan changed."""
        rows = self.live
        kept, working, seconds = self._current(rows)
        need = self._over(rows, kept, working)[0][self.device[rows]]
        full = np.flatnonzero(need > 0)
        if not len(full):
            return False
        rows, before = rows[full], (kept + working)[full, None]
        saved = before - (self.kept[rows] + self.working[rows])
        loss = (self.seconds[rows] - seconds[full, None]).clip(min=1e-12)
        # a change of layout also costs resharding: only where nothing else helps
        gain = (
            np.minimum(saved, need[full, None])
            / loss
            * np.where(self._same_layout(rows), 1.0, 1e-3)
        )
        return self._exchange(rows, np.where(self.legal[rows] & (saved > 0), gain, -1.0))

    def one_filling(self) -> bool:
        """Take one faster strategy in every stage that has room; return whether any plan changed."""
        rows = self.live
        kept, working, seconds = (values[:, None] for values in self._current(rows))
        over, largest = self._over(rows, kept[:, 0], working[:, 0])
        room, highest = -over[self.device[rows], None], largest[self.device[rows], None]
        more = self.kept[rows] - kept + (self.working[rows] - highest).clip(min=0.0)
        saved = seconds - self.seconds[rows]
        useful = self.legal[rows] & self._same_layout(rows)
        useful &= (saved > LEAST_SAVING * seconds) & (more <= room)
        some = np.flatnonzero(useful.any(1))
        gain = np.where(useful[some], saved[some] / more[some].clip(min=1.0), -1.0)
        return bool(len(some)) and self._exchange(rows[some], gain)

    def fit_prices(self) -> None:
        """Take the best strategies under a price of every device's bytes, the lowest at which they fit.

        Bisection of the multipliers of the memory constraints; the layouts of the layers stay.
        """
        rows = self.live
        seconds = np.where(self.legal & self._same_layout(rows), self.seconds, np.inf)
        total = np.bincount(self.device, self._current(rows)[2], minlength=len(self.capacity))
        scale = total / self.capacity
        low, high = np.full(len(scale), -PRICE_RANGE), np.full(len(scale), PRICE_RANGE)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            self._take_cheapest(seconds, scale * np.exp(middle))
            kept, working, _ = self._current(rows)
            over = self._over(rows, kept, working)[0] > 0
            low, high = np.where(over, middle, low), np.where(over, high, middle)
        self._take_cheapest(seconds, scale * np.exp(high))

    def _take_cheapest(self, seconds: Array, prices: Array) -> None:
        """Take every layer's least sum of seconds `(N, C)` and of bytes at the prices of its device."""
        self.choices = (seconds + prices[self.device, None] * self.kept).argmin(-1)

    def _same_layout(self, rows: Index) -> NDArray[np.bool_]:
        """Return strategies of the layout that each of some layers has, `(n, C)`."""
        return np.asarray(self.layout[self.choices[rows], None] == self.layout)

    def _current(self, rows: Index) -> tuple[Array, Array, Array]:
        """Return bytes that add up, bytes at work and seconds of some layers as they are, `(n,)` each."""
        chosen = self.choices[rows]
        return self.kept[rows, chosen], self.working[rows, chosen], self.seconds[rows, chosen]

    def _exchange(self, rows: Index, gain: Array) -> bool:
        """Make the exchange of the largest gain `(n, C)` in every device of the layers `rows`, if above 0."""
        choice, device = gain.argmax(-1), self.device[rows]
        best = gain[np.arange(len(rows)), choice]
        # the best layer of every device: the first of its group in falling order
        order = np.lexsort((-best, device))
        first = order[np.flatnonzero(np.diff(device[order], prepend=-1))]
        first = first[best[first] > 0]
        self.choices[rows[first]] = choice[first]
        changed = np.zeros(len(self.capacity), dtype=bool)
        changed[device[first]] = True
        self.live = self.live[changed[self.device[self.live]]]
        return len(first) > 0

    def _over(self, rows: Index, kept: Array, working: Array) -> tuple[Array, Array]:
        """Return bytes of every device above its capacity and the largest at work, `(B * pp,)`.

        Args:
            rows: All layers of the devices that count.
            kept, working: Of these layers, `(n,)`.
        """
        device, largest = self.device[rows], np.zeros(len(self.capacity))
        np.maximum.at(largest, device, working)
        held = np.bincount(device, kept, minlength=len(largest))
        return held + largest - self.capacity, largest
