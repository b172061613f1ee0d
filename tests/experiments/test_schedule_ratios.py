import csv
from pathlib import Path

import pytest

from darts_parallel.config.options import parse
from darts_parallel.errors import ConfigError
from experiments import schedule_ratios

HEADER = ("model", "pp", "tokens_per_s_per_gpu", "memory_gb", "notes")


def measured(path: Path, *rows: tuple[str, float, float]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = [("Llama2-7B", 8, speed, memory, f"schedule {name}; dense") for name, speed, memory in rows]
        csv.writer(file).writerows([HEADER, *lines])
    return path


def test_the_table_compares_every_schedule_with_1f1b_and_fits_the_micro_batches(tmp_path: Path) -> None:
    data = measured(tmp_path / "runs.csv", ("1f1b", 100.0, 20.0), ("zbv", 130.0, 22.0))
    given = [f"data={data}", f"out={tmp_path}", "micro_batches=[8,16]"]
    assert schedule_ratios.run(parse(schedule_ratios.RatioOptions, given)) == 0
    with (tmp_path / "ratios.csv").open(encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert [float(value) for value in list(first.values())[1:]] == [1.0] * 4
    assert (second["schedule"], float(second["measured_speed"])) == ("zero_bubble_v", 1.3)
    # the bubble of 1F1B costs (pp - 1) / m: less with more micro-batches
    options = parse(schedule_ratios.RatioOptions, [f"data={data}"])
    few, many = (schedule_ratios.compare(options, count)[1].predicted_speed for count in (8, 16))
    assert 1.0 < many < few
    assert float(second["predicted_speed"]) == pytest.approx(
        min(few, many, key=lambda x: abs(x - 1.3)), abs=1e-4
    )


def test_a_file_without_1f1b_is_refused(tmp_path: Path) -> None:
    data = measured(tmp_path / "runs.csv", ("zbv", 130.0, 22.0))
    with pytest.raises(ConfigError, match="under 1f1b"):
        schedule_ratios.run(parse(schedule_ratios.RatioOptions, [f"data={data}"]))
