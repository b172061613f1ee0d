"""The script that measures a GPU, tried on the CPU."""

import csv
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from experiments import measure_gpu
from experiments.data.normalize import read_folder
from experiments.measure_gpu import (
    STEPS,
    MeasureOptions,
    TrainingStep,
    model_of,
    run,
    training_step,
)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


def test_its_rows_are_read_as_runs_of_the_switches_that_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_gpu, "BACKENDS", ("MATH", "CUDNN_ATTENTION"))
    options = MeasureOptions(str(tmp_path), "small", seconds=0.0, modes=["eager"])
    assert run(options) == 0
    kernels = {row["kernel"]: float(row["s"]) for row in rows_of(tmp_path / "kernels.csv")}
    expected = {"product", "attention math", "rms_norm", "swiglu", "cross_entropy"}
    assert set(kernels) == expected | {"launches of a block"}
    assert min(kernels.values()) > 0.0
    assert "attention cudnn_attention eager 1x4x32x16: not measured: No" in capsys.readouterr().out
    text = (tmp_path / "runs.csv").read_text()
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "here.csv").write_text(text.replace(",CPU,", ",H100 SXM,"))
    runs, skipped = read_folder(str(folder))
    assert not skipped
    assert [(own.loss, own.lora_rank or 0) for own in runs] == [
        ("full", 0),
        ("fused", 0),
        ("full", 16),
    ]
    assert {own.compiled for own in runs} == {False}
    assert all("measured here" in own.source for own in runs)


def test_a_step_trains_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, fused = [], []
    optimizer, linear = torch.optim.Adam, functional.linear_cross_entropy

    def adam(weights: list[torch.Tensor], **options: bool) -> torch.optim.Adam:
        trained.append(sum(weight.numel() for weight in weights))
        return optimizer(weights, **options)

    def linear_loss(*given: torch.Tensor) -> torch.Tensor:
        fused.append(len(trained))
        return linear(*given)

    monkeypatch.setattr(torch.optim, "Adam", adam)
    monkeypatch.setattr(functional, "linear_cross_entropy", linear_loss)
    losses = {}
    for step in (own for own in STEPS if not own.compiled):
        torch.manual_seed(0)
        work = training_step(model_of("small"), step)
        losses[step] = [work() for _ in range(3)]
        assert losses[step] == sorted(losses[step], reverse=True)
        assert losses[step][-1] < losses[step][0]
    whole, second, adapters = trained
    assert whole == second > 10 * adapters
    # 2 blocks, 3 products of 64 inputs and 64, 32 and 32 outputs, adapters of rank 16
    assert adapters == 2 * 16 * (3 * 64 + 64 + 32 + 32)
    assert fused == [2, 2, 2]
    assert losses[TrainingStep()][0] == pytest.approx(
        losses[TrainingStep(loss="fused")][0], rel=0.02
    )
