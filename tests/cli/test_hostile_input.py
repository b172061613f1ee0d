"""Files without an end, signs for terminals, a disk without room, no output: a sentence, and the plan."""

import errno
import json
import sys

import pytest

from darts_parallel.errors import MOST_SAID, DartsParallelError, begin_command, one_line
from darts_parallel.report import Tracker
from tests.support.commands import QUIET, TOY, Command, alias_bomb


@pytest.mark.parametrize(
    "arguments", [("plan=/dev/zero",), ("tune", "/dev/zero"), ("model=hf", "model.path=/dev/zero")]
)
def test_a_file_without_an_end_is_refused(
    arguments: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("darts_parallel.errors.MOST_READ", 10**5)
    outcome = command(*arguments)
    assert outcome.status == 2
    assert "cannot be read (File too large)" in outcome.err


def test_aliases_that_stand_for_more_than_the_memory_holds_are_refused(command: Command) -> None:
    (command.folder / "model").mkdir()
    (command.folder / "model/mine.yaml").write_text(alias_bomb())
    outcome = command("--config-dir", ".", "model=mine")
    assert outcome.status == 2
    assert "model/mine.yaml must hold at most 100,000 values" in outcome.err


def test_a_sentence_is_one_line_of_signs_that_do_nothing() -> None:
    assert one_line("a \x1b[31mb\n\x07c\u202e モ") == "a \\x1b[31mb \\x07c\\u202e モ"
    long = one_line("key=" + "x" * 10**6 + " is wrong; try 1.")
    assert len(long) < MOST_SAID + 10
    assert long.startswith("key=")
    assert long.endswith("try 1.")


def test_curves_without_room_cost_no_plan(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tracker, "finish", full)
    outcome = command(*TOY, "verification.enabled=false")
    assert (outcome.status, outcome.err) == (0, "")
    assert "the curves cannot be written (No space left on device)" in outcome.out
    assert command.plan_file().is_file()


def test_what_cannot_be_found_or_written_next_to_the_plan_is_a_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise DartsParallelError("space.cp=2 must be one of [none].")

    for name in ("sensitivity", "ladder"):
        monkeypatch.setattr(f"darts_parallel.cli._job.{name}", refused)
    (command.folder / "run/report.html").mkdir(parents=True)
    outcome = command(*TOY, *QUIET, "hydra.run.dir=run")
    assert (outcome.status, outcome.err) == (0, "")
    for what in ("the sensitivity", "the risk table"):
        assert f"{what} is missing: space.cp=2 must be one of [none].\n" in outcome.out
    said = " ".join(outcome.out.split())
    assert "report.html cannot be written (Is a directory)" in said
    assert command.plan_file().is_file()


def test_a_plan_that_cannot_be_written_is_printed(command: Command) -> None:
    """A full disk took a plan that had been searched for minutes."""
    (command.folder / "run/plan.json").mkdir(parents=True)
    outcome = command(*TOY, *QUIET, "hydra.run.dir=run")
    assert outcome.status == 2
    assert "plan.json cannot be written (Is a directory)" in outcome.err
    assert " per iteration · " in outcome.out
    assert "start it" not in outcome.out


def test_a_sweep_whose_table_cannot_be_written_ends_in_one_sentence(command: Command) -> None:
    """Hydra showed a warning of Python, and the exit status was 0."""
    (command.folder / "swept/results.csv").mkdir(parents=True)
    outcome = command("-m", *TOY, *QUIET, "space.pp=1,2", "hydra.sweep.dir=swept")
    assert outcome.status == 2
    why = "swept/results.csv cannot be written (Is a directory)"
    assert outcome.err == f"darts-parallel: output: {why}.\n"


def test_a_risk_level_that_cannot_be_written_is_left_out(command: Command) -> None:
    (command.folder / "run/plan_fastest.json").mkdir(parents=True)
    outcome = command(
        *TOY,
        "output.tensorboard=false",
        "cluster.devices.toy.memory_GiB=0.104",
        "space.out_of_memory=0.3",
        "hydra.run.dir=run",
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert "plan_fastest.json is missing: output: " in outcome.out
    ladder = json.loads(command.plan_file().read_text())["ladder"]
    assert "plan_fastest.json" not in {rung["plan"] for rung in ladder}


def test_a_closed_output_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    begin_command()
    with sys.stdout as nobody:
        print("nothing")
    assert nobody.name == "/dev/null"
