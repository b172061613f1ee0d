"""Alpa (Zheng et al., OSDI 2022): stages by dynamic programming, strategies inside by an integer program.

Sections 4 and 5: layers are clustered; for every run of clusters and every submesh an integer program chooses
a strategy for each operator, the seconds of the operators and of resharding between them being least; a
dynamic program over the runs then minimises `sum + (micro-batches - 1) * max`, trying bottlenecks from below.
The integer program is solved by HiGHS (`scipy.optimize.milp`; extra `rivals`). Restricted to our plans:
submeshes are equal, an operator is a cluster of layers (at most `CLUSTERS`), and memory is a row of the
integer program, for a rounded-up number of micro-batches in flight. The most promising outer choices come
first, and those whose lower bound the best plan beats are left out.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from baselines.incumbent import Incumbent
from baselines.result import BaselineResult, TableResult, on_problem
from baselines.stage_costs import OuterChoice, cheapest_split, outer_choices
from darts_parallel.bounds import lower_bound
from darts_parallel.problem import Problem
from darts_parallel.table import CostTable

CLUSTERS = 12
"""Layer clusters of a model; the paper finds that a few are enough."""
Segment = tuple[int, int, int]
"""Stage signature, first cluster, end."""


def find_plan(problem: Problem, *, budget: float | None = None, seed: int = 0) -> BaselineResult:
    """The plan of the two nested programs.

    Args:
        problem: Model, cluster, job and space.
        budget: Seconds of wall-clock; None: as long as it takes.
        seed: Ignored, nothing is random.
    """
    return on_problem(problem, lambda tables, kind, end: solve(tables, kind, deadline=end), budget)


def solve(
    tables: Sequence[CostTable], kind: str, *, deadline: float | None = None, seed: int = 0
) -> TableResult:
    """The same over cost tables; arguments as `random_search.solve`."""
    incumbent = Incumbent(tables, deadline)
    order = sorted(
        ((lower_bound(outer.costs, "layerwise"), number, outer)
         for number, outer in enumerate(outer_choices(incumbent))), key=lambda entry: entry[:2],
    )  # fmt: skip
    for bound, _, outer in order:
        if incumbent.over() or bound >= incumbent.cost:
            break
        _plan(outer, incumbent)
    return incumbent.result()


def clusters(joined: NDArray[np.bool_], pp: int, most: int = CLUSTERS) -> list[int]:
    """First layers of clusters, and the number of layers: the first unit, the last, even runs between.

    Args:
        joined: Layers that stay with the one before, `(L,)`.
        pp: Stages; there are at least as many clusters.
        most: Clusters otherwise.
    """
    units = np.flatnonzero(~joined).tolist()
    inner, wanted = units[1:-1], max(most, pp) - 2
    step = max(-(-len(inner) // max(wanted, 1)), 1) if len(units) - 2 > wanted else 1
    kept = inner[::step] if len(inner[::step]) + 2 >= pp else inner
    return [*dict.fromkeys([units[0], *kept, units[-1]]), len(joined)]


def _plan(outer: OuterChoice, incumbent: Incumbent) -> None:
    """The inter-operator program over all segments, each solved by the intra-operator program."""
    costs = outer.costs
    edges = clusters(costs.joined, costs.pp)
    number = len(edges) - 1
    program = _IntraOperator(outer, edges)
    seconds = np.full((costs.pp, number + 1, number + 1), np.inf)
    for stage in range(costs.pp):
        for first in range(stage, number - (costs.pp - 1 - stage)):
            if (first == 0) != (stage == 0):
                continue
            for end in range(first + 1, number - (costs.pp - 1 - stage) + 1):
                if (end == number) != (stage == costs.pp - 1) or incumbent.over():
                    continue
                answer = program.solve(stage, first, end)
                if answer is None:
                    break  # more layers need more memory
                seconds[stage, first, end] = answer[0]
    split = cheapest_split(seconds, outer.rest)
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
    """Integer programs of one outer choice; those of like stages and equal layers are solved once."""

    def __init__(self, outer: OuterChoice, edges: list[int]) -> None:
        self.costs, self.edges = outer.costs, edges
        self.known: dict[tuple[object, ...], tuple[float, list[int]] | None] = {}

    def solve(self, stage: int, first: int, end: int) -> tuple[float, list[int]] | None:
        """Seconds of a micro-batch and the strategy of every cluster; None where nothing fits."""
        costs = self.costs
        flight = 2.0 ** np.ceil(np.log2(costs.in_flight[stage]))  # rounded up: fewer programs
        layers = costs.layer_class[self.edges[first] : self.edges[end]].tolist()
        lengths = np.diff(self.edges[first : end + 1]).tolist()
        key = (int(costs.stage_kind[stage]), flight, float(costs.capacity[stage]), *layers, "|", *lengths)
        if key not in self.known:
            self.known[key] = self._program(stage, flight, first, end)
        answer = self.known[key]
        if answer is None or stage == 0:
            return answer
        border = costs.p2p[costs.boundary_kind[stage - 1], self.edges[first] - 1]
        return answer[0] + float(border.min()), answer[1]

    def _program(self, stage: int, flight: float, first: int, end: int) -> tuple[float, list[int]] | None:
        """One strategy for each cluster, resharding as flows between the layouts of neighbours."""
        costs, kind, count = self.costs, self.costs.stage_kind[stage], end - first
        runs = [slice(self.edges[c], self.edges[c + 1]) for c in range(first, end)]
        num, layouts = len(costs.choices), costs.p2p.shape[-1]
        inside = [
            costs.reshard[kind, r.start : r.stop - 1, costs.layout, costs.layout].sum(axis=-1) for r in runs
        ]
        load = [costs.time[kind, r].sum(axis=0) + i + (costs.sync[kind, r] + costs.once[r]).sum(axis=0)
                / costs.num_micro_batches for r, i in zip(runs, inside, strict=True)]  # fmt: skip
        memory = [(costs.static[r] + flight * costs.activation[r]).sum(axis=0) for r in runs]
        working = [costs.working[r].max(axis=0) for r in runs]
        flows = [costs.reshard[kind, r.start - 1].ravel() for r in runs[1:]]
        objective = np.concatenate([*load, *flows, [0.0]])
        rows = lil_array((count + 2 * layouts * (count - 1) + count + 1, len(objective)))
        low, high = np.zeros(rows.shape[0]), np.zeros(rows.shape[0])
        low[:count] = high[:count] = 1.0
        row = count
        for c in range(count):
            rows[c, c * num : (c + 1) * num] = 1.0
        for c in range(count - 1):
            begin = count * num + c * layouts**2
            for y in range(layouts):
                rows[row, begin + y * layouts : begin + (y + 1) * layouts] = 1.0
                rows[row, c * num : (c + 1) * num] = -(costs.layout == y).astype(float)
                rows[row + 1, begin + y : begin + layouts**2 : layouts] = 1.0
                rows[row + 1, (c + 1) * num : (c + 2) * num] = -(costs.layout == y).astype(float)
                row += 2
        capacity = float(costs.capacity[stage])
        for c in range(count):  # the working memory is the largest of the clusters'
            rows[row, c * num : (c + 1) * num] = working[c] / capacity
            rows[row, len(objective) - 1] = -1.0
            low[row] = -np.inf
            row += 1
        rows[row, : count * num] = np.concatenate(memory) / capacity
        rows[row, len(objective) - 1] = 1.0
        low[row], high[row] = -np.inf, 1.0
        whole = np.zeros(len(objective))
        whole[: count * num] = 1.0
        scale = max(float(np.abs(objective).max()), 1e-30)
        answer = milp(objective / scale, constraints=LinearConstraint(rows.tocsr(), low, high),
                      integrality=whole, bounds=Bounds(0.0, np.where(whole > 0, 1.0, np.inf)))  # fmt: skip
        if answer.x is None:
            return None
        chosen = answer.x[: count * num].reshape(count, num).argmax(axis=1).tolist()
        seconds = costs.time[kind]
        own = sum(float(seconds[r, c].sum() + i[c]) for r, i, c in zip(runs, inside, chosen, strict=True))
        switched = sum(
            float(costs.reshard[kind, r.start - 1, costs.layout[a], costs.layout[b]])
            for r, a, b in zip(runs[1:], chosen[:-1], chosen[1:], strict=True)
        )
        return own + switched, chosen
