"""Seconds and memory of every possible stage, and the splits that planners make of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baselines.incumbent import Incumbent
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.bounds import OuterCosts
from darts_parallel.exact.segments import (
    Array,
    best_bottleneck,
    best_sum,
    largest,
    rising_limits,
    segment_max,
    spans,
    split_below,
)
from darts_parallel.plan.strategy import LayerStrategy

STEP = 1e-4
"""Relative distance of the bottlenecks that `cheapest_split` tries; Alpa's epsilon."""


@dataclass(frozen=True)
class OuterChoice:
    """One pipeline degree and number of micro-batches, ready to be planned."""

    table: int
    outer: int
    costs: OuterCosts
    strategies: tuple[LayerStrategy, ...]
    """Of `costs`, `(C,)`."""

    @property
    def rest(self) -> float:
        """Micro-batches less one: how often the slowest stage counts beside the sum."""
        return self.costs.num_micro_batches - 1.0

    def plans(self, starts: list[int], choices: list[int]) -> HardPlans:
        """One plan; `choices` are numbers of `strategies`, one for each layer."""
        table_choices = self.costs.choices[choices].tolist()
        return HardPlans(torch.tensor([self.outer]), torch.tensor([table_choices]), torch.tensor([starts]))

    def uniform(self, starts: list[int], choice: int) -> HardPlans:
        """One plan of one strategy."""
        return self.plans(starts, [choice] * self.costs.num_layers)


def outer_choices(incumbent: Incumbent) -> Iterator[OuterChoice]:
    """Every outer choice of the tables of `plain_tables`, until the time is over."""
    for number in plain_tables(incumbent.tables):
        table = incumbent.tables[number]
        for outer in range(table.num_outer):
            if incumbent.over():
                return
            if bool(table.allowed[outer].any()):
                costs = OuterCosts.read(table, outer)
                strategies = tuple(table.choices[c] for c in costs.choices.tolist())
                yield OuterChoice(number, outer, costs, strategies)


def plain_tables(tables: Sequence[CostTable]) -> list[int]:
    """Numbers of the tables that these systems know: not interleaved, least context parallelism."""
    known = [number for number, table in enumerate(tables) if table.virtual_stages == 1]
    least = min((tables[number].cp for number in known), default=1)
    return [number for number in known if tables[number].cp == least]


def plain(strategies: tuple[LayerStrategy, ...], *, recompute: tuple[str, ...] = ("none",)) -> list[int]:
    """Strategies of systems without ZeRO, sequence parallelism and compressed communication.

    Of all degrees (of tensors and experts) and every kind of recomputation the one strategy with the least
    of these that the space has; of the kinds of recomputation those that it has.
    """
    kept = []
    for degrees in sorted({(strategy.tp, strategy.ep, strategy.etp) for strategy in strategies}):
        for kind in recompute:
            mine = [
                c for c, s in enumerate(strategies) if (s.tp, s.ep, s.etp) == degrees and s.recompute == kind
            ]
            if mine:
                kept.append(
                    min(mine, key=lambda c: (strategies[c].sequence_parallel, strategies[c].zero_stage))
                )
    return kept


class UniformStages:
    """All stages of an outer choice whose layers share one strategy; arrays `(K, L + 1, L + 1)`."""

    def __init__(self, costs: OuterCosts, choice: int) -> None:
        self.costs, self.choice = costs, choice
        size = costs.num_layers
        self.legal = np.triu(np.ones((size + 1, size + 1), dtype=bool), 1)
        self.legal[:-1] &= ~costs.fused_to_previous[:, None]
        self.legal[:, :-1] &= ~costs.fused_to_previous[None, :]
        self.runs = costs.kind_allowed[costs.stage_kind, choice]

    def seconds(self) -> Array:
        """Of one micro-batch, the boundary before the stage included; infinite where no stage can be."""
        costs, layout = self.costs, self.costs.layout[self.choice]
        own = spans(costs.time[:, :, self.choice])
        pairs = np.pad(costs.reshard[:, :, layout, layout], ((0, 0), (1, 0)))
        inside = spans(pairs)
        inside[:, :-1] -= pairs[:, :, None]  # the pair before a stage's first layer is not inside
        result = (own + inside)[costs.stage_kind]
        result[1:, 1:-1] += costs.p2p[costs.boundary_kind][:, :, layout, layout, None]
        return np.where(self.legal & self.runs[:, None, None], result, np.inf)

    def sync(self) -> Array:
        """Seconds of gradient synchronisation and optimizer."""
        return np.where(self.legal, spans(self.costs.sync[:, :, self.choice])[self.costs.stage_kind], np.inf)

    def fits(self) -> NDArray[np.bool_]:
        """Whether the stage's memory suffices."""
        costs, c = self.costs, self.choice
        kept = costs.static[None, :, c] + costs.in_flight[:, None] * costs.activation[None, :, c]
        peak = spans(kept) + segment_max(costs.working[:, c])
        # rounding of prefix sums must not exclude what fits to the byte
        enough = peak <= costs.capacity[:, None, None] * (1 + 1e-12)
        return np.asarray(self.legal & self.runs[:, None, None] & enough)


def bottleneck_split(stages: Array) -> list[int] | None:
    """First layers of the stages whose largest value is least (the sum breaks ties); None: no split."""
    limit = best_bottleneck(stages)
    return split_below(stages, limit)[1] if np.isfinite(limit) else None


def cheapest_split(stages: Array, rest: float) -> tuple[float, list[int]] | None:
    """The split of least `sum + rest * max`, by trying bottlenecks from below (Alpa, section 5.2).

    Args:
        stages: Seconds of every stage and segment, `(K, L + 1, L + 1)`.
        rest: Micro-batches less one.

    Returns:
        Seconds and first layers, within `STEP` of the best; None where there is no split.
    """
    least = best_sum(stages)
    best: tuple[float, list[int]] | None = None
    for limit in rising_limits(stages, STEP):
        if best is not None and least + rest * limit >= best[0]:
            break
        total, starts = split_below(stages, limit)
        seconds = total + rest * largest(stages, starts)
        if best is None or seconds < best[0]:
            best = (seconds, starts)
    return best
