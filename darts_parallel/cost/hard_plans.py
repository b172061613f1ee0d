"""The true cost: reads a cost table for hard plans, one or thousands at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.table import CostTable
from darts_parallel.cost.terms.offload import offloaded_shares
from darts_parallel.plans import Plan
from darts_parallel.schedules import find


@dataclass(frozen=True)
class HardPlans:
    """B hard plans of one table.

    `outer` (B,): outer choice; `choices` (B, L): strategy of every layer; `first_layers` (B, K): first
    layer of every stage in the order of layers, rising from 0. All integer.
    """

    outer: Tensor
    choices: Tensor
    first_layers: Tensor

    def __getitem__(self, index: Tensor | slice) -> "HardPlans":
        return HardPlans(self.outer[index], self.choices[index], self.first_layers[index])

    def __len__(self) -> int:
        return len(self.outer)

    @staticmethod
    def concatenate(parts: list["HardPlans"]) -> "HardPlans":
        """Return all plans of `parts`, in order."""
        return HardPlans(
            *map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True))
        )

    def stages(self) -> Tensor:
        """Return the stage of every layer, shape `(B, L)`."""
        begun = torch.zeros_like(self.choices)
        begun.scatter_add_(1, self.first_layers, torch.ones_like(self.first_layers))
        return begun.cumsum(1) - 1

    def within(self, space_kind: str) -> Tensor:
        """Return which plans lie in the space: `uniform`, `stagewise` or `layerwise`, shape `(B,)`."""
        if space_kind == "layerwise":
            return torch.ones(len(self), dtype=torch.bool)
        first = (
            self.first_layers.gather(1, self.stages())
            if space_kind == "stagewise"
            else 0 * self.choices
        )
        return (self.choices == self.choices.gather(1, first)).all(1)

    def to_plan(self, index: int, table: CostTable) -> Plan:
        """Read plan number `index` as stages and strategies."""
        starts, choices = self.first_layers[index].tolist(), self.choices[index].tolist()
        count, schedule = int(table.num_micro_batches[self.outer[index]]), table.pipeline.schedule
        if table.pipeline.start:
            schedule = find(schedule).code(table.pp, count, table.virtual_stages)
        return Plan(
            num_micro_batches=count,
            boundaries=(*starts, len(choices)),
            layers=tuple(table.choices[c] for c in choices),
            cp=table.cp,
            node_order=table.node_order,
            virtual_stages=table.virtual_stages,
            schedule=schedule,
            offload=offloaded_shares(table, self[index : index + 1]),
        )


@dataclass(frozen=True)
class PricedPlan:
    """One feasible plan of one of several tables, and its price."""

    table: int
    """Number of its table."""
    plan: HardPlans
    """The plan, a batch of length 1."""
    time: float
    """True cost, seconds per iteration."""

    @property
    def outer(self) -> tuple[int, int]:
        """Outer choice: number of the table, and number within it."""
        return self.table, int(self.plan.outer[0])

    def to_plan(self, tables: Sequence[CostTable]) -> Plan:
        """Return the plan as stages and strategies; `tables` are those that its number counts."""
        return self.plan.to_plan(0, tables[self.table])


def unit_starts(fused_to_previous: Tensor) -> Tensor:
    """Return the first layer of every unit (a layer with the joined ones that follow it), shape `(U,)`."""
    return torch.nonzero(~fused_to_previous).squeeze(-1)


def round_edges(edges: Tensor, num_units: int) -> Tensor:
    """Return the closest valid stage starts, in units: every stage keeps at least one.

    Args:
        edges: Rising positions, shape `(B, K - 1)`.
        num_units: U, at least K.

    Returns:
        Starts of all stages, shape `(B, K)`, strictly rising from 0, integer.
    """
    pp = edges.shape[1] + 1
    order = torch.arange(1, pp)
    free = (torch.round(edges).long() - order).clamp(min=0)
    inner = torch.cummax(free, dim=1).values if pp > 1 else free
    inner = inner.clamp(max=num_units - pp) + order
    return torch.cat([torch.zeros(len(edges), 1, dtype=torch.long), inner], dim=1)


def even_uniform_plans(table: CostTable, *, ends_apart: bool = False) -> HardPlans:
    """Return every outer choice with every strategy for all layers, stages as even as they can be.

    Args:
        ends_apart: Even without the first and the last unit, which come on top: trainers cut blocks so.
    """
    units = unit_starts(table.fused_to_previous)
    edges = (
        ends_apart
        + torch.arange(1, table.num_stages) * (len(units) - 2 * ends_apart) / table.num_stages
    )
    starts = units[round_edges(edges.unsqueeze(0), len(units))]
    outer, choice = torch.nonzero(table.allowed, as_tuple=True)
    choices = choice.unsqueeze(1).expand(-1, table.num_layers)
    return HardPlans(outer, choices, starts.expand(len(outer), -1))
