"""Alpa (Zheng et al., OSDI 2022): stages by dynamic programming, strategies inside by an integer program.

Sections 4 and 5: layers are clustered; for every run of clusters and every submesh an integer program chooses
a strategy for each operator, the seconds of the operators and of resharding between them being least; a
dynamic program over the runs then minimises `sum + (micro-batches - 1) * max`, trying bottlenecks from below.
The integer program is solved by HiGHS (`scipy.optimize.milp`). Restricted to our plans: submeshes
are equal, an operator is a layer, every layer is a cluster, and memory is a row of the integer
program, for the micro-batches that the stage has in flight. The most promising pipeline
configurations come first; those whose lower bound the best plan beats are left out.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag
from scipy.optimize import Bounds, LinearConstraint, milp

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import OuterChoice, cheapest_split, promising
from darts_parallel.cost import Array, Index
from darts_parallel.exact import StageSegments


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the plan of every configuration that may beat the best, the most promising first."""
    for outer in promising(incumbent):
        _plan(outer, incumbent)


solve = on_tables(offer_plans)


def _plan(outer: OuterChoice, incumbent: Incumbent) -> None:
    """Solve the inter-operator program over all segments, each solved by the intra-operator program."""
    costs = outer.costs
    # every unit is a cluster
    units = np.flatnonzero(~costs.fused_to_previous)
    edges = [*units.tolist(), costs.num_layers]
    number = len(edges) - 1
    program = _IntraOperator(outer, edges)
    segments = StageSegments.legal(costs.pp, np.zeros(number, dtype=bool))
    seconds = _segment_seconds(program, segments, incumbent)
    split = cheapest_split(segments, seconds, outer.rest)
    if split is None:
        return
    starts = split[1]
    choices = []
    for stage, (first, end) in enumerate(pairwise([*starts, number])):
        answer = program.solve(stage, first, end)
        if answer is None:
            return
        for cluster, choice in enumerate(answer.choices, first):
            choices += [choice] * (edges[cluster + 1] - edges[cluster])
    first_layers = [edges[c] for c in starts]
    incumbent.offer(outer.table, outer.plans(first_layers, choices))


def _segment_seconds(
    program: "_IntraOperator",
    segments: StageSegments,
    incumbent: Incumbent,
) -> Array:
    """Return the seconds of every segment of clusters, `(N,)`; infinite where nothing fits."""
    seconds = np.full(len(segments), np.inf)
    full = set()
    for row in range(len(segments)):
        stage = int(segments.stage[row])
        first = int(segments.first[row])
        if (stage, first) in full or incumbent.over():
            continue
        answer = program.solve(stage, first, int(segments.end[row]))
        if answer is None:
            full.add((stage, first))  # more layers need more memory
        else:
            seconds[row] = answer.seconds
    return seconds


class _Answer(NamedTuple):
    """Solution of one intra-operator program."""

    seconds: float
    """Seconds of a micro-batch."""
    choices: list[int]
    """Strategy of every cluster."""


