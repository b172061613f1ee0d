"""Pipeline configurations as the published systems see them, and their splits into stages."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from baselines._planner import Incumbent
from darts_parallel.cost import Array, HardPlans, OuterCosts, Tables
from darts_parallel.exact import StageSegments, lower_bound
from darts_parallel.plans import Strategies

STEP = 1e-4
"""Relative distance of the bottlenecks that `cheapest_split` tries; Alpa's epsilon."""


@dataclass(frozen=True)
class OuterChoice:
    """One pipeline degree and number of micro-batches, ready to be planned."""

    table: int
    outer: int
    costs: OuterCosts
    strategies: Strategies
    """Strategies of `costs`, `(C,)`."""

    @property
    def rest(self) -> float:
        """Return micro-batches less one: how often the slowest stage counts beside the sum."""
        return self.costs.num_micro_batches - 1.0

    def plans(
        self,
        starts: list[int],
        choices: list[int],
    ) -> HardPlans:
        """Make one plan; `choices` are numbers of `strategies`, one for each layer."""
        outer = torch.tensor([self.outer])
        table_choices = torch.from_numpy(self.costs.choices[choices])
        first_layers = torch.tensor([starts])
        return HardPlans(outer, table_choices[None], first_layers)

    def uniform(
        self,
        starts: list[int],
        choice: int,
    ) -> HardPlans:
        """Make one plan of one strategy."""
        choices = [choice] * self.costs.num_layers
        return self.plans(starts, choices)


def outer_choices(incumbent: Incumbent) -> Iterator[OuterChoice]:
    """Yield every configuration of the tables of `plain_tables`, until the time is over."""
    for number in plain_tables(incumbent.tables):
        table = incumbent.tables[number]
        for outer in range(table.num_outer):
            if incumbent.over():
                return
            if bool(table.allowed[outer].any()):
                costs = OuterCosts.read(table, outer)
                strategies = tuple(table.choices[c] for c in costs.choices.tolist())
                yield OuterChoice(number, outer, costs, strategies)


def promising(incumbent: Incumbent) -> Iterator[OuterChoice]:
    """Yield configurations in the order of their lower bounds, while one may beat the best plan."""
    ranked = []
    for outer in outer_choices(incumbent):
        bound = lower_bound(outer.costs, "layerwise")
        ranked.append((bound, outer))
    ranked.sort(key=lambda entry: entry[0])
    for bound, outer in ranked:
        if incumbent.over() or bound >= incumbent.cost:
            break
        yield outer


def plain_tables(tables: Tables) -> list[int]:
    """Return numbers of the tables that these systems know: not interleaved, least context parallelism."""
    known = [number for number, table in enumerate(tables) if table.virtual_stages == 1]
    least = min((tables[number].cp for number in known), default=1)
    return [number for number in known if tables[number].cp == least]


def plain(
    strategies: Strategies,
    *,
    recompute: tuple[str, ...] = ("none",),
) -> list[int]:
    """Return strategies of systems without ZeRO, sequence parallelism and compressed communication.

    One strategy for each degree (of tensors and experts) and kind of recomputation in the space: the
    one with the least of these features that the space has.
    """
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for c, strategy in enumerate(strategies):
        if strategy.recompute in recompute:
            kind = recompute.index(strategy.recompute)
            key = (strategy.tp, strategy.ep, strategy.etp, kind)
            groups.setdefault(key, []).append(c)

    def features(c: int) -> tuple[bool, int]:
        return strategies[c].sequence_parallel, strategies[c].zero_stage

    return [min(groups[key], key=features) for key in sorted(groups)]


def cheapest_split(
    segments: StageSegments,
    seconds: Array,
    rest: float,
) -> tuple[float, list[int]] | None:
    """Find the split of least `sum + rest * max`, by trying bottlenecks from below (Alpa, section 5.2).

    Args:
        seconds: Of each, `(N,)`.
        rest: Micro-batches less one.

    Returns:
        Seconds and first layers, within `STEP` of the best; None where there is no split.
    """
    least = segments.least_sum(seconds)
    best: tuple[float, list[int]] | None = None
    for limit in segments.rising_limits(seconds, STEP):
        if best is not None and least + rest * limit >= best[0]:
            break
        total, starts = segments.split_below(seconds, limit)
        rows = segments.rows_of(starts)
        whole = total + rest * float(seconds[rows].max())
        if best is None or whole < best[0]:
            best = (whole, starts)
    return best
