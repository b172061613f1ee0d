"""Problems on other hardware."""

from dataclasses import replace
from typing import Any

from darts_parallel.problem.problem import Problem


def scaled(problem: Problem, name: str, factor: Any) -> Problem:
    """Return the problem with one figure of its hardware multiplied.

    Args:
        problem: A problem.
        name: "devices.NAME.FIGURE" (of every device), "intra_node.FIGURE" or "inter_node.FIGURE".
        factor: A number, or a tensor to differentiate by.
    """
    owner, figure = name.rsplit(".", 1)
    cluster = problem.cluster
    if owner == "inter_node":
        link = replace(cluster.inter_node, **{figure: getattr(cluster.inter_node, figure) * factor})
        return replace(problem, cluster=replace(cluster, inter_node=link))
    part = "intra_node" if owner == "intra_node" else "device"
    groups = []
    for group in cluster.groups:
        old = getattr(group, part)
        new = replace(old, **{figure: getattr(old, figure) * factor})
        groups.append(replace(group, **{part: new}))
    return replace(problem, cluster=replace(cluster, groups=tuple(groups)))
