from dataclasses import replace
from itertools import pairwise

import pytest

from darts_parallel import LayerStrategy, Plan, evaluate, load_problem
from darts_parallel.planner._session import Asked
from darts_parallel.planner._stage_balance import balance_stages

JOB = ["model=gpt2_xl", "cluster=a10_8x4", "training=gpt2_xl", "model.num_layers=12"]


def uniform_plan(*boundaries: int) -> Plan:
    pp = len(boundaries) - 1
    strategy = LayerStrategy(tp=1, dp=32 // pp, zero_stage=1)
    return Plan(num_micro_batches=4, boundaries=boundaries, layers=(strategy,) * boundaries[-1])


def spread(plan: Plan) -> float:
    seconds = evaluate(plan, load_problem(JOB)).stage_times_s
    return sum(value * value for value in seconds)


def test_stages_that_may_give_layers_away_do_and_the_time_stays() -> None:
    problem = load_problem(JOB)
    asked = Asked.of(problem, tables=())
    # the last stage is the slowest: the head and two blocks
    uneven = uniform_plan(0, 1, 5, 11, 15)
    even = balance_stages(uneven, asked)
    before, after = evaluate(uneven, problem), evaluate(even, problem)
    assert after.iteration_time_s <= before.iteration_time_s * (1 + 1e-12)
    assert spread(even) < spread(uneven)
    assert even.layers == uneven.layers
    blocks = [max(cut - 1, 0) for cut in even.boundaries]  # the embedding is none
    lengths = [end - first for first, end in pairwise(blocks)]
    assert max(lengths[:3]) - min(lengths[:3]) <= 1
    assert balance_stages(even, asked) == even


def test_no_plan_gets_slower_or_stops_fitting() -> None:
    problem = load_problem([*JOB, "cluster.devices.a10.memory_GiB=7"])
    asked = Asked.of(problem, tables=())
    for cuts in ((2, 9, 13), (7, 8, 11), (4, 10, 12), (3, 7, 10)):
        plan = uniform_plan(0, *cuts, 15)
        even = balance_stages(plan, asked)
        old, new = evaluate(plan, problem), evaluate(even, problem)
        assert new.iteration_time_s <= old.iteration_time_s * (1 + 1e-12)
        assert new.feasible or even == plan


@pytest.mark.parametrize("override", ["cost.pipeline=simulated", "space=stagewise"])
def test_where_a_split_means_more_the_plan_stays(override: str) -> None:
    plan = uniform_plan(0, 1, 5, 11, 15)
    layers = (replace(plan.layers[0], zero_stage=0), *plan.layers[1:])
    mixed = replace(plan, layers=layers)
    asked = Asked.of(load_problem([*JOB, override]), tables=())
    assert balance_stages(mixed, asked) == mixed
    rough = uniform_plan(0, 1, 2, 3, 15)
    assert (balance_stages(rough, asked) == rough) == asked.simulated
