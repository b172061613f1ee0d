"""Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): tensor, data and pipeline parallelism by stage.

Sections 4 and 5: a dynamic program over the layers chooses stages, each with its own tensor-parallel degree
and, under the memory limit, recomputation layer by layer; the slowest stage is minimised. What to
recompute in a stage is a knapsack, which a heuristic solves as in the paper: the most bytes per second first.
Restricted to our plans: stages have equally many devices. No ZeRO, no sequence parallelism where the space
leaves that free.
"""

import numpy as np

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import OuterChoice, bottleneck_split, outer_choices, plain
from darts_parallel.cost import Array, segment_max
from darts_parallel.exact import ChosenStages

LEAST_SECONDS = 1e-12
"""Added to the seconds of recomputation, so that bytes per second stay finite."""


def offer_plans(
    incumbent: Incumbent,
    space_kind: str,
    seed: int,
) -> None:
    """Offer the best stages of every configuration."""
    for outer in outer_choices(incumbent):
        degrees = sorted({strategy.tp for strategy in outer.strategies})
        options = [_Recomputation.of(outer, tp) for tp in degrees]
        segments = options[0].segments
        loads = np.stack([option.load() for option in options])
        starts = bottleneck_split(segments, loads.min(axis=0))
        if starts is None:
            continue
        choices: list[int] = []
        for row in segments.rows_of(starts).tolist():
            fastest = options[int(loads[:, row].argmin())]
            choices += fastest.strategies(row)
        incumbent.offer(outer.table, outer.plans(starts, choices))


solve = on_tables(offer_plans, keep_all=True, layerwise=True)


class _Recomputation:
    """Price stages of one tensor-parallel degree whose layers are recomputed as memory demands."""

    def __init__(
        self,
        outer: OuterChoice,
        keep: int,
        again: int,
    ) -> None:
        costs = outer.costs
        self.costs = costs
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
        working = segment_max(costs.working[:, [keep, again]].max(axis=1))
        peak = segments.sums(memory[:, :, keep], np.arange(costs.pp))
        peak = peak + working[segments.first, segments.end]
        self.missing = peak - costs.capacity[segments.stage]

    @staticmethod
    def of(
        outer: OuterChoice,
        tp: int,
    ) -> "_Recomputation":
        """Choose the strategies of a degree; without recomputation, or nothing else, both are the same."""
        found = []
        for kind in ("none", "selective", "full"):
            every = plain(outer.strategies, recompute=(kind,))
            found += [c for c in every if outer.strategies[c].tp == tp][:1]
        return _Recomputation(outer, found[0], found[-1])

    def load(self) -> Array:
        """Return seconds of every stage with what it must recompute, and its share of the synchronisation."""
        stages, segments = self.stages, self.segments
        result = stages.seconds() + stages.sync() / self.costs.num_micro_batches
        missing = self.missing.copy()
        added = np.zeros(len(segments))
        for stage, order in enumerate(self.order):
            own = np.flatnonzero(segments.stage == stage)
            for layer in order.tolist():
                begun = segments.first[own] <= layer
                inside = own[begun & (layer < segments.end[own])]
                if self.saved[stage, layer] > 0:
                    take = inside[missing[inside] > 0]
                    missing[take] -= self.saved[stage, layer]
                    added[take] += self.extra[stage, layer]
        added = np.where(missing > 0, np.inf, added)
        return np.asarray(result + added)

    def strategies(self, row: int) -> list[int]:
        """Return strategy of every layer of a stage, given by the row of its segment."""
        missing = self.missing[row]
        stage = int(self.segments.stage[row])
        first = int(self.segments.first[row])
        end = int(self.segments.end[row])
        result = [self.keep] * (end - first)
        for layer in self.order[stage].tolist():
            useful = missing > 0 and self.saved[stage, layer] > 0
            if useful and first <= layer < end:
                missing -= self.saved[stage, layer]
                result[layer - first] = self.again
        return result
