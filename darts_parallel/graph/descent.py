"""The search in the DARTS form: probabilities of all choices move down the gradient of a step's mean seconds.

Independent choices would price a tensor by products of its operators' probabilities, whose local minima lie
far above the best plan (docs/graph.md). So every tensor has probabilities of its own for each pair of its
producer's state and a consumer's, and multipliers learn that their sums are the operators' probabilities (the
local polytope), that equal layouts are paid once, and that the bytes fit: the programme's rows. Steps are of
Chambolle and Pock 2011 (J. Math. Imaging Vis. 40), with a size for every variable (Pock and Chambolle 2011,
ICCV, lemma 2); now and then the probabilities are rounded, and coordinate descent goes on from there.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._space import Fan, GraphSpace

POLISHED = 4
"""Rounded plans that coordinate descent goes on from: the best ones."""


@dataclass(frozen=True)
class DescentOptions:
    """How long the descent is, and how large its steps are."""

    steps: int = 2000
    check: int = 200
    """Steps after which a plan is rounded."""
    balance: tuple[float, ...] = (10.0, 1.0)
    """Steps of the multipliers over those of the probabilities, of every restart."""
    seed: int = 0


@dataclass(frozen=True)
class DescentAnswer:
    """The best plan of a descent."""

    assignment: tuple[int, ...]
    rounded_seconds: float
    """Seconds of a step of the best rounded plan, before coordinate descent."""
    seconds: float
    """After coordinate descent."""
    fits: bool
    """The plan is within the memory."""
    search_seconds: float


def descend(space: GraphSpace, options: DescentOptions | None = None) -> DescentAnswer:
    """Search by gradient descent on relaxed choices; the best rounded plan after coordinate descent."""
    chosen, began = options or DescentOptions(), time.perf_counter()
    programme, rng = GraphProgramme(space), np.random.default_rng(chosen.seed)
    rounded = dict.fromkeys(
        plan for balance in chosen.balance for plan in _rounded(programme, chosen, balance, rng)
    )
    likely = sorted(rounded, key=lambda plan: _merit(space, plan))
    better = [coordinate_descent(space, plan) for plan in likely[:POLISHED]]
    best = min(better, key=lambda plan: _merit(space, plan))
    return DescentAnswer(
        tuple(best),
        space.total_seconds(likely[0]),
        space.total_seconds(best),
        not space.excess_bytes(best),
        time.perf_counter() - began,
    )


class PairDescent:
    """Probabilities of all choices and pairs of a programme, and the multipliers of its rows.

    Args:
        balance: Steps of the multipliers over those of the probabilities.
    """

    def __init__(self, programme: GraphProgramme, balance: float, rng: np.random.Generator) -> None:
        self.programme = programme
        self.matrix, self.low, self.high = programme.constraints()
        self.size = 1.0 / abs(self.matrix).sum(0).clip(1e-9) / balance
        self.reach = balance / abs(self.matrix).sum(1).clip(1e-9)
        self.now, self.multipliers = rng.random(len(programme.cost)) * 0.1, np.zeros(len(self.low))

    def step(self, costs: np.ndarray) -> None:
        """Move down the gradient of the mean seconds, by the costs of all variables."""
        unit = costs[: self.programme.whole].mean().clip(1e-30)
        then = self.now - self.size * (costs / unit + self.matrix.T @ self.multipliers)
        then = then.clip(0.0, self.programme.upper)
        above = self.multipliers / self.reach + self.matrix @ (2.0 * then - self.now)
        self.multipliers = self.reach * (above - above.clip(self.low, self.high))
        self.now = then

    def probabilities(self) -> list[np.ndarray]:
        """Return those of every group's choices."""
        parts = [self.now[a:b].clip(1e-12) for a, b in self.programme.spans]
        return [part / part.sum() for part in parts]


def _rounded(
    programme: GraphProgramme, options: DescentOptions, balance: float, rng: np.random.Generator
) -> Iterator[tuple[int, ...]]:
    """Yield the likeliest choices of one descent, and those of its mean since the last ones."""
    descent, costs = PairDescent(programme, balance, rng), programme.tied_costs()
    mean = np.zeros(len(costs))
    for k in range(1, options.steps + 1):
        descent.step(costs)
        mean = mean + descent.now
        if k % options.check == 0 or k == options.steps:
            yield from map(programme.rounded, (descent.now, mean))
            mean = np.zeros(len(costs))


def _merit(space: GraphSpace, plan: Sequence[int]) -> tuple[float, float]:
    """Return bytes above the memory, then seconds: smaller is better."""
    return space.excess_bytes(plan), space.total_seconds(plan)


def coordinate_descent(space: GraphSpace, start: Sequence[int], sweeps: int = 50) -> list[int]:
    """Change one group's choice at a time while the plan improves: fewer bytes too many, then seconds."""
    plan = list(start)
    fans: dict[int, list[Fan]] = defaultdict(list)
    tied = [
        {g, *(h for choice in group.choices for h in choice.merged)}
        for g, group in enumerate(space.groups)
    ]
    near = [sorted({h for one in own for h in tied[one]}) for own in tied]
    for fan in space.fans:
        for group in {h for g in {fan.producer, *fan.consumers} for h in near[g]}:
            fans[group].append(fan)

    def merit(group: int, choice: int, now: int) -> tuple[float, float, bool, int]:
        trial = list(plan)
        for g, k in space.changes(plan, group, choice).items():
            trial[g] = k
        moves = sum(space.fan_seconds(fan, trial) for fan in fans[group])
        own = sum(float(space.seconds[g][trial[g]]) for g in near[group])
        return space.excess_bytes(trial), own + moves, choice != now, choice

    for _ in range(sweeps):
        before = list(plan)
        for group, seconds in enumerate(space.seconds):
            now = plan[group]
            best = min(merit(group, choice, now) for choice in range(len(seconds)))[-1]
            for g, k in space.changes(plan, group, best).items():
                plan[g] = k
        if plan == before:
            break
    return plan
