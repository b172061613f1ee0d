"""The check: a linear and an integer programme of the same costs, solved by HiGHS.

    minimise    sum_g seconds_g x_g + sum_t count_t (forward_t w_t + backward_t v_t)
    subject to  sum_k x_g[k] = 1                                        every group g chooses once
                sum_d z_tc[p, d] = sum of x over choices of t's producer that make p
                sum_p z_tc[p, d] = sum of x over choices of consumer c that want d
                w_t[p, f] >= sum of z_tc[p, d] over states d of placement f, every consumer c
                v_t[p, g] >= sum of z_tc[p, d] over states d of gradient placement g
                u_i >= sum of x_g[k] over choices of g that keep item i;  sum_i bytes_i u_i <= memory

`x` is 0 or 1 in the integer programme. `w` and `v` are paid once, however many consumers want them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from darts_parallel.errors import InfeasibleError
from darts_parallel.graph._space import Fan, GraphSpace
from darts_parallel.graph.operators import PARAMETER, RELAY

Assignment = tuple[int, ...]
"""Number of the choice of every group."""
GIB = 2.0**30
TIE = 1e-8
"""Seconds added to collectives and split parameters, so that the simplest of equal plans is chosen."""
UNIT = 1e-5
"""Seconds of a unit of the programme: HiGHS stops at differences of a millionth of it."""
SHORT = 1e-2
"""Seconds of computation from which on `TIE` and `UNIT` are these; of a shorter step they are shares."""
INTEGRAL = 1e-6
"""Distance from 0 and 1 up to which a solution counts as whole."""
OPTIMAL, INFEASIBLE = 0, 2
"""Answers of scipy's `milp`."""


@dataclass(frozen=True)
class ProgrammeAnswer:
    """Optima of the linear and the integer programme."""

    assignment: Assignment
    seconds: float
    """Seconds of a step of the assignment."""
    lp_seconds: float
    """Optimum of the linear relaxation: no plan is faster."""
    tight: bool
    """The plan takes the seconds of the relaxation."""
    proven: bool
    """HiGHS has proven that no plan of the space is faster (by more than `TIE` a collective)."""
    solve_seconds: float
    variables: int


class ConstraintRow(NamedTuple):
    """One constraint: bounds of a weighted sum of variables."""

    columns: Sequence[int]
    factors: Sequence[float]
    low: float
    high: float


