from dataclasses import replace

import pytest
import torch

from darts_parallel import load_problem
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, even_uniform_plans
from darts_parallel.cost.table import build_tables
from darts_parallel.gradient import descent
from darts_parallel.gradient._promising_outers import promising_outers, relaxed_outers
from darts_parallel.gradient.pool import PlanPool
from tests.support.random_plans import random_plans

TOY = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.zero_stage=[0,1]"]
TOY += ["space.axis_order=tp-dp-pp"]
FREE = [*TOY, "space.schedules=[1f1b,interleaved,v_min]", "cost.pipeline=simulated"]


def tables_of(overrides: list[str]) -> list[CostTable]:
    problem = load_problem(overrides)
    return build_tables(problem)


def kept(pool: PlanPool) -> dict[tuple[int, int], list[float]]:
    return {outer: [entry.time for entry in entries] for outer, entries in pool.entries.items()}


@pytest.fixture(scope="module")
def tables() -> list[CostTable]:
    return tables_of(FREE)


@pytest.mark.parametrize("share", [1.0, 0.0015])
def test_the_best_plans_are_kept_without_simulating_the_others(
    tables: list[CostTable], share: float
) -> None:
    tables = [replace(table, capacity=share * table.capacity) for table in tables]
    lazy, whole, asked = PlanPool(tables, "layerwise"), PlanPool(tables, "layerwise"), 0
    for number, table in enumerate(tables):
        rng = torch.Generator().manual_seed(number)
        for _ in range(2):  # the second batch meets plans that are kept already
            plans: HardPlans = random_plans(table, 60, rng)
            lazy.add(number, plans)
            whole._keep(number, plans, evaluate_batch(table, plans))
            asked += len(plans)
    assert kept(lazy) == kept(whole) != {}
    assert lazy.evaluated < whole.evaluated == asked


def passes(tables: list[CostTable]) -> int:
    return sum(
        int(table.num_micro_batches.sum())
        * table.num_stages
        * (2 if "zero" not in s and "v_" not in s else 3)
        for table in tables
        for s in [table.pipeline.schedule]
    )


def test_a_search_looks_at_no_more_passes_than_it_may_else_at_all(tables: list[CostTable]) -> None:
    assert promising_outers(tables) is tables
    few = promising_outers(tables, 200)
    assert 0 < passes(few) <= 200 < passes(tables)
    assert sum(table.num_outer for table in promising_outers(tables, 1)) == 1
    plain = tables_of(TOY)
    assert promising_outers(plain, 1) is plain, "what is not simulated costs nothing"


def test_a_descent_relaxes_the_outer_choices_of_the_fastest_known_plans(
    tables: list[CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tables_of(TOY)
    pool = PlanPool([*tables, *plain], "uniform")
    for number, table in enumerate(pool.tables):
        pool.add(number, even_uniform_plans(table))
    every = [torch.ones(table.num_outer, dtype=torch.bool) for table in pool.tables]
    known = (pool.tables, pool.by_outer(), 4)
    assert all(bool(taken.all()) for taken in relaxed_outers(*known, every))
    fastest = next(entry for entry in pool.by_outer() if entry.table < len(tables))
    table = tables[fastest.table]
    one = 4 * table.num_layers * (len(table.choices) + table.num_stages)
    monkeypatch.setattr("darts_parallel.gradient._promising_outers.WEIGHTS", one)
    *simulated, closed = relaxed_outers(*known, every)
    taken = [
        (n, outer)
        for n, row in enumerate(simulated)
        for outer in torch.nonzero(row).flatten().tolist()
    ]
    assert taken == [fastest.outer]
    assert closed.all(), "what is not simulated is limited by weights of its own"
    monkeypatch.setattr("darts_parallel.gradient._promising_outers.PLAIN_WEIGHTS", 1)
    *simulated, closed = relaxed_outers(*known, every)
    assert int(closed.sum()) == 1, "one stays, however large it is"
    none = [torch.zeros_like(rows) for rows in every]
    assert not any(bool(rows.any()) for rows in relaxed_outers(*known, none))


def test_an_outer_choice_of_a_simulated_pipeline_leaves_where_it_is_behind(
    tables: list[CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(load_problem(FREE).config.search, num_steps=4, num_restarts=2)
    ends = []
    for margin in (1e9, 1e-9):
        monkeypatch.setattr(descent, "PRUNE_MARGIN", margin)
        found = descent.search_tables(tables, "layerwise", config, 0)
        ends.append(len(found.history[-1].outer_weights))
    assert ends[0] > ends[1] >= 1


def test_what_seems_promising_and_fits_nowhere_is_no_proof_that_nothing_fits(
    tables: list[CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(load_problem(FREE).config.search, num_steps=3, num_restarts=2, polish=False)
    full = [
        replace(table, capacity=torch.zeros_like(table.capacity))
        for table in promising_outers(tables, 1)
    ]
    monkeypatch.setattr(descent, "promising_outers", lambda pruned: full)
    found = descent.search_tables(tables, "uniform", config, 0)
    assert found is not None
