"""Galvatron (Miao et al., VLDB 2023): layer-wise dynamic programming under a memory budget.

Section 4: for every pipeline degree and batch split the layers are cut into stages beforehand, evenly, or
balanced by time or by memory (Galvatron-BMW's two ends), and inside each stage a dynamic program over
layers, memory and strategies minimises the stage's seconds with the cost of changing layout between layers.
Here the program is the exact planner's, which keeps labels instead of slots of quantized memory and, for a
given cut, chooses the stages of a pipeline together. What is lost against the exact planner: stages are cut
before strategies are known.
"""

from contextlib import suppress

import numpy as np

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import OuterChoice, outer_choices
from darts_parallel.cost import even_uniform_plans
from darts_parallel.exact import (
    ChosenStages,
    DeadlineError,
    OuterChoiceSolver,
    SegmentBounds,
    outer_bound,
)


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the best plan of every cut that beats the plans before it."""

    def check(labels: int = 0) -> None:
        if incumbent.over():
            raise DeadlineError

    for outer in outer_choices(incumbent):
        table = incumbent.tables[outer.table]
        if table.host:  # the program does not place anything in host memory
            continue
        every = SegmentBounds.build(outer.costs, "layerwise")
        bound = outer_bound(table, outer.outer, "layerwise")
        for starts in _cuts(outer, even_uniform_plans(table).first_layers[0].tolist()):
            case = OuterChoiceSolver(table, outer.table, outer.outer, bound)
            case.segments = _at_cut(every, starts)
            limit = min(incumbent.cost, case.most_expensive())
            with suppress(DeadlineError):
                found = case.solve("layerwise", limit, check)
                if found is not None:
                    incumbent.offer(outer.table, found.plan)


solve = on_tables(offer_plans)


def _at_cut(bounds: SegmentBounds, starts: list[int]) -> SegmentBounds:
    """Return the segments that are stages of one cut of the layers, given by the stages' first layers."""
    stages = bounds.stages
    ends = [*starts[1:], stages.num_layers]
    first = np.array(starts)[stages.stage]
    end = np.array(ends)[stages.stage]
    begins = stages.first == first
    return bounds.keep(begins & (stages.end == end))


def _cuts(
    outer: OuterChoice,
    even: list[int],
) -> list[list[int]]:
    """Return even stages, stages of about equal seconds, and of about equal memory; each at most once."""
    costs = outer.costs
    fastest = int(costs.time.sum(axis=(0, 1)).argmin())
    stages = ChosenStages.uniform(costs, fastest)
    in_flight = costs.in_flight[:, None, None]
    kept = costs.static[None] + in_flight * costs.activation[None]
    smallest = int(kept.sum(axis=(0, 1)).argmin())
    capacity = costs.capacity[:, None].clip(min=1.0)
    share = kept[:, :, smallest] / capacity
    memory = stages.segments.sums(share, np.arange(costs.pp))
    found = [even]
    for values in (stages.seconds(), memory):
        starts = stages.segments.even_split(values)
        if starts and starts not in found:
            found.append(starts)
    return found