class GraphProgramme:
    """The programme of a space."""

    def __init__(self, space: GraphSpace) -> None:
        self.space = space
        fastest = sum(float(seconds.min()) for seconds in space.seconds)
        self.scale = min(1.0, max(fastest, 1e-12) / SHORT)
        self.cost: list[float] = []
        self.upper: list[float] = []
        """Largest value of every variable; 0 forbids a choice."""
        self.rows: list[ConstraintRow] = []
        self.first = [self._new(seconds) for seconds in space.seconds]
        """First variable of every group's choices."""
        self.whole = len(self.cost)
        for first, end in self.spans:
            ones = [1.0] * (end - first)
            self.rows.append(ConstraintRow(range(first, end), ones, 1.0, 1.0))
        for fan in space.fans:
            self._add_fan(fan)
        if space.memory is None:
            return
        # bound the bytes that are kept, each item once (in GiB, which scales the row)
        first = self._new(np.zeros(len(space.kept)))
        for k, item in enumerate(space.kept):
            for group, choices in item.users:
                self._at_least(first + k, [self.first[group] + choice for choice in choices])
        sizes = [item.bytes / GIB for item in space.kept]
        every = range(first, first + len(sizes))
        self.rows.append(ConstraintRow(every, sizes, -np.inf, space.memory / GIB))

    def _new(self, costs: Sequence[float] | np.ndarray) -> int:
        """Add variables from 0 to 1; return the first one's index."""
        first = len(self.cost)
        self.cost.extend(map(float, costs))
        self.upper.extend(1.0 for _ in costs)
        return first

    def _at_least(
        self,
        column: int,
        others: Sequence[int],
    ) -> None:
        """Demand that a variable is no smaller than a sum of others."""
        factors = [1.0] + [-1.0] * len(others)
        self.rows.append(ConstraintRow([column, *others], factors, 0.0, np.inf))

    def tied_costs(self) -> np.ndarray:
        """Return the costs with `TIE` for collectives and split parameters."""
        costs = np.array(self.cost)
        tie = TIE * self.scale
        costs[self.whole :] += tie * (costs[self.whole :] > 0)
        for first, group in zip(self.first, self.space.groups, strict=True):
            if group.operators[0].op in (PARAMETER, RELAY):
                for k, choice in enumerate(group.choices):
                    if set(choice.labels) - {"none"}:
                        costs[first + k] += tie / 10.0
        return costs

    def _add_fan(self, fan: Fan) -> None:
        """Join a producer to every consumer by their common distribution.

        Several consumers share the variables of moves; one alone pays in its distribution.
        """
        shared = []
        seconds = [table.seconds[:, table.layout] for table in fan.moves]
        paid = fan.count * np.sum(seconds, axis=0)
        if len(fan.consumers) > 1:
            for table in fan.moves:
                variables = self._grid(fan.count * table.seconds)
                shared.append((variables, table.layout))
            paid = np.zeros_like(paid)
        for wanted, group in zip(fan.wanted, fan.consumers, strict=True):
            used = np.unique(wanted)
            grid = self._grid(paid[:, used])
            for p, cells in enumerate(grid):
                self._marginal(cells, fan.producer, np.flatnonzero(fan.made == p))
            for cells, state in zip(grid.T, used, strict=True):
                self._marginal(cells, group, np.flatnonzero(wanted == state))
            # a move is paid where a consumer wants its layout, once for all of them
            for variables, layout in shared:
                for (p, target), variable in np.ndenumerate(variables):
                    cells = grid[p, layout[used] == target].tolist()
                    if cells and self.cost[variable] > 0:
                        self._at_least(int(variable), cells)

    def _grid(self, costs: np.ndarray) -> np.ndarray:
        """Add a variable for every cost of a table; return the indices in its shape."""
        first = self._new(costs.reshape(-1))
        return first + np.arange(costs.size).reshape(costs.shape)

    def _marginal(
        self,
        cells: np.ndarray,
        group: int,
        choices: np.ndarray,
    ) -> None:
        columns = [*cells.tolist(), *(self.first[group] + choices).tolist()]
        factors = [1.0] * len(cells) + [-1.0] * len(choices)
        self.rows.append(ConstraintRow(columns, factors, 0.0, 0.0))

    def solve(self, limit: float = 60.0) -> ProgrammeAnswer:
        """Solve the relaxation, and the integer programme where that is not whole.

        Errors:
            InfeasibleError: no plan fits into the memory, or none was found in time.
        """
        began = time.perf_counter()
        relaxed = self._run(np.array(self.cost), 0, limit)
        answer = self._run(self.tied_costs(), 1, limit)
        if INFEASIBLE in (relaxed.status, answer.status):
            raise InfeasibleError(self._memory_sentence())
        if answer.x is None:
            raise InfeasibleError(
                f"time_limit={limit:g}: HiGHS found no plan in {limit:g} s; try a longer time_limit."
            )
        chosen = self.rounded(answer.x)
        seconds = self.space.total_seconds(chosen)
        lower = 0.0
        if relaxed.fun is not None:
            lower = float(relaxed.fun) * UNIT * self.scale
        tight = seconds <= lower * (1.0 + INTEGRAL)
        proven = answer.status == OPTIMAL
        spent = time.perf_counter() - began
        return ProgrammeAnswer(chosen, seconds, lower, tight, proven, spent, len(self.cost))

    def _memory_sentence(self) -> str:
        least = sum(item.bytes for item in self.space.kept) / GIB
        memory = (self.space.memory or 0.0) / GIB
        return (
            f"memory={memory:.4g}: no plan keeps parameters and activations of a rank in {memory:.4g} "
            f"GiB; try memory={least:.4g}, which holds all tensors in all layouts, or a larger mesh."
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last variable of every group's choices."""
        return list(pairwise([*self.first, self.whole]))

    def rounded(self, values: np.ndarray) -> Assignment:
        """Return the likeliest choice of every group."""
        return tuple(int(values[first:end].argmax()) for first, end in self.spans)

    def constraints(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the sparse matrix of all rows, and the least and largest value of each."""
        from scipy.sparse import csr_array

        # the solver of scipy before 1.15 takes indices of 32 bits alone
        columns = np.fromiter(chain.from_iterable(row.columns for row in self.rows), np.int32)
        factors = list(chain.from_iterable(row.factors for row in self.rows))
        lengths = [len(row.columns) for row in self.rows]
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        shape = len(self.rows), len(self.cost)
        low = np.array([row.low for row in self.rows])
        high = np.array([row.high for row in self.rows])
        return csr_array((factors, columns, ends), shape=shape), low, high

    def _run(
        self,
        costs: np.ndarray,
        integrality: int,
        limit: float,
    ) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp

        whole = np.zeros(len(self.cost))
        whole[: self.whole] = integrality
        units = costs / (UNIT * self.scale)
        rows = LinearConstraint(*self.constraints())
        bounds = Bounds(0.0, np.array(self.upper))
        options = {"time_limit": limit, "mip_rel_gap": 1e-9}
        return milp(units, constraints=rows, integrality=whole, bounds=bounds, options=options)
