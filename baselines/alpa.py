"""Alpa (Zheng et al., OSDI 2022): stages by dynamic programming, strategies inside by an integer program.

Sections 4 and 5: layers are clustered; for every run of clusters and every submesh an integer program chooses
a strategy for each operator, the seconds of the operators and of resharding between them being least; a
dynamic program over the runs then minimises `sum + (micro-batches - 1) * max`, trying bottlenecks from below.
The integer program is solved by HiGHS (`scipy.optimize.milp`). Restricted to our plans: submeshes
are equal, an operator is a cluster of layers (at most `CLUSTERS`), and memory is a row of the
integer program, for a rounded-up number of micro-batches in flight. The most promising outer choices come
first, and those whose lower bound the best plan beats are left out.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import OuterChoice, cheapest_split, outer_choices
from darts_parallel.cost import Array, Index
from darts_parallel.exact import StageSegments, lower_bound

CLUSTERS = 12
"""Layer clusters of a model; the paper finds that a few are enough."""


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer the plan of every outer choice that may beat what is known, the most promising first."""
    order = sorted(
        (
            (lower_bound(outer.costs, "layerwise"), number, outer)
            for number, outer in enumerate(outer_choices(incumbent))
        ),
        key=lambda entry: entry[:2],
    )
    for bound, _, outer in order:
        if incumbent.over() or bound >= incumbent.cost:
            break
        _plan(outer, incumbent)


solve = on_tables(offer_plans, layerwise=True)


