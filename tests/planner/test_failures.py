"""Failures in the command: what a checkpoint holds, plans on fewer nodes, the nodes that goodput wants."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from darts_parallel.cost import build_tables
from darts_parallel.exact import find_uniform_plan
from darts_parallel.planner import failure_costs
from darts_parallel.planner.failing_job import failing_job
from darts_parallel.planner.node_choice import node_choices, rent, rented
from darts_parallel.problem import FailingJob, Problem, SmallerPlan, goodput, load_problem
from darts_parallel.report.failures import failure_lines
from tests.support.commands import QUIET, TOY, Command

JOB = ["model=toy", "cluster=toy", "training=toy", "space=uniform", "space.out_of_memory=0.5"]
MTBF = "cluster.mtbf_hours_per_gpu"
FAILING = [f"{MTBF}=100", "cluster.checkpoint_GBps=0.01"]


def job_of(problem: Problem) -> FailingJob:
    job = failing_job(problem, problem.cluster)
    assert job is not None
    return job


def test_a_checkpoint_holds_weights_and_optimizer_state_of_what_is_trained() -> None:
    problem = load_problem([*JOB, *FAILING])
    assert job_of(problem).write == pytest.approx(14 * problem.model.num_parameters / 1e7)
    adapters = load_problem([*JOB, *FAILING, "training.lora_rank=2"])
    assert job_of(adapters).write < 0.1 * job_of(problem).write
    assert job_of(load_problem([*JOB, *FAILING, "cluster.checkpoint_GB=2"])).write == 200.0


def test_units_of_the_keys() -> None:
    more = ["cluster.restart_minutes=2", "cluster.repair_hours=3", "cluster.spare_nodes=1"]
    job = job_of(load_problem([*JOB, *FAILING, *more]))
    assert job.node_rate == pytest.approx(4 / 360_000)  # four GPUs a node
    assert (job.restart, job.repair, job.spares, job.nodes) == (120.0, 10800.0, 1, 2)


def test_a_job_that_failures_leave_nothing_is_never_done() -> None:
    failing = [*JOB, *FAILING, "cluster.checkpoint_GB=1e9"]
    costs = failure_costs(load_problem(failing), 1.0)
    assert costs is not None
    assert costs.days is None
    assert " · never done · " in failure_lines(costs)[0]
    hopeless = failure_costs(load_problem([*JOB, *FAILING, f"{MTBF}=0.001"]), 1.0)
    assert hopeless is not None
    assert (hopeless.tokens_per_s, hopeless.days) == (pytest.approx(0.0, abs=1e-9), None)


def test_the_plan_on_fewer_nodes_is_the_exact_one_of_these() -> None:
    offer = [*JOB, *FAILING, "cluster.nodes.0.count=4", "cluster.repair_hours=50"]
    costs = failure_costs(load_problem(offer), 1.0)
    assert costs is not None
    smaller = costs.shares.smaller
    assert smaller is not None
    fewer = load_problem([*offer, f"cluster.nodes.0.count={smaller.nodes}"])
    assert smaller.slowdown == pytest.approx(find_uniform_plan(build_tables(fewer)).cost)
    waits = goodput(job_of(load_problem(offer)))
    assert waits.smaller is None
    assert costs.shares.useful > waits.useful


@cache
def optimum(nodes: int) -> float:
    """Return the optimal seconds on some of 8 nodes; failures do not change them."""
    config = load_problem([*JOB, "cluster.nodes.0.count=8"]).config
    return find_uniform_plan(build_tables(Problem.from_config(rented(config, [nodes])))).cost


@pytest.mark.parametrize("mtbf", [3, 30, 300, 3000])
def test_goodput_chooses_the_best_of_all_numbers_of_nodes(mtbf: float) -> None:
    problem = load_problem(
        [
            *JOB,
            *FAILING,
            "objective=goodput",
            "cluster.nodes.0.count=8",
            f"cluster.mtbf_hours_per_gpu={mtbf}",
        ]
    )
    worths = {}
    for counts in node_choices(problem.cluster):
        own = Problem.from_config(rented(problem.config, counts))
        job = job_of(own)
        assert job.spares + job.nodes == 8
        try:
            seconds = optimum(counts[0])
        except ValueError:
            continue
        smaller = []
        for fewer in {min(int(counts[0] * s), counts[0] - 1) for s in (1.0, 7 / 8, 3 / 4, 1 / 2)}:
            with suppress(ValueError):
                smaller.append(SmallerPlan(fewer, optimum(fewer) / seconds))
        worths[counts] = goodput(replace(job, smaller=tuple(smaller))).useful / seconds
    found = rent(problem)
    assert found.useful / found.iteration_time_s == pytest.approx(max(worths.values()))
    assert worths[found.counts] == pytest.approx(max(worths.values()))


def test_the_command_prints_two_lines_and_writes_them(command: Command) -> None:
    plain = command(*TOY, *QUIET, "hydra.run.dir=plain")
    before = json.loads((command.folder / "plain/plan.json").read_text())
    steps = "objective.num_iterations=1e6"
    outcome = command(*TOY, *QUIET, *FAILING, steps, "hydra.run.dir=failing")
    assert outcome.status == 0, outcome.err
    after = json.loads((command.folder / "failing/plan.json").read_text())
    assert "failures" not in before["predicted"]
    assert "failures" not in plain.out
    assert after["stages"] == before["stages"]
    found = after["predicted"]["failures"]
    job = load_problem([*TOY, *FAILING])
    tokens = 1e6 * job.tokens_per_iteration
    assert found["num_tokens"] == tokens
    assert found["days"] == pytest.approx(tokens / found["tokens_per_s"] / 86400)
    share = f"{100 * found['shares']['useful']:.1f} %"
    words = " ".join(outcome.out.split())
    assert f"failures leave {share}: {found['tokens_per_s']:,.0f} tokens/s" in words
    assert f"spare nodes: 0, best {found['best_spare_nodes']}" in words


def test_the_command_keeps_spares_where_goodput_asks_for_them(command: Command) -> None:
    failing = ["cluster.mtbf_hours_per_gpu=3", "cluster.checkpoint_GBps=1"]
    outcome = command(*TOY, *QUIET, *failing, "objective=goodput", "cluster.nodes.0.count=8")
    assert outcome.status == 0, outcome.err
    data = json.loads(command.plan_file().read_text())
    running = sum(node["count"] for node in data["cluster"]["nodes"])
    assert running < 8
    assert data["cluster"]["spare_nodes"] == 8 - running
    assert data["predicted"]["failures"]["spare_nodes"] == 8 - running
