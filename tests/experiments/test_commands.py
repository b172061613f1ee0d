import csv
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from darts_parallel.config.composition import load_config
from darts_parallel.config.options import READER_LEFT, describe, parse, run_main
from darts_parallel.errors import ConfigError
from darts_parallel.planner.node_choice import node_choices
from darts_parallel.problem.problem import load_problem
from darts_parallel.run.workers import preloaded
from experiments import benchmark, replan, results_page
from experiments.benchmark import WORK, BenchmarkOptions, Timed
from experiments.compare import INTERRUPTED, CompareOptions, compare
from experiments.comparison import problems, summary
from experiments.comparison.gaps import SHARES, Distribution, Findings, percent, summarise
from experiments.comparison.picture import gaps_figure, save
from experiments.comparison.problems import CORE, MIXED, PRESETS, UNEVEN, suite
from experiments.comparison.quantiles import quantile
from experiments.comparison.runs import ORACLE, SEARCH, UNIFORM, Run, Work, run_case
from experiments.pareto import ParetoOptions
from experiments.study import Report, Study, StudyOptions, run_study, solve_all


def quiet_console() -> Console:
    return Console(file=StringIO(), width=120)


def oracle(problem: str, *, proven: bool = True) -> Run:
    return Run(problem, ORACLE, None, 1.0, 0.5, 10, proven, 0.0)


def found(problem: str, seed: int, gap: float, raw: float) -> Run:
    return Run(problem, SEARCH, seed, 1.0 + gap, 2.0, 100, False, gap, raw)


def test_the_suite_has_its_thirty_problems_with_names_of_their_own() -> None:
    cases = suite()
    assert len(cases) == 2 * len(PRESETS) + len(UNEVEN) + len(MIXED) + 2 * len(problems.LARGE)
    assert len(cases) >= 30
    assert len({case.name for case in cases}) == len(cases)
    assert not any(case.model == "toy" for case in cases)
    assert [case.name for case in suite(["bert_345m on a10_4x4, tight"])] == ["bert_345m on a10_4x4, tight"]
    with pytest.raises(ConfigError, match=r"problems=gpt9 is part of no problem's name.*gpt2_xl"):
        suite(["gpt9"])


@pytest.mark.parametrize("problem", replan.PROBLEMS)
def test_problems_to_replan_have_presets(problem: str) -> None:
    model, cluster = problem.split(" on ")
    config = load_config([f"model={model}", f"training={model}", f"cluster={cluster}"])
    assert (config.model.name, config.cluster.name) == (model, cluster)


def test_the_default_offer_of_pareto_is_fasops_study() -> None:
    problem = load_problem(ParetoOptions().overrides)
    assert (problem.config.model.name, problem.config.training.seq_len) == ("gpt2_xl", 1024)
    assert len(node_choices(problem)) == 80


def test_the_core_of_the_suite_has_every_kind_of_problem() -> None:
    core, whole = suite(["core"]), suite()
    assert [case.name for case in core] == list(CORE)
    assert len(core) < len(whole)
    assert {case.variant for case in core} == {case.variant for case in whole}
    assert {case.model for case in whole} - {case.model for case in core} == {"bloom_176b"}


def test_a_tight_problem_has_less_memory_and_an_uneven_one_other_layers() -> None:
    loose, tight, uneven = (case.tables()[0] for case in suite(["toy on toy"]))
    assert tight.capacity[0] < loose.capacity[0]
    ratio = uneven.forward / loose.forward
    assert ratio.isfinite().logical_not().sum() == loose.forward.eq(0).sum()
    factors = ratio[ratio.isfinite()]
    assert float(factors.min()) >= 0.5
    assert float(factors.max()) <= 2.0
    assert float(factors.std()) > 0.1


