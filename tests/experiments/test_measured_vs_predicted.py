import csv
from pathlib import Path

import pytest

from darts_parallel.errors import ConfigError
from darts_parallel.plan.legality import refuse_unexecutable
from experiments.measured_vs_predicted import MeasuredOptions, problem_of, run, uniform_plans

SMALL = ["model.hidden_size=16", "model.num_layers=2", "model.vocab_size=100", "training.seq_len=8",
         "model.max_seq_len=8", "training.global_batch_size=4"]  # fmt: skip
FEW = ["space.num_micro_batches=2", "space.zero_stage=0"]


def test_the_plans_cover_every_degree_and_all_run() -> None:
    problem = problem_of(MeasuredOptions(devices=4, share_cores=True))
    plans = uniform_plans(problem)
    assert {(p.layers[0].dp, p.layers[0].tp, p.pp) for p in plans} == {
        (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)
    }  # fmt: skip
    for plan in plans:
        refuse_unexecutable(plan, problem)


def test_measured_seconds_stand_beside_predicted_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = MeasuredOptions(devices=2, share_cores=True, repeats=2, overrides=[*SMALL, *FEW])
    options.out = str(tmp_path)
    assert run(options) == 0
    assert "rank correlation" in capsys.readouterr().out
    text = (tmp_path / "measured_vs_predicted.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 3  # dp 2, tp 2, pp 2
    for row in rows:
        assert 0 < float(row["fastest_s"]) <= float(row["measured_s"]) <= float(row["slowest_s"])
        assert float(row["predicted_s"]) > 0
    assert (tmp_path / "measured_vs_predicted.png").stat().st_size > 0


def test_more_processes_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"devices=1000 must be at most the \d+ cores of this machine"):
        MeasuredOptions(devices=1000)
