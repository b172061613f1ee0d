"""The plans that need the least memory, and the error when none fits."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, inf, log10
from typing import Any

import torch

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    CostTable,
    HardPlans,
    Tables,
    build_tables,
    evaluate_batch,
    lightest_plans,
)
from darts_parallel.errors import Amounts, DartsParallelError, Entries, InfeasibleError
from darts_parallel.exact import least_bound
from darts_parallel.plans import Plan, tensor_degrees
from darts_parallel.problem import GIB, Cluster, Device, Problem, memory_unit

ROUNDS = 6
"""Times that the memory of the GPUs is raised until some plan fits."""
FREE: Entries = {
    "pp": None,
    "tp": None,
    "dp": None,
    "num_micro_batches": None,
    "micro_batch_size": None,
    "zero_stage": None,
    "recompute": None,
    "sequence_parallel": None,
    "memory_margin": 0.0,
}
"""Settings of a space in which a user has pinned nothing."""


def proven_infeasible(tables: Tables, space_kind: str) -> bool:
    """Return whether every pipeline configuration needs more memory than there is."""
    return least_bound(tables, space_kind) == inf


class NoPlanFitsError(InfeasibleError):
    """No plan fits the memory; the sentence names the binding constraint and the smallest changes.

    It is made when it is first read: a search goes on after most of these errors, with more memory.

    Args:
        problem: The job without a plan.
        tables: Its tables, one for each pipeline configuration.
        proven: Whether an exact method says that no plan fits; False by default: bounds may say so,
            or none was found.
    """

    @cached_property
    def _words(self) -> str:
        return _sentence(*self.args)

    def __str__(self) -> str:
        return self._words

    @property
    def lightest(self) -> Plan:
        """The plan that exceeds the memory least."""
        problem, tables = self.args[:2]
        found = _lightest_of_all(tables, problem.config.space.kind)
        return found.plan.to_plan(0, found.table)

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str]]:
        return InfeasibleError, (str(self),)  # other processes get the sentence without tables


def _sentence(problem: Problem, tables: Tables, proven: bool = False) -> str:
    """Name the constraint that binds a problem without a plan, and the smallest changes that help."""
    kind = problem.config.space.kind
    cluster = problem.cluster
    lightest = _lightest_of_all(tables, kind)
    excess = lightest.devices(cluster)
    device = max(excess, key=lambda name: excess[name])
    unit, size = memory_unit(device.memory)
    whole = (1.0 - problem.margin) * device.memory / size
    needed = whole + lightest.excess / size
    found = "" if proven or proven_infeasible(tables, kind) else " that was found"
    changes = " or ".join(_Remedies(problem, lightest).all()) or "other GPUs or a smaller model"
    return (
        f"memory: model={problem.model.config.name} fits in no {kind} plan{found} on "
        f"cluster={cluster.name}; the lightest plan ({lightest.detail}) needs {needed:.2f} {unit} of "
        f"the {whole:.2f} {unit} of {device.name}; smallest changes that help: {changes}."
    )


@dataclass(frozen=True)
class _Remedies:
    """Find changes of a problem with which some plan fits."""

    problem: Problem
    lightest: "_Lightest"

    def all(self) -> list[str]:
        """List the changes, as overrides or as words."""
        # with pins in the way, more nodes help little
        return self.memory() + (self.pins() or self.nodes()) + self.tensor_degrees()

    def changed(self, cluster: Cluster | None = None, **freed: Any) -> "_Lightest":
        """Return the lightest plan on another cluster, or in another space."""
        config = self.problem.config.with_space(**freed)
        cluster = cluster or self.problem.cluster
        tables = build_tables(replace(self.problem, config=config, cluster=cluster))
        return _lightest_of_all(tables, config.space.kind)

    def memory(self) -> list[str]:
        """Return memory of the GPUs with which some plan fits, as overrides.

        With more memory on one node type the lightest plan moves layers. So the other types are
        looked at again.
        """
        wanted: Amounts = {}
        cluster = self.problem.cluster
        lightest = self.lightest
        for _ in range(ROUNDS):
            for device, excess in lightest.devices(cluster).items():
                if excess > 0:
                    more = excess / (1.0 - self.problem.margin)
                    size = float(device.memory + more) / GIB
                    # the next larger size with few digits
                    steps = 10.0 ** _digits(size)
                    wanted[device.name] = ceil(size * steps) / steps
            cluster = _with_memory(cluster, wanted)
            lightest = self.changed(cluster)
            if lightest.excess <= 0:
                sizes = [
                    f"cluster.devices.{name}.memory_GiB={size:.{_digits(size)}f}"
                    for name, size in wanted.items()
                ]
                return [" and ".join(sizes)]
        return []

    def pins(self) -> list[str]:
        """Return the settings of the space that are in the way, if no plan fits because of them."""
        space = self.problem.config.space
        pins = [f"space.{name}" for name, value in FREE.items() if getattr(space, name) != value]
        if pins and self.changed(**FREE).excess <= 0:
            return [f"freeing {', '.join(pins)}"]
        return []

    def tensor_degrees(self) -> list[str]:
        """Return wider tensor parallelism with which some plan fits, as an override."""
        problem = self.problem
        usual, wider = tensor_degrees(
            problem.config.space, problem.model, problem.cluster, problem.measured
        )
        if wider and self.changed(tp=usual + wider).excess <= 0:
            return [f"space.tp=[{','.join(map(str, usual + wider))}]"]
        return []

    def nodes(self) -> list[str]:
        """Return the smallest doubling of the first node group with which some plan fits, in words."""
        first, *others = self.problem.cluster.groups
        for factor in (2, 4, 8, 16, 32):
            more = replace(first, count=first.count * factor)
            larger = replace(self.problem.cluster, groups=(more, *others))
            with suppress(DartsParallelError):
                if self.changed(larger).excess <= 0:
                    group = f" of {first.device.name}" if others else ""
                    return [f"{more.count} nodes{group} instead of {first.count}"]
        return []


def _with_memory(cluster: Cluster, wanted: Amounts) -> Cluster:
    """Return the cluster with other memory of some devices, in GiB by name."""

    def changed(device: Device) -> Device:
        if device.name not in wanted:
            return device
        return replace(device, memory=wanted[device.name] * GIB)

    return cluster.with_devices(changed)


def _digits(size: float) -> int:
    """Return digits after the point that tell sizes apart by a hundredth, two at least."""
    return max(2, 1 - floor(log10(size)))


@dataclass(frozen=True)
class _Lightest:
    """The plan that exceeds its memory least."""

    table: CostTable
    over: torch.Tensor
    """Bytes above the capacity of every stage, negative where it fits, shape `(K,)`."""
    detail: str
    plan: HardPlans

    @property
    def excess(self) -> float:
        """Return bytes of the stage that exceeds its memory most."""
        return float(self.over.max())

    def devices(self, cluster: Cluster) -> dict[Device, float]:
        """Return the largest excess of a stage on each type of GPU, in bytes."""
        table = self.table
        found: dict[Device, float] = {}
        cluster = cluster.arranged(table.node_order)
        for stage, excess in enumerate(self.over.tolist()):
            device = cluster.stage_group(stage % table.pp, table.pp).device
            found[device] = max(excess, found.get(device, excess))
        return found


def _lightest_of_all(tables: Tables, space_kind: str) -> _Lightest:
    found = []
    for table, plans in zip(tables, lightest_plans(tables, space_kind), strict=True):
        limit = table.capacity * (1 + PLAN_MEMORY_TOLERANCE)
        over = evaluate_batch(table, plans).memory - limit
        index = int(over.amax(1).argmin())
        count = int(table.num_micro_batches[plans.outer[index]])
        detail = f"{table.name}, {count} micro-batches"
        found.append(_Lightest(table, over[index], detail, plans[index : index + 1]))
    return min(found, key=lambda own: own.excess)


def any_fits(tables: Tables, space_kind: str) -> bool:
    """Return whether the lightest plan of some pipeline configuration fits the memory."""
    return _lightest_of_all(tables, space_kind).excess <= 0
