"""`darts-parallel tune`: proposals, trials by list or file, sentences for wrong ones, the loop on gloo."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from darts_parallel.cli._arguments import flags_first
from darts_parallel.cli._job import Job
from darts_parallel.cli._plan_config import tuned_config
from darts_parallel.cli._tune import _risk_levels, read_trials
from darts_parallel.config.composition import composed_config
from darts_parallel.errors import ConfigError, DartsParallelError
from darts_parallel.plans.file import read_own_problem, read_plan
from darts_parallel.problem.problem import load_problem
from darts_parallel.run.measure import execute
from darts_parallel.run.settings import RunSettings
from darts_parallel.run.workers import Workers
from tests.support.commands import QUIET, Command
from tests.support.running import TINY

SMALL = (
    *TINY,
    *QUIET,
    "cluster.nodes.0.count=1",
    "cluster.nodes.0.gpus=2",
    "space=executable",
    "space.kind=uniform",
    "space.recompute=[none,full]",
    "space.num_micro_batches=[2,4]",
    "search.exact_seconds=20",
    "search.num_steps=10",
    "search.num_restarts=2",
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan that was found before anything was tried."""
    folder = tmp_path_factory.mktemp("tune")
    problem = load_problem([*SMALL])
    (folder / "first").mkdir()
    Job(problem, folder / "first", Console(file=StringIO())).run()
    return folder


def test_plans_of_other_risk_are_candidates_where_the_plan_names_them(first: Path) -> None:
    folder = first / "levels"
    shutil.copytree(first / "first", folder)
    source = folder / "plan.json"
    data = json.loads(source.read_text())
    problem = read_own_problem(str(source))
    assert _risk_levels(problem, str(source)) == []
    shutil.copy(source, folder / "plan_safe.json")
    shutil.copy(source, folder / "plan_fastest.json")
    data["ladder"] = [{"plan": "plan_safe.json", "seconds": 1.0, "chance": 0.0}]
    source.write_text(json.dumps(data))
    safe = read_plan(str(folder / "plan_safe.json"), problem.model)
    assert _risk_levels(problem, str(source)) == [safe]