def test_compare_leaves_rows_a_summary_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # its processes are forked from the server that other tests have started, too, instead of importing torch
    context = preloaded()
    monkeypatch.setattr("experiments.compare.multiprocessing.get_context", lambda method: context)
    arguments = ["problems=toy on toy, loose", "seeds=1", "jobs=1", f"out={tmp_path}", "search.num_steps=20",
                 "methods=[gradient_search,exhaustive_uniform,annealing,amp]", "budget=0.2"]  # fmt: skip
    console = quiet_console()
    assert compare(parse(CompareOptions, arguments), console) == 0
    with (tmp_path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [ORACLE, UNIFORM, SEARCH, "annealing", "amp"]
    header = "problem, method, seed, iteration_time_s, seconds, evaluations, proven, gap, raw_gap"
    assert list(rows[0]) == header.split(", ")
    assert rows[0]["proven"] == "True"
    assert float(rows[0]["gap"]) == 0.0
    assert all(float(row["gap"]) > -1e-9 for row in rows)
    assert "search.num_steps=20" in (tmp_path / "summary.md").read_text()
    assert "| annealing | 1 |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "curves.csv").read_text().count("annealing") >= 1
    for name in ("gaps.png", "anytime.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "toy on toy" in console.file.getvalue()  # type: ignore[attr-defined]


def test_compare_keeps_what_is_done_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_then_interrupt(*_: object):  # type: ignore[no-untyped-def]
        yield "toy on toy, tight", [oracle("toy on toy, tight"), found("toy on toy, tight", 0, 0.0, 0.1)]
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.compare._solve_all", one_then_interrupt)
    console = quiet_console()
    assert compare(CompareOptions(problems=["toy"], out=str(tmp_path)), console) == INTERRUPTED
    assert len((tmp_path / "compare.csv").read_text().splitlines()) == 3
    assert "1 of 3 problems are done" in console.file.getvalue()  # type: ignore[attr-defined]


def test_gaps_of_an_oracle_that_stopped_early_are_from_its_bound() -> None:
    case = suite(["toy on toy, tight"])[0]
    search = replace(load_config().search, num_steps=5, num_restarts=2)
    rows = run_case(Work(case, (UNIFORM,), (0,), search, oracle_seconds=1e-9))
    assert not rows[0].proven
    assert Findings.of(rows).unproven == (case.name,)
    assert Findings.of(rows).polished is None


def test_quantiles_are_observed_values_and_failures_stay_infinite() -> None:
    values = [0.03, 0.0, float("inf"), 0.01, 0.02]
    assert [quantile(values, share) for share in (5, 20, 21, 50, 80, 81, 100)] == [
        0.0, 0.0, 0.01, 0.02, 0.03, float("inf"), float("inf"),
    ]  # fmt: skip
    assert quantile([0.0] * 19 + [1.0], 95) == 0.0
    assert quantile([7.0], 5) == 7.0


def test_the_share_of_exact_gaps_forgives_rounding_only() -> None:
    part = Distribution.of([0.0, 9e-10, -9e-10, 2e-9])
    assert part.count == 4
    assert part.exact == 0.75
    assert len(part.quantiles) == len(SHARES)


def test_findings_name_misses_worst_first_and_leave_unproven_problems_out() -> None:
    runs = [oracle("a"), found("a", 0, 0.001, 0.02), found("a", 1, 0.0, 0.004)]
    runs += [oracle("b"), found("b", 0, 0.02, 0.03), oracle("c", proven=False), found("c", 0, 0.5, 0.6)]
    findings = Findings.of(runs)
    assert [(run.problem, run.seed) for run in findings.misses] == [("b", 0), ("a", 0)]
    assert findings.unproven == ("c",)
    assert findings.polished is not None
    assert findings.polished.count == 3
    assert [met for _, _, met in findings.targets()] == [False, False, False]
    assert [summary.search_seconds for summary in summarise(runs)] == [2.0, 2.0, 2.0]
    text = summary.markdown(findings, "note")
    assert "- b, seed 0: polished 2.000 %, raw 3.000 %" in text
    assert "stopped early on c" in text


def test_a_run_below_the_proven_answer_is_called_a_contradiction() -> None:
    findings = Findings.of([oracle("a"), found("a", 3, -1e-6, 0.0)])
    assert [run.seed for run in findings.contradictions] == [3]
    assert "Contradiction" in summary.markdown(findings, "note")


def test_percent_tells_zero_from_a_rounded_number() -> None:
    assert [percent(x) for x in (0.0, 5e-10, 1e-8, 0.0123, float("inf"), None)] == [
        "0", "0", "1e-06 %", "1.230 %", "no plan", "-",
    ]  # fmt: skip


def test_the_picture_takes_failures_unproven_problems_and_missing_methods(tmp_path: Path) -> None:
    runs = [oracle("a"), found("a", 0, float("inf"), float("inf")), oracle("b", proven=False)]
    save(gaps_figure(Findings.of(runs)), tmp_path / "gaps.png")
    save(gaps_figure(Findings.of([oracle("a")])), tmp_path / "none.png")
    for name in ("gaps.png", "none.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    names = [label.get_text() for label in gaps_figure(Findings.of(runs)).axes[1].get_yticklabels()]
    assert sorted(names) == ["a", "b (to the bound)"]


def test_options_reach_nested_keys_and_single_values_stand_for_lists() -> None:
    options = parse(
        CompareOptions, ["search.num_steps=100", "problems=gpt2_xl", "seeds=2", "methods=[gradient_search]"]
    )
    assert (options.search.num_steps, options.problems, options.seeds) == (100, ["gpt2_xl"], 2)
    assert options.methods == [SEARCH]
    assert options.search.num_restarts == load_config().search.num_restarts
    assert "seeds=5" in describe(CompareOptions)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("problem=[x]", "problem=\\[x\\] is not an option; try problems."),
        ("search.num_stepz=3", "try search.num_steps."),
        ("seeds", "seeds has no value"),
        ("seeds=", "seeds= has no value"),
        ("seeds=abc", "seeds=abc must be a whole number"),
        ("seeds=0", "seeds=0 must be at least 1"),
        ("search.relaxation=hard", "search.relaxation=hard must be one of softmax, gumbel"),
        ("methods=[magic]", "methods=magic must be one of"),
        ("problems=[x", "cannot be read"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_status_2(
    argument: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(CompareOptions, [argument])
    monkeypatch.setattr(sys, "argv", ["compare", argument])
    assert run_main("experiments.compare", None, CompareOptions, lambda options: 0) == 2
    written = capsys.readouterr().err
    assert written.startswith("experiments.compare: ")
    assert written.count("\n") == 1


def test_benchmark_judges_the_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = benchmark.report([Timed("a", 2.0, 1.5, 1.0, 9.0, "-"), Timed("b", 1.0, 1.5, 1.0, 9.0, "-")], 3)
    assert "| a | 1.50 | 1.00 | 9.00 | 2 | yes | - |" in report.text
    assert "| b | 1.50 | 1.00 | 9.00 | 1 | NO | - |" in report.text
    monkeypatch.setitem(WORK, "nothing", (1.0, lambda: "done"))
    assert benchmark.run(BenchmarkOptions(repeats=2, only=["nothing"], out=str(tmp_path))) == 0
    assert "1 of 1 are within their targets." in capsys.readouterr().out
    with pytest.raises(ConfigError, match="only=magic is part of no name"):
        benchmark.run(BenchmarkOptions(only=["magic"]))


@dataclass(frozen=True)
class Square:
    """A row of a study."""

    number: int
    square: int
    curve: tuple[int, ...] = field(default=(), repr=False)


def squared(number: int) -> list[Square]:
    """Solve a task."""
    return [Square(number, number * number)]


SQUARES = Study("squares", "What?", "cubes.", squared, lambda rows: Report("note", ["| a |"], str(len(rows))))


def test_a_study_writes_rows_in_the_order_of_its_tasks_and_keeps_what_is_done(tmp_path: Path) -> None:
    tasks: dict[str, int] = {"two": 2, "three": 3}
    assert run_study(SQUARES, tasks, StudyOptions(jobs=1, out=str(tmp_path))) == 0
    assert (tmp_path / "squares.csv").read_text() == "number,square\n2,4\n3,9\n"
    assert (tmp_path / "squares.md").read_text() == "note\n\n| a |\n\n2\n"

    def interrupted(number: int) -> list[Square]:
        if number == 3:
            raise KeyboardInterrupt
        return squared(number)

    early = replace(SQUARES, solve=interrupted)
    assert run_study(early, tasks, StudyOptions(jobs=1, out=str(tmp_path), publish=True)) == INTERRUPTED
    assert (tmp_path / "squares.csv").read_text() == "number,square\n2,4\n"
    assert not (results_page.RESULTS / "squares.md").exists()


def test_tasks_are_solved_in_processes_of_their_own() -> None:
    pytest.importorskip("joblib")
    found = dict(solve_all(lambda task: (task, os.getpid()), {"a": 1, "b": 2}, jobs=2))
    assert {name: task for name, (task, _) in found.items()} == {"a": 1, "b": 2}
    assert os.getpid() not in {process for _, process in found.values()}


def test_a_page_of_results_names_its_command_and_commit_and_shows_its_pictures(tmp_path: Path) -> None:
    (tmp_path / "curve.png").write_bytes(b"picture")
    pictures = {tmp_path / "curve.png": "a curve"}
    page = results_page.publish(
        "x", "Why?", "python -m experiments.x", "new\n", pictures, tmp_path / "results", "how."
    )
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Why?\n\n    python -m experiments.x\n\nCommit ")
    assert text.endswith("new\n\n![a curve](pictures/x_curve.png)\n\nNot shown: how.\n")
    assert (tmp_path / "results" / "pictures" / "x_curve.png").read_bytes() == b"picture"


def test_a_reader_that_leaves_ends_a_command_in_silence() -> None:
    command = [sys.executable, "-m", "experiments.bilevel", "--help"]
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=plain) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == READER_LEFT
