"""Seconds between layers, by hand: 10 GB/s and 5 us inside a node of the toy cluster."""

import pytest
import torch

from darts_parallel import load_problem
from darts_parallel.cost._transitions import boundary_seconds, reshard_seconds, stored_bytes
from darts_parallel.cost.compute import alignment
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.cluster import BoundaryTopology
from tests.support.layer_kinds import TOY


def test_a_change_of_layout_moves_the_missing_bytes_both_ways() -> None:
    cluster = load_problem(TOY).cluster
    layouts = [LayerStrategy(1, 4), LayerStrategy(2, 2, sequence_parallel=True)]
    stored = torch.tensor([[[8e6, 4e6]]], dtype=torch.float64)
    found = reshard_seconds(cluster, [(0, 4)], stored, layouts)[0, 0, 0]
    # half of what either layout needs is missing
    once = (4e6 / 2 + 8e6 / 2) / 10e9 + 2 * 5e-6
    torch.testing.assert_close(found, torch.tensor([[0.0, once], [once, 0.0]], dtype=torch.float64))


def test_an_output_has_bytes_of_its_width_on_the_ranks_that_divide_it() -> None:
    layers = load_problem(TOY).model.layers
    layouts = [LayerStrategy(4, 1), LayerStrategy(2, 2, sequence_parallel=True)]
    tokens = torch.tensor([[64.0, 32.0]], dtype=torch.float64)
    found = stored_bytes(layers, layouts, tokens, width=2)[0].tolist()
    assert len(found) == len(layers) - 1
    for layer, own in zip(layers[:-1], found, strict=True):
        parts = 4 if layer.kind == "head" else 1  # logits are divided without sequence parallelism
        assert own == [128 * layer.output_elements / parts, 64 * layer.output_elements / 2]


@pytest.mark.parametrize("rings", [1, 4])
def test_slices_that_cross_a_boundary_are_gathered_by_the_receiving_ranks(rings: int) -> None:
    shared = (
        f"cluster.nodes.0.intra_node.shared={str(rings > 1).lower()}"  # by all four GPUs of a node
    )
    cluster, whole = load_problem([*TOY, shared]).cluster, 8e6
    boundary = BoundaryTopology(0, True, 4, 0, 4)
    stored = torch.full((1, 1, 1), whole, dtype=torch.float64)
    found = boundary_seconds(cluster, [boundary], stored, [LayerStrategy(4, 1)])
    message, gather = rings * whole / 4 / 10e9 + 5e-6, rings * 3 / 4 * whole / 10e9 + 3 * 5e-6
    assert float(found) == pytest.approx(2 * (message + gather), rel=1e-12)


def test_sides_that_are_no_multiple_of_64_elements_are_slow() -> None:
    problem = load_problem([*TOY, "cluster.devices.toy.misaligned_efficiency=0.5"])
    sizes = torch.tensor([128.0, 96.0, 63.0], dtype=torch.float64)
    assert alignment(sizes, problem.cluster.groups[0].device).tolist() == [1.0, 0.5, 0.5]
