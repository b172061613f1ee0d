"""The search in the DARTS form: logits of every operator, softmax, annealed, rounded, coordinate descent.

Choices are taken as independent: a tensor is brought to placement f with probability
`P(producer) * (1 - prod over consumers (1 - P(consumer wants f)))`, which is the exact mean of the cost of a
fan under independent choices. Memory is a multiplier times the bytes above the limit.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from darts_parallel.graph._space import Fan, GraphSpace


@dataclass(frozen=True)
class DescentOptions:
    """How long and how hot the descent is."""

    steps: int = 200
    restarts: int = 4
    learning_rate: float = 0.1
    hottest: float = 1.0
    """Temperature of the softmax at the first step."""
    coldest: float = 0.05
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


class MeanFieldCost:
    """Mean seconds and bytes of independent choices, vectorised over restarts."""

    def __init__(self, space: GraphSpace) -> None:
        sizes = [len(group.choices) for group in space.groups]
        self.first = np.concatenate([[0], np.cumsum(sizes)])
        self.group = torch.tensor(np.repeat(np.arange(len(sizes)), sizes))
        self.compute = torch.tensor(np.concatenate(space.seconds))
        self.rows: list[tuple[int, int]] = []
        """Pairs of a row (a state of a fan's producer, or what a consumer wants) and a choice."""
        self.count = 0
        self.terms: list[tuple[int, int, float]] = []
        """Row of the producer's state, set of consumers' rows, seconds."""
        self.sets: list[tuple[int, int]] = []
        """Pairs of a set and a row of it."""
        self.num_sets = 0
        for fan in space.fans:
            self._add(fan)
        self.kept_sets = self.num_sets
        for item in space.kept:
            for group, choices in item.users:
                self.sets.append((self.num_sets, self._row([self.first[group] + k for k in choices])))
            self.num_sets += 1
        self.bytes = torch.tensor([item.bytes for item in space.kept], dtype=torch.float64)
        self.memory = space.memory
        self._freeze()

    def _row(self, choices: Sequence[int]) -> int:
        self.rows += [(self.count, int(k)) for k in choices]
        self.count += 1
        return self.count - 1

    def _add(self, fan: Fan) -> None:
        group = self.first[fan.producer[0]]
        makes = [self._row(group + np.flatnonzero(fan.of_choice[0] == p)) for p in range(len(fan.produced))]
        for costs, index in ((fan.forward, fan.placement_of), (fan.backward, fan.gradient_of)):
            for target in range(costs.shape[1]):
                for array, (g, _) in zip(fan.of_choice[1:], fan.consumers, strict=True):
                    wants = np.flatnonzero(index[array] == target)
                    if len(wants):
                        self.sets.append((self.num_sets, self._row(self.first[g] + wants)))
                self.terms += [
                    (row, self.num_sets, fan.count * float(costs[p, target]))
                    for p, row in enumerate(makes) if costs[p, target] > 0
                ]  # fmt: skip
                self.num_sets += 1

    def _freeze(self) -> None:
        pairs = torch.tensor(self.rows).reshape(-1, 2)
        self.row_of, self.choice_of = pairs[:, 0], pairs[:, 1]
        members = torch.tensor(self.sets).reshape(-1, 2)
        self.set_of, self.member = members[:, 0], members[:, 1]
        self.makes = torch.tensor([t[0] for t in self.terms], dtype=torch.long)
        self.wanted = torch.tensor([t[1] for t in self.terms], dtype=torch.long)
        self.price = torch.tensor([t[2] for t in self.terms], dtype=torch.float64)

    def probabilities(self, logits: Tensor, temperature: float) -> Tensor:
        """Return the softmax of every group, `(restarts, choices)`."""
        scaled = logits / temperature
        top = torch.full((logits.shape[0], len(self.first) - 1), -torch.inf, dtype=logits.dtype)
        top = top.scatter_reduce(1, self.group.expand_as(scaled), scaled, "amax")
        weights = torch.exp(scaled - top[:, self.group])
        return weights / torch.zeros_like(top).index_add(1, self.group, weights)[:, self.group]

    def __call__(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean seconds, and mean bytes above the memory as a share of it, `(restarts,)`."""
        restarts = len(probabilities)
        rows = probabilities.new_zeros(restarts, self.count)
        rows = rows.index_add(1, self.row_of, probabilities[:, self.choice_of])
        misses = torch.log1p(-rows[:, self.member].clamp(max=1.0 - 1e-9))
        none = probabilities.new_zeros(restarts, self.num_sets).index_add(1, self.set_of, misses)
        some = 1.0 - torch.exp(none)
        seconds = probabilities @ self.compute
        seconds = seconds + (rows[:, self.makes] * some[:, self.wanted]) @ self.price
        if self.memory is None:
            return seconds, torch.zeros_like(seconds)
        used = some[:, self.kept_sets :] @ self.bytes
        return seconds, (used / self.memory - 1.0).clamp(min=0.0)


def descend(space: GraphSpace, options: DescentOptions | None = None) -> DescentAnswer:
    """Search by gradient descent on relaxed choices; the best restart after coordinate descent.

    Args:
        space: What may be chosen.
        options: Steps, restarts, temperatures, seed.
    """
    chosen = options or DescentOptions()
    began = time.perf_counter()
    cost = MeanFieldCost(space)
    generator = torch.Generator().manual_seed(chosen.seed)
    count = len(cost.compute)
    unit = float(cost.compute.sum() + cost.price.sum()) / max(len(space.groups), 1)
    logits = 0.3 * torch.randn(chosen.restarts, count, generator=generator, dtype=torch.float64)
    logits = (logits - cost.compute / max(unit, 1e-30)).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=chosen.learning_rate)
    multiplier = torch.zeros(chosen.restarts, dtype=torch.float64)
    typical = None
    for step in range(chosen.steps):
        cooled = (chosen.coldest / chosen.hottest) ** (step / max(chosen.steps - 1, 1))
        seconds, excess = cost(cost.probabilities(logits, chosen.hottest * cooled))
        typical = seconds.detach() if typical is None else typical
        multiplier = multiplier + 0.1 * excess.detach()
        loss = (seconds / typical + multiplier * excess).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    plans = [_rounded(cost, row) for row in logits.detach()]
    rounded = min(_merit(space, plan) for plan in plans)
    better = [coordinate_descent(space, plan) for plan in plans]
    best = min(better, key=lambda plan: _merit(space, plan))
    fits = space.memory is None or space.memory_bytes(best) <= space.memory
    return DescentAnswer(
        tuple(best), rounded[1], space.total_seconds(best), fits, time.perf_counter() - began
    )


def _rounded(cost: MeanFieldCost, logits: Tensor) -> list[int]:
    ends = cost.first
    return [int(logits[a:b].argmax()) for a, b in pairwise(ends)]


def _merit(space: GraphSpace, plan: Sequence[int]) -> tuple[float, float]:
    """Return bytes above the memory, then seconds: smaller is better."""
    excess = 0.0 if space.memory is None else max(space.memory_bytes(plan) - space.memory, 0.0)
    return excess, space.total_seconds(plan)


def coordinate_descent(space: GraphSpace, start: Sequence[int], sweeps: int = 50) -> list[int]:
    """Change one group's choice at a time while the plan improves: fewer bytes too many, then seconds.

    Args:
        start: A choice for every group.
        sweeps: Most passes over all groups.
    """
    plan = list(start)
    fans: dict[int, list[Fan]] = defaultdict(list)
    for fan in space.fans:
        for group in {fan.producer[0], *(g for g, _ in fan.consumers)}:
            fans[group].append(fan)
    for _ in range(sweeps):
        changed = False
        for group, seconds in enumerate(space.seconds):
            now, best = plan[group], None
            for k in range(len(seconds)):
                plan[group] = k
                moves = sum(space.fan_seconds(fan, plan) for fan in fans[group])
                excess = 0.0
                if space.memory is not None:
                    excess = max(space.memory_bytes(plan) - space.memory, 0.0)
                merit = (excess, float(seconds[k]) + moves, k != now, k)
                best = merit if best is None or merit < best else best
            assert best is not None
            plan[group] = best[3]
            changed |= best[3] != now
        if not changed:
            break
    return plan
