"""Figures of the hardware that a design may change, by name.

`device.peak_flops` is that of every node group, each times the same factor; `nodes.1.device.peak_flops` is
that of the second group alone. Links are `intra_node` and `inter_node`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from darts_parallel.errors import ConfigError
from darts_parallel.problem import Cluster, Problem

MEMORY = "device.memory"
FIGURES = {
    "device.peak_flops": (1, "peak_TFLOPs"), MEMORY: (1, "memory_GiB"),
    "device.memory_bandwidth": (1, "memory_bandwidth_GBps"), "intra_node.bandwidth": (1, "bandwidth_GBps"),
    "intra_node.latency": (-1, "latency_us"), "inter_node.bandwidth": (1, "bandwidth_GBps"),
    "inter_node.latency": (-1, "latency_us"),
}  # fmt: skip
"""Figures: 1 where more is better or -1 where less is, and the key of the configuration."""


def figure_of(name: str) -> str:
    """Return the name of a figure inside of its node group."""
    return ".".join(name.split(".")[-2:])


def places(name: str, cluster: Cluster) -> list[int | None]:
    """Return the node groups whose figure a name means; None: the network that groups share.

    Errors:
        ConfigError: no such figure or group, or a figure that the cluster cannot change alone.
    """
    figure, groups = figure_of(name), cluster.groups
    first, *numbers = name.removesuffix(figure).rstrip(".").split(".")
    index = int(numbers[0]) if first == "nodes" and len(numbers) == 1 and numbers[0].isdecimal() else None
    if figure not in FIGURES or (first and index is None):
        raise ConfigError(
            f"design.knobs.{name} must be one of {', '.join(FIGURES)}, or nodes.0. and one of them; "
            "try device.peak_flops."
        )
    network = figure.startswith("inter_node")
    if index is None:
        own = [i for i, group in enumerate(groups) if not network or group.inter_node is not None]
        return [*own, None] if network else [*own]
    rule = f"design.knobs.{name} must name"
    if index >= len(groups):
        raise ConfigError(
            f"{rule} one of {len(groups)} node groups, counted from 0; try nodes.{len(groups) - 1}.{figure}."
        )
    alike = [group.device.name for group in groups].count(groups[index].device.name)
    if figure.startswith("device") and alike > 1:
        raise ConfigError(f"{rule} a group with a device of its own, which no other shares; try {figure}.")
    if network and groups[index].inter_node is None:
        raise ConfigError(f"{rule} a group with an inter_node link of its own; try {figure}.")
    return [index]


def owner_of(name: str, place: int | None, cluster: Cluster) -> Any:
    """Return the device or link of one place that has a figure."""
    return getattr(cluster if place is None else cluster.groups[place], figure_of(name).split(".")[0])


def reference(name: str, cluster: Cluster) -> float:
    """Return the value of a figure in SI units, of one place that has it."""
    return float(getattr(owner_of(name, places(name, cluster)[-1], cluster), name.rpartition(".")[2]))


def scaled(problem: Problem, factors: dict[str, Any]) -> Problem:
    """Return the problem with figures, by name, times factors."""
    names = [(name, place) for name in factors for place in places(name, problem.cluster)]
    return scaled_at(problem, [(name, place, factors[name]) for name, place in names])


def scaled_at(problem: Problem, factors: Iterable[tuple[str, int | None, Any]]) -> Problem:
    """Return the problem with figures, by name and place, times factors, which may be tensors."""
    cluster = problem.cluster
    for name, place, factor in factors:
        part, field = figure_of(name).split(".")
        owner = owner_of(name, place, cluster)
        changed = {part: replace(owner, **{field: getattr(owner, field) * factor})}
        if place is None:
            cluster = replace(cluster, **changed)
        else:
            groups = list(cluster.groups)
            groups[place] = replace(groups[place], **changed)
            cluster = replace(cluster, groups=tuple(groups))
    return replace(problem, cluster=cluster)


def overrides_of(problem: Problem, factors: dict[str, float]) -> list[str]:
    """Return overrides of the configuration that multiply its figures by factors."""
    config, values = problem.config.cluster, dict[str, float]()
    for name, factor in factors.items():
        figure = figure_of(name)
        part, key, found = figure.split(".")[0], FIGURES[figure][1], dict[str, float]()
        for place in places(name, problem.cluster):
            node: Any = config if place is None else config.nodes[place]
            where = "cluster" if place is None else f"cluster.nodes.{place}"
            where, owner = f"{where}.{part}", getattr(node, part)
            if part == "device":
                where, owner = f"cluster.devices.{owner}", config.devices[owner]
            value = getattr(owner, key)
            peaks = {f".{kind}": peak for kind, peak in value.items()} if isinstance(value, dict) else {}
            found |= {f"{where}.{key}{kind}": number for kind, number in (peaks or {"": value}).items()}
        for key, number in found.items():
            values[key] = values.get(key, number) * factor
    return [f"{key}={value!r}" for key, value in values.items()]
