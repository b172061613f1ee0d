import pytest
import torch

from darts_parallel import load_problem
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.table import build_tables
from darts_parallel.gradient import screening
from darts_parallel.gradient.polishing import polish
from darts_parallel.gradient.screening import MoveEvaluator
from darts_parallel.plans.space import outer_spaces
from tests.support.random_plans import random_plans

TOY = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.zero_stage=[0,1]"]


def table_of(schedule: str) -> CostTable:
    named = [f"space.schedules=[{schedule}]"] if schedule else []
    problem = load_problem([*TOY, *named])
    return build_tables(problem, [outer_spaces(problem)[0]])[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble_v"])
def test_a_plan_is_found_faster_exactly_where_one_of_the_plans_is(schedule: str) -> None:
    rng = torch.Generator().manual_seed(0)
    table = table_of(schedule)
    plans = random_plans(table, 300, rng)
    cost = evaluate_batch(table, plans)
    true = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
    evaluator = MoveEvaluator(table)
    least = float(true.min())
    for best in (2.0 * least, 1.05 * least, least * (1 + 1e-9)):
        seconds = evaluator.seconds(plans, best)
        found = seconds.isfinite()
        assert found.any()
        torch.testing.assert_close(seconds[found], true[found])
    # nothing is faster than the fastest, and paths tell so without all simulations
    before = evaluator.simulated
    assert not evaluator.seconds(plans, least).isfinite().any()
    assert evaluator.simulated - before < int(true.isfinite().sum())


def test_a_polished_plan_of_a_simulated_pipeline_has_no_better_neighbour() -> None:
    rng = torch.Generator().manual_seed(1)
    table = table_of("zero_bubble_h1")
    cost = evaluate_batch(table, plans := random_plans(table, 200, rng))
    start = plans[torch.nonzero(cost.feasible).flatten()[:1]]
    plan, seconds, _ = polish(table, start, "uniform")
    assert seconds <= float(evaluate_batch(table, start).iteration_time[0])
    changed = (
        plan.choices.new_tensor(range(len(table.choices))).unsqueeze(1).expand(-1, table.num_layers)
    )
    others = type(plan)(
        plan.outer.expand(len(changed)), changed, plan.first_layers.expand(len(changed), -1)
    )
    cost = evaluate_batch(table, others)
    assert (cost.iteration_time[cost.feasible] >= seconds * (1 - 1e-9)).all()


@pytest.mark.parametrize("schedule", ["", "zero_bubble_h1"])
def test_slices_of_plans_have_true_seconds_and_end_at_a_gain(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(schedule)
    plans = random_plans(table, 50, torch.Generator().manual_seed(2))
    cost = evaluate_batch(table, plans)
    true = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
    size = 7
    monkeypatch.setattr(screening, "SLICE", size * table.num_layers)
    best = float(true.median())
    seconds = MoveEvaluator(table).seconds(plans, best)
    found = seconds.isfinite()
    torch.testing.assert_close(seconds[found], true[found])
    first = int((true < best).nonzero()[0]) // size
    if table.pipeline.simulated:  # the first slice with a faster plan is the last
        assert set((found.nonzero().flatten() // size).tolist()) == {first}
    else:
        assert torch.equal(seconds, true)
    late = MoveEvaluator(table, stop=lambda: True)
    assert not late.seconds(plans, best).isfinite().any()
    assert late.simulated == 0
