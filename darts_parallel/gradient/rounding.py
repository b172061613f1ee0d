"""Relaxed plans to hard ones: argmax strategies, rounded edges, and a repair of what does not fit."""

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
        current = self.choices[..., None]
        kept, working, seconds = (
            np.take_along_axis(values, current, -1) for values in (self.kept, self.working, self.seconds)
        )
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
        gain = np.where(self.legal[active] & (saved > 0) & (need > 0), gain, -1.0)
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

    def _over(self, kept: Array, working: Array) -> Array:
        """Bytes of every device above its capacity, `(B, pp)`, from those of the layers `(B, L)`."""
        size = (len(kept), len(self.capacity))
        group = (np.arange(len(kept))[:, None] * size[1] + self.devices).ravel()
        largest = np.zeros(size[0] * size[1])
        np.maximum.at(largest, group, working.ravel())
        held = np.bincount(group, kept.ravel(), minlength=len(largest))
        return np.asarray((held + largest).reshape(size) - self.capacity)
