"""The ablation: its sweep leaves rows, a table and a picture; curves are read right."""

import csv
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from darts_parallel.config.options import parse
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError
from darts_parallel.exact.schedule_bounds import simulated_lower_bound
from darts_parallel.gradient.descent import GradientSearch, search_tables
from darts_parallel.problem.problem import load_problem
from experiments.ablate import AblateOptions, ablate
from experiments.comparison.ablate_report import bilevel_lines
from experiments.comparison.controls import CONTROLS
from experiments.comparison.problems import suite
from experiments.comparison.quantiles import read_curve
from experiments.comparison.variants import GRADIENT_VARIANTS, PROBLEMS


def test_a_quick_sweep_leaves_rows_a_table_and_a_picture(tmp_path: Path) -> None:
    options = parse(AblateOptions, ["quick=true", "variants=[default,annealing,no_gradient,no_descent]",
                                    "seeds=1", "launcher=basic", f"out={tmp_path}"])  # fmt: skip
    console = Console(file=StringIO(), width=140)
    assert ablate(options, ["hydra/hydra_logging=none"], console) == 0
    with (tmp_path / "ablate.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"default", "annealing", "no_gradient", "no_descent"}
    assert float(rows["default"]["raw_gap"]) >= float(rows["default"]["gap"]) > -1e-9
    for name in ("annealing", "no_descent"):
        assert float(rows[name]["gap_at_equal_seconds"]) >= float(rows[name]["gap"]) > -1e-9
    assert "| default | the search, at 150 steps |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "ablate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", list(CONTROLS))
def test_controls_plan_problems_of_schedules_and_repeat_themselves(name: str) -> None:
    given = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.tp=1"]
    tables = build_tables(
        load_problem([*given, "space.num_micro_batches=4", "space.schedules=[1f1b,interleaved]"])
    )
    config = SearchConfig(num_steps=20, num_restarts=4, max_seconds=0.5)
    found = [search_tables(tables, "layerwise", config, 1, loop=CONTROLS[name]) for _ in range(2)]
    bound = simulated_lower_bound(tables, "layerwise", seconds=1.0)
    for result in found:
        assert result is not None
        assert bound <= result.iteration_time_s <= result.raw_iteration_time_s < float("inf")
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
        assert gradient is not None
        size = gradient.square().mean(tuple(range(2, gradient.dim())) or (0,)).sqrt()
        torch.testing.assert_close(size, torch.full_like(size, number + 1.0))
        assert gradient.numel() == 1 or gradient.std() > 0


def test_a_folder_may_have_an_odd_name(tmp_path: Path) -> None:
    folder = tmp_path / "it's [/] {x}, $(y)"
    options = AblateOptions(variants=["annealing"], quick=True, seeds=1, launcher="basic", out=str(folder))
    assert ablate(options, ["hydra/hydra_logging=none"], Console(file=StringIO())) == 0
    assert len(list(folder.glob("runs/*/*/row.json"))) == 1


def test_the_joblib_launcher_runs_the_same_sweep(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    options = AblateOptions(variants=["annealing"], quick=True, seeds=2, launcher="joblib", out=str(tmp_path))
    assert ablate(options, ["hydra/hydra_logging=none"], Console(file=StringIO())) == 0
    assert len(list(tmp_path.glob("runs/*/*/row.json"))) == 2


def test_a_curve_is_read_at_the_last_improvement_before_a_time() -> None:
    curve = [(0.5, 9.0), (1.0, 7.0), (3.0, 6.0)]
    assert [read_curve(curve, at) for at in (0.4, 0.5, 2.9, 100.0)] == [float("inf"), 9.0, 7.0, 6.0]


def test_every_variant_changes_something_and_every_problem_is_of_the_suite() -> None:
    for name, variant in GRADIENT_VARIANTS.items():
        changed = SearchConfig(**variant.changes) != SearchConfig() or variant.loop is not GradientSearch
        assert changed == (name != "default")
    for name in PROBLEMS.values():
        assert [case.name for case in suite([name])] == [name]


def test_orders_are_told_apart_and_a_run_without_a_rate_counts_as_a_failure() -> None:
    rows = [{"variant": "bilevel_first_order", "time_to_target_ratio": ratio, "cpu_seconds": 2.0} for ratio in
            (0.5, None, 0.8)]  # fmt: skip
    assert bilevel_lines(rows) == [
        "- bilevel_first_order: predicted time to the target loss 0.800 times the all-16-bit plan's "
        "(0.500 to inf); 2 CPU seconds."
    ]


def test_an_unknown_variant_and_a_missing_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"variants=defualt must be one of .*try default"):
        AblateOptions(variants=["defualt"])
    monkeypatch.setattr("experiments.ablate._has_plugin", lambda launcher: False)
    options = AblateOptions(quick=True, launcher="ray", out=str(tmp_path))
    with pytest.raises(ConfigError, match=r"launcher=ray needs .*darts-parallel\[ray\]"):
        ablate(options, [], Console(file=StringIO()))
