import csv
from dataclasses import replace
from pathlib import Path

import pytest

from darts_parallel.config.options import parse
from experiments import schedule_ratios

HEADER = ("schedule", "pp", "tokens_per_s_per_gpu", "memory_gb")


def measured(path: Path, *rows: tuple[str, float, float]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = [(name, 8, speed, memory) for name, speed, memory in rows]
        csv.writer(file).writerows([HEADER, *lines])
    return path


def test_the_table_compares_with_1f1b(tmp_path: Path) -> None:
    data = measured(tmp_path / "runs.csv", ("1f1b", 1e-3, 20.0), ("zbv", 1.3e-3, 22.0))
    given = [f"data={data}", f"out={tmp_path}", "micro_batches=8"]
    assert schedule_ratios.run(parse(schedule_ratios.RatioOptions, given)) == 0
    with (tmp_path / "schedule_ratios.csv").open(encoding="utf-8") as file:
        first, second, *shared = csv.DictReader(file)
    assert [row["passes"] for row in shared] == ["trace"] * 2
    assert [float(value) for value in list(first.values())[2:]] == [1.0] * 4
    assert (second["schedule"], float(second["measured_speed"])) == (
        "zero_bubble_v",
        pytest.approx(1.3),
    )
    # the bubble of 1F1B costs (pp - 1) / m: less with more micro-batches
    runs, speeds = schedule_ratios.read_runs(str(data)), []
    for count in (8, 16):
        problem = schedule_ratios.problem_of(count)
        speeds.append(schedule_ratios.compare(runs, problem, count)[1].predicted_speed)
    few, many = speeds
    assert 1.0 < many < few
    assert float(second["predicted_speed"]) == pytest.approx(few, abs=1e-4)


def test_the_shipped_runs_are_of_16_blocks_by_the_flop_of_a_token() -> None:
    options = schedule_ratios.RatioOptions()
    runs = schedule_ratios.read_runs(options.data)
    assert [(run.schedule, run.pp) for run in runs] == [
        (name, 8) for name in schedule_ratios.NAMES.values()
    ]
    model = schedule_ratios.problem_of(8).model
    with Path(options.data).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            flops = float(row["tflops_per_gpu"]) * 1e12 / float(row["tokens_per_s_per_gpu"])
            assert model.flops_per_token(4096) == pytest.approx(flops, rel=0.01)


def test_slower_kernels_give_1f1b_its_measured_speed(tmp_path: Path) -> None:
    path = measured(tmp_path / "runs.csv", ("v-min", 8897.2, 11.9), ("1f1b", 10057.0, 16.3))
    base = schedule_ratios.read_runs(str(path))[0]
    problem, slowdown = schedule_ratios.problem_run(8, base)
    assert abs(slowdown - 1.0) > 0.05
    shipped = schedule_ratios.problem_of(8)
    seconds, _ = schedule_ratios.predict(problem, "1f1b", 8, 8)
    assert 8 * 4096 / (8 * seconds) == pytest.approx(10057, rel=1e-4)
    # all kernels alike: passes keep their lengths against each other
    assert schedule_ratios.shares_of(problem, 8, 8) == pytest.approx(
        schedule_ratios.shares_of(shipped, 8, 8)
    )
    assert schedule_ratios.problem_run(8, replace(base, tokens_per_s=1e-6))[1] == 1.0
