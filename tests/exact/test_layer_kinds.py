"""Layers of different kinds are really planned: exactly, by gradient, and named in the report."""

import pytest

from darts_parallel.cost import OuterCosts
from darts_parallel.cost.table import build_tables
from darts_parallel.gradient.descent import search
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.problem import load_problem
from tests.support.exact_check import check
from tests.support.layer_kinds import HYBRID, MIXER, PREDICTION, TOY, WINDOWS
from tests.support.optima import assert_same_optimum

SMALL = [
    "space.tp=[1,2]",
    "space.zero_stage=[0]",
    "space.sequence_parallel=false",
    "space.recompute=[none,full]",
]


@pytest.mark.parametrize(
    "overrides",
    [
        [*TOY, "model.num_layers=3", "model.hybrid_override_pattern=M*-", *MIXER],
        [*TOY, "model.num_layers=3", "model.sliding_window=8", "model.sliding_window_pattern=2"],
        [*PREDICTION, "model.num_layers=2"],
    ],
    ids=["hybrid", "windows", "prediction"],
)
def test_dynamic_programming_equals_brute_force(overrides: list[str]) -> None:
    problem = load_problem([*overrides, *SMALL, "space.pp=2", "space.num_micro_batches=[2,4]"])
    assert_same_optimum(build_tables(problem), "layerwise")


def test_equal_costs_and_nothing_else_merge_layers() -> None:
    problem = load_problem(
        [*WINDOWS, "model.num_layers=6", "model.sliding_window_pattern=3", "space.pp=2"]
    )
    table = build_tables(problem, outer_spaces(problem)[:1])[0]
    classes = OuterCosts.read(table, 0).layer_class.tolist()
    blocks = classes[1:7]
    assert blocks[0] == blocks[1] == blocks[3] == blocks[4]
    assert blocks[2] == blocks[5] != blocks[0]


def test_the_gradient_search_finds_the_proven_plan_of_a_hybrid() -> None:
    problem = load_problem(
        [*HYBRID, "search.num_steps=30", "search.num_restarts=4", "space.pp=[1,2]"]
    )
    found, best = search(problem), check(problem)
    assert best.proven
    assert found.iteration_time_s == pytest.approx(best.iteration_time_s, rel=1e-9)
