"""Where the layers of hard plans stand in a cost table: reads their costs, and adds them up."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.pipeline import summed


@dataclass(frozen=True)
class PlanPlaces:
    """Layers of B hard plans of K stages in a table.

    Costs are read by flat indices: indexing with several tensors takes five times as long.
    """

    table: CostTable
    outer: Tensor
    """Outer choice of every plan, `(B,)`."""
    choices: Tensor
    """Strategy of every layer, `(B, L)`."""
    stages: Tensor
    """Stage of every layer, `(B, L)`."""

    @cached_property
    def devices(self) -> Tensor:
        """Device of every layer, `(B, L)`."""
        return self.table.stage_device[self.stages]

    @cached_property
    def kinds(self) -> Tensor:
        """Kind of every layer's stage, `(B, L)`."""
        return self.table.stage_kind[self.stages]

    @cached_property
    def in_flight(self) -> Tensor:
        """Micro-batches that the stage of every layer holds at once, `(B, L)`."""
        rows = self.outer.unsqueeze(1) * self.table.num_stages
        return self.table.in_flight.take(rows + self.stages)

    @cached_property
    def _places(self) -> Tensor:
        """Index of every layer in costs `(O, L, C)`, `(B, L)`."""
        layers = torch.arange(self.table.num_layers)
        rows = self.outer.unsqueeze(1) * self.table.num_layers + layers
        return rows * len(self.table.choices) + self.choices

    @cached_property
    def _places_by_kind(self) -> Tensor:
        """Index of every layer in costs `(O, Q, L, C)`, `(B, L)`."""
        num_kinds = self.table.time.shape[1]
        if num_kinds == 1:
            return self._places
        skipped = self.outer.unsqueeze(1) * (num_kinds - 1) + self.kinds
        return self._places + skipped * (self.table.num_layers * len(self.table.choices))

    def read(self, values: Tensor) -> Tensor:
        """Read every layer's cost, `(O, L, C)` to `(B, L)`."""
        return values.take(self._places)

    def read_by_kind(self, values: Tensor) -> Tensor:
        """Read every layer's cost on its kind of stage, `(O, Q, L, C)` to `(B, L)`."""
        return values.take(self._places_by_kind)

    def by_device(self, layers: Tensor) -> Tensor:
        """Add up the layers of every device, `(B, L)` to `(B, pp)`."""
        return summed(layers, self.devices, self.table.pp)

    def by_stage(self, layers: Tensor) -> Tensor:
        """Add up the layers of every stage, `(B, L)` to `(B, K)`."""
        return summed(layers, self.stages, self.table.num_stages)
