import csv
import gzip
from pathlib import Path

import pytest

from darts_parallel.config.options import parse
from darts_parallel.errors import ConfigError
from experiments import replay_traces
from experiments.replay_traces import COLUMNS

Row = tuple[int, int, int, str, int, int, float, float]


def two_stages(step: int, forward: float, slow: float, receive: float) -> list[Row]:
    """One rank, two stages, two micro-batches: F0 F1 B0 B1 beside F0 B0 F1 B1; backward takes `slow`."""
    begin = 1.0
    # stage 1 works from the end of the first forward to the end; stage 0 ends with a last backward
    second = begin + forward + 2 * (forward + slow)
    return [
        (step, 0, 0, "params-all-gather", -1, 0, 0.0, 0.9),
        (step, 0, 0, "forward-compute", 0, 0, begin, forward),
        (step, 0, 0, "forward-compute", 1, 1, begin + forward, forward),
        (step, 0, 0, "backward-recv", -1, 0, begin + 2 * forward, receive),
        (step, 0, 0, "backward-compute", 0, 0, begin + 2 * forward + slow, slow),
        (step, 0, 0, "backward-compute", 1, 1, second, slow),
        (step, 0, 1, "forward-compute", 0, 0, begin + forward, forward),
        (step, 0, 1, "backward-compute", 0, 0, begin + 2 * forward, slow),
        (step, 0, 1, "forward-compute", 1, 1, begin + 2 * forward + slow, forward),
        (step, 0, 1, "backward-compute", 1, 1, begin + 3 * forward + slow, slow),
        # stage 1 waits here for stage 0, whose recorded seconds hold no waiting
        (step, 0, 0, "embedding-grads-all-reduce", -1, 0, second + slow, 0.125),
        (step, 0, 1, "embedding-grads-all-reduce", -1, 0, second, slow + 0.125),
        (step, 0, 0, "optimizer", -1, 0, second + slow + 0.125, 0.25),
        (step, 0, 1, "optimizer", -1, 0, second + slow + 0.125, 0.125),
    ]


def write(path: Path, rows: list[Row]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([(*COLUMNS[:5], "seq_id", *COLUMNS[5:]), *rows])


def replayed(folder: Path) -> list[dict[str, str]]:
    options = parse(replay_traces.ReplayOptions, [f"data={folder}", f"out={folder / 'out'}"])
    assert replay_traces.run(options) == 0
    with (folder / "out" / "replay.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_step_without_waiting_between_its_passes_is_given_exactly(tmp_path: Path) -> None:
    write(tmp_path / "trace-A.csv.gz", two_stages(7, 1.0, 2.0, 5.0) + two_stages(9, 0.5, 1.5, 5.0))
    rows = replayed(tmp_path)
    assert [list(row) for row in rows] == [["trace", "step", "measured_s", "predicted_s"]] * 2
    assert [(row["trace"], row["step"]) for row in rows] == [("A", "7"), ("A", "9")]
    for row, expected in zip(rows, [9.375, 6.375], strict=True):
        assert float(row["measured_s"]) == pytest.approx(expected)
        assert float(row["predicted_s"]) == pytest.approx(expected)


def test_the_prediction_reads_no_receive_and_scales_with_the_computation(tmp_path: Path) -> None:
    write(tmp_path / "trace-A.csv.gz", two_stages(0, 1.0, 2.0, 0.001))
    write(tmp_path / "trace-B.csv.gz", two_stages(0, 1.0, 2.0, 500.0))
    write(tmp_path / "trace-C.csv.gz", two_stages(0, 2.0, 4.0, 0.001))
    first, second, third = (float(row["predicted_s"]) for row in replayed(tmp_path))
    assert first == second
    assert third - 0.375 == pytest.approx(2 * (first - 0.375))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:2] + rows[3:], "one forward and one backward pass of every rank"),
        (
            lambda rows: [r for r in rows if r[3] != "backward-compute"],
            "must hold forward-compute and",
        ),
        (lambda rows: [(*r[:7], "x") for r in rows], "must hold a number in every column"),
        (lambda rows: [(*r[:6], -r[6], r[7]) for r in rows], "in the order of 1f1b or gpipe"),
    ],
)
def test_a_broken_trace_is_refused_in_a_sentence(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path / "trace-A.csv.gz", change(two_stages(0, 1.0, 2.0, 0.0)))
    with pytest.raises(ConfigError, match=message):
        replayed(tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace-NAME"):
        replayed(tmp_path)


def test_the_shipped_steps_are_replayed_within_two_percent(tmp_path: Path) -> None:
    assert replay_traces.run(parse(replay_traces.ReplayOptions, [f"out={tmp_path}"])) == 0
    with (tmp_path / "replay.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["trace"] for row in rows] == ["SE"] * 5 + ["ST"] * 32
    assert all(abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1) < 0.02 for row in rows)
