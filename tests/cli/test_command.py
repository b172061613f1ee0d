import json
import math
import os
import re
import signal
from contextlib import suppress
from io import StringIO
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from rich.console import Console

from darts_parallel.cli._arguments import flags_first
from darts_parallel.cli._job import Job, busy_words
from darts_parallel.config.composition import with_own_job
from darts_parallel.errors import ConfigError
from darts_parallel.problem.problem import load_problem
from darts_parallel.run.workers import preloaded
from tests.support.commands import QUIET, TOY, Command
from tests.support.processes import PATIENCE_S, told_command

FEW = ("space.zero_stage=1", "space.recompute=[none,full]", "space.num_micro_batches=[2,4]")
"""Pins of the strategies; proofs are then a matter of milliseconds."""


def test_a_bug_of_ours_keeps_its_traceback(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **settings: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("darts_parallel.cli._job.find_plan", broken)
    with pytest.raises(ZeroDivisionError):
        command(*TOY, *QUIET)
    assert not list(command.folder.iterdir())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan of an earlier run."""
    folder = tmp_path_factory.mktemp("earlier")
    Job(load_problem([*TOY, *QUIET]), folder, Console(file=StringIO())).run()
    return folder


def test_a_refused_run_leaves_the_files_of_an_earlier_one_alone(
    command: Command, earlier: Path
) -> None:
    copytree(earlier, command.folder / "here")
    before = (command.folder / "here/plan.json").read_bytes()
    outcome = command(*TOY, "space.pp=3", "hydra.run.dir=here")
    assert outcome.status == 2
    assert outcome.files == ("here", "here/plan.json", "here/report.html")
    assert (command.folder / "here/plan.json").read_bytes() == before


def test_a_sweep_without_any_plan_ends_in_a_sentence_a_job(command: Command) -> None:
    outcome = command(*TOY, *QUIET, "--multirun", "search.num_steps=0,-1")
    assert outcome.status == 2
    rule = "must be at least 1; try 1.\n"
    said = [f"darts-parallel: search.num_steps={number} {rule}" for number in (0, -1)]
    assert outcome.err == "".join(said)
    assert outcome.files == ()


def test_a_sweep_goes_on_after_a_refused_job_and_its_table_says_so(command: Command) -> None:
    outcome = command(*TOY, *QUIET, "--multirun", "space.pp=3,2", "search.num_steps=2")
    assert outcome.status == 0
    assert outcome.err.startswith("darts-parallel: space.pp=3 must")
    (table,) = command.folder.rglob("results.csv")
    keys, refused, planned = table.read_text().splitlines()
    assert keys.startswith("space.pp,")
    assert keys.endswith(",dp_tp_pp")
    assert refused.startswith("3,")
    assert refused.endswith(",no plan")
    assert planned.startswith("2,")
    assert planned.endswith("/2")


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_asking_for_words_writes_no_file(command: Command, flag: str) -> None:
    outcome = command(flag)
    assert outcome.status == 0
    assert "darts-parallel" in outcome.out
    assert outcome.files == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["a=1", "--multirun", "b=2"], ["--multirun", "a=1", "b=2"]),
        (["a=1", "--info"], ["--info=all", "a=1"]),
        (["--info", "a=1", "-m"], ["--multirun", "--info=all", "a=1"]),
        (["a=1", "--info", "defaults", "b=2"], ["--info=defaults", "a=1", "b=2"]),
        (["a=1", "-cd", "here", "b=2"], ["--config-dir=here", "a=1", "b=2"]),
        (["--config-dir=here", "a=1", "-c", "job"], ["--config-dir=here", "--cfg=job", "a=1"]),
        (["+tp=2", "++a=1", "+a.b=1", "+a@b=1"], ["tp=2", "a=1", "+a.b=1", "+a@b=1"]),
        ([], []),
    ],
)
def test_flags_come_before_overrides(given: list[str], wanted: list[str]) -> None:
    assert flags_first(given) == wanted


def test_the_configuration_can_be_shown(command: Command) -> None:
    outcome = command(*TOY, "--cfg", "job")
    assert outcome.status == 0
    assert "num_layers: 4" in outcome.out


def without_seconds(path: Path) -> str:
    return re.sub(r'"seconds": [^,\n]+', '"seconds": 0', path.read_text())


def test_equal_seeds_give_equal_bytes_but_for_seconds(command: Command) -> None:
    texts = []
    for name in ("one", "two"):
        assert command(*TOY, *FEW, "output.tensorboard=false", f"hydra.run.dir={name}").status == 0
        texts.append(without_seconds(command.folder / name / "plan.json"))
    assert texts[0] == texts[1]


def test_hydra_starts_a_job_only_where_it_is_needed_and_the_plan_is_the_same(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hydra = ("hydra.verbose=false", "hydra.run.dir='by hydra'")
    assert command(*TOY, *FEW, *by_hydra, "output.tensorboard=false").status == 0
    monkeypatch.setattr("hydra.main", None)
    assert command(*TOY, *FEW, "hydra.run.dir=alone", "output.tensorboard=false").status == 0
    texts = [without_seconds(command.folder / name / "plan.json") for name in ("by hydra", "alone")]
    assert texts[0] == texts[1]
    with pytest.raises(TypeError):
        command(*TOY, "--cfg", "job")


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(finite(entry) for entry in value.values())
    if isinstance(value, list):
        return all(finite(entry) for entry in value)
    return not isinstance(value, float) or math.isfinite(value)


def test_the_plan_file_keeps_the_contract(command: Command) -> None:
    assert command(*TOY, *FEW).status == 0
    path = command.plan_file()
    plan = json.loads(path.read_text())
    assert (plan["schema"], plan["model"]["name"]) == ("darts-parallel/plan/1", "toy")
    assert (plan["cluster"]["name"], plan["training"]["global_batch_size"]) == ("toy", 16)
    assert plan["pp"] == len(plan["stages"]) == plan["parallelism"]["pp"]
    assert sorted(rank for stage in plan["stages"] for rank in stage["ranks"]) == list(range(8))
    assert [layer["name"] for layer in plan["layers"]][:2] == ["embedding", "layers.0"]
    assert {"tp", "dp", "zero_stage", "recompute", "sequence_parallel"} <= set(plan["layers"][0])
    assert set(plan["parallelism"]) == {
        "dp",
        "tp",
        "pp",
        "cp",
        "virtual_stages",
        "micro_batch_size",
    }
    predicted = plan["predicted"]
    assert {"iteration_time_s", "tokens_per_s", "mfu", "memory_bytes", "breakdown_s"} <= set(
        predicted
    )
    assert len(predicted["memory_bytes"]) == plan["pp"]
    assert sum(predicted["breakdown_s"].values()) == pytest.approx(
        predicted["iteration_time_s"], rel=1e-9
    )
    assert {"seconds", "steps", "restarts", "seed", "raw_iteration_time_s"} <= set(plan["search"])
    assert plan["search"]["stopped_by"] is None
    for entry in plan["verification"].values():
        assert {"iteration_time_s", "gap", "seconds", "plans_evaluated"} <= set(entry)
    assert set(plan["verification"]) == {"exhaustive", "dynamic_programming"}
    assert plan["config"]["search"]["num_steps"] == 10
    assert plan["version"]
    assert finite(plan)
    assert list((path.parent / "tensorboard").iterdir())


def test_a_written_plan_is_evaluated_to_the_same_numbers(command: Command, earlier: Path) -> None:
    copytree(earlier, command.folder / "one")
    outcome = command(*TOY, *QUIET, "plan=one/plan.json", "hydra.run.dir=two")
    assert outcome.status == 0, outcome.err
    first, second = (
        json.loads((command.folder / n / "plan.json").read_text()) for n in ("one", "two")
    )
    for key in ("predicted", "stages", "layers", "parallelism"):
        assert first[key] == second[key]


def test_the_simple_cost_model_refuses_different_node_types(command: Command) -> None:
    outcome = command("model=toy", "training=toy", "cluster=toy_mixed", "cost=searcher", *QUIET)
    assert outcome.status == 2
    assert "cost=searcher must have nodes of one type" in outcome.err
    assert outcome.files == ()


@pytest.mark.slow
def test_ctrl_c_leaves_the_best_plan_and_status_0(tmp_path: Path) -> None:
    endless = [
        *TOY,
        *QUIET,
        "search.num_steps=1000000",
        "search.max_seconds=300",
        "output.progress=false",
    ]
    hears, says = preloaded().Pipe(duplex=False)
    process = preloaded().Process(
        target=told_command, args=(says, tmp_path, [*endless, "hydra.run.dir=run"]), daemon=True
    )
    process.start()
    says.close()
    while hears.recv() < 3:
        pass
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["search"]["stopped_by"] == "user"
    assert plan["predicted"]["feasible"] is True


class ReaderLeft(StringIO):
    """Standard output whose reader has gone, as behind `| head -1`."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_the_trainers_files_are_written_before_the_report_is_read(tmp_path: Path) -> None:
    problem = load_problem([*TOY, *QUIET, "space=uniform", "export=torch"])
    with suppress(SystemExit):  # rich ends the command
        Job(problem, tmp_path, Console(file=ReaderLeft())).run()
    assert (tmp_path / "plan.json").is_file()
    assert list(tmp_path.glob("*torch*"))


def test_a_model_of_the_user_named_alone_takes_the_job_next_to_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, text in (
        ("model", "defaults: [toy]\n"),
        ("training", "defaults: [toy]\nseq_len: 16\n"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / "own.yaml").write_text(text, encoding="utf-8")
    job = ["model=own", "cluster=toy"]
    assert load_problem(job, str(tmp_path)).training.seq_len == 16
    done = command("--config-dir", str(tmp_path), *job, "--cfg", "job")
    assert "  seq_len: 16\n" in done.out
    monkeypatch.chdir(tmp_path)  # a folder that is not named counts nowhere
    assert with_own_job(["model=own"]) == ["model=own", "training=any"]


def test_a_model_named_alone_takes_its_own_job_and_price_takes_degrees() -> None:
    assert with_own_job(["model=toy"]) == ["model=toy", "training=toy"]
    assert with_own_job(["model=hf"]) == ["model=hf", "training=any"]
    for others in (
        ["model=toy", "training=llama3_8b"],
        ["model=toy", "plan=x.json"],
        ["cluster=toy"],
        [],
    ):
        assert with_own_job(others) == others
    assert flags_first(["price", "model=toy", "dp=4", "recompute=none"]) == [
        "space=uniform",
        "space.out_of_memory=0.5",
        "model=toy",
        "dp=4",
        "recompute=none",
        "price=true",
    ]
    assert flags_first(["a/plan.json"]) == ["plan=a/plan.json"]
    assert flags_first(["price", "a/plan.json"]) == ["plan=a/plan.json", "price=true"]
    assert flags_first(["explain", "plan.json", "x.y=1"]) == [
        "plan=plan.json",
        "x.y=1",
        "explain=true",
    ]
    with pytest.raises(ConfigError, match="price needs a plan"):
        flags_first(["price", "model=toy"])


def test_a_busy_machine_is_named_by_its_cpu_seconds() -> None:
    assert busy_words(7.0, 10.0) == ""
    assert "busy: the search got 6.9 CPU s in 10.0 s" in busy_words(6.9, 10.0)