@pytest.mark.slow
def test_the_loop_closes_right_here(
    command: Command, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Propose, run two plans with gloo, replan: the seconds of every plan follow those that are told."""
    monkeypatch.setattr("darts_parallel.planner.tuning.CANDIDATES", 8)
    shutil.copytree(first / "first", command.folder / "first")
    first = command("tune", "first/plan.json", "--top", "2", *QUIET, "hydra.run.dir=tried")
    assert first.status == 0, first.err
    assert "Try next" in first.out
    state = json.loads((command.folder / "tried/plan.json").read_text())["tune"]
    assert [entry["trials"] for entry in state["next"]] == [0, 0]
    assert state["scale"] == 1.0
    problem_file = command.folder / "first/plan.json"
    trials = []
    priced = command("price", "tried/plan_1.json", *QUIET, "hydra.run.dir=priced", "export=torch")
    assert "given plan, not searched" in priced.out, priced.err
    assert (command.folder / "priced/plan.json").exists()
    assert (command.folder / "priced/train_torch.py").exists()
    settings = RunSettings(plan=str(problem_file), steps=2, warmup=1, device="cpu", timeout_s=60)
    with Workers(2, 60.0, "cpu") as workers:
        for number in (1, 2):
            path = command.folder / f"tried/plan_{number}.json"
            problem = read_own_problem(str(path))
            outcome = workers.run(
                execute, problem, read_plan(str(path), problem.model), settings, "cpu"
            )[0]
            assert (
                outcome.measurement.iteration_time_s > 0.0
            )  # how long is a matter of the machine's load
            predicted = json.loads(path.read_text())["predicted"]["iteration_time_s"]
            trials.append((f"tried/plan_{number}.json", 3.0 * predicted))
    rows = ["plan,seconds,memory_gb,oom", *(f"{path},{seconds!r},," for path, seconds in trials)]
    (command.folder / "trials.csv").write_text("\n".join(rows) + "\n")
    done = command(
        "tune", "first/plan.json", *QUIET, "tune.measured=trials.csv", "hydra.run.dir=after"
    )
    assert "tune.measured=FILE.csv" in done.out, done.err
    after = json.loads((command.folder / "after/plan.json").read_text())["tune"]
    assert after["scale"] != 1.0
    tried = {entry["plan"]: entry["seconds"] for entry in after["trials"]}
    assert tried == {path: pytest.approx(seconds) for path, seconds in trials}
    best = after["best"]
    assert best["expected_iteration_time_s"] == pytest.approx(
        best["predicted_iteration_time_s"] * after["scale"], rel=0.5
    )


WRONG = (
    ({"plan": "first/plan.json"}, "must say seconds, or oom: true"),
    (
        {"plan": "first/plan.json", "seconds": 1, "memory_gb": 1e300},
        "memory_gb=1e+300 must be at most 1e+12",
    ),
    ({"plan": "first/plan.json", "seconds": "0,02"}, "0,02 must be a number; try 0.02."),
    ({"seconds": 1}, "plan is missing and has no default"),
    ({"plan": "none.json", "seconds": 1}, "none.json cannot be read"),
    ("nothing.csv", "tune.measured=nothing.csv cannot be read"),
    (
        "empty.csv",
        "tune.measured=empty.csv: it must hold at least one row; try the columns plan,seconds,",
    ),
)


@pytest.mark.parametrize(("trial", "words"), WRONG)
def test_a_wrong_trial_is_one_sentence(
    trial: dict[str, Any] | str, words: str, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(first)
    problem = read_own_problem("first/plan.json")
    Path("empty.csv").write_text("plan,seconds,oom\n")
    measured = trial if isinstance(trial, str) else [trial]
    with pytest.raises(DartsParallelError, match=re.escape(words)):
        read_trials(problem, measured)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model=bert_345m", "was made for model=toy, and this command asks for another"),
        ("training.global_batch_size=64", "training.global_batch_size=64 must stay"),
        ("training.seq_len=4", "training.seq_len=4 must stay"),
        (
            "cluster.nodes.7.count=1",
            "cluster.nodes.7.count=1 does not fit the plan in tune.from=first/plan.json",
        ),
    ],
)
def test_the_job_of_a_plan_stays_what_it_was(
    change: str, words: str, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(first)
    composed = composed_config([] if "nodes" in change else [change])
    with pytest.raises(DartsParallelError, match=re.escape(words)):
        tuned_config("first/plan.json", composed, [change])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"cannot be read \(No such file"),
        ("{", "is not valid JSON"),
        ("[]", "the field config is missing"),
        ("{}", "the field config is missing"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_under_the_key_that_named_it(
    command: Command, content: str | None, words: str
) -> None:
    if content is not None:
        (command.folder / "p.json").write_text(content)
    before = list(command.folder.iterdir())
    outcome = command("tune.from=p.json")
    assert outcome.status == 2
    assert re.search(rf"^darts-parallel: tune\.from=p\.json.*{words}.*\.$", outcome.err)
    assert list(command.folder.iterdir()) == before


@pytest.mark.slow
def test_logs_move_figures_that_later_commands_take(
    command: Command, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("darts_parallel.planner.tuning.CANDIDATES", 1)
    source, line = first / "first/plan.json", "elapsed time per iteration (ms): {:.4f} |\n"
    seconds = json.loads(source.read_text())["predicted"]["iteration_time_s"]
    for number, share in enumerate((1.5, 1.4)):
        (command.folder / f"{number}.log").write_text(line.format(1e3 * share * seconds) * 8)
        done = command(
            "tune", str(source), "--from-log", f"{number}.log", *QUIET, f"hydra.run.dir={number}"
        )
        assert f"({number + 1}): outputs/tuned/cluster" in done.out, done.err
        assert f"darts-parallel price {number}/plan.json" in done.out
    (path,) = (command.folder / "outputs/tuned/cluster").iterdir()
    figures = ("--config-dir", "outputs/tuned", f"cluster={path.stem}", "hydra.run.dir=priced")
    assert command("price", str(source), *figures, *QUIET).status == 0
    found = json.loads((command.folder / "priced/plan.json").read_text())["predicted"][
        "iteration_time_s"
    ]
    assert found / seconds == pytest.approx(1.45, abs=0.15)
    # the printed command plans the same job by the moved figures, without any other key
    done = command("price", "1/plan.json", *QUIET, "hydra.run.dir=again")
    assert done.status == 0, done.err
    first_job, again = (
        json.loads(path.read_text())["config"]
        for path in (source, command.folder / "again/plan.json")
    )
    for key in ("model", "training", "trainer", "space", "cost"):
        assert again[key] == first_job[key]
    assert [run["log"][:5] for run in again["cluster"]["runs"]] == ["0.log", "1.log"]


@pytest.mark.parametrize("way", ["log", "csv"])
def test_seconds_that_are_too_far_off_are_refused_by_log_and_by_table(
    command: Command, first: Path, way: str
) -> None:
    source = first / "first/plan.json"
    (command.folder / "x.log").write_text("elapsed time per iteration (ms): 1e5 |\n" * 8)
    (command.folder / "x.csv").write_text(f"plan,seconds\n{source},100\n")
    given = ["--from-log", "x.log"] if way == "log" else ["tune.measured=x.csv"]
    done = command("tune", str(source), *given, *QUIET, "hydra.run.dir=off")
    assert done.status == 2
    assert re.search(r"measured at 100 s must be as predicted, and is .* off; try", done.err)
    assert not (command.folder / "off/plan.json").exists()


@pytest.mark.parametrize("steps", ["0.0", "9" * 400])
def test_steps_of_no_length_or_without_end_are_refused_as_too_far_off(
    command: Command, first: Path, steps: str
) -> None:
    (command.folder / "x.log").write_text(f"elapsed time per iteration (ms): {steps} |\n" * 8)
    source = str(first / "first/plan.json")
    done = command("tune", source, "--from-log", "x.log", *QUIET, "hydra.run.dir=off")
    assert done.status == 2
    assert re.search(r"must be as predicted, and is [\d.]+ standard deviations off; try", done.err)


def test_the_verb_and_its_flag_are_overrides() -> None:
    assert flags_first(["tune", "p.json", "--top", "5"]) == ["tune.from=p.json", "tune.top=5"]
    assert flags_first(["--top=2", "tune", "p.json"]) == ["tune.from=p.json", "tune.top=2"]
    for wrong, hint in (
        (["tune", "p.json", "--top"], "--top: expected one argument"),
        (["tune", "p.json", "--top", "x"], "--top: invalid int value: 'x'"),
        (["--top", "3", "plan=p.json"], r"try darts-parallel tune plan\.json"),
    ):
        with pytest.raises(ConfigError, match=hint):
            flags_first(wrong)
    assert flags_first(["tune", "p.json", "--from-log", "a.log"]) == [
        "tune.from=p.json",
        "tune.log=a.log",
    ]
    with pytest.raises(ConfigError, match="tune needs the plan of the job"):
        flags_first(["tune"])
