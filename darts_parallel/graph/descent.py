"""The search in the DARTS form: probabilities of all choices move down the gradient of a step's mean seconds.

Independent choices would price a tensor by products of its operators' probabilities, whose local minima lie
far above the best plan (docs/explanation/graphs.md). So every tensor has probabilities of its own for each
pair of its producer's state and a consumer's. Multipliers learn the rows of the programme: sums of pairs
are the operators' probabilities (the local polytope), equal layouts are paid once, and the bytes fit. Steps
are of Chambolle and Pock 2011 (J. Math. Imaging Vis. 40), with a size for every variable (Pock and
Chambolle 2011, ICCV, lemma 2). At intervals the probabilities are rounded, and coordinate descent continues
from there.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from darts_parallel.graph._programme import Assignment, GraphProgramme
from darts_parallel.graph._space import Fan, GraphSpace

STEPS = 2000
CHECKED = 200
"""Steps after which a plan is rounded; they divide `STEPS`."""
BALANCES = (10.0, 1.0)
"""Step size of the multipliers per step size of the probabilities, one for every restart."""
SWEEPS = 50
"""Changes of every choice by coordinate descent, at most."""
POLISHED = 4
"""Rounded plans from which coordinate descent continues: the best ones."""


@dataclass(frozen=True)
class DescentAnswer:
    """The best plan of a descent."""

    assignment: Assignment
    rounded_seconds: float
    """Seconds of a step of the best rounded plan, before coordinate descent."""
    seconds: float
    """After coordinate descent."""
    fits: bool
    """The plan is within the memory."""
    search_seconds: float


def descend(space: GraphSpace, seed: int = 0) -> DescentAnswer:
    """Search by gradient descent on relaxed choices; the best rounded plan after coordinate descent."""
    began = time.perf_counter()
    programme = GraphProgramme(space)
    rng = np.random.default_rng(seed)

    def merit(plan: Sequence[int]) -> tuple[float, float]:
        """Return bytes above the memory, then seconds: smaller is better."""
        return space.excess_bytes(plan), space.total_seconds(plan)

    costs = programme.tied_costs()
    rounded: dict[Assignment, None] = {}
    """The likeliest choices of every descent, and those of its mean since the last ones."""
    for balance in BALANCES:
        pairs = PairDescent(programme, balance, rng)
        total = np.zeros(len(costs))
        for k in range(1, STEPS + 1):
            pairs.step(costs)
            total = total + pairs.now
            if k % CHECKED == 0:
                rounded |= dict.fromkeys(map(programme.rounded, (pairs.now, total)))
                total = np.zeros(len(costs))
    likely = sorted(rounded, key=merit)
    best = min((coordinate_descent(space, plan) for plan in likely[:POLISHED]), key=merit)
    excess, seconds = merit(best)
    before = space.total_seconds(likely[0])
    spent = time.perf_counter() - began
    return DescentAnswer(tuple(best), before, seconds, not excess, spent)


class PairDescent:
    """Probabilities of all choices and pairs of a programme, and the multipliers of its rows.

    Args:
        balance: Step size of the multipliers per step size of the probabilities.
    """

    def __init__(
        self,
        programme: GraphProgramme,
        balance: float,
        rng: np.random.Generator,
    ) -> None:
        self.programme = programme
        self.matrix, self.low, self.high = programme.constraints()
        sizes = abs(self.matrix)
        self.size = 1.0 / sizes.sum(0).clip(1e-9) / balance
        self.reach = balance / sizes.sum(1).clip(1e-9)
        # small numbers that differ, so that restarts differ
        self.now = rng.random(len(programme.cost)) * 0.1
        self.multipliers = np.zeros(len(self.low))

    def step(self, costs: np.ndarray) -> None:
        """Move down the gradient of the mean seconds, by the costs of all variables."""
        unit = costs[: self.programme.whole].mean().clip(1e-30)
        slope = costs / unit + self.matrix.T @ self.multipliers
        then = (self.now - self.size * slope).clip(0.0, self.programme.upper)
        rows = self.multipliers / self.reach + self.matrix @ (2.0 * then - self.now)
        self.multipliers = self.reach * (rows - rows.clip(self.low, self.high))
        self.now = then

    def probabilities(self) -> list[np.ndarray]:
        """Return the probabilities of every group's choices."""
        found = []
        for first, end in self.programme.spans:
            part = self.now[first:end].clip(1e-12)
            found.append(part / part.sum())
        return found


def coordinate_descent(space: GraphSpace, start: Sequence[int]) -> list[int]:
    """Change one group's choice at a time while the plan improves: fewer bytes too many, then seconds."""
    plan = list(start)
    fans = defaultdict[int, list[Fan]](list)
    """Tensors whose moves a group's choice changes."""
    for fan in space.fans:
        for number in {fan.producer, *fan.consumers}:
            fans[number].append(fan)

    def merit(group: int, choice: int) -> tuple[float, float, bool, int]:
        """Return bytes above the memory, then the seconds that may change; the plan's own choice first."""
        trial = plan.copy()
        trial[group] = choice
        seconds = float(space.seconds[group][choice])
        seconds += sum(space.fan_seconds(fan, trial) for fan in fans[group])
        return space.excess_bytes(trial), seconds, choice != plan[group], choice

    for _ in range(SWEEPS):
        before = plan.copy()
        for group, seconds in enumerate(space.seconds):
            *_, plan[group] = min(merit(group, choice) for choice in range(len(seconds)))
        if plan == before:
            break
    return plan
