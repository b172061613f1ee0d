from pathlib import Path

import pytest
import torch

from darts_parallel.config.options import parse
from darts_parallel.errors import ConfigError
from experiments import schedules


def test_the_table_has_a_row_for_every_pipeline_and_no_error_where_stages_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "pp=[2,3]",
        "micro_batches_per_stage=[1,6]",
        "unevenness=[0,0.3]",
        "message=[0.1]",
        "pipelines=20",
    ]
    path = tmp_path / "table.md"
    assert schedules.run(parse(schedules.ScheduleOptions, [*given, f"out={path}"])) == 0
    text = capsys.readouterr().out
    assert path.read_text() == text
    rows = [
        line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ") and "---" not in line
    ]
    assert [(row[0].strip(), row[1].strip()) for row in rows[1:5]] == [
        ("2", "2"), ("2", "12"), ("3", "3"), ("3", "18")
    ]  # fmt: skip
    assert all(row[2].strip() == "0 (0 to 0)" for row in rows[1:5])
    assert all(row[3].strip() != "0 (0 to 0)" for row in rows[1:5])


@pytest.mark.parametrize("blocking", [True, False])
def test_the_error_is_that_of_the_closed_form(blocking: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    passes = schedules.random_pipelines(1, 2, 0.0, 0.1, rng)
    # one micro-batch: 3 + 3 s of stages and two messages of 0.3 s, which nothing can overlap
    assert float(schedules.closed_form_error(passes, 1, blocking=blocking)) == pytest.approx(0.0, abs=1e-12)


def test_a_negative_unevenness_is_refused() -> None:
    with pytest.raises(ConfigError, match="unevenness=-1"):
        parse(schedules.ScheduleOptions, ["unevenness=[-1]"])
