from itertools import pairwise

import pytest

from darts_parallel import evaluate, load_problem
from darts_parallel.cost import PassSeconds, hard_plan, pass_seconds
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report.trace import plan_timeline
from darts_parallel.schedules import find

JOB = [
    "model=toy",
    "cluster=toy",
    "training=toy",
    "space.pp=4",
    "search.num_steps=5",
    "search.num_restarts=2",
    "search.polish=false",
    "output.tensorboard=false",
    "verification.enabled=false",
]
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


def seconds_of(plan: Plan, problem: Problem) -> PassSeconds:
    """Seconds of a micro-batch by stage; blocking messages are inside the passes."""
    table, hard, _ = hard_plan(plan, problem)
    passes = pass_seconds(table, hard)
    return passes.blocking() if table.pipeline.blocking else passes


@pytest.mark.parametrize("cost", COSTS)
def test_a_timeline_holds_every_pass_without_overlap_on_a_device(cost: list[str]) -> None:
    problem = load_problem(JOB + cost)
    plan = uneven_plan(problem)
    shown = plan_timeline(plan, problem)
    passes = seconds_of(plan, problem)
    for device, order in enumerate(find(problem.config.cost.schedule).orders(4, 8)):
        mine = [event for event in shown.events if event.device == device]
        assert [event.operation for event in mine] == list(order)
        assert all(a.end <= b.start * (1 + 1e-12) for a, b in pairwise(mine))
        forward = [event.end - event.start for event in mine if event.operation.kind == "F"]
        assert forward == pytest.approx([float(passes.forward[0, device])] * 8, rel=1e-9)
    assert shown.schedule == problem.config.cost.schedule


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
    passes = seconds_of(plan, problem)
    total = (passes.forward + passes.backward)[0]
    assert total.tolist() == pytest.approx(evaluate(plan, problem).stage_times_s, rel=1e-12)
    assert (passes.weight_gradient < passes.backward).all()
