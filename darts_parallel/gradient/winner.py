"""The history of the restart that wins: its weights at many steps, from the first one on.

Which restart wins is known at the end only, so those of all restarts are kept; thinning drops the
histories of what it drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.gradient.relaxed_cost import RelaxedPlans, SurrogateCost
from darts_parallel.gradient.restarts import RestartBatch


@dataclass(frozen=True)
class WinnerHistory:
    """Record one restart over the search; S recorded steps."""

    steps: tuple[int, ...]
    """Numbers of the recorded steps."""
    name: str
    """Name of its outer choice."""
    choices: tuple[str, ...]
    """Strategies by name, C."""
    probabilities: Tensor
    """Weight of every layer's strategies, shape `(S, L, C)`, single precision."""
    memory: Tensor
    """Expected bytes of a device of every stage, without the framework's reserve, `(S, pp)`."""
    multipliers: Tensor
    """Multipliers of the memory constraints, `(S, pp)`."""


_Page = tuple[Tensor, ...]
"""Probabilities, memory and multipliers of all restarts of one group at one step."""


class Histories:
    """Keep pages of all groups; the groups' order is that of the search."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps: list[int] = []
        self._pages: list[list[_Page]] = []

    def record(
        self,
        step: int,
        groups: Sequence[RestartBatch],
        weights: Sequence[RelaxedPlans],
        costs: Sequence[SurrogateCost],
    ) -> None:
        """Write a page of every group, where it is time for one."""
        if step % self.every:
            return
        self._pages = self._pages or [[] for _ in groups]
        self._steps.append(step)
        for pages, group, relaxed, cost in zip(self._pages, groups, weights, costs, strict=True):
            memory = cost.memory.detach().float()
            pages.append((relaxed.choices.detach().float(), memory, group.multipliers.float()))

    def keep(self, groups: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Forget what thinning drops.

        Args:
            groups: For each group that stays its place before, its kept outer choices `(O',)` and their
                kept restarts `(O', R')`.
        """
        kept = [
            (self._pages[place], (outer.unsqueeze(1), restarts))
            for place, outer, restarts in groups
        ]
        self._pages = [[tuple(part[own] for part in page) for page in pages] for pages, own in kept]

    def winner(
        self, groups: Sequence[RestartBatch], merits: Sequence[Tensor]
    ) -> WinnerHistory | None:
        """Return the history of the restart of lowest merit, merits `(O, R)` by group; None without pages."""
        if not merits or not self._pages or not self._pages[0]:
            return None
        place = min(range(len(merits)), key=lambda index: float(merits[index].min()))
        outer, restart = divmod(int(merits[place].argmin()), merits[place].shape[1])
        group, columns = groups[place], zip(*self._pages[place], strict=True)
        names = tuple(choice.label() for choice in group.table.choices)
        parts = (torch.stack([page[outer, restart] for page in column]) for column in columns)
        return WinnerHistory(tuple(self._steps), group.names[outer], names, *parts)
