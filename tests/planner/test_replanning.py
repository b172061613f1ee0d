"""Replanning: the carried-over plan, the warm start, what moves, and the command."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from shutil import copy

import pytest
import torch
from rich.console import Console

from darts_parallel.cli._arguments import flags_first
from darts_parallel.cli._job import Job
from darts_parallel.cli._job_config import replan_config
from darts_parallel.config.composition import composition
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.memory import state_bytes
from darts_parallel.cost.pruning import without_dominated
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import DartsParallelError
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.gradient.descent import search
from darts_parallel.gradient.restarts import RestartBatch
from darts_parallel.plan.space import outer_spaces
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.planner.replanning import carried_over, replan
from darts_parallel.planner.state_moves import moved_state
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.commands import QUIET, Command
from tests.support.random_plans import random_plans
from tests.support.spaces import is_in_space

TOY = ["model=toy", "cluster=toy", "training=toy"]
MIXED = ["model=toy", "cluster=toy_mixed", "training=toy", "space.num_micro_batches=[2,4]"]

PINS = ["space.zero_stage=1", "space.recompute=none", "space.sequence_parallel=false", "search.num_steps=40"]


def plan_of(problem: Problem, pp: int, tp: int, zero: int = 0) -> Plan:
    strategy = LayerStrategy(tp, problem.cluster.num_devices // pp // tp, zero)
    edges = {1: (0, 7), 2: (0, 3, 7), 4: (0, 2, 3, 4, 7)}[pp]
    return Plan(4, edges, (strategy,) * 7)


def total_state(problem: Problem) -> float:
    size = state_bytes(problem.training.precision, problem.training.optimizer)
    return problem.model.num_parameters * (size.parameter + size.optimizer)


@pytest.mark.parametrize(("pp", "tp", "zero"), [(1, 1, 0), (2, 2, 1), (4, 2, 3), (1, 4, 3)])
def test_the_same_plan_on_the_same_nodes_moves_nothing(pp: int, tp: int, zero: int) -> None:
    problem = load_problem(TOY)
    plan = plan_of(problem, pp, tp, zero)
    moves = moved_state(plan, problem, plan, problem)
    assert moves.moved_bytes == pytest.approx(0.0, abs=1e-6)
    assert moves.restored_bytes == pytest.approx(0.0, abs=1e-6)
    assert moves.kept_bytes > 0
    assert zero < 3 or moves.kept_bytes == pytest.approx(total_state(problem), rel=0.15)  # norms on every GPU


def test_plain_data_parallelism_on_half_the_nodes_keeps_everything_in_place() -> None:
    problem, smaller = load_problem(TOY), load_problem([*TOY, "cluster.nodes.0.count=1"])
    moves = moved_state(plan_of(problem, 1, 1), problem, plan_of(smaller, 1, 1), smaller)
    assert (moves.moved_bytes, moves.restored_bytes) == (0.0, 0.0)
    assert moves.kept_bytes == pytest.approx(4 * total_state(problem), rel=0.01)


def test_sharded_state_of_lost_nodes_comes_from_a_checkpoint_and_once_only() -> None:
    problem, smaller = load_problem(TOY), load_problem([*TOY, "cluster.nodes.0.count=1"])
    moves = moved_state(plan_of(problem, 1, 1, 3), problem, plan_of(smaller, 1, 1, 3), smaller)
    state = total_state(problem)
    assert moves.restored_bytes == pytest.approx(state / 2, rel=0.02)
    assert moves.kept_bytes + moves.moved_bytes == pytest.approx(state / 2, rel=0.02)
    # shards of an eighth become shards of a quarter: the first GPU keeps its own, others hold a part of it
    assert moves.kept_bytes == pytest.approx(state / 8, rel=0.02)


def test_stages_that_swap_their_nodes_move_all_they_hold() -> None:
    problem = load_problem(TOY)
    plan = plan_of(problem, 2, 1)
    moves = moved_state(plan, problem, replace(plan, node_order=(1, 0)), problem)
    assert (moves.kept_bytes, moves.restored_bytes) == (0.0, 0.0)
    # the tied table is held by both stages
    state = state_bytes("bf16", "adam")
    table = 256 * 64 * (state.parameter + state.optimizer)
    assert moves.moved_bytes == pytest.approx(4 * (total_state(problem) + table), rel=1e-6)


@pytest.mark.parametrize("kind", ["layerwise", "stagewise", "uniform"])
def test_a_carried_over_plan_is_legal_and_the_same_where_it_can_be(kind: str) -> None:
    problem = load_problem([*MIXED, f"space={kind}"])
    rng = torch.Generator().manual_seed(0)
    tables = build_tables(problem)
    plan = random_plans(tables[0], 1, rng)
    if kind == "uniform":
        plan = replace(plan, choices=plan.choices[:, :1].expand(-1, 7))
    if kind == "stagewise":
        plan = replace(plan, choices=plan.choices.gather(1, plan.first_layers.gather(1, plan.stages())))
    old = plan.to_plan(0, tables[0])
    for table in tables:
        carried = carried_over(old, table, kind)
        cost = evaluate_batch(table, carried)
        for index in range(len(carried)):
            assert is_in_space(carried[index : index + 1], problem.config.space)
            evaluate(carried.to_plan(index, table), problem)
        assert cost.iteration_time.isfinite().all()
    same = carried_over(old, tables[0], kind)
    assert old in [same.to_plan(i, tables[0]) for i in range(len(same))]


def test_restarts_begin_at_the_known_plan() -> None:
    problem = load_problem([*TOY, "space.pp=2"])
    table = without_dominated(build_tables(problem, outer_spaces(problem)[:1])[0])
    rng = torch.Generator().manual_seed(0)
    plans = random_plans(table, table.num_outer, rng)
    group = RestartBatch.initial(
        table, "layerwise", problem.config.search, rng, 0, torch.arange(table.num_outer)
    )
    group.initialize_from(plans, 3.0)
    half = problem.config.search.num_restarts // 2
    assert torch.equal(group.logits[:, :half].argmax(-1), plans.choices.unsqueeze(1).expand(-1, half, -1))
    starts = torch.searchsorted(group.units, plans.first_layers[:, 1:].contiguous())
    assert ((group.edges[:, 0] - starts).abs() < 1.0).all()


def test_a_warm_plan_after_a_loss_is_the_optimum_of_what_is_left_or_near_it() -> None:
    whole, left = (load_problem([*MIXED, f"cluster.nodes.0.count={count}"]) for count in (2, 1))
    warm = replan(left, search(whole, seed=0).plan, seed=0)
    exact = find_layerwise_plan(build_tables(left), "layerwise")
    assert exact.proven
    assert -1e-9 <= warm.iteration_time_s / exact.cost - 1.0 <= 0.01


FAST = ["search.num_steps=10", "search.num_restarts=2", "search.polish_starts=2"]


@pytest.fixture(scope="module")
def old_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two groups of nodes, as the command writes it."""
    folder = tmp_path_factory.mktemp("old")
    Job(load_problem([*MIXED, *QUIET, *PINS, *FAST]), folder, Console(file=StringIO())).run()
    return folder / "plan.json"


