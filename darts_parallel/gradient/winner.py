"""The history of the restart that wins: its weights at many steps, from the first one on.

The winner is known at the end only. So snapshots of all restarts are kept, and thinning drops those
of the restarts that it drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.gradient.relaxed_cost import RelaxedPlans, SurrogateCost
from darts_parallel.gradient.restarts import KeptRestarts, RestartBatch, lowest


@dataclass(frozen=True)
class WinnerHistory:
    """One restart over the search; S recorded steps."""

    steps: tuple[int, ...]
    """Numbers of the recorded steps."""
    name: str
    """Name of its pipeline configuration."""
    choices: tuple[str, ...]
    """Strategies by name, C."""
    probabilities: Tensor
    """Weight of every layer's strategies, shape `(S, L, C)`, single precision."""
    memory: Tensor
    """Expected bytes of a device of every stage, without the framework's reserve, `(S, pp)`."""
    multipliers: Tensor
    """Multipliers of the memory constraints, `(S, pp)`."""


@dataclass(frozen=True)
class _Snapshot:
    """All restarts of one group at one step."""

    probabilities: Tensor
    memory: Tensor
    multipliers: Tensor

    def select(self, kept: KeptRestarts) -> "_Snapshot":
        probabilities = kept.of(self.probabilities)
        memory = kept.of(self.memory)
        return _Snapshot(probabilities, memory, kept.of(self.multipliers))


class Histories:
    """Keep snapshots of all groups.

    Args:
        every: Steps between two snapshots.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps: list[int] = []
        self._snapshots: list[list[_Snapshot]] = []
        """Snapshots of every group, in the search's order of groups."""

    def record(
        self,
        step: int,
        groups: Sequence[RestartBatch],
        weights: Sequence[RelaxedPlans],
        costs: Sequence[SurrogateCost],
    ) -> None:
        """Take a snapshot of every group where one is due."""
        if step % self.every:
            return
        self._snapshots = self._snapshots or [[] for _ in groups]
        self._steps.append(step)
        for index, group in enumerate(groups):
            probabilities = weights[index].choices.detach().float()
            memory = costs[index].memory.detach().float()
            snapshot = _Snapshot(probabilities, memory, group.multipliers.float())
            self._snapshots[index].append(snapshot)

    def keep(self, parts: Sequence[KeptRestarts]) -> None:
        """Drop what thinning drops: all but the kept restarts of some groups."""
        remaining = []
        for kept in parts:
            snapshots = self._snapshots[kept.group]
            remaining.append([snapshot.select(kept) for snapshot in snapshots])
        self._snapshots = remaining

    def winner(
        self, groups: Sequence[RestartBatch], merits: Sequence[Tensor]
    ) -> WinnerHistory | None:
        """Return the history of the restart of lowest merit, `(O, R)` by group; None without one."""
        if not merits or not self._snapshots or not self._snapshots[0]:
            return None
        lead, outer, restart = lowest(merits)
        snapshots = self._snapshots[lead]

        def series(name: str) -> Tensor:
            return torch.stack([getattr(page, name)[outer, restart] for page in snapshots])

        group = groups[lead]
        fields = ("probabilities", "memory", "multipliers")
        tensors = {name: series(name) for name in fields}
        steps = tuple(self._steps)
        return WinnerHistory(steps, group.names[outer], group.choice_names, **tensors)
