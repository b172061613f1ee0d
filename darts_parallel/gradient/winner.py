"""The history of the restart that wins: its weights at many steps, from the first one on.

Which restart wins is known at the end only, so those of all restarts are kept; thinning drops the
histories of what it drops.
"""

from collections.abc import Callable, Sequence
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
    """Expected bytes over capacity of every stage, `(S, pp)`."""
    multipliers: Tensor
    """Multipliers of the memory constraints, `(S, pp)`."""


@dataclass
class _Page:
    """Hold all restarts of one group at one step."""

    step: int
    probabilities: Tensor
    memory: Tensor
    multipliers: Tensor

    def taken(self, take: Callable[[Tensor], Tensor]) -> "_Page":
        return _Page(self.step, take(self.probabilities), take(self.memory), take(self.multipliers))


class Histories:
    """Keep pages of all groups; the groups' order is that of the search.

    Args:
        every: Steps between two pages.
    """

    def __init__(self, every: int) -> None:
        self.every = every
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
        for pages, group, relaxed, cost in zip(self._pages, groups, weights, costs, strict=True):
            pages.append(
                _Page(
                    step,
                    relaxed.choices.detach().float(),
                    (cost.memory / cost.capacity).detach().float(),
                    group.multipliers.float(),
                )
            )

    def keep(self, groups: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Forget what thinning drops.

        Args:
            groups: For each group that stays its place before, its kept outer choices `(O',)` and their
                kept restarts `(O', R')`.
        """
        self._pages = [
            [page.taken(lambda x, o=outer, r=restarts: x[o.unsqueeze(1), r]) for page in self._pages[place]]  # type: ignore[misc]
            for place, outer, restarts in groups
        ]

    def winner(self, groups: Sequence[RestartBatch], merits: Sequence[Tensor]) -> WinnerHistory | None:
        """Return the history of the restart of lowest merit, merits `(O, R)` by group; None without pages."""
        if not merits or not self._pages or not self._pages[0]:
            return None
        place = min(range(len(merits)), key=lambda index: float(merits[index].min()))
        outer, restart = divmod(int(merits[place].argmin()), merits[place].shape[1])
        pages, group = self._pages[place], groups[place]

        def of(name: str) -> Tensor:
            return torch.stack([getattr(page, name)[outer, restart] for page in pages])

        return WinnerHistory(
            steps=tuple(page.step for page in pages),
            name=group.names[outer],
            choices=tuple(choice.label() for choice in group.table.choices),
            probabilities=of("probabilities"),
            memory=of("memory"),
            multipliers=of("multipliers"),
        )
