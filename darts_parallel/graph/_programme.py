"""The check: a linear and an integer programme of the same costs, solved by HiGHS.

    minimise    sum_g seconds_g x_g + sum_t count_t (forward_t w_t + backward_t v_t)
    subject to  sum_k x_g[k] = 1                                        every group g chooses once
                sum_d z_tc[p, d] = sum of x over choices of t's producer that make p
                sum_p z_tc[p, d] = sum of x over choices of consumer c that want d
                w_t[p, f] >= sum of z_tc[p, d] over states d of placement f, every consumer c
                v_t[p, g] >= sum of z_tc[p, d] over states d of gradient placement g
                x_g[k] = x_h[k]           products of one input that are merged: all of them choose so
                u_i >= sum of x_g[k] over choices of g that keep item i;  sum_i bytes_i u_i <= memory

`x` is 0 or 1 in the integer programme. `w` and `v` are paid once, however many consumers want them.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from darts_parallel.errors import InfeasibleError
from darts_parallel.graph._space import Fan, GraphSpace
from darts_parallel.graph.operators import PARAMETER, RELAY

GIB = 2.0**30
TIE = 1e-8
"""Seconds added to collectives and split parameters when the plan is chosen: of equal plans the simplest."""
UNIT = 1e-5
"""Seconds of a unit of the programme: HiGHS stops at differences of a millionth of it."""
SHORT = 1e-2
"""Seconds of computation from which on `TIE` and `UNIT` are these; of a shorter step they are shares."""
INTEGRAL = 1e-6
"""Distance from 0 and 1 up to which a solution counts as whole."""
OPTIMAL, TIME_LIMIT, INFEASIBLE = 0, 1, 2
"""Answers of scipy's `milp`."""


@dataclass(frozen=True)
class ProgrammeAnswer:
    """Optima of the linear and the integer programme."""

    assignment: tuple[int, ...]
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


