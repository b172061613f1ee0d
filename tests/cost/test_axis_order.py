"""Stages on parts of every node (`space.axis_order=tp-pp-dp`): places, prices, files and refusals."""

import json
from dataclasses import replace

import pytest
import torch

from darts_parallel.config import EXPORTS, PIPELINES_INSIDE, PIPELINES_OUTSIDE, read_trainer
from darts_parallel.cost import build_tables, evaluate
from darts_parallel.cost.table import PlacedSpace
from darts_parallel.errors import ConfigError, PlanError, UnsupportedError
from darts_parallel.exact import find_uniform_plan
from darts_parallel.export import export_plan
from darts_parallel.plans import Plan, check_plan, job_facts, outer_spaces, trainer_runs_plan
from darts_parallel.problem import Problem, load_problem, order_inside_nodes

SMALL = (
    "model=llama2_7b",
    "model.num_layers=6",
    "training=llama2_7b",
    "training.global_batch_size=64",
    "cluster=h100_8x8",
    "nodes=4",
    "space=uniform",
)
SLOW = (
    "model=llama3_8b",
    "model.num_layers=32",
    "training=llama3_8b",
    "training.global_batch_size=2048",
    "cluster=box",
    "gpu=l40s",
    "gpus=8",
    "cluster.inter_node.bandwidth_GBps=2.5",
)


def problem_of(order: str, *changes: str) -> Problem:
    return load_problem([*SMALL, f"space.axis_order={order}", *changes])


def inside_plan(problem: Problem, pp: int = 2) -> Plan:
    space = next(own for own in outer_spaces(problem) if own.pp == pp and own.node_order)
    layers = (space.choices[0],) * len(problem.model.layers)
    boundaries = tuple(round(k * len(layers) / pp) for k in range(pp + 1))
    return Plan(4, boundaries, layers, node_order=space.node_order)


