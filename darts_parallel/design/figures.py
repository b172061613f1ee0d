"""Figures of the hardware that a design may change, by name.

`device.peak_flops` is that of every node group, each times the same factor; `nodes.1.device.peak_flops` is
that of the second group alone. Links are `intra_node` and `inter_node`.
"""

from dataclasses import replace
from typing import Any

from darts_parallel.config import NodeGroupConfig
from darts_parallel.errors import ConfigError
from darts_parallel.problem import Cluster, NodeGroup, Problem

MEMORY = "device.memory"
FIGURES = {
    "device.peak_flops": 1,
    "device.memory": 1,
    "device.memory_bandwidth": 1,
    "intra_node.bandwidth": 1,
    "intra_node.latency": -1,
    "inter_node.bandwidth": 1,
    "inter_node.latency": -1,
}
"""Figures, and 1 where more is better, -1 where less is."""
KEYS = {
    "device.memory": "memory_GiB",
    "device.memory_bandwidth": "memory_bandwidth_GBps",
    "intra_node.bandwidth": "bandwidth_GBps",
    "intra_node.latency": "latency_us",
    "inter_node.bandwidth": "bandwidth_GBps",
    "inter_node.latency": "latency_us",
}
"""Keys of the configuration that hold them; `peak_flops` is all of `peak_TFLOPs`."""


def split_name(name: str) -> tuple[int | None, str]:
    """Return the node group of a figure (None: all of them) and its name inside of one.

    Errors:
        ConfigError: no such figure.
    """
    parts = name.split(".")
    group = int(parts[1]) if len(parts) == 4 and parts[0] == "nodes" and parts[1].isdecimal() else None
    figure = name if group is None else ".".join(parts[2:])
    if figure not in FIGURES:
        raise ConfigError(
            f"design.knobs.{name} must be one of {', '.join(FIGURES)}, or nodes.0. and one of them; "
            "try device.peak_flops."
        )
    return group, figure


def reference(name: str, cluster: Cluster) -> float:
    """Return the value of a figure in SI units, of the first group that has it."""
    group, figure = split_name(name)
    part, field = figure.split(".")
    first = cluster.groups[group or 0]
    owner: Any = {
        "device": first.device,
        "intra_node": first.intra_node,
        "inter_node": cluster.nic(group or 0),
    }[part]
    return float(getattr(owner, field))


def members(name: str, cluster: Cluster) -> list[int]:
    """Return the node groups whose figure a name means.

    Errors:
        ConfigError: the cluster has no such group, or cannot change its figure alone.
    """
    group, figure = split_name(name)
    if group is None:
        return list(range(len(cluster.groups)))
    if group >= len(cluster.groups):
        raise ConfigError(
            f"design.knobs.{name} must name one of {len(cluster.groups)} node groups, counted from 0; "
            f"try nodes.{len(cluster.groups) - 1}.{figure}."
        )
    alike = [g.device.name for g in cluster.groups].count(cluster.groups[group].device.name)
    if figure.startswith("device.") and alike > 1:
        raise ConfigError(
            f"design.knobs.{name} must name a group with a device of its own, not one that others share; "
            f"try {figure}."
        )
    if figure.startswith("inter_node.") and cluster.groups[group].inter_node is None:
        raise ConfigError(
            f"design.knobs.{name} must name a group with an inter_node link of its own; try {figure}."
        )
    return [group]


def scaled(problem: Problem, factors: dict[str, Any]) -> Problem:
    """Return the problem with figures times factors, which may be tensors; memory excepted.

    Args:
        factors: By the name of the figure.
    """
    cluster = problem.cluster
    groups, between = list(cluster.groups), cluster.inter_node
    for name, factor in factors.items():
        figure = split_name(name)[1]
        for index in members(name, cluster):
            groups[index] = _group(groups[index], figure, factor)
        part, field = figure.split(".")
        if part == "inter_node" and split_name(name)[0] is None:
            between = replace(between, **{field: getattr(between, field) * factor})
    return replace(problem, cluster=replace(cluster, groups=tuple(groups), inter_node=between))


def _group(group: NodeGroup, figure: str, factor: Any) -> NodeGroup:
    """Return a node group with one figure times a factor."""
    part, field = figure.split(".")
    owner: Any = getattr(group, part)
    if owner is None:
        return group
    return replace(group, **{part: replace(owner, **{field: getattr(owner, field) * factor})})


def overrides_of(problem: Problem, factors: dict[str, float]) -> list[str]:
    """Return overrides of the configuration that multiply its figures by factors."""
    config, values = problem.config.cluster, dict[str, float]()
    for name, factor in factors.items():
        group, figure = split_name(name)
        for index in members(name, problem.cluster):
            node = config.nodes[index]
            for key, value in _places(figure, index, node, config):
                values.setdefault(key, value * factor)
        part = figure.split(".")[0]
        if part == "inter_node" and group is None:
            key = KEYS[figure]
            values[f"cluster.inter_node.{key}"] = getattr(config.inter_node, key) * factor
    return [f"{key}={value!r}" for key, value in values.items()]


def _places(figure: str, index: int, node: NodeGroupConfig, config: Any) -> list[tuple[str, float]]:
    """Return keys and values of the configuration that hold a figure of one node group."""
    part = figure.split(".")[0]
    if part == "device":
        place, device = f"cluster.devices.{node.device}", config.devices[node.device]
        if figure == "device.peak_flops":
            return [(f"{place}.peak_TFLOPs.{kind}", peak) for kind, peak in device.peak_TFLOPs.items()]
        return [(f"{place}.{KEYS[figure]}", getattr(device, KEYS[figure]))]
    link = getattr(node, part)
    return (
        []
        if link is None
        else [(f"cluster.nodes.{index}.{part}.{KEYS[figure]}", getattr(link, KEYS[figure]))]
    )
