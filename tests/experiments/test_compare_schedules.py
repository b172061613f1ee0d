import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines import SCHEDULE_PLANNERS
from darts_parallel.config.options import parse
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.errors import ConfigError
from darts_parallel.exact.enumeration import brute_force
from experiments import compare_schedules
from experiments.comparison import schedule_problems
from experiments.comparison.schedule_orders import order_gaps, orders_table
from experiments.comparison.schedule_problems import CASES, ScheduleCase
from experiments.comparison.schedule_suite import (
    DEFAULT,
    PUBLISHED,
    SEARCH,
    answers_csv,
    gaps_table,
    solve_case,
)

TINY = ScheduleCase(
    "toy",
    ("model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.tp=1", "space.num_micro_batches=4"),
    layout="Et|t*2|t|L",
)
QUICK = SearchConfig(num_steps=6, num_restarts=2, hard_every=3, polish_starts=1, polish_finalists=1)


@pytest.mark.parametrize("name", ["even_split", "min_max_chunks", "bottleneck_moves"])
def test_rivals_give_legal_plans_of_the_cost_they_claim_and_none_below_the_optimum(name: str) -> None:
    tables = TINY.tables()
    found = SCHEDULE_PLANNERS[name].solve(tables, "layerwise", deadline=time.monotonic() + 20.0)
    assert found.best is not None
    cost = evaluate_batch(tables[found.best.table], found.best.plan)
    assert bool(cost.feasible[0])
    assert float(cost.iteration_time[0]) == pytest.approx(found.cost, rel=1e-12)
    small = [table for table in tables if table.virtual_stages == 1]
    if name != "bottleneck_moves":
        alone = SCHEDULE_PLANNERS[name].solve(small, "uniform")
        assert alone.cost >= brute_force(small, "uniform").cost * (1 - 1e-12)


def test_every_method_is_compared_at_equal_seconds_with_a_bound_below_all() -> None:
    solved = solve_case(TINY, [0], 0.3, QUICK)
    assert {answer.method for answer in solved.answers} == {SEARCH, DEFAULT, PUBLISHED, *SCHEDULE_PLANNERS}
    assert 0 < solved.bound <= solved.best
    rows = list(csv.DictReader(answers_csv([solved]).splitlines()))
    assert min(float(row["iteration_time_s"]) for row in rows) == solved.best
    text = gaps_table([solved])
    assert "of 1 problems" in text
    assert text.count("\n| toy |") == 1
    ends = f"{solved.best:.4g} s | {solved.bound:.4g} s | {100 * (solved.best / solved.bound - 1):.2f} % |"
    assert f"| {ends}" in text
    torch.set_num_threads(1)


def test_the_command_leaves_its_table_and_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_schedules, "CASES", (TINY,))
    given = [f"out={tmp_path}", "seeds=1", "budget=0.2", "search.num_steps=4", "search.num_restarts=2",
             "order_seconds=0"]  # fmt: skip
    assert compare_schedules.run(parse(compare_schedules.ScheduleComparison, given)) == 0
    assert (tmp_path / "schedules.md").read_text() in capsys.readouterr().out
    assert len((tmp_path / "schedules.csv").read_text().splitlines()) == 4 + len(SCHEDULE_PLANNERS)
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_best_order_of_passes_is_never_slower_than_the_rule_nor_below_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedules = "space.schedules=[1f1b,zero_bubble_h1,zero_bubble_v]"
    monkeypatch.setattr(schedule_problems, "FREE", ("space.zero_stage=1", "space.recompute=none", schedules))
    gaps = order_gaps(replace(TINY, given=(*TINY.given, "space.num_micro_batches=2")), 20.0)
    assert {gap.schedule for gap in gaps} == {"1f1b", "zero_bubble_h1", "zero_bubble_v"}
    for gap in gaps:
        assert gap.bound * (1 - 1e-4) <= gap.best <= gap.rule * (1 + 1e-6)
    assert orders_table(gaps).count("| toy |") == len(gaps)


def test_there_are_at_least_twelve_problems_and_another_is_refused(tmp_path: Path) -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 12
    given = ["problems=[elephants]", f"out={tmp_path}"]
    with pytest.raises(ConfigError, match="elephants"):
        compare_schedules.run(parse(compare_schedules.ScheduleComparison, given))
