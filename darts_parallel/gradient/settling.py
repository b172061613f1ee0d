"""The last steps of the descent, at whole stage boundaries.

While boundaries move, the slowest stage changes from step to step, and a strategy that lost early cannot
return: its logit is too low. So the best roundings of the boundaries are fixed, every strategy gets some
weight again, and the logits alone settle. At fixed stages the relaxed problem is close to a linear one:
weights of strategies, the slowest stage, bytes of every device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from darts_parallel.cost import CostTable, HardPlans, Tables
from darts_parallel.gradient.restarts import KeptRestarts, RestartBatch

SETTLE_FROM = 0.85
"""Share of the steps from which stage boundaries are whole."""
SETTLING_BETAS = (0.5, 0.9)
"""Decay of Adam's moments in the last steps: they must forget the first slopes, which are large."""
CONFIGURATIONS = 4
"""Largest number of pipeline configurations that take part in the last steps."""
MARGIN = 0.05
"""Log-seconds to the best relaxed plan at which a pipeline configuration takes no part any more."""


class Start(NamedTuple):
    """How one restart begins the last steps."""

    rounding: int
    """Rounding of the boundaries that it takes; 0 is the best."""
    aim: float
    """Share of the capacity that its relaxed plan may fill: a rounded plan may need more."""


STARTS = (
    Start(0, 0.98),
    Start(0, 0.97),
    Start(0, 1.0),
    Start(1, 0.98),
    Start(0, 0.99),
    Start(2, 0.98),
    Start(0, 0.96),
    Start(1, 0.97),
)
"""Restarts of the last steps, of all pipeline configurations together, the most useful first."""


class Settled(NamedTuple):
    """The restarts of one group that go on with whole stage boundaries."""

    kept: KeptRestarts
    first_layers: Tensor
    """First layers of their stages, `(O', R', K)`."""
    starts: tuple[Start, ...]
    """How each of the R' begins."""


def can_settle(tables: Tables, space_kind: str) -> bool:
    """Return whether the best configurations alone may go on: polishing returns to the others."""
    plain = all(table.has_plain_stages and not table.simulated for table in tables)
    return plain and space_kind == "layerwise"


def settled(
    groups: Sequence[RestartBatch], merits: Sequence[Tensor], tables: Tables
) -> list[Settled]:
    """Return the best roundings of the best configurations, by group.

    Args:
        merits: Rankings of the relaxed plans of every group, `(O, R)`, lower is better.
    """
    ranked = []
    for index, merit in enumerate(merits):
        for row, least in enumerate(merit.amin(1).tolist()):
            ranked.append((least, index, row))
    ranked.sort()
    limit = ranked[0][0] + MARGIN
    close = [place for least, *place in ranked if least <= limit][:CONFIGURATIONS]
    starts = STARTS[: len(STARTS) // len(close)]
    result = []
    for index in sorted({number for number, _ in close}):
        group = groups[index]
        rows = sorted(row for number, row in close if number == index)
        found = [_roundings(group, row, tables[group.table_index], starts) for row in rows]
        restarts, first_layers = map(torch.stack, zip(*found, strict=True))
        kept = KeptRestarts(index, torch.tensor(rows), restarts)
        result.append(Settled(kept, first_layers, starts))
    return result


def _roundings(
    group: RestartBatch, row: int, table: CostTable, starts: Sequence[Start]
) -> tuple[Tensor, Tensor]:
    """Return restart `(R',)` and first layers `(R', K)` of a configuration's rounding for each start."""
    size = group.logits.shape[1]
    plans = []
    ranks = []
    for restart in range(size):
        priced, found = group.rounding(row * size + restart, table).descend()
        plans.append(priced)
        ranks.append(found)
    order = torch.cat(ranks).argsort(stable=True)
    counts = torch.tensor([len(found) for found in ranks])
    restarts = torch.arange(size).repeat_interleave(counts)[order]
    first_layers = HardPlans.concatenate(plans).first_layers[order]
    seen: dict[tuple[int, ...], int] = {}
    for place, first in enumerate(first_layers.tolist()):
        seen.setdefault(tuple(first), place)
    best = list(seen.values())
    # few boundaries have few roundings
    chosen = torch.tensor([best[min(start.rounding, len(best) - 1)] for start in starts])
    return restarts[chosen], first_layers[chosen]
