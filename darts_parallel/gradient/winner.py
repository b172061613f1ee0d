"""The history of the restart that wins: its weights at many steps, from the first one on.

The winner is known at the end only. So snapshots of all restarts are kept, and thinning drops those
of the restarts that it drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost import PricedPlan
from darts_parallel.gradient.relaxed_cost import RelaxedPlans
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


class Histories:
    """Keep snapshots of all groups.

    Args:
        every: Steps between two snapshots.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps: list[int] = []
        self._snapshots: list[list[Tensor]] = []
        """Weights `(O, R, L, C)` of every group, in the search's order of groups, step by step."""

    def record(self, step: int, weights: Sequence[RelaxedPlans]) -> None:
        """Take a snapshot of every group where one is due."""
        if step % self.every:
            return
        self._snapshots = self._snapshots or [[] for _ in weights]
        self._steps.append(step)
        for snapshots, relaxed in zip(self._snapshots, weights, strict=True):
            snapshots.append(relaxed.choices.detach().float())

    def keep(self, parts: Sequence[KeptRestarts]) -> None:
        """Drop what thinning drops: all but the kept restarts of some groups."""
        remaining = []
        for kept in parts:
            snapshots = self._snapshots[kept.group]
            remaining.append([kept.of(snapshot) for snapshot in snapshots])
        self._snapshots = remaining

    def winner(
        self, groups: Sequence[RestartBatch], merits: Sequence[Tensor], best: PricedPlan
    ) -> WinnerHistory | None:
        """Return the history of the best restart; None without one.

        Args:
            merits: Rankings of every group, `(O, R)`, lower is better.
            best: The best plan: a restart of its pipeline configuration is returned if there is one.
        """
        if not merits or not self._snapshots or not self._snapshots[0]:
            return None
        own = []
        for group, merit in zip(groups, merits, strict=True):
            same = group.outer_index == best.outer[1]
            same &= group.table_index == best.outer[0]
            own.append(merit.masked_fill(~same.unsqueeze(1), torch.inf))
        if min(float(merit.min()) for merit in own) < torch.inf:
            merits = own
        lead, outer, restart = lowest(merits)
        pages = [snapshot[outer, restart] for snapshot in self._snapshots[lead]]
        group = groups[lead]
        return WinnerHistory(
            steps=tuple(self._steps),
            name=group.names[outer],
            choices=group.choice_names,
            probabilities=torch.stack(pages),
        )
