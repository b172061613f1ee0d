"""Stages of many plans at once: contiguous splits of small sum under a limit on the slowest stage.

All plans have the same number of stages K and of layers L. For falling limits T the smallest sum S(T) of
stage seconds is found by dynamic programming over the stages (`StageSegments.least_sums`), vectorised over
the plans; each answer's own maximum is the next limit, so that the points where S changes are visited one
after the other. They end where even the smallest maximum could no longer make up for the sum.
"""

from dataclasses import dataclass

import numpy as np

from darts_parallel.exact.segments import Array, Index, StageSegments

MOST_LIMITS = 24
"""Limits that are tried for one plan."""
TOLERANCE = 1e-12
"""Relative; sums that differ by rounding are equal."""


@dataclass(frozen=True)
class Splits:
    """The best split of every plan."""

    cost: Array
    """`sum + later * max + largest synchronisation + fixed`, seconds, `(B,)`; infinite where none fits."""
    sync: Array
    """Its largest synchronisation, `(B,)`."""
    first_layers: Index
    """First layer of every stage, `(B, K)`."""


@dataclass(frozen=True)
class SplitProblems:
    """B plans whose stage starts are wanted."""

    segments: StageSegments
    """Possible stages, N."""
    seconds: Array
    """Seconds of a micro-batch, `(N, B)`; infinite where the plan cannot have the stage."""
    sync: Array
    """Synchronisation seconds, `(N, B)`."""
    later: Array
    """Micro-batches less one, `(B,)`."""
    fixed: Array
    """Seconds that every split pays, `(B,)`."""
    ceiling: Array
    """Seconds above which a plan is of no interest, `(B,)`."""

    def best(self) -> Splits:
        """Return splits of the smallest `sum + later * max + largest synchronisation + fixed`.

        A split is chosen for its sum and maximum; its synchronisation counts as it comes.
        """
        count = len(self.later)
        first_layers = np.zeros((count, self.segments.num_stages), dtype=np.int64)
        found = Splits(np.full(count, np.inf), np.full(count, np.inf), first_layers)
        slowest = self.segments.before(self.seconds, np.maximum)[-1, -1]
        least_sync = self.segments.before(self.sync, np.maximum)[-1, -1]
        alive = np.flatnonzero(np.isfinite(slowest))
        # the smallest maximum first: a good answer, which narrows the limits worth trying
        self._improve(found, alive, slowest[alive] * (1 + TOLERANCE))
        limit = np.full(count, np.inf)
        for _ in range(MOST_LIMITS):
            if not len(alive):
                break
            total, reached = self._improve(found, alive, limit[alive])
            # from here on the sum only grows, so that a larger maximum than this cannot win
            goal = np.minimum(found.cost[alive], self.ceiling[alive]) * (1 - TOLERANCE)
            spare, later = goal - total - self.fixed[alive] - least_sync[alive], self.later[alive]
            with np.errstate(divide="ignore", invalid="ignore"):
                useful = np.where(later > 0, spare / later, np.where(spare > 0, np.inf, 0.0))
            limit[alive] = np.minimum(reached * (1 - TOLERANCE), useful)
            alive = alive[limit[alive] > slowest[alive] * (1 + TOLERANCE)]
        return found

    def _improve(self, found: Splits, which: Index, limit: Array) -> tuple[Array, Array]:
        """Note the smallest sums of the plans `which` within limits; return those sums and their maxima."""
        seconds = self.seconds[:, which]
        total, starts = self.segments.least_sums(np.where(seconds <= limit, seconds, np.inf))
        rows, column = self.segments.rows_of(starts), np.arange(len(which))[:, None]
        reached = seconds[rows, column].max(axis=1)
        largest = self.sync[rows, which[:, None]].max(axis=1)
        value = total + self.fixed[which] + self.later[which] * reached + largest
        better = value < found.cost[which]
        improved = which[better]
        found.cost[improved], found.sync[improved] = value[better], largest[better]
        found.first_layers[improved] = starts[better]
        return total, reached
