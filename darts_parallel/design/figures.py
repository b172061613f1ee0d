"""Figures of the hardware that a design may change, by name.

`device.peak_flops` is that of every node group, each times the same factor; `nodes.1.device.peak_flops` is
that of the second group alone. Links are `intra_node` and `inter_node`.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from darts_parallel.config import Config, require
from darts_parallel.errors import ConfigError, closest
from darts_parallel.problem import Cluster, Problem

MEMORY = "device.memory"
FIGURES = {
    "device.peak_flops": (1, "peak_TFLOPs"),
    MEMORY: (1, "memory_GiB"),
    "device.memory_bandwidth": (1, "memory_bandwidth_GBps"),
    "intra_node.bandwidth": (1, "bandwidth_GBps"),
    "intra_node.latency": (-1, "latency_us"),
    "inter_node.bandwidth": (1, "bandwidth_GBps"),
    "inter_node.latency": (-1, "latency_us"),
}
"""Figures: 1 where more is better or -1 where less is, and the key of the configuration."""
Place = int | None  # number of a node group; None: the network that groups share


def figure_of(name: str) -> str:
    """Return the name of a figure inside of its node group."""
    return ".".join(name.split(".")[-2:])


def places(name: str, cluster: Cluster) -> list[Place]:
    """Return the places whose figure a name means; refuse what the cluster lacks or cannot change alone."""
    match = re.fullmatch(r"(?:nodes\.(\d{1,4})\.)?(\w+\.\w+)", name)
    if match is None or match[2] not in FIGURES:
        raise ConfigError(
            f"design.knobs.{name} must be one of {', '.join(FIGURES)}, or nodes.0. and one of "
            "them; try device.peak_flops."
        )
    part, devices = match[2].split(".")[0], [group.device.name for group in cluster.groups]
    own = [
        i for i, g in enumerate(cluster.groups) if part != "inter_node" or g.inter_node is not None
    ]
    if match[1] is None:
        return [*own, None] if part == "inter_node" else [*own]
    alone = [i for i in own if part != "device" or devices.count(devices[i]) == 1]
    if int(match[1]) not in alone:
        near = f"nodes.{closest(int(match[1]), alone)}.{match[2]}" if alone else match[2]
        rule = f"name a node group, counted from 0, whose {part} no other shares"
        require(False, f"design.knobs.{name}", rule, near)
    return [int(match[1])]


def reference(name: str, cluster: Cluster) -> float:
    """Return the value of a figure in SI units, of one place that has it."""
    place, (part, key) = places(name, cluster)[-1], figure_of(name).split(".")
    return float(getattr(getattr(cluster if place is None else cluster.groups[place], part), key))


def scaled(problem: Problem, factors: Iterable[tuple[str, Place, Any]]) -> Problem:
    """Return the problem with figures, by name and place, times factors, which may be tensors."""
    cluster = problem.cluster
    for name, place, factor in factors:
        part, key = figure_of(name).split(".")
        holder: Any = cluster if place is None else cluster.groups[place]
        owner = getattr(holder, part)
        holder = replace(holder, **{part: replace(owner, **{key: getattr(owner, key) * factor})})
        groups = (holder if i == place else group for i, group in enumerate(cluster.groups))
        cluster = holder if place is None else replace(cluster, groups=tuple(groups))
    return replace(problem, cluster=cluster)


def scaled_config(problem: Problem, factors: Mapping[str, float]) -> Config:
    """Return the problem's configuration with figures, by name, times factors."""
    config = deepcopy(problem.config)
    cluster = config.cluster
    for name, factor in factors.items():
        part, key = figure_of(name).split(".")[0], FIGURES[figure_of(name)][1]
        nodes: list[Any] = [
            cluster if p is None else cluster.nodes[p] for p in places(name, problem.cluster)
        ]
        parts = (getattr(node, part) for node in nodes)
        owners = {id(o): o for o in (cluster.devices[o] if part == "device" else o for o in parts)}
        for owner in owners.values():
            old = getattr(owner, key)
            peaks = (
                {kind: peak * factor for kind, peak in old.items()}
                if isinstance(old, dict)
                else None
            )
            setattr(owner, key, peaks or old * factor)
    return config
