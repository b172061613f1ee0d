"""Formulas of the closed-form searcher, by hand: toy model (220,544 parameters), 1,024 tokens, 8 toy GPUs.

Model FLOP per token: 6 * (4 * (4 * 64^2 + 2 * 64 * 256) + 64 * 256) = 1,277,952 for the matrices and
6 * 4 * 2 * 64 * 64 = 196,608 for the attention scores; 10 GB/s inside a node of 4, 1 GB/s between.
"""

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.searcher import SearcherModel, products
from darts_parallel.errors import PlanError
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

FLOPS = 1024 * (1_277_952 + 196_608)
GRADIENTS = 2 * 220_544
ACTIVATION = 1024 * 64 * 2
COLLECTIVES = 4 * (2 + 2)  # all-reduces of the blocks, forward and backward


@pytest.fixture(scope="module")
def searcher_problem() -> Problem:
    return load_problem(["model=toy", "cluster=toy", "training=toy", "cost=searcher"])


def read(problem: Problem) -> SearcherModel:
    return SearcherModel.of(problem.model, problem.cluster, problem.training)


def extra_collectives(problem: Problem) -> int:
    """Those of embedding, head and loss."""
    total = sum(
        layer.tp_collectives + layer.tp_collectives_backward for layer in problem.model.layers
    )
    return total - COLLECTIVES


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "efficiency", "link"),
    [
        (1, 1, 8, 0.35, 10e9),
        (8, 1, 1, 0.35 / 2.4 / 1.7, 1e9),
        (2, 2, 2, 0.35 / 1.2 / 1.25, 10e9),
        (2, 4, 1, 0.35 / 1.2 / 1.75 / 1.2, 10e9),
        (4, 1, 2, 0.35 / 1.6 / 1.3, 10e9),
        (16, 1, 1, 0.35 / 4.0 / 2.5, 1e9),
    ],
)
def test_every_term_is_the_reports_formula(
    searcher_problem: Problem, dp: int, tp: int, pp: int, efficiency: float, link: float
) -> None:
    (terms,) = read(searcher_problem).breakdowns([(dp, tp, pp)])
    compute = FLOPS / (1e12 * dp * tp * efficiency) / (0.60 if pp > 1 else 1.0)
    assert terms["compute"] == pytest.approx(compute, rel=1e-12)
    assert terms["gradient_sync"] == pytest.approx(2 * (dp - 1) / dp * GRADIENTS / link, rel=1e-12)
    moved = (COLLECTIVES + extra_collectives(searcher_problem)) * ACTIVATION / tp
    assert terms["tensor_parallel"] == pytest.approx(2 * (tp - 1) / tp * moved / 10e9, rel=1e-12)
    assert terms["p2p_and_resharding"] == pytest.approx((pp - 1) * 2 * ACTIVATION / 10e9, rel=1e-12)


@pytest.mark.parametrize("devices", [1, 6, 8, 32, 96])
def test_the_products_are_all_products(devices: int) -> None:
    found = list(products(devices))
    every = range(1, devices + 1)
    assert len(found) == len(set(found))
    assert set(found) == {
        (devices // tp // pp, tp, pp) for tp in every for pp in every if devices % (tp * pp) == 0
    }


def test_evaluate_reads_the_same_model(searcher_problem: Problem) -> None:
    plan = Plan(4, (0, 3, 7), (LayerStrategy(2, 2),) * 7)
    (terms,) = read(searcher_problem).breakdowns([(2, 2, 2)])
    cost = evaluate(plan, searcher_problem)
    assert cost.breakdown_s == terms
    assert cost.iteration_time_s == pytest.approx(sum(terms.values()), rel=1e-12)


def test_a_plan_that_mixes_degrees_has_no_price_in_it(searcher_problem: Problem) -> None:
    mixed = Plan(4, (0, 3, 7), (LayerStrategy(2, 2), *(LayerStrategy(1, 4),) * 6))
    for plan in (mixed, Plan(4, (0, 3, 7), (LayerStrategy(2, 1),) * 7, cp=2)):
        with pytest.raises(PlanError, match="must have one"):
            evaluate(plan, searcher_problem)
