"""One gradient for both copies of a tied vocabulary table."""

import torch
import torch.distributed as dist
from torch import Tensor

from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.run.meshes import Meshes, shard_ranks
from darts_parallel.run.replicated import Replicated
from darts_parallel.run.units import Unit, aligned, local

EMBEDDING, HEAD = "embedding.table.weight", "head.output.weight"


class TiedTables:
    """Sums the gradients of the two copies, as Megatron-LM's embedding group does.

    Where both copies are divided alike, a rank sums its part with its partner's in the other stage;
    else whole gradients are gathered first.

    Args:
        strategies: Of embedding and head.
        units: Of this rank.
        meshes: Groups of the plan.
        vocab_size: Rows without padding.
    """

    def __init__(
        self,
        strategies: tuple[LayerStrategy, LayerStrategy],
        units: dict[str, Unit],
        meshes: Meshes,
        vocab_size: int,
    ) -> None:
        self.copies = [
            (units[name], table)
            for name, table in (("embedding", EMBEDDING), ("head", HEAD))
            if name in units and table in units[name].parameters
        ]
        self.group, self.vocab_size = meshes.tied, vocab_size
        if self.group is None and len(self.copies) < 2:
            self.copies = []  # one stage, one table
        first, last = strategies
        alike = (first.tp, shard_ranks(first)) == (last.tp, shard_ranks(last))
        reduced_late = first.zero_stage < 2
        self.by_parts = alike and reduced_late == (last.zero_stage < 2) and self.group is not None
        self.early = self.by_parts and reduced_late

    def sum_before(self) -> None:
        """Before ZeRO 0 and 1 reduce gradients over data-parallel ranks."""
        if self.early:
            self._sum_parts()

    def sum_after(self) -> None:
        """After that."""
        if self.early or not self.copies:
            return
        if self.by_parts:
            self._sum_parts()
            return
        wholes = [unit.full_gradient(table)[: self.vocab_size] for unit, table in self.copies]
        total = torch.stack(wholes).sum(0)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for unit, table in self.copies:
            _set_rows(unit, table, total)

    def _sum_parts(self) -> None:
        for unit, table in self.copies:
            # a tensor-parallel lookup may leave a partial sum of the whole table
            gradient = unit.parameters[table].grad = aligned(unit.parameters[table])
            dist.all_reduce(local(gradient), group=self.group)


def _set_rows(unit: Unit, table: str, total: Tensor) -> None:
    """Write this rank's part of the whole gradient where the optimizer reads it."""
    mesh, parameter = unit.mesh, unit.parameters[table]
    rows = torch.nn.functional.pad(total, (0, 0, 0, parameter.shape[0] - total.shape[0]))
    rows = rows.chunk(mesh["tp"].size())[mesh["tp"].get_local_rank()]
    if isinstance(unit, Replicated):
        unit.overwrite(table, rows)
        return
    gradient = parameter.grad
    assert gradient is not None
    part = local(gradient)
    if part.numel():
        part.copy_(rows.chunk(mesh["shard"].size())[mesh["shard"].get_local_rank()])
