import csv
import json
import os
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from darts_parallel.cli._sweep_table import Job, joined_seeds, read_job, swept_keys, write_sweep
from darts_parallel.cli._sweeps import sweep_folder
from tests.support.commands import QUIET, TOY, Command


def job(seconds: float, gap: float | None = 0.01, **overrides: int | str) -> Job:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    results = {"iteration_time_s": seconds, "repaired_gap": gap, "gap": 0.0, "seconds": 2.0}
    results["tokens_per_s"] = 1000.0 / seconds
    results |= {"out_of_memory_probability": 0.25, "micro_batch_size": 4}
    return {"model": "toy", **values, **results, "dp_tp_pp": f"1/2/{int(seconds)}"}


def test_a_sweep_runs_every_value_and_ends_with_medians_over_seeds_and_files(
    command: Command,
) -> None:
    # a flag may stand anywhere; one pipeline degree and few strategies make four jobs short
    small = (
        "space.pp=2",
        "space.zero_stage=1",
        "space.recompute=none",
        "space.num_micro_batches=[2,4]",
    )
    outcome = command(*TOY, *QUIET, *small, "--multirun", "search.num_steps=2,4", "search.seed=0,1")
    assert outcome.status == 0, outcome.err
    (folder,) = {path.parent for path in command.folder.rglob("results.csv")}
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert len(names) == 4
    assert all(f"search.seed={number % 2}" in name for number, name in enumerate(names))
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["search.num_steps"], row["search.seed"]) for row in rows] == [
        (steps, seed) for steps in ("2", "4") for seed in ("0", "1")
    ]
    for row, name in zip(rows, names, strict=True):
        plan = json.loads((folder / name / "plan.json").read_text())
        assert float(row["iteration_time_s"]) == plan["predicted"]["iteration_time_s"]
        assert plan["search"]["seed"] == int(row["search.seed"])
        gaps = {stage["name"]: stage["gap"] for stage in plan["search"]["stages"]}
        assert float(row["gap"]) == gaps["chosen"]
        repaired = gaps["repaired"]
        assert row["repaired_gap"] == ("" if repaired is None else str(repaired))
        assert row["dp_tp_pp"].endswith(f"/{plan['pp']}")
        assert (
            float(row["out_of_memory_probability"])
            == plan["predicted"]["out_of_memory_probability"]
        )
        assert row["micro_batch_size"] == str(plan["parallelism"]["micro_batch_size"] or "")
    lines = (folder / "results.md").read_text().splitlines()
    assert lines[0].startswith("| search.num_steps | seeds | s/iteration |")
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["2", "4"]
    assert "4 jobs, medians over seeds" in outcome.out


def test_degrees_of_context_and_experts_are_named_where_there_are_some(tmp_path: Path) -> None:
    layers = [{"dp": 8, "tp": 1}, {"dp": 8, "tp": 1, "ep": 4}]
    degrees = {"pp": 2, "cp": 2, "parallelism": {"micro_batch_size": 1}}
    plan = {"layers": layers, "predicted": {"iteration_time_s": 1.0}, "search": None, **degrees}
    (tmp_path / "overrides.json").write_text("[]")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = read_job(tmp_path)
    assert found["dp_tp_pp"] == "8/1/2 cp 2 ep 1-4"
    assert found["micro_batch_size"] == 1
    assert found["out_of_memory_probability"] is None


@pytest.mark.slow
def test_the_table_has_the_words_of_the_command_and_the_file_has_the_keys(command: Command) -> None:
    small = ("space.pp=2", "space.zero_stage=1", "space.recompute=none", "search=exact")
    outcome = command(*TOY, *QUIET, *small, "--multirun", "nodes=2,4", "gbs=16,32")
    assert outcome.status == 0, outcome.err
    (file,) = command.folder.rglob("results.csv")
    assert file.read_text().startswith("cluster.nodes.0.count,training.global_batch_size,")
    table = file.with_name("results.md").read_text()
    assert table.startswith("| nodes | gbs | s/iteration |")


def test_values_of_keys_are_printed_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    plan = {
        "layers": [{"dp": 8, "tp": 1}],
        "predicted": {"iteration_time_s": 1.108309, "tokens_per_s": 118_262.97},
        "search": {"seconds": 0.174772, "stages": [{"name": "repaired", "gap": 7.96e-5}]},
        "pp": 2,
        "cp": 1,
        "parallelism": {"micro_batch_size": 1},
    }
    for number, recompute in enumerate(("selective", "[none,full]")):
        folder = tmp_path / str(number)
        folder.mkdir()
        given = [f"space.recompute={recompute}", "space.out_of_memory=0.10", f"space.tp={number}"]
        (folder / "overrides.json").write_text(json.dumps(given))
        (folder / "plan.json").write_text(json.dumps(plan))
    write_sweep(
        OmegaConf.create(
            {"hydra": {"sweep": {"dir": str(tmp_path)}}, "output": {"tensorboard": False}}
        )
    )
    out = capsys.readouterr().out
    assert "[none,full]  1 " in out, "\n" + out


