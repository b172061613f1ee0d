"""The plans that need the least memory, and what to say when even they do not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Any

import torch

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    CostTable,
    build_tables,
    evaluate_batch,
    lightest_plans,
)
from darts_parallel.errors import DartsParallelError, InfeasibleError
from darts_parallel.exact import outer_lower_bounds
from darts_parallel.plans import tensor_degrees
from darts_parallel.problem import GIB, Cluster, Device, Problem, memory_unit

ROUNDS = 6
"""Times that the memory of the GPUs is raised until some plan fits."""
FREE: dict[str, Any] = {
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


def proven_infeasible(tables: Sequence[CostTable], space_kind: str) -> bool:
    """Return whether the memory that plans need at least exceeds what there is, in every outer choice."""
    return all(bool(outer_lower_bounds(table, space_kind).isinf().all()) for table in tables)


def explain_infeasible(
    problem: Problem, tables: Sequence[CostTable], *, proven: bool = False
) -> InfeasibleError:
    """Return the error for a problem without a plan: the binding constraint and the smallest way out.

    Args:
        proven: Whether an exact method says that no plan fits; else bounds may, or none was found.
    """
    space, cluster = problem.config.space, problem.cluster

    def changed(cluster: Cluster = cluster, **freed: Any) -> _Lightest:
        """Return the lightest plan on another cluster, or in another space."""
        config = replace(problem.config, space=replace(space, **freed))
        return _lightest_of_all(
            build_tables(replace(problem, config=config, cluster=cluster)), space.kind
        )

    lightest = _lightest_of_all(tables, space.kind)
    device = max(lightest.devices(cluster).items(), key=lambda entry: entry[1])[0]
    unit, size = memory_unit(device.memory)
    whole = (1.0 - problem.margin) * device.memory / size
    needed = whole + lightest.excess / size
    ways = _memory_that_fits(cluster, problem.margin, lightest, changed)
    pins = [f"space.{name}" for name, value in FREE.items() if getattr(space, name) != value]
    if pins and changed(**FREE).excess <= 0:
        ways.append(f"freeing {', '.join(pins)}")
    usual, wider = tensor_degrees(space, problem.model, cluster, problem.measured)
    if wider and changed(tp=usual + wider).excess <= 0:
        ways.append(f"space.tp=[{','.join(map(str, usual + wider))}]")
    more = _nodes_that_fit(cluster, lambda larger: changed(larger).excess <= 0)
    if more:
        ways.append(f"{more} nodes instead of {cluster.groups[0].count}")
    found = "" if proven or proven_infeasible(tables, space.kind) else " that was found"
    changes = " or ".join(ways) or "other GPUs or a smaller model"
    return InfeasibleError(
        f"memory: model={problem.model.config.name} fits in no {space.kind} plan{found} on "
        f"cluster={cluster.name}; the lightest plan ({lightest.detail}) needs {needed:.2f} {unit} of "
        f"the {whole:.2f} {unit} of {device.name}; smallest changes that help: {changes}."
    )


def _memory_that_fits(
    cluster: Cluster,
    margin: float,
    lightest: "_Lightest",
    changed: Callable[[Cluster], "_Lightest"],
) -> list[str]:
    """Return memory of the GPUs with which some plan fits, as overrides; none where none was found.

    With more memory on one node type the lightest plan moves layers: the other types are looked at again.
    """
    wanted: dict[str, float] = {}
    for _ in range(ROUNDS):
        for device, excess in lightest.devices(cluster).items():
            if excess > 0:
                more = excess / (1.0 - margin)
                wanted[device.name] = _rounded_up(float(device.memory + more) / GIB)
        cluster = cluster.with_devices(
            lambda own: replace(own, memory=wanted[own.name] * GIB) if own.name in wanted else own
        )
        lightest = changed(cluster)
        if lightest.excess <= 0:
            sizes = {name: f"{size:.{_digits(size)}f}" for name, size in wanted.items()}
            return [
                " and ".join(
                    f"cluster.devices.{name}.memory_GiB={text}" for name, text in sizes.items()
                )
            ]
    return []


def _digits(size: float) -> int:
    """Return digits after the point that tell sizes apart by a hundredth, two at least."""
    return max(2, 1 - floor(log10(size)))


def _rounded_up(size: float) -> float:
    """Return the next larger size with few digits."""
    steps = 10.0 ** _digits(size)
    return ceil(size * steps) / steps


@dataclass(frozen=True)
class _Lightest:
    """Hold the plan that overshoots its memory least.

    `over`: bytes above the capacity of every stage, negative where it fits, shape `(K,)`.
    """

    table: CostTable | None
    over: torch.Tensor
    detail: str

    @property
    def excess(self) -> float:
        """Return bytes of the stage that overshoots most."""
        return float(self.over.max())

    def devices(self, cluster: Cluster) -> dict[Device, float]:
        """Return the most that a stage on each type of GPU overshoots, in bytes."""
        table, found = self.table, dict[Device, float]()
        if table is None:
            return {cluster.groups[0].device: self.excess}
        cluster = cluster.arranged(table.node_order)
        for stage, excess in enumerate(self.over.tolist()):
            device = cluster.stage_group(stage % table.pp, table.pp).device
            found[device] = max(excess, found.get(device, excess))
        return found


def _lightest_of_all(tables: Sequence[CostTable], space_kind: str) -> _Lightest:
    best = _Lightest(None, torch.tensor([torch.inf]), "none")
    for table, plans in zip(tables, lightest_plans(tables, space_kind), strict=True):
        over = evaluate_batch(table, plans).memory - table.capacity * (1 + PLAN_MEMORY_TOLERANCE)
        excess = over.amax(1)
        index = int(excess.argmin())
        if float(excess[index]) < best.excess:
            count = int(table.num_micro_batches[plans.outer[index]])
            best = _Lightest(table, over[index], f"{table.label}, {count} micro-batches")
    return best


def any_fits(tables: Sequence[CostTable], space_kind: str) -> bool:
    """Return whether the lightest plan of some outer choice fits the memory."""
    return _lightest_of_all(tables, space_kind).excess <= 0


def _nodes_that_fit(cluster: Cluster, fits: Callable[[Cluster], bool]) -> int | None:
    """Return smallest doubling of the first node group with which the lightest plan fits, or None."""
    first, *others = cluster.groups
    for factor in (2, 4, 8, 16, 32):
        more = replace(first, count=first.count * factor)
        try:
            if fits(replace(cluster, groups=(more, *others))):
                return more.count
        except DartsParallelError:
            continue
    return None
