"""Seconds of all even uniform plans of a job at any figures, their slopes, and the bytes that they need."""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from darts_parallel.cost import (
    ROUNDING,
    BatchCost,
    CostTable,
    HardPlans,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
)
from darts_parallel.design.bound import Array
from darts_parallel.design.figures import members, scaled
from darts_parallel.design.request import Knob
from darts_parallel.errors import InfeasibleError
from darts_parallel.plan import OuterSpace, Plan, outer_spaces
from darts_parallel.problem import Problem

AMPLE = 1e18
"""Bytes of a device whose memory is not asked for: which plans fit is decided by what is bought."""


@dataclass(frozen=True)
class Pricing:
    """All even uniform plans of one job on one cluster, P of them."""

    problem: Problem
    knobs: tuple[Knob, ...]
    """All but those of memory, n of them."""
    memories: tuple[Knob, ...]
    """Those of memory, M of them."""

    @cached_property
    def ample(self) -> Problem:
        """Return the problem with more memory than any plan needs."""
        groups = tuple(
            replace(g, device=replace(g.device, memory=AMPLE)) for g in self.problem.cluster.groups
        )
        return replace(self.problem, cluster=replace(self.problem.cluster, groups=groups))

    @cached_property
    def spaces(self) -> list[OuterSpace]:
        """Return the outer choices of the space."""
        return outer_spaces(self.ample)

    def _tables(self, factors: dict[str, float | Tensor]) -> list[tuple[CostTable, HardPlans, BatchCost]]:
        """Return tables, their even uniform plans and costs with figures times factors."""
        found = []
        for table in build_tables(scaled(self.ample, factors), self.spaces):
            plans = even_uniform_plans(table)
            found.append((table, plans, evaluate_batch(table, plans)))
        return found

    @cached_property
    def _at_reference(self) -> list[tuple[CostTable, HardPlans, BatchCost]]:
        return self._tables({})

    @cached_property
    def useful(self) -> Tensor:
        """Return the numbers of plans that are legal and whose memory can be bought, `(P,)`."""
        legal = torch.cat([cost.feasible for _, _, cost in self._at_reference])
        most = torch.tensor([knob.high for knob in self.memories], dtype=torch.float64)
        fits = (self._all_needs[:, :-1] <= most * (1 + ROUNDING)).all(1)
        return torch.nonzero(legal & fits & (self._all_needs[:, -1] <= 1 + ROUNDING)).squeeze(1)

    @cached_property
    def _all_needs(self) -> Tensor:
        """Return the factors of memory that plans need: of every knob, and of groups that have none."""
        cluster, margin = self.problem.cluster, self.problem.config.space.memory_margin
        held = [set(members(knob.name, cluster)) for knob in self.memories]
        rest = set(range(len(cluster.groups))).difference(*held)
        rows = []
        for table, _, cost in self._at_reference:
            arranged = cluster.arranged(table.node_order)
            stages = [set(arranged.stage_topology(k, table.pp).groups) for k in range(table.pp)]
            factors = torch.zeros(len(cost.memory), len(held) + 1, dtype=torch.float64)
            for stage, groups in enumerate(stages):
                for group in groups:
                    device = cluster.groups[group].device
                    need = (cost.memory[:, stage] + device.reserved) / ((1.0 - margin) * device.memory)
                    for column, own in enumerate([*held, rest]):
                        if group in own:
                            factors[:, column] = torch.maximum(factors[:, column], need)
            rows.append(factors)
        return torch.cat(rows)

    @cached_property
    def needs(self) -> Array:
        """Return the factor of every memory knob that plans need, `(P, M)`.

        Errors:
            InfeasibleError: no plan fits the largest memory.
        """
        if not len(self.useful):
            least = float(self._all_needs.amax(1).min())
            raise InfeasibleError(
                f"design: the job {self.problem.config.model.name} fits nowhere on "
                f"{self.problem.cluster.name}, where the lightest plan needs {least:.3g} times the memory; "
                "try a higher bound of device.memory, or more nodes."
            )
        low = np.array([knob.low for knob in self.memories])
        return np.asarray(np.maximum(self._all_needs[self.useful][:, :-1].numpy(), low))

    def log_seconds(self, z: Array) -> Array:
        """Return log seconds per iteration of every plan at log goodness `z`, shape `(P,)`."""
        factors = {k.name: float(np.exp(k.sense * y)) for k, y in zip(self.knobs, z, strict=True)}
        seconds = torch.cat([cost.iteration_time for _, _, cost in self._tables(dict(factors))])
        return np.asarray(seconds[self.useful].log().numpy())

    def slopes(self, z: Array) -> Array:
        """Return the slopes of `log_seconds` in the log goodness of every knob, `(P, n)`.

        Exact: one forward pass of automatic differentiation through the tables for each knob, for all
        plans at once.
        """
        columns = []
        for chosen in self.knobs:
            with forward_ad.dual_level():
                factors: dict[str, float | Tensor] = {}
                for knob, y in zip(self.knobs, z, strict=True):
                    value = torch.tensor(np.exp(knob.sense * y), dtype=torch.float64)
                    if knob is chosen:
                        value = _dual(value, knob.sense * value)
                    factors[knob.name] = value
                parts = []
                for _, _, cost in self._tables(factors):
                    seconds, slope = forward_ad.unpack_dual(cost.iteration_time)  # type: ignore[no-untyped-call]
                    parts.append(torch.zeros_like(seconds) if slope is None else slope / seconds)
                columns.append(torch.cat(parts)[self.useful].numpy())
        size = len(self.useful)
        return np.stack(columns, 1) if columns else np.zeros((size, 0))

    def plan(self, number: int) -> Plan:
        """Return a plan by its number among the P."""
        index = int(self.useful[number])
        for table, plans, _ in self._at_reference:
            if index < len(plans):
                return plans.to_plan(index, table)
            index -= len(plans)
        raise IndexError(number)


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    """Return a number with its tangent; what torch imports for that uses functions that it deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return made
