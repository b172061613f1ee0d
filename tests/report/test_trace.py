import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from darts_parallel import evaluate, load_problem
from darts_parallel.cli._job import Job
from darts_parallel.plan.file import write_json
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report.trace import plan_timeline, trace_dict
from darts_parallel.schedules import find

JOB = ["model=toy", "cluster=toy", "training=toy", "space.pp=4", "search.num_steps=5",
       "search.num_restarts=2", "search.polish=false", "output.tensorboard=false",
       "verification.enabled=false"]  # fmt: skip
COSTS = [
    [],
    ["cost.pipeline=simulated"],
    ["cost.pipeline=simulated", "cost.schedule=gpipe"],
    ["cost.pipeline=simulated", "cost.schedule=zero_bubble"],
    ["cost.pipeline=simulated", "cost.p2p=overlapped"],
]


def uneven_plan(problem: Problem) -> Plan:
    layers = problem.num_layers
    size = problem.cluster.num_devices // 4
    return Plan(8, (0, 2, 3, 4, layers), (LayerStrategy(size, 1),) * layers)


@pytest.mark.parametrize("cost", COSTS)
def test_a_trace_read_back_holds_every_pass_without_overlap_on_a_device(
    tmp_path: Path, cost: list[str]
) -> None:
    problem = load_problem(JOB + cost)
    plan = uneven_plan(problem)
    write_json(tmp_path / "plan.trace.json", trace_dict(plan, problem))
    trace = json.loads((tmp_path / "plan.trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    orders = find(problem.config.cost.schedule).orders(4, 8)
    shown = plan_timeline(plan, problem)
    for device, order in enumerate(orders):
        mine = [span for span in spans if span["pid"] == device]
        assert [s["name"] for s in mine[: len(order)]] == [f"{o.kind}{o.micro_batch}" for o in order]
        assert all(s["dur"] > 0 for s in mine)
        assert all(a["ts"] + a["dur"] <= b["ts"] * (1 + 1e-12) for a, b in pairwise(mine))
        forward = [s["dur"] for s in mine if s["cat"] == "forward"]
        expected = 1e6 * float(shown.passes.forward[0, device])
        assert forward == pytest.approx([expected] * 8, rel=1e-12)
    assert trace["otherData"]["schedule"] == problem.config.cost.schedule


@pytest.mark.parametrize("cost", COSTS[1:])
def test_the_timeline_ends_when_the_simulated_iteration_does(cost: list[str]) -> None:
    problem = load_problem(JOB + cost)
    plan = uneven_plan(problem)
    shown, priced = plan_timeline(plan, problem), evaluate(plan, problem)
    end = max(end + sync for end, sync in zip(shown.pipeline_ends_s, shown.sync_s, strict=True))
    tied = priced.breakdown_s["tied_embedding_sync"]
    assert priced.iteration_time_s == pytest.approx(end + tied, rel=1e-12)
    assert sum(priced.breakdown_s.values()) == pytest.approx(priced.iteration_time_s, rel=1e-12)


def test_without_synchronisation_blocking_passes_sum_to_the_stage_times() -> None:
    problem = load_problem(JOB)
    plan = uneven_plan(problem)
    passes = plan_timeline(plan, problem).passes
    total = (passes.forward + passes.backward)[0]
    assert total.tolist() == pytest.approx(evaluate(plan, problem).stage_times_s, rel=1e-12)
    assert (passes.weight_gradient < passes.backward).all()


def test_the_command_writes_the_trace_where_it_is_asked_to(tmp_path: Path) -> None:
    for folder, extra in (("with", ["output.trace=true"]), ("without", [])):
        (tmp_path / folder).mkdir()
        Job(load_problem([*JOB, *extra]), tmp_path / folder, Console(quiet=True)).run()
    assert json.loads((tmp_path / "with" / "plan.trace.json").read_text())["traceEvents"]
    assert not (tmp_path / "without" / "plan.trace.json").exists()
