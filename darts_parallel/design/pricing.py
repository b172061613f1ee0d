"""Seconds of all even uniform plans of a job at any figures, their slopes, and the bytes that they need.

Memory is bought for the chance `space.out_of_memory` of one device, with the spread of the
reference's bytes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    Array,
    BatchCost,
    CostTable,
    HardPlans,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
    filled,
    flatnonzero,
)
from darts_parallel.design.bound import Knobs
from darts_parallel.design.figures import Factor, Place, figure_of, places, scaled, sense
from darts_parallel.errors import InfeasibleError
from darts_parallel.planner import tightened
from darts_parallel.plans import Plan, outer_spaces
from darts_parallel.problem import Cluster, Problem

AMPLE = 1e9
"""Factor of the memory in tables: which plans fit is decided by what is bought."""


class PricedTable(NamedTuple):
    """A table, its even uniform plans and their cost."""

    table: CostTable
    plans: HardPlans
    cost: BatchCost


@dataclass(frozen=True)
class Priced:
    """Log seconds of P plans at a point of F factors; slopes when they are first asked for."""

    log_seconds: Tensor
    point: Tensor

    @property
    def heights(self) -> Array:
        """Log seconds as numbers."""
        return self.log_seconds.detach().numpy()

    @cached_property
    def slopes(self) -> Array:
        """Gradients of all plans at once, `(P, F)`.

        The gradient of a mixture of plans with weights w is linear in w: its own gradients are the
        columns.
        """
        if not len(self.point):
            return np.zeros((len(self.heights), 0))
        seconds = self.log_seconds
        weights = torch.zeros_like(seconds, requires_grad=True)
        (mixed,) = torch.autograd.grad(seconds, self.point, weights, create_graph=True)
        each = torch.eye(len(mixed), dtype=torch.float64)
        (columns,) = torch.autograd.grad(mixed, weights, each, is_grads_batched=True)
        return columns.T.numpy()


class _Factors:
    """Factors of the figures of places, F of them, by n knobs.

    Knobs that name one place, `inter_node.bandwidth` and `nodes.0.inter_node.bandwidth`, multiply
    there.
    """

    def __init__(self, knobs: Knobs, cluster: Cluster) -> None:
        inside: dict[tuple[str, Place], list[int]] = {}
        for index, name in enumerate(knobs.names):
            figure = figure_of(name)
            for place in places(name, cluster):
                own = inside.setdefault((figure, place), [])
                own.append(index)
        products = []
        self.rows: list[Factor] = []
        """Number of the factor by figure and place."""
        for (name, place), own in inside.items():
            if own not in products:
                products.append(own)
            number = products.index(own)
            self.rows.append(Factor(name, place, number))
        self.matrix: Array = np.zeros((len(products), len(knobs)))
        for row, own in enumerate(products):
            self.matrix[row, own] = 1.0


class Pricing:
    """All even uniform plans of one job on one cluster, P of them, with n knobs and M more of memory.

    Seconds are convex in what places have, so slopes are those in F factors, by the knobs in them.

    Attributes:
        factors: 1 where a knob is in a factor, `(F, n)`; without such knobs one for each.
        start: Log goodness of the reference, within the bounds, `(n,)`.
        needs: Factor of every memory knob that plans need, `(P, M)`.

    Errors:
        InfeasibleError: no plan fits the largest memory.
    """

    def __init__(
        self,
        problem: Problem,
        knobs: Knobs,
        memories: Knobs,
    ) -> None:
        self.problem = tightened(problem)
        self._factors = _Factors(knobs, problem.cluster)
        self.factors = self._factors.matrix
        self.start = np.clip(0.0, knobs.low, knobs.high)
        self.ample = problem.with_devices(
            lambda device: replace(device, memory=device.memory * AMPLE)
        )
        self.spaces = outer_spaces(self.ample)
        point = torch.tensor(self.factors @ self.start, requires_grad=True)
        self._begun = self._tables(point)
        needs = self._needs(memories)
        most = torch.tensor(np.append(np.exp(memories.high), 1.0))
        legal = torch.cat([own.cost.feasible for own in self._begun])
        bought = needs <= most * (1 + PLAN_MEMORY_TOLERANCE)
        fitting = legal & bought.all(1)
        self.useful = flatnonzero(fitting)
        if not len(self.useful):
            lightest = float(needs.amax(1).min())
            raise InfeasibleError(
                f"design: the job {problem.config.model.name} fits nowhere on {problem.cluster.name}, where "
                f"the lightest plan needs {lightest:.3g} times the memory; try a higher bound "
                "of device.memory, or more nodes."
            )
        of_knobs = needs[self.useful][:, :-1].numpy()
        self.needs: Array = np.maximum(of_knobs, np.exp(memories.low))
        self.at_start = Priced(self._log_seconds(self._begun), point)

    def _tables(self, z: Tensor) -> list[PricedTable]:
        """Price all plans where the log goodness of factors is `z`."""
        result = []
        factors = []
        for name, place, own in self._factors.rows:
            factors.append(Factor(name, place, (sense(name) * z[own]).exp()))
        for table in build_tables(scaled(self.ample, factors), self.spaces):
            plans = even_uniform_plans(table)
            cost = evaluate_batch(table, plans, linear=True)
            result.append(PricedTable(table, plans, cost))
        return result

    def _log_seconds(self, priced: list[PricedTable]) -> Tensor:
        seconds = torch.cat([own.cost.iteration_time for own in priced])
        return seconds[self.useful].log()

    def _needs(self, memories: Knobs) -> Tensor:
        """Return factors of memory that plans need: of every knob, and of groups without, `(., M + 1)`."""
        cluster = self.problem.cluster
        columns: list[set[Place]] = [set(places(name, cluster)) for name in memories.names]
        groups: set[Place] = set(range(len(cluster.groups)))
        columns.append(groups.difference(*columns))
        rows = []
        for priced in self._begun:
            by_group = self._group_needs(priced)
            unused = filled(0.0, len(priced.plans))
            factors = []
            for column in columns:
                own = [by_group[group] for group in by_group if group in column]
                largest = torch.stack([unused, *own]).amax(0)
                factors.append(largest)
            rows.append(torch.stack(factors, 1))
        return torch.cat(rows)

    def _group_needs(self, priced: PricedTable) -> dict[int, Tensor]:
        """Return the factor of the memory of every node group in use that plans need, `(P,)` each."""
        cluster = self.problem.cluster
        table = priced.table
        arranged = cluster.arranged(table.node_order)
        needs: dict[int, Tensor] = {}
        for stage in range(table.pp):
            for group in arranged.stage_topology(stage, table.pp).groups:
                device = cluster.groups[group].device
                usable = (1.0 - self.problem.margin) * device.memory
                used = priced.cost.memory[:, stage] + device.reserved
                need = used / usable
                needs[group] = torch.maximum(needs.get(group, need), need)
        return needs

    def at(self, z: Array) -> Priced:
        """Price all plans at log goodness `z`."""
        point = torch.tensor(self.factors @ z, requires_grad=True)
        seconds = self._log_seconds(self._tables(point))
        return Priced(seconds, point)

    def plan(self, number: int) -> Plan:
        """Return a plan by its number among the P."""
        index = int(self.useful[number])
        for table, plans, _ in self._begun:
            if index < len(plans):
                return plans.to_plan(index, table)
            index -= len(plans)
        raise IndexError(number)
