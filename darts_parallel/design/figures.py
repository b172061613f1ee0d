"""Figures of the hardware that a design may change, by name.

`device.peak_flops` means the peaks of every node group, each times the same factor;
`nodes.1.device.peak_flops` means those of the second group alone. Links are `intra_node` and
`inter_node`.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from darts_parallel.config import Config, require
from darts_parallel.errors import ConfigError, closest
from darts_parallel.problem import Cluster, Problem

MEMORY = "device.memory"


FIGURES = {
    "device.peak_flops": "peak_TFLOPs",
    MEMORY: "memory_GiB",
    "device.memory_bandwidth": "memory_bandwidth_GBps",
    "intra_node.bandwidth": "bandwidth_GBps",
    "intra_node.latency": "latency_us",
    "inter_node.bandwidth": "bandwidth_GBps",
    "inter_node.latency": "latency_us",
}
"""Keys of the configuration by figure."""
Place = int | None
"""Number of a node group; None: the network that groups share."""


class Factor(NamedTuple):
    """A change of one figure of one place."""

    name: str
    place: Place
    factor: Any
    """A number or a tensor."""


def figure_of(name: str) -> str:
    """Return the name of a figure inside of its node group."""
    return ".".join(name.split(".")[-2:])


def sense(name: str) -> int:
    """Return 1 for a figure of which more is better, -1 for a latency."""
    return -1 if name.endswith(".latency") else 1


def places(name: str, cluster: Cluster) -> list[Place]:
    """Return the places whose figure a name means; refuse what the cluster lacks or cannot change alone."""
    match = re.fullmatch(r"(?:nodes\.(\d{1,4})\.)?(\w+\.\w+)", name)
    if match is None or match[2] not in FIGURES:
        raise ConfigError(
            f"design.knobs.{name} must be one of {', '.join(FIGURES)}, or nodes.0. and one of "
            "them; try device.peak_flops."
        )
    group, figure = match.groups()
    part = figure.split(".")[0]
    if group is None:
        every: list[Place] = [*_groups_with(part, cluster)]
        return [*every, None] if part == "inter_node" else every
    alone = _groups_with(part, cluster)
    if part == "device":
        devices = [own.device.name for own in cluster.groups]
        alone = [index for index in alone if devices.count(devices[index]) == 1]
    near = f"nodes.{closest(int(group), alone)}.{figure}" if alone else figure
    rule = f"name a node group, counted from 0, whose {part} no other shares"
    require(int(group) in alone, f"design.knobs.{name}", rule, near)
    return [int(group)]


def _groups_with(part: str, cluster: Cluster) -> list[int]:
    """Return the node groups that have a part of their own."""
    every = range(len(cluster.groups))
    if part != "inter_node":
        return list(every)
    return [index for index in every if cluster.groups[index].inter_node is not None]


def reference(name: str, cluster: Cluster) -> float:
    """Return the value of a figure in SI units, of one place that has it."""
    part, field = figure_of(name).split(".")
    place = places(name, cluster)[-1]
    owner = getattr(_holder(cluster, place), part)
    return float(getattr(owner, field))


def _holder(cluster: Any, place: Place) -> Any:
    """Return the node group of a place, or the cluster itself."""
    return cluster if place is None else cluster.groups[place]


def scaled(problem: Problem, factors: Iterable[Factor]) -> Problem:
    """Return the problem with figures times factors."""
    cluster = problem.cluster
    for name, place, factor in factors:
        part, field = figure_of(name).split(".")
        holder = _holder(cluster, place)
        owner = getattr(holder, part)
        value = getattr(owner, field) * factor
        owner = replace(owner, **{field: value})
        holder = replace(holder, **{part: owner})
        if place is None:
            cluster = holder
        else:
            groups = list(cluster.groups)
            groups[place] = holder
            cluster = replace(cluster, groups=tuple(groups))
    return replace(problem, cluster=cluster)


def scaled_config(problem: Problem, factors: Mapping[str, float]) -> Config:
    """Return the problem's configuration with figures, by name, times factors."""
    config = deepcopy(problem.config)
    cluster: Any = config.cluster
    for name, factor in factors.items():
        part = figure_of(name).split(".")[0]
        owners = {}
        for place in places(name, problem.cluster):
            owner = getattr(cluster if place is None else cluster.nodes[place], part)
            if part == "device":
                owner = cluster.devices[owner]
            owners[id(owner)] = owner  # groups may share a device
        key = FIGURES[figure_of(name)]
        for owner in owners.values():
            new = getattr(owner, key)
            if isinstance(new, dict):  # peaks by precision
                new = {kind: peak * factor for kind, peak in new.items()}
            else:
                new *= factor
            setattr(owner, key, new)
    return config
