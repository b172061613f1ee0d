"""Seconds of all even uniform plans of a job at any figures, their slopes, and the bytes that they need.

Memory is bought for the chance `space.out_of_memory` of one device, with the spread of the reference's bytes.
"""

from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    BatchCost,
    CostTable,
    HardPlans,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
)
from darts_parallel.design.bound import Array, Knobs
from darts_parallel.design.figures import FIGURES, Place, figure_of, places, scaled
from darts_parallel.errors import InfeasibleError
from darts_parallel.planner import tightened
from darts_parallel.plans import Plan, outer_spaces
from darts_parallel.problem import Problem

AMPLE = 1e9  # factor of the memory in tables: which plans fit is decided by what is bought
Tables = list[tuple[CostTable, HardPlans, BatchCost]]


class Priced:
    """Log seconds (`heights`) of P plans at a point of F factors; slopes when they are first asked for."""

    def __init__(self, log_seconds: Tensor, point: Tensor) -> None:
        self._log_seconds, self.point = log_seconds, point
        self.heights: Array = log_seconds.detach().numpy()

    @cached_property
    def slopes(self) -> Array:
        """Gradients of all plans at once, `(P, F)`.

        The gradient of a mixture of plans with weights w is linear in w: its own gradients are the columns.
        """
        if not len(self.point):
            return np.zeros((len(self.heights), 0))
        weights = torch.zeros(len(self.heights), dtype=torch.float64, requires_grad=True)
        (mixed,) = torch.autograd.grad(self._log_seconds, self.point, weights, create_graph=True)
        each = torch.eye(len(mixed), dtype=torch.float64)
        (columns,) = torch.autograd.grad(mixed, weights, each, is_grads_batched=True)
        return np.asarray(columns.T.numpy())


class Pricing:
    """All even uniform plans of one job on one cluster, P of them, with n knobs and M more of memory.

    Seconds are convex in what places have: knobs that name one place, `inter_node.bandwidth` and
    `nodes.0.inter_node.bandwidth`, multiply there, so slopes are those in F factors, by the knobs in them.

    Attributes:
        factors: 1 where a knob is in a factor, `(F, n)`; without such knobs one for each.
        start: Log goodness of the reference, within the bounds, `(n,)`.
        needs: Factor of every memory knob that plans need, `(P, M)`.

    Errors:
        InfeasibleError: no plan fits the largest memory.
    """

    def __init__(self, problem: Problem, knobs: Knobs, memories: Knobs) -> None:
        self.problem, inside = tightened(problem), dict[tuple[str, Place], list[int]]()
        for index, name in enumerate(knobs.names):
            for place in places(name, problem.cluster):
                inside.setdefault((figure_of(name), place), []).append(index)
        products = list(dict.fromkeys(map(tuple, inside.values())))
        self._places = [(*place, products.index(tuple(own))) for place, own in inside.items()]
        every = [[float(knob in own) for knob in range(len(knobs.names))] for own in products]
        self.factors: Array = np.reshape(every, (len(products), len(knobs.names)))
        self.start = np.clip(0.0, knobs.low, knobs.high)
        self.ample = problem.with_devices(
            lambda device: replace(device, memory=device.memory * AMPLE)
        )
        self.spaces = outer_spaces(self.ample)
        point = torch.tensor(self.factors @ self.start, requires_grad=True)
        self._begun = self._tables(point)
        needs = self._needs(memories)
        most = torch.tensor([*np.exp(memories.high), 1.0], dtype=torch.float64)
        legal = torch.cat([cost.feasible for _, _, cost in self._begun])
        self.useful = torch.nonzero(
            legal & (needs <= most * (1 + PLAN_MEMORY_TOLERANCE)).all(1)
        ).squeeze(1)
        if not len(self.useful):
            job, lightest = problem.config.model.name, float(needs.amax(1).min())
            raise InfeasibleError(
                f"design: the job {job} fits nowhere on {problem.cluster.name}, where the "
                f"lightest plan needs {lightest:.3g} times the memory; try a higher bound "
                "of device.memory, or more nodes."
            )
        self.needs: Array = np.maximum(needs[self.useful][:, :-1].numpy(), np.exp(memories.low))
        self.at_start = Priced(self._log_seconds(self._begun), point)

    def _tables(self, z: Tensor) -> Tables:
        """Return tables, their even uniform plans and costs where the log goodness of factors is `z`."""
        factors = [
            (name, place, (FIGURES[name][0] * z[own]).exp()) for name, place, own in self._places
        ]
        linear = torch.is_grad_enabled() and z.requires_grad
        tables = build_tables(scaled(self.ample, factors), self.spaces)
        planned = ((table, even_uniform_plans(table)) for table in tables)
        return [(*own, evaluate_batch(*own, linear=linear)) for own in planned]

    def _log_seconds(self, priced: Tables) -> Tensor:
        return torch.cat([cost.iteration_time for _, _, cost in priced])[self.useful].log()

    def _needs(self, memories: Knobs) -> Tensor:
        """Return factors of memory that plans need: of every knob, and of groups without, `(., M + 1)`."""
        cluster, margin = self.problem.cluster, self.problem.margin
        held = [{place or 0 for place in places(name, cluster)} for name in memories.names]
        held.append(set(range(len(cluster.groups))).difference(*held))
        rows = []
        for table, _, cost in self._begun:
            arranged = cluster.arranged(table.node_order)
            factors = torch.zeros(len(cost.memory), len(held), dtype=torch.float64)
            for stage, column in product(range(table.pp), range(len(held))):
                for group in held[column].intersection(
                    arranged.stage_topology(stage, table.pp).groups
                ):
                    device = cluster.groups[group].device
                    need = (cost.memory[:, stage] + device.reserved) / (
                        (1.0 - margin) * device.memory
                    )
                    factors[:, column] = torch.maximum(factors[:, column], need)
            rows.append(factors)
        return torch.cat(rows)

    def log_seconds(self, z: Tensor) -> Tensor:
        """Return log seconds per iteration of every plan at log goodness `z` of the knobs, `(P,)`."""
        return self._log_seconds(self._tables(torch.tensor(self.factors) @ z))

    def at(self, z: Array) -> Priced:
        """Price all plans at log goodness `z`."""
        point = torch.tensor(self.factors @ z, requires_grad=True)
        return Priced(self._log_seconds(self._tables(point)), point)

    def plan(self, number: int) -> Plan:
        """Return a plan by its number among the P."""
        every = [
            (table, plans, index) for table, plans, _ in self._begun for index in range(len(plans))
        ]
        table, plans, index = every[int(self.useful[number])]
        return plans.to_plan(index, table)
