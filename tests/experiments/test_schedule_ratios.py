import csv
from dataclasses import replace
from pathlib import Path

import pytest

from darts_parallel.config.options import parse
from experiments import schedule_ratios

HEADER = ("model", "pp", "tokens_per_s_per_gpu", "memory_gb", "notes")


def measured(path: Path, *rows: tuple[str, float, float]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = [("Llama2-7B", 8, speed, memory, f"schedule {name}; dense") for name, speed, memory in rows]
        csv.writer(file).writerows([HEADER, *lines])
    return path


def test_the_table_compares_with_1f1b(tmp_path: Path) -> None:
    data = measured(tmp_path / "runs.csv", ("1f1b", 100.0, 20.0), ("zbv", 130.0, 22.0))
    given = [f"data={data}", f"out={tmp_path}", "micro_batches=8"]
    assert schedule_ratios.run(parse(schedule_ratios.RatioOptions, given)) == 0
    with (tmp_path / "schedule_ratios.csv").open(encoding="utf-8") as file:
        first, second, *shared = csv.DictReader(file)
    assert [row["passes"] for row in shared] == ["trace"] * 2
    assert [float(value) for value in list(first.values())[2:]] == [1.0] * 4
    assert (second["schedule"], float(second["measured_speed"])) == ("zero_bubble_v", 1.3)
    # the bubble of 1F1B costs (pp - 1) / m: less with more micro-batches
    runs, speeds = schedule_ratios.read_runs(str(data)), []
    for count in (8, 16):
        problem = schedule_ratios.problem_of("llama2_7b", "mi300x_1x8", 4096, count)
        speeds.append(schedule_ratios.compare(runs, problem, count)[1].predicted_speed)
    few, many = speeds
    assert 1.0 < many < few
    assert float(second["predicted_speed"]) == pytest.approx(few, abs=1e-4)


def test_the_shipped_runs_need_no_argument(tmp_path: Path) -> None:
    measured = schedule_ratios.read_runs(schedule_ratios.RatioOptions().data)
    assert [run.schedule for run in measured.runs] == list(schedule_ratios.NAMES.values())
    assert measured.pp == 8


def test_a_model_cut_shorter_is_known_by_the_flop_of_a_token() -> None:
    # 235.7 TFLOP/s at 10,057 tokens/s (AMD, Primus): Llama 2 7B with half of its blocks
    assert schedule_ratios.blocks_run("llama2_7b", 4096, 235.7e12 / 10057) == 16
    assert schedule_ratios.blocks_run("llama2_7b", 4096, 1.03 * 235.7e12 / 10057) == 32
    assert schedule_ratios.blocks_run("llama2_7b", 4096, None) == 32


def test_slower_kernels_give_1f1b_its_measured_speed(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,pp,tokens_per_s_per_gpu,tflops_per_gpu,memory_gb,notes\n"
        "Llama2-7B,8,10057,235.7,16.3,schedule 1f1b\n"
        "Llama2-7B,8,8897.2,208.5,11.9,schedule v-min\n"
    )
    options = parse(schedule_ratios.RatioOptions, [f"data={path}", "micro_batches=8"])
    runs = schedule_ratios.read_runs(str(path))
    problem, slowdown = schedule_ratios.problem_run(options, runs)
    assert slowdown is not None
    assert abs(slowdown - 1.0) > 0.05
    shipped = schedule_ratios.problem_of("llama2_7b", options.cluster, 4096, 8, 16)
    seconds, _ = schedule_ratios.predict(problem, "1f1b", 8, 8)
    assert 8 * 4096 / (8 * seconds) == pytest.approx(10057, rel=1e-4)
    # all kernels alike: passes keep their lengths against each other
    assert schedule_ratios.shares_of(problem, 8, 8) == pytest.approx(schedule_ratios.shares_of(shipped, 8, 8))
    unknown = replace(runs, runs=(replace(runs.reference, flops_per_token=None),))
    assert schedule_ratios.problem_run(options, unknown)[1] is None
