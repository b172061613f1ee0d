"""The named runs of conf/experiment: each leaves a plan, states its command and is in conf/README.md."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from darts_parallel.cli import _trainers
from darts_parallel.cli._job import Job
from darts_parallel.config.composition import load_config
from darts_parallel.config.schema import config_dir
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.commands import QUIET, one_trainer

NAMED = Path(config_dir()) / "README.md"
NAMED_RUNS = sorted(path.stem for path in (Path(config_dir()) / "experiment").glob("*.yaml"))
SHORT = [
    "search.method=gradient",
    "search.num_steps=3",
    "search.num_restarts=2",
    "search.max_seconds=2",
]
LARGE = {
    "llama3_8b_a10": ["space.pp=4", "search.polish=false"],
    "llama3_70b_64xh100": ["space.pp=8", "space.tp=8", "search.polish=false"],
    "gpt3_175b_384xa100": ["space.pp=12", "space.tp=8"],
    "bloom_176b_384xa100": ["space.pp=12", "space.tp=8"],
    "t5_a10": ["space.pp=2", "space.tp=2"],
    "tight_memory": ["space.pp=8", "search.polish=false"],
    "stagewise": ["space.pp=8", "space.tp=4"],
    "uniform": ["space.pp=8", "space.tp=4"],
}
"""One degree for those that take more than seconds."""


@pytest.mark.parametrize("name", [name for name in NAMED_RUNS if name != "bilevel"])
def test_every_named_run_leaves_a_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # that of bilevel: tests/bilevel/test_job.py
    monkeypatch.setattr(_trainers, "NEWEST", one_trainer([name]))
    problem = load_problem([f"experiment={name}", *LARGE.get(name, []), *SHORT, *QUIET])
    console = Console(file=StringIO(), width=120)
    seconds = Job(problem, tmp_path, console).run()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["predicted"]["iteration_time_s"] == pytest.approx(seconds, rel=1e-12)
    assert plan["model"]["name"] in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMED_RUNS)
def test_every_named_run_states_its_command_and_a_change(
    name: str, default_problem: Problem
) -> None:
    lines = (Path(config_dir()) / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# darts-parallel experiment={name}"
    assert lines[2].startswith("# ")
    assert lines[2].endswith(".")
    assert f"`{name}`" in NAMED.read_text(encoding="utf-8")
    assert load_problem([f"experiment={name}"]).config != default_problem.config


def test_a_named_run_wins_over_every_default_and_loses_to_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [{override /model: toy}, {override /training: toy}]\n"
        "search: {num_steps: 7}\n"
        "verification: {max_seconds: 7.0}\noutput: {tensorboard: false}\n"
    )
    config = load_config(["experiment=mine", "search.num_restarts=3"], str(tmp_path))
    assert config.model.name == "toy"
    assert (config.search.num_steps, config.search.num_restarts) == (7, 3)
    assert (config.verification.max_seconds, config.output.tensorboard) == (7.0, False)
    again = load_config(["experiment=mine", "search.num_steps=9", "model=bert_345m"], str(tmp_path))
    assert (again.search.num_steps, again.model.name) == (9, "bert_345m")
