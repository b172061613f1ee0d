"""The ablation: its sweep leaves rows, a table and a picture; curves are read right."""

import csv
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from darts_parallel.config.options import parse
from darts_parallel.config.search import SearchConfig
from darts_parallel.errors import ConfigError
from experiments.ablate import AblateOptions, ablate
from experiments.comparison.ablate_report import bilevel_lines
from experiments.comparison.arms import GRADIENT_ARMS, PROBLEMS
from experiments.comparison.problems import suite
from experiments.comparison.quantiles import read_curve


def test_a_quick_sweep_leaves_rows_a_table_and_a_picture(tmp_path: Path) -> None:
    options = parse(AblateOptions, ["quick=true", "arms=[default,annealing]", "seeds=1", "launcher=basic",
                                    f"out={tmp_path}"])  # fmt: skip
    console = Console(file=StringIO(), width=140)
    assert ablate(options, ["hydra/hydra_logging=none"], console) == 0
    with (tmp_path / "ablate.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"default", "annealing"}
    assert float(rows["default"]["raw_gap"]) >= float(rows["default"]["gap"]) > -1e-9
    assert float(rows["annealing"]["gap_at_equal_seconds"]) >= float(rows["annealing"]["gap"]) > -1e-9
    assert "| default | the search, at 150 steps |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "ablate.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_may_have_an_odd_name(tmp_path: Path) -> None:
    folder = tmp_path / "it's [/] {x}, $(y)"
    options = AblateOptions(arms=["annealing"], quick=True, seeds=1, launcher="basic", out=str(folder))
    assert ablate(options, ["hydra/hydra_logging=none"], Console(file=StringIO())) == 0
    assert len(list(folder.glob("runs/*/*/row.json"))) == 1


def test_the_joblib_launcher_runs_the_same_sweep(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    options = AblateOptions(arms=["annealing"], quick=True, seeds=2, launcher="joblib", out=str(tmp_path))
    assert ablate(options, ["hydra/hydra_logging=none"], Console(file=StringIO())) == 0
    assert len(list(tmp_path.glob("runs/*/*/row.json"))) == 2


def test_a_curve_is_read_at_the_last_improvement_before_a_time() -> None:
    curve = [(0.5, 9.0), (1.0, 7.0), (3.0, 6.0)]
    assert [read_curve(curve, at) for at in (0.4, 0.5, 2.9, 100.0)] == [float("inf"), 9.0, 7.0, 6.0]


def test_every_arm_changes_something_and_every_problem_is_of_the_suite() -> None:
    for name, arm in GRADIENT_ARMS.items():
        changed = SearchConfig(**arm.changes) != SearchConfig()
        assert changed == (name != "default")
    for name in PROBLEMS.values():
        assert [case.name for case in suite([name])] == [name]


def test_orders_are_told_apart_and_a_run_without_a_rate_counts_as_a_failure() -> None:
    rows = [{"arm": "bilevel_first_order", "time_to_target_ratio": ratio, "cpu_seconds": 2.0} for ratio in
            (0.5, None, 0.8)]  # fmt: skip
    assert bilevel_lines(rows) == [
        "- bilevel_first_order: predicted time to the target loss 0.800 times the all-16-bit plan's "
        "(0.500 to inf); 2 CPU seconds."
    ]


def test_an_unknown_arm_and_a_missing_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"arms=defualt must be one of .*try default"):
        AblateOptions(arms=["defualt"])
    monkeypatch.setattr("experiments.ablate._has_plugin", lambda launcher: False)
    options = AblateOptions(quick=True, launcher="ray", out=str(tmp_path))
    with pytest.raises(ConfigError, match=r"launcher=ray needs .*darts-parallel\[ray\]"):
        ablate(options, [], Console(file=StringIO()))
