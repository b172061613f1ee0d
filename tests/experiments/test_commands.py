import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from darts_parallel import search
from darts_parallel.config.composition import load_config
from darts_parallel.config.options import READER_LEFT, describe, parse, run_main
from darts_parallel.errors import INTERRUPTED, ConfigError
from darts_parallel.problem.problem import load_problem
from experiments import compare, results_page
from experiments.compare import CompareOptions
from experiments.comparison.runs import SEARCH
from experiments.study import (
    Study,
    StudyOptions,
    report_text,
    run_study,
    solve_all,
    unless_interrupted,
)


def test_options_reach_nested_keys_and_single_values_stand_for_lists() -> None:
    options = parse(
        CompareOptions,
        ["search.num_steps=100", "problems=gpt2_xl", "seeds=2", "methods=[gradient_search]"],
    )
    assert (options.search.num_steps, options.problems, options.seeds) == (100, ["gpt2_xl"], 2)
    assert options.methods == [SEARCH]
    assert options.search.num_restarts == load_config().search.num_restarts
    assert "seeds=5" in describe(CompareOptions)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("problem=[x]", "problem=\\[x\\] is not a key of the configuration; try problems."),
        ("search.num_stepz=3", "try search.num_steps."),
        ("seeds", "seeds= must have a value; try seeds=VALUE"),
        ("seeds=", "seeds= must have a value"),
        ("seeds=abc", "seeds=abc must be a whole number"),
        ("seeds=0", "seeds=0 must be at least 1"),
        ("search.fitting=hard", "search.fitting=hard must be one of repair, fill, prices, splits"),
        ("methods=[magic]", "methods=magic must be one of"),
        ("problems=[x", "cannot be read"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_status_2(
    argument: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(CompareOptions, [argument])
    monkeypatch.setattr(sys, "argv", ["compare", argument])
    assert run_main("experiments.compare", compare.run) == 2
    written = capsys.readouterr().err
    assert written.startswith("experiments.compare: ")
    assert written.count("\n") == 1


@dataclass(frozen=True)
class Square:
    """A row of a study."""

    number: int
    square: int
    curve: tuple[int, ...] = field(default=(), repr=False)


def squared(number: int) -> list[Square]:
    """Solve a task."""
    return [Square(number, number * number)]


SQUARES = Study(
    "squares",
    "What?",
    "cubes.",
    squared,
    lambda rows: report_text("note", ["| a |"], str(len(rows))),
)


def test_a_study_writes_rows_in_the_order_of_its_tasks_and_keeps_what_is_done(
    tmp_path: Path,
) -> None:
    tasks: dict[str, int] = {"two": 2, "three": 3}
    assert run_study(SQUARES, tasks, StudyOptions(jobs=1, out=str(tmp_path))) == 0
    assert (tmp_path / "squares.csv").read_text() == "number,square\n2,4\n3,9\n"
    assert (tmp_path / "squares.md").read_text() == "note\n\n| a |\n\n2\n"

    def interrupted(number: int) -> list[Square]:
        if number == 3:
            raise KeyboardInterrupt
        return squared(number)

    early = replace(SQUARES, solve=interrupted)
    assert (
        run_study(early, tasks, StudyOptions(jobs=1, out=str(tmp_path), publish=True))
        == INTERRUPTED
    )
    assert (tmp_path / "squares.csv").read_text() == "number,square\n2,4\n"
    assert not (results_page.RESULTS / "squares.md").exists()


def asleep(task: float) -> tuple[float, int]:
    time.sleep(task)
    return task, os.getpid()


@pytest.mark.slow
def test_tasks_are_solved_in_processes_of_which_none_outlives_what_was_left_early() -> None:
    answers = solve_all(asleep, {"a": 0.0, "b": 0.01, "long": 600.0, "next": 600.0}, jobs=2)
    found = dict([next(answers), next(answers)])
    assert {name: task for name, (task, _) in found.items()} == {"a": 0.0, "b": 0.01}
    assert os.getpid() not in {process for _, process in found.values()}
    answers.close()
    assert not multiprocessing.active_children()


def test_a_page_of_results_names_its_command_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    command = "python -m experiments.x"
    content = results_page.Page("x", "Why?", command, "new\n", "how.")
    page = results_page.publish(content)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Why?\n\n    python -m experiments.x\n\nCommit ")
    assert text.endswith("new\n\nNot shown: how.\n")


@pytest.mark.slow
def test_a_reader_that_leaves_ends_a_command_in_silence() -> None:
    command = [sys.executable, "-m", "experiments.bilevel", "--help"]
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=plain
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == READER_LEFT


def test_ctrl_c_in_a_search_ends_the_study_too() -> None:
    few = ["search.num_steps=2", "search.num_restarts=2", "search.polish=false"]
    found = search(
        load_problem(["model=toy", "cluster=toy", "training=toy", "space=uniform", *few]), seed=0
    )
    assert unless_interrupted(found) is found
    with pytest.raises(KeyboardInterrupt):
        unless_interrupted(replace(found, stopped_by="user"))