def runs(name: str, problem: Problem) -> bool:
    """Return whether a trainer takes the plan with pipelines inside nodes."""
    job = job_facts(problem.model, problem.training, problem.software)
    return trainer_runs_plan(read_trainer(name), job, problem.model, inside_plan(problem))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_every_stage_has_an_equal_part_of_each_node_and_sends_inside_it(pp: int) -> None:
    cluster = problem_of(PIPELINES_INSIDE).cluster
    arranged = cluster.arranged(order_inside_nodes(cluster, pp))
    assert sorted(arranged.pipeline_ranks) == list(range(32))
    for stage in range(pp):
        assert arranged.stage_topology(stage, pp).counts == (8 // pp,) * 4
        boundary = arranged.boundary_topology(stage, pp)
        assert boundary.inside_node
        assert boundary.senders == 8, "all stages of a node send at once"
        assert boundary.receivers == 8 // pp
        assert not cluster.boundary_topology(stage, pp).inside_node or 32 // pp < 8
    size = 32 // pp
    first = arranged.pipeline_ranks[:size]
    assert first == tuple(8 * node + k for node in range(4) for k in range(8 // pp))


@pytest.mark.parametrize("pp", [1, 3, 16])
def test_there_is_no_such_order_unless_stages_divide_the_gpus_of_several_nodes(pp: int) -> None:
    assert order_inside_nodes(problem_of(PIPELINES_INSIDE).cluster, pp) == ()
    assert order_inside_nodes(load_problem(["cluster=h100_1x8"]).cluster, 2) == ()
    assert order_inside_nodes(load_problem(["cluster=a10_a100_mixed"]).cluster, 2) == ()


@pytest.mark.parametrize("pp", [2, 4])
def test_a_stage_costs_what_its_part_of_the_nodes_costs_with_its_share_of_the_network(
    pp: int,
) -> None:
    """The stage of `pp` equals one stage on nodes of `8 / pp` GPUs whose network is `1 / pp` as wide."""
    problem = problem_of(PIPELINES_INSIDE, f"space.pp={pp}")
    (table,) = build_tables(problem)
    bandwidth = problem.config.cluster.inter_node.bandwidth_GBps / pp
    alone = problem_of(
        PIPELINES_OUTSIDE,
        "space.pp=1",
        f"gpus={8 // pp}",
        f"cluster.inter_node.bandwidth_GBps={bandwidth}",
    )
    (other,) = build_tables(alone)
    kept = [other.choices.index(choice) for choice in table.choices]
    assert len(kept) > 10
    here, there = (own.num_micro_batches.tolist().index(4) for own in (table, other))
    for name in ("forward", "backward", "sync"):
        found = getattr(table, name)[here, 0, 1:-2]
        expected = getattr(other, name)[there, 0, 1:-2][..., kept]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_own_terms_see_every_stage_begin_on_the_first_node() -> None:
    problem = problem_of(PIPELINES_INSIDE, "space.pp=[1,4]")
    spaces = outer_spaces(problem)
    assert [space.pp for space in spaces] == [1, 4]
    for space in spaces:
        placed = PlacedSpace.of(problem.cluster, space, problem.config)
        assert placed.stage_node.tolist() == [0] * space.pp
    outside = problem_of(PIPELINES_OUTSIDE, "space.pp=8")
    placed = PlacedSpace.of(outside.cluster, outer_spaces(outside)[0], outside.config)
    assert placed.stage_node.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_messages_between_stages_do_not_feel_the_network() -> None:
    found = []
    tied = {}
    for bandwidth in (1.0, 100.0):
        change = f"cluster.inter_node.bandwidth_GBps={bandwidth}"
        tables = build_tables(problem_of("null", "space.pp=2", "model.tie_embeddings=true", change))
        for table in tables:
            tied[bandwidth, bool(table.node_order)] = table.per_iteration.amax()
        sent = {bool(table.node_order): table.p2p.diagonal(dim1=-2, dim2=-1) for table in tables}
        found.append(sent)
    slow, fast = found
    assert torch.equal(slow[True], fast[True])
    assert (slow[False] > 10.0 * fast[False]).all()
    # nor does the gradient of the table that the first and the last stage share
    assert tied[1.0, True] == tied[100.0, True] > 0.0
    assert tied[1.0, False] > 10.0 * tied[100.0, False]


def test_a_slow_network_and_large_batches_want_pipelines_inside_nodes() -> None:
    tables = build_tables(problem_of("null", *SLOW))
    outside = find_uniform_plan([table for table in tables if not table.node_order])
    both = find_uniform_plan(tables)
    assert both.cost < 0.98 * outside.cost
    assert both.best is not None
    assert tables[both.best.table].order_name == PIPELINES_INSIDE


def test_a_file_keeps_the_order_of_the_ranks() -> None:
    problem = problem_of(PIPELINES_INSIDE)
    own = inside_plan(problem)
    ranks = problem.cluster.arranged(own.node_order).pipeline_ranks
    data = own.to_dict(problem.model.layer_names, ranks)
    data["cluster"] = {"nodes": [{"count": 4, "gpus": 8}]}
    again = Plan.from_dict(json.loads(json.dumps(data)))
    assert again == own
    assert f"pp 2 · {PIPELINES_INSIDE}" in again.describe(64)
    check_plan(again, problem.model, problem.cluster, problem.training, problem.measured)
    assert evaluate(again, problem) == evaluate(own, problem)
    assert evaluate(replace(own, node_order=()), problem) != evaluate(own, problem)


def test_a_plan_whose_tensor_parallel_groups_do_not_divide_the_part_of_a_node_is_refused() -> None:
    problem = problem_of(PIPELINES_INSIDE)
    own = inside_plan(problem, pp=4)
    wide = tuple(replace(layer, tp=4, dp=2, sequence_parallel=True) for layer in own.layers)
    arguments = (problem.model, problem.cluster, problem.training, problem.measured)
    with pytest.raises(PlanError, match="must name each of the 4 nodes once"):
        check_plan(replace(own, layers=wide), *arguments)
    with pytest.raises(PlanError, match="must name each of the 4 nodes once"):
        check_plan(
            replace(own, cp=4, layers=tuple(replace(one, dp=2) for one in own.layers)), *arguments
        )
    with pytest.raises(PlanError, match="must name each of the 4 nodes once"):
        check_plan(replace(own, node_order=own.node_order[:8]), *arguments)


def test_megatron_gets_its_flag_and_other_trainers_refuse() -> None:
    problem = problem_of(PIPELINES_INSIDE, "trainer=megatron", "space.pp=2")
    exported = export_plan(problem, inside_plan(problem), "megatron")
    assert "--use-tp-pp-dp-mapping" in exported.files["megatron.sh"]
    assert not any("start the nodes" in note for note in exported.notes)
    free = problem_of(PIPELINES_INSIDE)
    with pytest.raises(UnsupportedError, match="tp-pp-dp, and its ranks count pp last"):
        export_plan(free, inside_plan(free), "torchtitan")
    with pytest.raises(
        ConfigError, match="with trainer=torchtitan, whose ranks count pp last; try tp-dp-pp"
    ):
        problem_of(PIPELINES_INSIDE, "trainer=torchtitan")
    assert [name for name in EXPORTS if runs(name, problem)] == ["megatron"]
    for trainer in ("torchtitan", "torch"):
        assert not any(
            own.node_order for own in outer_spaces(problem_of("null", f"trainer={trainer}"))
        )


def test_groups_of_tp_and_cp_divide_the_part_of_a_node_and_experts_stay_out() -> None:
    spaces = outer_spaces(problem_of(PIPELINES_INSIDE, "space.cp=null"))
    inside = [own for own in spaces if own.node_order]
    assert {own.cp for own in inside} == {1, 2, 4}
    for own in inside:
        assert all(8 // own.pp % (choice.tp * own.cp) == 0 for choice in own.choices)
    tiny = load_problem(["model=toy_moe", "cluster=toy", "training=toy_moe"])
    assert not any(own.node_order for own in outer_spaces(tiny))


def test_experts_are_named_where_they_forbid_the_order() -> None:
    job = ["model=toy_moe", "cluster=toy", "training=toy_moe", "space.pp=2"]
    with pytest.raises(ConfigError, match=r"space.axis_order=tp-pp-dp must .* without experts"):
        outer_spaces(load_problem([*job, "space.axis_order=tp-pp-dp"]))


def test_an_order_that_no_pipeline_can_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"must have several equal nodes.*try space.axis_order=null"
    ):
        outer_spaces(problem_of(PIPELINES_INSIDE, "space.pp=2", "space.tp=8"))
