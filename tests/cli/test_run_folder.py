"""Finished work of a run stays, a refused one leaves nothing, and no two write into one folder."""

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.cli import _job as job
from darts_parallel.cli import _task as task
from darts_parallel.cli import command as cli
from darts_parallel.cli._run_folder import RunFolder
from darts_parallel.config.options import run_folder
from darts_parallel.errors import ConfigError
from tests.support.commands import QUIET, TOY, Command

EVENTS = f"tensorboard/events.out.tfevents.1.host.{os.getpid()}.0"


def entered(path: Path) -> RunFolder:
    path.mkdir(exist_ok=True)
    return RunFolder.enter(path, time.time() - 1.0)


def test_two_runs_of_one_second_get_a_folder_each(tmp_path: Path) -> None:
    path = tmp_path / "12-00-00"
    with entered(path).own(named=False) as first:
        with entered(path).own(named=False) as second:
            assert (first.path, second.path) == (path, tmp_path / "12-00-00-2")
        with (
            pytest.raises(ConfigError, match=r"is being written by another run; try .*12-00-00-2"),
            entered(path).own(named=True),
        ):
            pass
        (path / "plan.json").write_text("{}")
    # the first run is over and has left a plan: a folder that nobody chose is not used again
    with entered(path).own(named=False) as third:
        assert third.path != path
    with entered(path).own(named=True) as fourth:
        assert fourth.path == path


def test_only_what_is_no_result_is_removed(tmp_path: Path) -> None:
    folder = entered(tmp_path / "run")
    (folder.path / "tensorboard").mkdir()
    (folder.path / EVENTS).write_text("")
    folder.restore()
    assert not folder.path.exists()
    folder = entered(tmp_path / "run")
    (folder.path / "tensorboard").mkdir()
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "seed_0.pt").write_text("")
    folder.restore()
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "tensorboard"]


def test_what_others_have_written_meanwhile_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    folder = entered(tmp_path / "run")
    theirs = "tensorboard/events.out.tfevents.1.host.1.0"
    mine, others = ["overrides.json", EVENTS], ["tensorboard/notes", theirs, "old"]
    for name in (*mine, *others):
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).write_text("")
        os.utime(folder.path / name, (1.0, 1.0))
    folder.restore()
    assert all((folder.path / name).exists() for name in others)
    (folder.path / "old").rename(folder.path / "plan.json")
    folder.restore()
    assert (folder.path / "plan.json").exists()
    (folder.path / "plan.json").unlink()
    folder.restore()
    assert {path.name for path in folder.path.rglob("*") if path.is_file()} == {
        "notes",
        Path(theirs).name,
    }


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_plan_that_was_written_outlives_an_error_after_it(
    error: BaseException, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(job, "render_ending", fail)
    outcome = command(*TOY, *QUIET, "hydra.run.dir=run")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert "run/plan.json" in outcome.files


def test_a_plan_is_priced_on_its_own_problem_with_the_change(command: Command) -> None:
    assert run_folder(["hydra.run.dir="]).parts[:1] == run_folder([]).parts[:1] == ("outputs",)
    assert command(*TOY, *QUIET, "space.pp=1", "space.tp=1", "hydra.run.dir=own").status == 0
    plan = json.loads((command.folder / "own/plan.json").read_text())
    slower = plan["cluster"]["inter_node"]["bandwidth_GBps"] / 10
    changed = command(
        "plan=own/plan.json",
        f"cluster.inter_node.bandwidth_GBps={slower}",
        "output.tensorboard=false",
        "hydra.run.dir=changed",
    )
    assert changed.status == 0, changed.err
    priced = json.loads((command.folder / "changed/plan.json").read_text())
    assert priced["cluster"]["name"] == "toy"
    assert priced["cluster"]["inter_node"]["bandwidth_GBps"] == slower
    assert priced["predicted"]["iteration_time_s"] > plan["predicted"]["iteration_time_s"]
    wrong = command("plan=own/plan.json", "cluster.inter_node.bandwith=1", "hydra.run.dir=wrong")
    assert wrong.status == 2, wrong.out


def test_a_folder_that_the_user_names_is_written_again_and_stays_where_a_run_is_refused(
    command: Command,
) -> None:
    (command.folder / "mine").mkdir()
    assert command(*TOY, "space.pp=7", "hydra.run.dir=mine").status == 2
    assert (command.folder / "mine").is_dir()
    for _ in range(2):
        assert command(*TOY, *QUIET, "hydra.run.dir=mine").status == 0
    assert [path.name for path in command.folder.iterdir()] == ["mine"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second one in LC_ALL=C
def test_a_terminal_of_few_signs_gets_the_report_with_question_marks(
    monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors))
    cli._print_whatever_comes()
    print("dp 4 · tp 2", flush=True)
    assert raw.getvalue() == b"dp 4 ? tp 2\n"


def test_a_plan_that_cannot_be_written_leaves_no_curves_and_one_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(27, "File too large", "run/plan.json")

    monkeypatch.setattr(job, "write_json", fail)
    outcome = command(*TOY, "verification.enabled=false", "hydra.run.dir=run")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert not any("tfevents" in name for name in outcome.files)


def test_a_reader_that_has_gone_gets_all_files(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = job.render
    left = []

    def gone(*arguments: Any) -> list[Any]:
        task.PipedConsole(quiet=False).on_broken_pipe()
        return printed(*arguments)

    monkeypatch.setattr(job, "render", gone)
    # the captured output is no file
    monkeypatch.setattr(task, "leave_pipe", lambda: left.append(1))
    outcome = command(*TOY, *QUIET, "hydra.run.dir=run")
    assert (outcome.status, outcome.err, left) == (0, "", [1])
    assert {"run/plan.json", "run/report.html"} <= set(outcome.files)
