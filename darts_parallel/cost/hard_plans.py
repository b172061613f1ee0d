"""Hard plans of a cost table, as integer tensors: what searches and solvers move and price."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.config import Shares
from darts_parallel.cost.cost_table import CostTable, Tables
from darts_parallel.cost.host_memory import OffloadedPlans
from darts_parallel.cost.rows import Rows, flatnonzero
from darts_parallel.plans import Plan
from darts_parallel.schedules import find


@dataclass(frozen=True)
class HardPlans(Rows):
    """B hard plans of one table, all integer."""

    outer: Tensor
    """Outer choice, `(B,)`."""
    choices: Tensor
    """Strategy of every layer, `(B, L)`."""
    first_layers: Tensor
    """First layer of every stage in the order of layers, rising from 0, `(B, K)`."""

    @staticmethod
    def one(outer: int, choices: Sequence[int], first_layers: Sequence[int]) -> "HardPlans":
        """Return a batch of one plan."""
        return HardPlans(*(torch.tensor([own]) for own in (outer, choices, first_layers)))

    def repeated(self, count: int) -> "HardPlans":
        """Return the one plan `count` times."""
        choices = self.choices.expand(count, -1)
        return HardPlans(self.outer.expand(count), choices, self.first_layers.expand(count, -1))

    def stages(self) -> Tensor:
        """Return the stage of every layer, shape `(B, L)`."""
        begun = torch.zeros_like(self.choices)
        begun.scatter_add_(1, self.first_layers, torch.ones_like(self.first_layers))
        return begun.cumsum(1) - 1

    def within(self, space_kind: str) -> Tensor:
        """Return which plans lie in the space: `uniform`, `stagewise` or `layerwise`, shape `(B,)`."""
        if space_kind == "layerwise":
            return torch.ones(len(self), dtype=torch.bool)
        if space_kind == "stagewise":
            compared = self.first_layers.gather(1, self.stages())
        else:
            compared = torch.zeros_like(self.choices)
        return (self.choices == self.choices.gather(1, compared)).all(1)

    def to_plan(self, index: int, table: CostTable) -> Plan:
        """Read plan number `index` as stages and strategies."""
        starts = self.first_layers[index].tolist()
        choices = self.choices[index].tolist()
        count = int(table.num_micro_batches[self.outer[index]])
        schedule = table.pipeline.schedule
        if table.pipeline.start:
            schedule = find(schedule).code(table.pp, count, table.virtual_stages)
        boundaries = (*starts, len(choices))
        layers = tuple(table.choices[choice] for choice in choices)
        offload: Shares = ()
        if table.host is not None:
            own = self[index : index + 1]
            plans = OffloadedPlans(table, own.outer, own.choices, own.stages(), table.host)
            shares = plans.fractions()[0].tolist()
            offload = tuple(map(tuple, shares)) if any(map(any, shares)) else ()
        return Plan(
            count,
            boundaries,
            layers,
            cp=table.cp,
            node_order=table.node_order,
            virtual_stages=table.virtual_stages,
            schedule=schedule,
            offload=offload,
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

    def to_plan(self, tables: Tables) -> Plan:
        """Return the plan as stages and strategies; `table` is an index of `tables`."""
        return self.plan.to_plan(0, tables[self.table])


def unit_starts(fused_to_previous: Tensor) -> Tensor:
    """Return the first layer of every unit, shape `(U,)`.

    A unit is a layer with the fused layers that follow it; a stage holds whole units.
    """
    return flatnonzero(~fused_to_previous)


def round_edges(edges: Tensor, num_units: int) -> Tensor:
    """Return the closest valid stage starts, in units: every stage keeps at least one.

    Args:
        edges: Rising positions, shape `(B, K - 1)`.
        num_units: U, at least K.

    Returns:
        Starts of all stages, shape `(B, K)`, strictly rising from 0, integer.
    """
    num_stages = edges.shape[1] + 1
    order = torch.arange(1, num_stages)
    # without one unit for each earlier stage, the starts only have to be non-decreasing
    spare = (torch.round(edges).long() - order).clamp(min=0)
    if num_stages > 1:
        spare = torch.cummax(spare, dim=1).values
    inner = spare.clamp(max=num_units - num_stages) + order
    first = torch.zeros(len(edges), 1, dtype=torch.long)
    return torch.cat([first, inner], dim=1)


def even_starts(table: CostTable, *, ends_apart: bool = False) -> Tensor:
    """Return the first layers of stages as even as possible, `(1, K)`; `ends_apart` as below."""
    units = unit_starts(table.fused_to_previous)
    even_units = len(units) - 2 * ends_apart
    edges = ends_apart + torch.arange(1, table.num_stages) * even_units / table.num_stages
    return units[round_edges(edges.unsqueeze(0), len(units))]


def even_uniform_plans(table: CostTable, *, ends_apart: bool = False) -> HardPlans:
    """Return every outer choice with every strategy for all layers, stages as even as possible.

    Args:
        ends_apart: Even without the first and the last unit, which come on top, as trainers cut
            blocks.
    """
    starts = even_starts(table, ends_apart=ends_apart)
    outer, choice = torch.nonzero(table.allowed, as_tuple=True)
    choices = choice.unsqueeze(1).expand(-1, table.num_layers)
    return HardPlans(outer, choices, starts.expand(len(outer), -1))
