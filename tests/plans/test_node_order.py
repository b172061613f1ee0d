"""The order of nodes that the ranks of a plan file imply."""

from typing import Any

import pytest

from darts_parallel.errors import PlanError
from darts_parallel.plans._fields import node_order_of, offload_of

CLUSTER = {"nodes": [{"count": 2, "gpus": 2}, {"count": 1, "gpus": 4}]}
"""Nodes 0 and 1 have the ranks 0-1 and 2-3, node 2 has the ranks 4-7."""


def order(*ranks: Any, cluster: Any = CLUSTER) -> tuple[int, ...]:
    return node_order_of({"cluster": cluster, "stages": [{"ranks": own} for own in ranks]})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (([4, 5, 6, 7], [2, 3], [0, 1]), (2, 1, 0)),
        (([2, 3, 0, 1], [4, 5, 6, 7]), (1, 0, 2)),
        (([0, 1], [2, 3], [4, 5, 6, 7]), ()),
        # a node whose ranks are torn apart, cut short, unknown or no numbers
        (([1, 0], [2, 3], [4, 5, 6, 7]), ()),
        (([2, 3], [4, 5], [0, 1], [6, 7]), ()),
        (([4, 5, 6],), ()),
        (([8, 9],), ()),
        (([2, 3], ["0", 1]), ()),
        (([2, 3], [True, 1]), ()),
        ((), ()),
    ],
)
def test_ranks_imply_the_order_of_whole_nodes(
    ranks: tuple[list[Any], ...], expected: tuple[int, ...]
) -> None:
    assert order(*ranks) == expected


def test_parts_of_each_node_in_every_stage_imply_an_order_with_several_places_of_a_node() -> None:
    nodes = {"nodes": [{"count": 2, "gpus": 4}]}
    assert order([0, 1, 4, 5], [2, 3, 6, 7], cluster=nodes) == (0, 1, 0, 1)
    assert order([2, 3, 4, 5], [0, 1, 6, 7], cluster=nodes) == ()
    assert order([0, 4, 5, 6], [1, 2, 3, 7], cluster=nodes) == ()


@pytest.mark.parametrize(
    "group", [{"count": 1, "gpus": 0}, {"count": -1, "gpus": -2}, {"count": "1"}]
)
def test_nodes_without_gpus_imply_no_order(group: dict[str, Any]) -> None:
    assert order([0], cluster={"nodes": [group]}) == ()


@pytest.mark.parametrize(("share", "near"), [(1.5, 1.0), (-0.5, 0.0), (True, 0.0), ("half", 0.0)])
def test_a_share_outside_0_to_1_is_answered_with_the_closest_one(share: Any, near: float) -> None:
    stages = [{"offload": {"activation": share}}]
    with pytest.raises(PlanError, match=rf"must lie between 0 and 1; try {near}\.$"):
        offload_of(stages, (0,))


def test_chunks_repeat_ranks_and_files_without_a_cluster_imply_nothing() -> None:
    stages = [{"ranks": [2, 3]}, {"ranks": [0, 1]}, {"ranks": [2, 3], "chunk": 1}, "no stage"]
    assert node_order_of({"cluster": CLUSTER, "stages": stages}) == (1, 0)
    assert order([2, 3], [0, 1], cluster=None) == ()