class GraphProgramme:
    """The programme of a space."""

    def __init__(self, space: GraphSpace) -> None:
        self.space = space
        self.scale = min(1.0, max(sum(float(own.min()) for own in space.seconds), 1e-12) / SHORT)
        self.cost: list[float] = []
        self.upper: list[float] = []
        """Largest value of every variable: 0 for what may not be chosen."""
        self.rows: list[tuple[Sequence[int], Sequence[float], float, float]] = []
        """Columns, their factors, and the least and largest value of every row."""
        self.first = [self._new(seconds) for seconds in space.seconds]
        for group, seconds in zip(self.first, space.seconds, strict=True):
            self.rows.append((range(group, group + len(seconds)), [1.0] * len(seconds), 1.0, 1.0))
        self.whole = len(self.cost)
        for group, own in enumerate(space.groups):
            for k, choice in enumerate(own.choices):
                if (leader := (*choice.merged, group)[0]) != group:
                    twin = self.first[leader] + space.twin(leader, choice, choice.merged)
                    self.rows.append(((self.first[group] + k, twin), (1.0, -1.0), 0.0, 0.0))
        for fan in space.fans:
            self._fan(fan)
        if space.memory is not None:
            self._memory(space.memory)

    def _new(self, costs: Sequence[float] | np.ndarray) -> int:
        """Add variables from 0 to 1; return the first one's index."""
        first = len(self.cost)
        self.cost.extend(float(c) for c in costs)
        self.upper.extend(1.0 for _ in costs)
        return first

    def forbid(self, group: int, choices: Iterable[int]) -> None:
        """Take choices out of a group."""
        for choice in choices:
            self.upper[self.first[group] + choice] = 0.0

    def _at_least(self, column: int, others: Sequence[int]) -> None:
        """Demand that a variable is no smaller than a sum of others."""
        self.rows.append(([column, *others], [1.0, *[-1.0] * len(others)], 0.0, np.inf))

    def tied_costs(self) -> np.ndarray:
        """Return the costs with `TIE` for collectives and split parameters."""
        costs = np.array(self.cost)
        costs[self.whole :] += TIE * self.scale * (costs[self.whole :] > 0)
        for first, group in zip(self.first, self.space.groups, strict=True):
            split = [any(label != "none" for label in choice.labels) for choice in group.choices]
            if group.operators[0].op in (PARAMETER, RELAY):
                costs[first : first + len(split)] += TIE / 10.0 * self.scale * np.array(split)
        return costs

    def _fan(self, fan: Fan) -> None:
        """Join a producer to every consumer by their common distribution."""
        makes, alone = len(fan.moves[0][0]), len(fan.consumers) == 1
        paid = fan.count * np.sum([seconds[:, layout] for seconds, layout in fan.moves], axis=0)
        shared = []
        for seconds, layout in fan.moves * (not alone):
            first = self._new(fan.count * seconds.reshape(-1))
            shared.append((first + np.arange(seconds.size).reshape(seconds.shape), layout))
        for array, group in zip(fan.of_choice[1:], fan.consumers, strict=True):
            used = np.unique(array)
            first = self._new(paid[:, used].reshape(-1) if alone else np.zeros(makes * len(used)))
            grid = first + np.arange(makes * len(used)).reshape(makes, len(used))
            for p in range(makes):
                self._marginal(grid[p], fan.producer, np.flatnonzero(fan.of_choice[0] == p))
            for column, d in enumerate(used):
                self._marginal(grid[:, column], group, np.flatnonzero(array == d))
            for once, index in shared:
                for (p, target), variable in np.ndenumerate(once):
                    cells = grid[p, index[used] == target].tolist()
                    if cells and self.cost[variable] > 0:
                        self._at_least(int(variable), cells)

    def _marginal(self, cells: np.ndarray, group: int, choices: np.ndarray) -> None:
        columns = [*cells.tolist(), *(self.first[group] + choices).tolist()]
        self.rows.append((columns, [1.0] * len(cells) + [-1.0] * len(choices), 0.0, 0.0))

    def _memory(self, memory: float) -> None:
        """Bound the bytes that are kept, each item once (in GiB, which scales the row)."""
        first = self._new(np.zeros(len(self.space.kept)))
        for k, item in enumerate(self.space.kept):
            for group, choices in item.users:
                self._at_least(first + k, [self.first[group] + c for c in choices])
        sizes = [item.bytes / GIB for item in self.space.kept]
        self.rows.append((range(first, first + len(sizes)), sizes, -np.inf, memory / GIB))

    def solve(self, limit: float = 60.0) -> ProgrammeAnswer:
        """Solve the relaxation, and the integer programme where that is not whole.

        Errors:
            InfeasibleError: no plan fits into the memory, or none was found in time.
        """
        began = time.perf_counter()
        relaxed, answer = (
            self._run(np.array(self.cost), 0, limit),
            self._run(self.tied_costs(), 1, limit),
        )
        if INFEASIBLE in (relaxed.status, answer.status):
            least = sum(item.bytes for item in self.space.kept) / GIB
            memory = (self.space.memory or 0.0) / GIB
            raise InfeasibleError(
                f"memory={memory:.4g}: no plan keeps parameters and activations of a rank in {memory:.4g} "
                f"GiB (all tensors in all layouts are {least:.4g}); try more memory, or a larger mesh."
            )
        if answer.x is None:
            raise InfeasibleError(
                f"time_limit={limit:g}: HiGHS found no plan in {limit:g} s; try a longer time_limit."
            )
        picks = self.rounded(answer.x)
        lower = float(relaxed.fun) * UNIT * self.scale if relaxed.fun is not None else 0.0
        seconds = self.space.total_seconds(picks)
        return ProgrammeAnswer(
            picks,
            seconds,
            lower,
            seconds <= lower * (1.0 + INTEGRAL),
            answer.status == OPTIMAL,
            time.perf_counter() - began,
            len(self.cost),
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last variable of every group's choices."""
        return list(pairwise([*self.first, self.whole]))

    def rounded(self, values: np.ndarray) -> tuple[int, ...]:
        """Return the likeliest choice of every group."""
        return self.space.agreed([int(values[a:b].argmax()) for a, b in self.spans])

    def constraints(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the sparse matrix of all rows, and the least and largest value of each."""
        from scipy.sparse import csr_array

        columns, values, low, high = zip(*self.rows, strict=True)
        ends = np.cumsum([0, *map(len, columns)])
        matrix = csr_array(
            (list(chain(*values)), list(chain(*columns)), ends),
            shape=(len(columns), len(self.cost)),
        )
        return matrix, np.array(low), np.array(high)

    def _run(self, costs: np.ndarray, integrality: int, limit: float) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp

        whole = np.zeros(len(self.cost))
        whole[: self.whole] = integrality
        return milp(
            costs / (UNIT * self.scale),
            constraints=LinearConstraint(*self.constraints()),
            integrality=whole,
            bounds=Bounds(0.0, np.array(self.upper)),
            options={"time_limit": limit, "mip_rel_gap": 1e-9},
        )