class _IntraOperator:
    """Solve integer programs of one outer choice; those of like stages and equal layers once."""

    def __init__(self, outer: OuterChoice, edges: list[int]) -> None:
        self.costs = outer.costs
        self.edges = edges
        self.known: dict[tuple[object, ...], _Answer | None] = {}

    def solve(
        self,
        stage: int,
        first: int,
        end: int,
    ) -> _Answer | None:
        """Solve the stage of some clusters; None where nothing fits."""
        costs = self.costs
        in_flight = float(costs.in_flight[stage])
        edges = self.edges[first : end + 1]
        layers = costs.layer_class[edges[0] : edges[-1]]
        lengths = tuple(np.diff(edges).tolist())
        kind = int(costs.stage_kind[stage])
        capacity = float(costs.capacity[stage])
        key = (kind, in_flight, capacity, tuple(layers.tolist()), lengths)
        if key not in self.known:
            self.known[key] = self._program(kind, in_flight, capacity, first, end)
        answer = self.known[key]
        if answer is None or stage == 0:
            return answer
        boundary = costs.boundary_kind[stage - 1]
        message = costs.p2p[boundary, self.edges[first] - 1]
        return _Answer(answer.seconds + float(message.min()), answer.choices)

    def _program(
        self,
        kind: int,
        in_flight: float,
        capacity: float,
        first: int,
        end: int,
    ) -> _Answer | None:
        """Choose one strategy for each cluster: least seconds within the memory."""
        costs = self.costs
        seconds = []
        load = []
        memory = []
        working = []
        for c in range(first, end):
            run = slice(self.edges[c], self.edges[c + 1])
            inside = slice(run.start, run.stop - 1)
            reshard = costs.reshard[kind, inside, costs.layout, costs.layout]
            own = costs.time[kind, run].sum(axis=0) + reshard.sum(axis=-1)
            seconds.append(own)
            once = costs.sync[kind, run] + costs.per_iteration[run]
            load.append(own + once.sum(axis=0) / costs.num_micro_batches)
            kept = costs.static[run] + in_flight * costs.activation[run]
            memory.append(kept.sum(axis=0) / capacity)
            working.append(costs.working[run].max(axis=0) / capacity)
        pairs = [self.edges[c] - 1 for c in range(first + 1, end)]
        switches = [costs.reshard[kind, pair] for pair in pairs]
        # a strategy that this kind of stage cannot run never fits
        fill = np.where(costs.kind_allowed[kind], np.stack(memory), 2.0)
        chosen = choose(np.stack(load), switches, costs.layout, fill, np.stack(working))
        if chosen is None:
            return None
        total = 0.0
        for own, c in zip(seconds, chosen, strict=True):
            total += float(own[c])
        layouts = costs.layout[chosen].tolist()
        for switch, (a, b) in zip(switches, pairwise(layouts), strict=True):
            total += float(switch[a, b])
        return _Answer(total, chosen)


def choose(
    load: Array,
    switches: list[Array],
    layout: Index,
    memory: Array,
    working: Array,
) -> list[int] | None:
    """Solve the integer program of a chain of operators: least load and resharding that fit.

    Variables: one 0/1 for each operator and strategy, flows between the layouts of neighbours (Alpa's edge
    variables, linear), and the largest working memory.

    Args:
        load: Seconds, `(N, C)`.
        switches: Seconds from layout to layout between operators, `N - 1` of shape `(Y, Y)`.
        layout: Layout of every strategy, `(C,)`.
        memory: Shares of the capacity that add up, `(N, C)`.
        working: Shares of which the largest counts, `(N, C)`.

    Returns:
        A strategy for each operator; None where nothing fits.
    """
    count, num = load.shape
    choices = count * num
    flat = [switch.ravel() for switch in switches]
    objective = np.concatenate([load.ravel(), *flat, [0.0]])
    size = len(objective)
    one_of = np.zeros((count, size))
    one_of[:, :choices] = np.kron(np.eye(count), np.ones(num))
    fit = np.zeros((count + 1, size))
    fit[:count, :choices] = block_diag(*working)
    fit[count, :choices] = memory.ravel()
    fit[:, -1] = np.append(np.full(count, -1.0), 1.0)
    limits = [
        LinearConstraint(one_of, 1.0, 1.0),
        LinearConstraint(fit, -np.inf, np.eye(count + 1)[count]),
    ]
    if switches:
        limits.append(LinearConstraint(_flows(layout, count, len(switches[0])), 0.0, 0.0))
    whole = (np.arange(size) < choices).astype(float)
    scaled = objective / max(float(np.abs(objective).max()), 1e-30)
    bounds = Bounds(0.0, np.where(whole > 0, 1.0, np.inf))
    answer = milp(scaled, constraints=limits, integrality=whole, bounds=bounds)
    if answer.x is None:
        return None
    weights = answer.x[:choices].reshape(count, num)
    return weights.argmax(axis=1).tolist()


def _flows(layout: Index, count: int, width: int) -> Array:
    """Return rows that tie the flows between neighbours to their strategies' layouts.

    Args:
        layout: Layout of every strategy, `(C,)`.
        count: Operators.
        width: Layouts.
    """
    of_layout = (layout == np.arange(width)[:, None]).astype(float)
    one = np.eye(width)
    pairs = np.eye(count - 1)
    none = np.zeros_like(of_layout)
    before = np.vstack([of_layout, none])
    after = np.vstack([none, of_layout])
    operators = np.eye(count)
    left = np.kron(operators[:-1], before)
    right = np.kron(operators[1:], after)
    leaving = np.kron(one, np.ones(width))
    coming = np.kron(np.ones(width), one)
    flows = np.vstack([leaving, coming])
    last = np.zeros((len(left), 1))
    return np.hstack([-left - right, np.kron(pairs, flows), last])
