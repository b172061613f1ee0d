"""Stages whose layers are recomputed as memory demands, the most bytes per second first."""

import numpy as np

from baselines._stage_costs import OuterChoice
from darts_parallel.cost import Array, segment_max
from darts_parallel.exact import ChosenStages

LEAST_SECONDS = 1e-12
"""Added to the seconds of recomputation, so that bytes per second stay finite."""


class Recomputation:
    """Price all stages of one strategy whose layers are recomputed as memory demands."""

    def __init__(
        self,
        outer: OuterChoice,
        keep: int,
        again: int,
    ) -> None:
        """Order the layers of every stage.

        Args:
            keep, again: The strategy with the least and with the most recomputation.
        """
        costs = outer.costs
        self.keep = keep
        self.again = again
        extra = costs.time[:, :, again] - costs.time[:, :, keep]
        self.extra = extra.clip(min=0.0)[costs.stage_kind]
        in_flight = costs.in_flight[:, None, None]
        memory = costs.static[None] + in_flight * costs.activation[None]
        saved = memory[:, :, keep] - memory[:, :, again]
        self.saved = saved.clip(min=0.0)
        gain = self.saved / (self.extra + LEAST_SECONDS)
        self.order = np.argsort(-gain, axis=1, kind="stable")
        self.stages = ChosenStages.uniform(costs, keep)
        segments = self.stages.segments
        self.segments = segments
        self.recomputed = np.zeros((len(segments), costs.num_layers), dtype=bool)
        """Whether a stage computes a layer again, `(N, L)`."""
        working = segment_max(costs.working[:, [keep, again]].max(axis=1))
        peak = segments.sums(memory[:, :, keep], np.arange(costs.pp))
        peak = peak + working[segments.first, segments.end]
        added = self._recompute(peak - costs.capacity[segments.stage])
        self.seconds = self.stages.seconds() + added
        """Seconds of every stage with what it must recompute, `(N,)`; infinite where none fits."""

    def _recompute(self, missing: Array) -> Array:
        """Recompute layers until stages fit; return the seconds that this adds, `(N,)`.

        Args:
            missing: Bytes that stages lack, `(N,)`; changed in place.
        """
        segments = self.segments
        added = np.zeros(len(segments))
        for stage, order in enumerate(self.order):
            own = np.flatnonzero(segments.stage == stage)
            useful = order[self.saved[stage, order] > 0]
            for layer in useful.tolist():
                begun = segments.first[own] <= layer
                inside = own[begun & (layer < segments.end[own])]
                take = inside[missing[inside] > 0]
                missing[take] -= self.saved[stage, layer]
                added[take] += self.extra[stage, layer]
                self.recomputed[take, layer] = True
        return np.where(missing > 0, np.inf, added)

    def strategies(self, row: int) -> list[int]:
        """Return strategy of every layer of a stage, given by the row of its segment."""
        first = self.segments.first[row]
        end = self.segments.end[row]
        recomputed = self.recomputed[row, first:end]
        return np.where(recomputed, self.again, self.keep).tolist()