@pytest.mark.parametrize("curves", [False, True])
def test_the_eleventh_job_follows_the_tenth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], curves: bool
) -> None:
    plan = {"layers": [{"dp": 8, "tp": 1}], "predicted": {"iteration_time_s": 1.0}, "search": None}
    plan |= {"pp": 2, "cp": 1, "parallelism": {"micro_batch_size": 1}}
    for number in range(12):
        folder = tmp_path / f"{number},search.seed={number}"
        folder.mkdir()
        (folder / "overrides.json").write_text(json.dumps([f"search.num_steps={number}"]))
        (folder / "plan.json").write_text(json.dumps(plan))
    hydra = {"sweep": {"dir": str(tmp_path)}}
    write_sweep(OmegaConf.create({"hydra": hydra, "output": {"tensorboard": curves}}))
    assert (f"curves: tensorboard --logdir {tmp_path}\n" in capsys.readouterr().out) == curves
    lines = (tmp_path / "results.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == list(range(12))


def test_tokens_of_a_sweep_are_those_that_failures_leave(command: Command) -> None:
    failing = ["cluster.checkpoint_GBps=0.01", "cluster.mtbf_hours_per_gpu=100,1000"]
    outcome = command(*TOY, *QUIET, "search=exact", "--multirun", *failing)
    assert outcome.status == 0, outcome.err
    (file,) = command.folder.rglob("results.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    plans = [json.loads(path.read_text()) for path in sorted(file.parent.rglob("plan.json"))]
    useful = [plan["predicted"]["failures"]["tokens_per_s"] for plan in plans]
    assert [float(row["tokens_per_s"]) for row in rows] == useful
    assert useful[0] < useful[1]


def test_only_what_differs_is_swept_and_seeds_are_joined() -> None:
    jobs = [
        job(1.0, search__seed=0, a=1),
        job(3.0, search__seed=1, a=1),
        job(2.0, None, search__seed=0, a=2),
    ]
    assert swept_keys(jobs) == ["search.seed", "a"]
    assert joined_seeds(jobs, ["a"], seeds=True) == [
        ["1", "2", "2 + 200.00 %", "1.000 %", "0.000 %", "2", "666.67", "75 %", "4", "1/2/1"],
        ["2", "1", "2 + 0.00 %", "-", "0.000 %", "2", "500", "75 %", "4", "1/2/2"],
    ]
    assert joined_seeds(jobs[:1], ["a"], seeds=False)[0][:2] == ["1", "1"]


def test_folders_have_no_slashes_and_no_endless_names() -> None:
    assert sweep_folder(3, ["a=1", "plan=/x/y.json"]) == "3,a=1,plan=_x_y.json"
    assert sweep_folder(0, ["k" * 300]) == f"0,{'k' * 150}"


def test_a_folder_has_the_name_of_what_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names began with keys that all jobs share, and TensorBoard showed nothing else."""
    given = ["darts-parallel", "a=1,2", "b=3", "c=interval(0,1)", "model=x,y"]
    monkeypatch.setattr(sys, "argv", given)
    assert sweep_folder(1, ["a=1", "b=3", "c=0.5", "model=y"]) == "1,a=1,c=0.5,model=y"
    assert sweep_folder(1, ["b=3", "training=any"]) == "1,b=3,training=any"


@pytest.mark.parametrize(
    ("option", "extra"), [("hydra/sweeper=optuna", "optuna"), ("hydra/launcher=ray", "ray")]
)
def test_a_plugin_that_is_missing_is_named_with_its_extra(
    option: str, extra: str, command: Command
) -> None:
    outcome = command(*TOY, "--multirun", option, "search.seed=0,1")
    assert outcome.status == 2
    assert outcome.err == (
        f"darts-parallel: {option} needs a Hydra plugin that is not installed; try basic, or "
        f"pip install -e '.[{extra}]'.\n"
    )


def test_large_speeds_are_written_without_an_exponent() -> None:
    ((_, *cells),) = joined_seeds([job(0.005, model="toy")], ["model"], seeds=False)
    assert cells[4] == "200,000"
    assert cells[0] == "0.005"


@pytest.mark.slow
def test_jobs_of_an_earlier_sweep_are_not_in_the_table(command: Command) -> None:
    """They were its first rows, next to the sweep's own."""
    few = ("space.pp=2", "space.zero_stage=1", "space.num_micro_batches=[2,4]")
    job = (*TOY, *few, *QUIET, "--multirun", "hydra.sweep.dir=own")
    assert command(*job, "search.num_steps=2,3").status == 0
    shown = command(*job, "search.num_steps=5,6")
    assert "\n2 jobs" in shown.out, shown.err
    with (command.folder / "own/results.csv").open() as file:
        assert [row["search.num_steps"] for row in csv.DictReader(file)] == ["5", "6"]


def test_the_plan_of_an_earlier_sweep_is_not_that_of_a_refused_job(tmp_path: Path) -> None:
    for name, seconds in (("plan.json", 1), ("overrides.json", 2)):
        (tmp_path / name).write_text("[]")
        os.utime(tmp_path / name, (seconds, seconds))
    assert read_job(tmp_path)["dp_tp_pp"] == "no plan"
