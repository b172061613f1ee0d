import pytest
import torch

from darts_parallel.cost.collectives import RingGroup, all_reduce, p2p, reduce_scatter, single_ring
from darts_parallel.problem.cluster import Link
from darts_parallel.problem.problem import load_problem

INTRA, INTER = Link(100e9, 2e-6), Link(20e9, 10e-6)


def _group(local: int, nodes: int, gpus: int, intra: Link = INTRA) -> RingGroup:
    sizes = (torch.tensor([float(x)], dtype=torch.float64) for x in (local, nodes, gpus))
    return RingGroup(*sizes, intra, INTER)


def test_ring_all_reduce_inside_a_node() -> None:
    size = torch.tensor([1e9], dtype=torch.float64)
    expected = 2 * 7 / 8 * 1e9 / 100e9 + 2 * 3 * 2e-6
    assert float(all_reduce(size, _group(8, 1, 8))) == pytest.approx(expected)


def test_rings_share_a_nodes_link() -> None:
    size = torch.tensor([1e9], dtype=torch.float64)
    # 4 data-parallel groups of one rank a node (tp = 4): 4 rings over one link of 20 GB/s
    expected = (3 / 4) * 1e9 * 4 / 20e9 + 2 * 10e-6
    assert float(reduce_scatter(size, _group(1, 4, 4))) == pytest.approx(expected)
    # one group of 4 ranks a node: each ring carries a quarter, so the link carries the tensor once
    whole = float(reduce_scatter(size, _group(4, 4, 4)))
    inside = 3 / 4 * 1e9 / 100e9 + 2 * 2e-6
    assert whole == pytest.approx(inside + (3 / 4) * 1e9 / 20e9 + 2 * 10e-6)


def test_a_shared_link_inside_a_node_is_divided_by_its_groups() -> None:
    size = torch.tensor([1e9], dtype=torch.float64)
    shared = Link(INTRA.bandwidth, 0.0, shared=True)
    alone = float(all_reduce(size, _group(2, 1, 8, Link(INTRA.bandwidth, 0.0))))
    assert float(all_reduce(size, _group(2, 1, 8, shared))) == pytest.approx(4 * alone)


def test_without_a_switch_a_group_has_the_links_between_its_gpus() -> None:
    size, ways = torch.tensor([7e9], dtype=torch.float64), Link(70e9, 0.0, peer_links=7)
    assert float(p2p(size, 1, ways, inside_node=True)) == pytest.approx(0.7)
    # an all-gather of n GPUs: each sends its n-th part to the n - 1 others, by a link of 10 GB/s each
    for n in (2, 4, 8):
        assert float(reduce_scatter(size, _group(n, 1, 8, ways))) == pytest.approx(0.7 / n)
    assert float(reduce_scatter(size, _group(1, 1, 8, ways))) == 0.0
    assert float(p2p(size, 1, ways, inside_node=False)) == pytest.approx(0.1)


def test_p2p_divides_the_link_between_nodes_by_its_senders() -> None:
    size = torch.tensor(1e6, dtype=torch.float64)
    assert float(p2p(size, 4, INTER, inside_node=False)) == pytest.approx(4e6 / 20e9 + 10e-6)
    assert float(p2p(size, 4, INTRA, inside_node=True)) == pytest.approx(1e6 / 100e9 + 2e-6)


def test_stages_lie_on_consecutive_ranks() -> None:
    cluster = load_problem(["model=gpt2_xl", "training=gpt2_xl"]).cluster  # 8 nodes of 4
    assert cluster.stage_topology(0, 4).counts == (4, 4)
    assert cluster.stage_topology(0, 16).counts == (2,)
    assert cluster.boundary_topology(0, 16).inside_node
    assert not cluster.boundary_topology(1, 16).inside_node
    assert cluster.stage_topology(0, 2).data_parallel(2) == (2, 4)
    assert cluster.stage_topology(0, 16).data_parallel(1) == (2, 1)


def test_one_ring_sends_the_whole_tensor_by_one_adapter() -> None:
    size = torch.tensor([1e9], dtype=torch.float64)
    group = single_ring(_group(8, 4, 8), torch.tensor([True]))
    expected = 3 / 4 * 1e9 / (20e9 / 8) + 2 * 10e-6
    assert float(reduce_scatter(size, group)) == pytest.approx(expected)
    assert single_ring(_group(8, 1, 8), torch.tensor([True])) == _group(
        8, 1, 8
    )  # inside a node nothing changes
