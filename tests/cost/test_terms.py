"""The contract of every term of `cost/terms`: names, bytes, and an explanation that sums to the totals."""

from dataclasses import replace

import pytest
import torch

from darts_parallel import load_problem
from darts_parallel.cost.compute import ATTENTION_HALF_SIZE, stream_seconds
from darts_parallel.cost.layer_costs import MESSAGES, TIME_TERMS, layer_costs
from darts_parallel.cost.sharding import context_gather
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.table import build_tables
from darts_parallel.cost.terms import FORMULAS, TERMS
from darts_parallel.plans.space import outer_spaces
from tests.support.layer_kinds import HYBRID

CLUSTER = ["cluster=toy", "training=toy", "cluster.devices.toy.host_bandwidth_GBps=25"]
USERS = {
    "adapters": ["model=toy", *CLUSTER, "training.lora_rank=4"],
    "experts": ["model=toy_moe", "cluster=toy", "training=toy"],
    "offload": [
        "model=toy",
        *CLUSTER,
        "space.offload=[activation,optimizer]",
        "cluster.devices.toy.memory_GiB=0.1003",
    ],
    "state-space scan": HYBRID,
}
"""A problem that has each term: a new term adds a row."""


def test_every_name_belongs_to_one_term_and_has_a_formula() -> None:
    assert {term.name for term in TERMS} == set(USERS)
    assert len({term.name for term in TERMS}) == len(TERMS)
    assert sum(len(term.formulas) for term in TERMS) == len(FORMULAS)
    assert all(term.name in term.formulas for term in TERMS)
    assert len(set(TIME_TERMS)) == len(TIME_TERMS)
    assert {term.message for term in TERMS if term.message} <= set(MESSAGES)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_layer_with_the_term_has_bytes_and_seconds_that_can_be(term) -> None:  # type: ignore[no-untyped-def]
    problem = load_problem(USERS[term.name])
    space = outer_spaces(problem)[0]
    topology = problem.cluster.stage_topology(0, space.pp)
    stage = StageContext.build(problem, topology, space)
    for layer in filter(term.present, problem.model.kinds[0]):
        own = term.layer_cost(stage, layer)
        assert bool(((own.kept >= own.dropped) & (own.dropped >= 0) & (own.working >= 0)).all())
        assert bool(((own.forward >= 0) & (own.recomputed >= 0) & (own.weight_gradient >= 0)).all())
        costs = layer_costs(stage, layer, counts_table=True)
        assert bool((costs.backward >= costs.weight_gradient).all())
        parts = torch.stack([value.expand_as(costs.forward) for value in costs.terms.values()]).sum(
            0
        )
        torch.testing.assert_close(parts, costs.forward + costs.backward, rtol=1e-12, atol=0.0)


def test_a_scan_over_context_parallel_nodes_takes_their_own_link() -> None:
    """The link of the cluster, which no stage of these nodes uses, changes nothing."""
    slow, fast = (
        "{bandwidth_GBps: 0.001, latency_us: 5.0}",
        "{bandwidth_GBps: 9.0, latency_us: 1.0}",
    )
    seconds = []
    for between in (slow, fast):
        node = f"count: 2, gpus: 4, device: toy, intra_node: {fast}, inter_node: {slow}"
        links = [f"cluster.nodes=[{{{node}}}]", f"cluster.inter_node={between}"]
        problem = load_problem([*HYBRID, "space.cp=8", "space.pp=1", *links])
        seconds.append(build_tables(problem)[0].time)
    torch.testing.assert_close(seconds[0], seconds[1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (2, 4)])
def test_a_scan_sends_the_heads_of_its_tensor_rank_to_its_context_ranks(tp: int, cp: int) -> None:
    problem = load_problem([*HYBRID, f"space.cp={cp}", f"space.tp={tp}", "space.pp=1"])
    space = outer_spaces(problem)[0]
    stage = StageContext.build(problem, problem.cluster.stage_topology(0, 1), space)
    (scan,) = {layer for layer in problem.model.kinds[0] if layer.scan is not None}
    term = next(term for term in TERMS if term.name == "state-space scan")
    none = torch.zeros(1, dtype=torch.float64)
    forward, backward = term.message_seconds(stage, scan, (none, none))
    # the joint product's 2 x 128 + 2 x 4 x 16 + 8 columns and the scan's 128, in bf16, of a rank's heads
    size = 2 * (256 + 128 + 8 + 128) * stage.choices.tokens / tp
    assert forward.tolist() == context_gather(stage, size).tolist() == backward.tolist()
    assert bool((forward > 0).all())


@pytest.mark.parametrize("head", [16, 1])
def test_a_scan_multiplies_chunks_or_runs_on_the_vector_units(head: int) -> None:
    problem = load_problem([*HYBRID, "space.pp=1", "space.tp=2"])
    stage = StageContext.build(
        problem, problem.cluster.stage_topology(0, 1), outer_spaces(problem)[0]
    )
    (layer,) = {layer for layer in problem.model.kinds[0] if layer.scan is not None}
    assert layer.scan is not None
    scan, device = replace(layer.scan, head_dim=head), stage.device
    term = next(term for term in TERMS if term.name == "state-space scan")
    tokens = stage.choices.tokens / 2
    rate = device.half_flops * device.attention_efficiency * head / (head + ATTENTION_HALF_SIZE)
    if head == 1:
        rate = device.half_flops / 16
    memory = device.memory_bandwidth * device.memory_efficiency
    for factor in (1.0, 1e6):  # bytes decide, or arithmetic does
        more = {name: factor * getattr(scan, name) for name in ("flops", "flops_again")}
        own = term.layer_cost(stage, replace(layer, scan=replace(scan, **more)))
        seconds = []
        for flops, elements in (
            (scan.flops, scan.elements),
            (scan.flops_again, scan.elements_again),
        ):
            moved = stream_seconds(2 * tokens * elements, device)
            assert float(moved.max()) >= float((2 * tokens * elements / memory).max()) * 0.99
            seconds.append(torch.maximum(tokens * factor * flops / rate, moved))
        torch.testing.assert_close(own.forward, seconds[0])
        torch.testing.assert_close(own.backward, 2 * seconds[0] + seconds[1])