@pytest.fixture
def old(old_plan: Path, command: Command) -> None:
    (command.folder / "old").mkdir()
    copy(old_plan, command.folder / "old")


@pytest.mark.usefixtures("old")
def test_the_command_replans_from_a_file_and_refuses_what_it_cannot_keep(command: Command) -> None:
    # the second node group is the plan's own: the default cluster has one group only
    fewer = ["cluster.nodes.0.count=1", "cluster.nodes.1.count=1"]
    outcome = command("replan.from=old/plan.json", *fewer, *QUIET, "hydra.run.dir=new")
    assert outcome.status == 0, outcome.err
    assert "replanned in " in outcome.out
    assert "B of state move" in outcome.out or " bytes of state move" in outcome.out
    data = json.loads((command.folder / "new/plan.json").read_text())
    assert data["training"]["global_batch_size"] == 16
    assert data["config"]["search"]["num_restarts"] == 2  # the old plan's own settings
    assert sum(len(stage["ranks"]) for stage in data["stages"]) == 4
    assert (data["cluster"]["nodes"][0]["count"], data["replan"]["from"]) == (1, "old/plan.json")
    assert data["replan"]["kept_bytes"] > 0
    refused = command("replan.from=old/plan.json", "model.num_layers=6", "hydra.run.dir=refused")
    assert refused.status == 2
    assert "try model=toy with its own sizes." in refused.err
    assert not (command.folder / "refused").exists()
    for change, words in (
        ("model=bert_345m", "was made for model=toy, and this command asks for another"),
        ("training.global_batch_size=8", "training.global_batch_size=8 must stay"),
    ):
        with pytest.raises(DartsParallelError, match=words):
            replan_config("old/plan.json", composition([change]), [change])
    both = command("replan.from=old/plan.json", "plan=old/plan.json")
    assert both.status == 2
    assert "one command does one of both" in both.err


@pytest.mark.usefixtures("old")
def test_replan_as_a_verb_is_the_same_command(command: Command) -> None:
    assert flags_first([*QUIET, "replan", "old/plan.json", "a=1"]) == [
        *QUIET, "replan.from=old/plan.json", "a=1",
    ]  # fmt: skip
    refused = command("replan", "cluster.nodes.0.count=1")
    assert refused.status == 2
    assert "try darts-parallel replan plan.json." in refused.err
    absent = command("replan", "old/plan.json", "cluster.nodes.7.count=1")
    assert absent.status == 2
    assert "cluster.nodes.7.count=1 does not fit the plan in replan.from=old/plan.json" in absent.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"cannot be read \(No such file"),
        ("{", r"is not valid JSON"),
        ("[]", r"the field config is missing"),
        ("{}", r"the field config is missing"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_under_the_key_that_named_it(
    command: Command, content: str | None, words: str
) -> None:
    if content is not None:
        (command.folder / "p.json").write_text(content)
    before = list(command.folder.iterdir())
    outcome = command("replan.from=p.json")
    assert outcome.status == 2
    assert re.search(rf"^darts-parallel: replan\.from=p\.json.*{words}.*\.$", outcome.err)
    assert list(command.folder.iterdir()) == before


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_interleaved_plans_are_replanned_from_and_to(before: int, after: int) -> None:
    few = [*TOY, "search.num_steps=5", "search.num_restarts=2", "search.polish_starts=2", *PINS[:3]]
    few.append("space=uniform")
    old = load_problem([*few, f"space.virtual_stages={before}", "space.pp=2"])
    strategy, layers = LayerStrategy(1, 4, 1), old.num_layers
    edges = (0, 2, 3, 4, layers) if before == 2 else (0, 3, layers)
    plan = Plan(4, edges, (strategy,) * layers, virtual_stages=before)
    problem = load_problem([*few, f"space.virtual_stages={after}", "space.pp=2", "cluster.nodes.0.count=4"])
    found = replan(problem, plan)
    assert found.plan.virtual_stages == after
    assert evaluate(found.plan, problem).feasible
