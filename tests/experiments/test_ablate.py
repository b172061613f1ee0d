"""The ablation leaves rows, a table and a picture; curves are read right."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines import PLANNERS
from darts_parallel.config.options import parse
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError
from darts_parallel.exact.simulated import simulated_lower_bound
from darts_parallel.gradient.descent import GradientSearch, search_tables
from darts_parallel.problem.problem import load_problem
from experiments import ablate
from experiments.ablate import (
    PROBLEMS,
    VARIANTS,
    AblateOptions,
    bilevel_lines,
    gaps_at_equal_seconds,
)
from experiments.comparison.controls import CONTROLS
from experiments.comparison.problems import suite
from experiments.comparison.quantiles import read_curve
from experiments.comparison.runs import MethodRun


def test_a_quick_ablation_leaves_rows_a_table_and_a_picture(tmp_path: Path) -> None:
    names = "default,annealing,no_gradient,no_descent"
    options = parse(
        AblateOptions, ["quick=true", f"variants=[{names}]", "seeds=1", "jobs=1", f"out={tmp_path}"]
    )
    assert ablate.run(options) == 0
    with (tmp_path / "ablate.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"default", "annealing", "no_gradient", "no_descent"}
    assert float(rows["default"]["raw_gap"]) >= float(rows["default"]["gap"]) > -1e-9
    assert min(float(rows[name]["gap"]) for name in ("annealing", "no_descent")) > -1e-9
    text = (tmp_path / "ablate.md").read_text()
    assert "| default | the search, at 150 steps |" in text
    assert (tmp_path / "ablate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", list(CONTROLS))
def test_controls_plan_problems_of_schedules_and_repeat_themselves(name: str) -> None:
    given = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.tp=1"]
    tables = build_tables(
        load_problem([*given, "space.num_micro_batches=4", "space.schedules=[1f1b,interleaved]"])
    )
    config = SearchConfig(
        num_steps=20, num_restarts=4, max_seconds=0.5 if name == "no_descent" else 60.0
    )
    found = [search_tables(tables, "layerwise", config, 1, loop=CONTROLS[name]) for _ in range(2)]
    bound = simulated_lower_bound(tables, "layerwise")
    for result in found:
        assert bound <= result.iteration_time_s <= result.raw_iteration_time_s
        assert result.iteration_time_s < float("inf")
        assert result.steps == (0 if name == "no_descent" else 20)


def test_noise_has_the_size_of_the_gradient_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = suite(["toy on toy, tight"])[0].tables()
    search = CONTROLS["no_gradient"](tables, "layerwise", SearchConfig(num_restarts=4), 0)
    parameters = [parameter for parameter, _ in search.optimizer.parameters]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    search.move()
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        size = gradient.square().mean(tuple(range(2, gradient.dim())) or (0,)).sqrt()
        torch.testing.assert_close(size, torch.full_like(size, number + 1.0))
        assert gradient.numel() == 1 or gradient.std() > 0


def test_a_curve_is_read_at_the_last_improvement_before_a_time() -> None:
    curve = [(0.5, 9.0), (1.0, 7.0), (3.0, 6.0)]
    assert [read_curve(curve, at) for at in (0.4, 0.5, 2.9, 100.0)] == [float("inf"), 9.0, 7.0, 6.0]


def test_rivals_are_read_at_the_defaults_seconds() -> None:
    default = MethodRun("p", "default", 0, 1.0, 2.0, 1, gap=0.0)
    rival = MethodRun(
        "p", "annealing", 0, 1.5, 4.0, 1, gap=0.5, curve=((0.5, 3.0), (1.9, 2.0), (3.0, 1.5))
    )
    late = replace(rival, curve=((2.5, 1.5),))
    assert gaps_at_equal_seconds([rival, late], [default]) == [1.0, float("inf")]
    assert gaps_at_equal_seconds([rival, late], []) == [0.5, 0.5]


def test_every_variant_changes_something_and_every_problem_is_of_the_suite() -> None:
    for name, variant in VARIANTS.items():
        changed = (
            SearchConfig(**variant.changes) != SearchConfig() or variant.loop is not GradientSearch
        )
        assert changed == (name != "default" and name not in PLANNERS)
    for name in PROBLEMS.values():
        assert [case.name for case in suite([name])] == [name]


def test_orders_are_told_apart_and_a_run_without_a_rate_counts_as_a_failure() -> None:
    runs = [
        MethodRun("bilevel", "bilevel_first_order", 0, 1.0, 2.0, 0, gap=gap)
        for gap in (-0.5, float("inf"), -0.2)
    ]
    assert bilevel_lines(runs) == [
        "- bilevel_first_order: predicted time to the target loss 0.800 times the all-16-bit plan's "
        "(0.500 to inf); 2 CPU seconds."
    ]


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"variants=defualt must be one of .*try default"):
        AblateOptions(variants=["defualt"])