def clusters(fused_to_previous: NDArray[np.bool_], pp: int, most: int = CLUSTERS) -> list[int]:
    """Return first layers of clusters, and the number of layers: first unit, last, even runs between.

    Args:
        joined: Layers that stay with the one before, `(L,)`.
        pp: Stages; there are at least as many clusters.
    """
    units = np.flatnonzero(~fused_to_previous).tolist()
    inner, wanted = units[1:-1], max(most, pp) - 2
    step = max(-(-len(inner) // max(wanted, 1)), 1) if len(units) - 2 > wanted else 1
    kept = inner[::step] if len(inner[::step]) + 2 >= pp else inner
    return [*dict.fromkeys([units[0], *kept, units[-1]]), len(fused_to_previous)]


def _plan(outer: OuterChoice, incumbent: Incumbent) -> None:
    """Solve the inter-operator program over all segments, each solved by the intra-operator program."""
    costs = outer.costs
    edges = clusters(costs.fused_to_previous, costs.pp)
    number = len(edges) - 1
    program = _IntraOperator(outer, edges)
    segments = StageSegments.legal(costs.pp, np.zeros(number, dtype=bool))
    seconds, full = np.full(len(segments), np.inf), set[tuple[int, int]]()
    places = zip(
        segments.stage.tolist(), segments.first.tolist(), segments.end.tolist(), strict=True
    )
    for row, (stage, first, end) in enumerate(places):
        if (stage, first) in full or incumbent.over():
            continue
        answer = program.solve(stage, first, end)
        if answer is None:
            full.add((stage, first))  # more layers need more memory
        else:
            seconds[row] = answer[0]
    split = cheapest_split(segments, seconds, outer.rest)
    if split is None:
        return
    starts, choices = split[1], list[int]()
    for stage, (first, end) in enumerate(zip(starts, [*starts[1:], number], strict=True)):
        answer = program.solve(stage, first, end)
        assert answer is not None
        for cluster, choice in zip(range(first, end), answer[1], strict=True):
            choices += [choice] * (edges[cluster + 1] - edges[cluster])
    incumbent.offer(outer.table, outer.plans([edges[c] for c in starts], choices))


class _IntraOperator:
    """Solve integer programs of one outer choice; those of like stages and equal layers once."""

    def __init__(self, outer: OuterChoice, edges: list[int]) -> None:
        self.costs, self.edges = outer.costs, edges
        self.known: dict[tuple[object, ...], tuple[float, list[int]] | None] = {}

    def solve(self, stage: int, first: int, end: int) -> tuple[float, list[int]] | None:
        """Return seconds of a micro-batch and the strategy of every cluster; None where nothing fits."""
        costs = self.costs
        in_flight = 2.0 ** np.ceil(np.log2(costs.in_flight[stage]))  # rounded up: fewer programs
        layers = costs.layer_class[self.edges[first] : self.edges[end]].tolist()
        lengths = np.diff(self.edges[first : end + 1]).tolist()
        key = (
            int(costs.stage_kind[stage]),
            in_flight,
            float(costs.capacity[stage]),
            *layers,
            "|",
            *lengths,
        )
        if key not in self.known:
            self.known[key] = self._program(stage, in_flight, first, end)
        answer = self.known[key]
        if answer is None or stage == 0:
            return answer
        border = costs.p2p[costs.boundary_kind[stage - 1], self.edges[first] - 1]
        return answer[0] + float(border.min()), answer[1]

    def _program(
        self, stage: int, in_flight: float, first: int, end: int
    ) -> tuple[float, list[int]] | None:
        """Choose one strategy for each cluster: least seconds within the memory."""
        costs, kind = self.costs, int(self.costs.stage_kind[stage])
        runs = [slice(self.edges[c], self.edges[c + 1]) for c in range(first, end)]
        layouts = costs.layout
        inside = [
            costs.reshard[kind, r.start : r.stop - 1, layouts, layouts].sum(axis=-1) for r in runs
        ]
        switches = [costs.reshard[kind, r.start - 1] for r in runs[1:]]
        seconds = [costs.time[kind, r].sum(axis=0) + i for r, i in zip(runs, inside, strict=True)]
        per_iteration = [(costs.sync[kind, r] + costs.per_iteration[r]).sum(axis=0) for r in runs]
        share = [
            s + o / costs.num_micro_batches for s, o in zip(seconds, per_iteration, strict=True)
        ]
        memory = [(costs.static[r] + in_flight * costs.activation[r]).sum(axis=0) for r in runs]
        working = [costs.working[r].max(axis=0) for r in runs]
        capacity = float(costs.capacity[stage])
        # what this kind of stage cannot run never fits
        fill = np.where(costs.kind_allowed[kind], np.stack(memory) / capacity, 2.0)
        chosen = choose(np.stack(share), switches, layouts, fill, np.stack(working) / capacity)
        if chosen is None:
            return None
        own = sum(float(s[c]) for s, c in zip(seconds, chosen, strict=True))
        pairs = zip(switches, chosen[:-1], chosen[1:], strict=True)
        return own + sum(float(table[layouts[a], layouts[b]]) for table, a, b in pairs), chosen


def choose(
    load: Array, switches: list[Array], layout: Index, memory: Array, working: Array
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
    (count, num), width = load.shape, len(switches[0]) if switches else 0
    objective = np.concatenate([load.ravel(), *(table.ravel() for table in switches), [0.0]])
    one_of = np.zeros((count, len(objective)))
    flows = np.zeros((2 * width * (count - 1), len(objective)))
    fit = np.zeros((count + 1, len(objective)))
    held = (layout == np.arange(width)[:, None]).astype(float)
    for n in range(count):
        own = slice(n * num, (n + 1) * num)
        one_of[n, own], fit[n, own], fit[count, own] = 1.0, working[n], memory[n]
        if n + 1 < count:
            rows = flows[2 * width * n : 2 * width * (n + 1)]
            flow = rows[:, count * num + n * width**2 : count * num + (n + 1) * width**2]
            flow[:width] = np.kron(np.eye(width), np.ones(width))
            flow[width:] = np.kron(np.ones(width), np.eye(width))
            rows[:width, own] = rows[width:, (n + 1) * num : (n + 2) * num] = -held
    fit[:count, -1], fit[count, -1] = -1.0, 1.0
    whole = (np.arange(len(objective)) < count * num).astype(float)
    limits = [
        LinearConstraint(one_of, 1.0, 1.0),
        LinearConstraint(fit, -np.inf, np.eye(count + 1)[count]),
    ]
    if len(flows):
        limits.append(LinearConstraint(flows, 0.0, 0.0))
    answer = milp(
        objective / max(float(np.abs(objective).max()), 1e-30),
        constraints=limits,
        integrality=whole,
        bounds=Bounds(0.0, np.where(whole > 0, 1.0, np.inf)),
    )
    return (
        None
        if answer.x is None
        else answer.x[: count * num].reshape(count, num).argmax(axis=1).tolist()
    )
