"""`search.method`: descend and check, exact methods alone, or exact ones first; the report says which."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import darts_parallel
from darts_parallel.cli._job import Job
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError, InfeasibleError, PlanError
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.exact.result import TableResult
from darts_parallel.exact.uniform import find_uniform_plan
from darts_parallel.gradient.descent import descent_seconds, search, search_tables
from darts_parallel.gradient.step_record import PlanStage, SearchResult
from darts_parallel.planner import _descent_method, planning
from darts_parallel.planner._exact_methods import even_pool
from darts_parallel.planner._session import Asked, Method, Session
from darts_parallel.planner.methods import (
    CHECKS,
    METHODS,
    ORDERS,
    refined,
    run_phases,
    search_result,
    solve,
)
from darts_parallel.planner.planning import checked
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.text import claim
from tests.support.exact_check import check

TOY = [
    "experiment=quick",
    "output.tensorboard=false",
    "output.progress=false",
    "space.num_micro_batches=[4,8]",
]
EXACT_METHODS = "darts_parallel.planner._exact_methods"
FEW = ["search.num_steps=5", "search.num_restarts=2", "search.polish=false"]


def asked(order: str, problem: Problem | None = None) -> Session:
    """A session whose methods were asked in an order."""
    question = Asked.of(problem or load_problem([*TOY, f"search={order}"]))
    session = Session(question, METHODS)
    run_phases(session, ORDERS[order])
    return session


def run(folder: Path, *overrides: str) -> tuple[dict, str]:  # type: ignore[type-arg]
    """`plan.json` and the report."""
    console = Console(file=StringIO(), width=120)
    Job(load_problem([*TOY, "output.verbose=true", *overrides]), folder, console).run()
    return json.loads((folder / "plan.json").read_text()), console.file.getvalue()  # type: ignore[attr-defined]


def test_uniform_plans_of_a_session_are_its_exact_plans_with_one_strategy() -> None:
    session = asked("exact", load_problem([*TOY, "search=exact", "space=layerwise"]))
    by_name = {name: answer.plan for name, answer in session.found.answers.items()}
    uniform = by_name["exhaustive"]
    mixed = by_name["dynamic_programming"]
    assert uniform is not None
    assert mixed is not None
    assert (len(set(uniform.layers)), len(set(mixed.layers)) > 1) == (1, True)
    assert session.found.uniform_plans == [uniform]


def test_the_default_descends_is_checked_and_says_which_plan_was_taken(tmp_path: Path) -> None:
    data, report = run(tmp_path, "search.num_steps=20", "search.tie=0")
    search, checks = data["search"], data["verification"]
    assert (search["method"], search["taken_from"], search["steps"]) == ("gradient", "gradient", 20)
    assert search["stopped_by"] is None
    best = data["predicted"]["iteration_time_s"]
    stages = {stage["name"]: stage for stage in search["stages"]}
    assert list(stages) == ["relaxed", "repaired", "fitted", "polished", "chosen"]
    for stage in stages.values():
        gap = stage["iteration_time_s"] / best - 1 if stage["fits"] else None
        assert stage["gap"] == (None if gap is None else pytest.approx(gap, abs=1e-12))
        assert not stage["fits"] or stage["gap"] >= 0.0
    repaired = stages["repaired"]
    assert repaired["fits"]
    assert search["raw_iteration_time_s"] == repaired["iteration_time_s"]
    assert search["gradient_iteration_time_s"] == stages["polished"]["iteration_time_s"]
    assert stages["fitted"]["iteration_time_s"] >= stages["polished"]["iteration_time_s"]
    assert set(checks) == {"exhaustive", "dynamic_programming"}
    assert checks["dynamic_programming"]["proven"]
    assert "kept: the polished plan" in " ".join(report.split())
    assert "optimal in the model (layerwise" in report


def test_auto_takes_an_exact_method_that_ends_and_says_so(tmp_path: Path) -> None:
    data, report = run(tmp_path, "search=auto", "search.tie=0")
    assert (data["search"]["method"], data["search"]["taken_from"]) == (
        "auto",
        "dynamic_programming",
    )
    assert data["search"]["gradient_iteration_time_s"] is None
    assert [(own["name"], own["gap"]) for own in data["search"]["stages"]] == [("chosen", 0.0)]
    assert "proved its plan" in data["search"]["why"]
    assert data["verification"]["dynamic_programming"]["proven"]
    assert data["verification"]["dynamic_programming"]["gap"] == 0.0
    assert "dynamic programming: it proved its plan" in report
    assert "optimal in the model (layerwise" in report


def test_exact_methods_that_do_not_reach_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^search\.method=exact has no plan: .*search\.method=gradient\.$"
    ):
        run(tmp_path, "search=exact", "space.virtual_stages=[1,2]")


def test_in_python_a_problem_is_planned_as_the_command_does(tmp_path: Path) -> None:
    data, _ = run(tmp_path, "search.num_steps=20")
    planned = darts_parallel.plan(load_problem([*TOY, "search.num_steps=20"]))
    assert planned.result.iteration_time_s == data["predicted"]["iteration_time_s"]
    assert [entry.name for entry in planned.answers] == list(data["verification"])
    assert [list(pair) for pair in pairwise(planned.plan.boundaries)] == [
        s["layers"] for s in data["stages"]
    ]


@pytest.mark.parametrize(
    "overrides", [["cost=searcher"], ["cost.pipeline=simulated"], ["space.virtual_stages=[1,2]"]]
)
def test_no_plan_is_without_a_word_of_a_check(overrides: list[str]) -> None:
    planned = darts_parallel.plan(load_problem([*TOY, *overrides, *FEW]))
    assert planned.answers
    assert all(entry.proven or entry.note for entry in planned.answers)


def test_gradient_is_forced_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        f"{EXACT_METHODS}.find_uniform_plan", lambda *_, **__: pytest.fail("enumerated")
    )
    data, report = run(tmp_path, "search=gradient", "verification.enabled=false", *FEW)
    assert (data["search"]["method"], data["search"]["why"]) == ("gradient", "")
    assert data["search"]["steps"] == 5
    assert "5 steps" in report


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["search.exact_seconds=0"], "search.exact_seconds=0 leaves no time"),
        (["search.exact_seconds=1e-9"], "had no proof after search.exact_seconds=1e-09"),
        (["cost.pipeline=simulated"], "no exact method prices a simulated pipeline"),
        (["space.virtual_stages=[1,2]"], "exact methods only bound interleaved plans"),
    ],
)
def test_where_exact_methods_do_not_reach_the_gradient_search_runs_and_the_reason_is_given(
    overrides: list[str], why: str, tmp_path: Path
) -> None:
    data, report = run(tmp_path, "verification.enabled=false", "search=auto", *overrides, *FEW)
    assert (data["search"]["method"], data["search"]["taken_from"]) == ("auto", "gradient")
    assert why in data["search"]["why"]
    assert data["search"]["steps"] == 5
    assert " ".join(why.split()) in " ".join(report.split())


def test_what_an_exact_method_finds_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poor(*problem: Any, **settings: Any) -> SearchResult:
        found = search_tables(*problem, **settings)
        seconds, plan = found.alternatives[-1]
        return replace(
            found,
            plan=plan,
            iteration_time_s=seconds,
            raw_iteration_time_s=seconds,
            gradient_iteration_time_s=seconds,
            stages=(PlanStage("polished", seconds, fits=True),),
        )

    monkeypatch.setattr("darts_parallel.planner._descent_method.search_tables", poor)
    data, report = run(tmp_path, "space.num_micro_batches=null", *FEW)
    exact = data["verification"]["dynamic_programming"]
    assert exact["proven"]
    assert exact["gap"] == 0.0
    # the best plan of the toy is uniform
    assert data["search"]["taken_from"] == "exhaustive"
    gaps = {own["name"]: own["gap"] for own in data["search"]["stages"]}
    assert gaps["chosen"] == 0.0
    assert gaps["polished"] > 0
    assert "kept: the plan of exhaustive" in " ".join(report.split())
    assert data["predicted"]["iteration_time_s"] < data["search"]["raw_iteration_time_s"]
    assert data["predicted"]["iteration_time_s"] == pytest.approx(
        exact["iteration_time_s"], rel=1e-9
    )


@pytest.mark.parametrize("kind", ["uniform", "stagewise", "layerwise"])
def test_an_exact_answer_is_the_optimum_of_its_space(kind: str) -> None:
    problem = load_problem([*TOY, f"space={kind}"])
    result = search_result(asked("exact", problem))
    words = "all plans are" if kind == "uniform" else "it proved its plan"
    auto = load_problem([*TOY, f"space={kind}", "search=auto"])
    assert search_result(asked("auto", auto)).why.startswith(words)
    best = check(problem)
    assert result.iteration_time_s == pytest.approx(best.iteration_time_s, rel=1e-12)
    assert evaluate(result.plan, problem).iteration_time_s == pytest.approx(
        best.iteration_time_s, rel=1e-9
    )
    assert all(
        other.pp != result.plan.pp or other.num_micro_batches != result.plan.num_micro_batches
        for _, other in result.alternatives
    )
    assert [cost for cost, _ in result.alternatives] == sorted(
        cost for cost, _ in result.alternatives
    )


def test_ctrl_c_during_the_proof_keeps_the_best_uniform_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{EXACT_METHODS}.find_layerwise_plan", interrupt)
    session = asked("exact")
    result = search_result(session)
    assert session.reported.interrupted
    assert (result.stopped_by, result.method, len(set(result.plan.layers))) == (
        "user",
        "exhaustive",
        1,
    )


def test_a_problem_that_no_plan_fits_is_refused_in_the_same_words() -> None:
    problem: Problem = load_problem([*TOY, "cluster.devices.toy.memory_GiB=0.001"])
    with pytest.raises(InfeasibleError) as exact:
        search_result(asked("exact", problem))
    with pytest.raises(InfeasibleError) as gradient:
        search(problem)
    assert str(exact.value) == str(gradient.value)


def test_exact_methods_find_what_descent_misses_or_prove_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_descent_method, "search_tables", lambda *given, **named: None)
    assert planning.plan(load_problem(TOY)).result.method == "dynamic_programming"
    with pytest.raises(
        InfeasibleError, match=r"fits in no layerwise plan that was found on cluster"
    ):
        planning.plan(load_problem([*TOY, "verification.enabled=false"]))


def test_a_result_is_refined_only_by_a_better_plan_of_its_space() -> None:
    session = asked("exact")
    found = replace(search_result(session), method="gradient")
    session.found.result = found
    entry = session.found.answers["dynamic_programming"]
    assert refined(found, session) is found
    session.found.answers = {
        "dynamic_programming": replace(entry, iteration_time_s=1e-9, space="stagewise")
    }
    assert refined(found, session) is found
    session.found.answers["exhaustive"] = replace(
        entry, name="exhaustive", iteration_time_s=2e-9, space="uniform"
    )
    assert refined(found, session).method == "exhaustive"
    session.found.answers["dynamic_programming"] = replace(entry, iteration_time_s=1e-9)
    better = refined(found, session)
    assert (better.iteration_time_s, better.method) == (1e-9, "dynamic_programming")


def test_a_claim_that_a_plan_contradicts_is_no_proof_and_no_plan_leaves_its_space() -> None:
    session = asked("exact")
    found, entry = search_result(session), session.found.answers["dynamic_programming"]
    assert all(answer.proven for answer in checked(found, session))
    session.found.answers["dynamic_programming"] = replace(
        entry, lower_bound_s=1.01 * entry.lower_bound_s
    )
    answers = {answer.name: answer for answer in checked(found, session)}
    assert (answers[entry.name].proven, answers[entry.name].lower_bound_s) == (False, 0.0)
    problem = load_problem(TOY)
    assert "optimal" not in claim(problem, evaluate(found.plan, problem), [answers[entry.name]])
    first, *others = found.plan.layers
    mixed = replace(found.plan, layers=(replace(first, recompute="full"), *others))
    session.asked = replace(session.asked, space_kind="uniform")
    with pytest.raises(PlanError, match="space=uniform must hold"):
        checked(replace(found, plan=mixed), session)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "overrides", [[], ["search.exact_seconds=1e-9"], ["cost.pipeline=simulated", "space.pp=2"]]
)
def test_no_plan_is_counted_twice(
    order: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[int] = []

    def counted(tables: Sequence[CostTable], *given: Any, **settings: Any) -> TableResult:
        asked_for.append(len(tables))
        return find_uniform_plan(tables, *given, **settings)

    monkeypatch.setattr(f"{EXACT_METHODS}.find_uniform_plan", counted)
    monkeypatch.setattr(
        "darts_parallel.exact.layerwise.find_uniform_plan", lambda *_, **__: pytest.fail("again")
    )
    problem = load_problem([*TOY, *FEW, f"search={order}", *overrides])
    session = Session(Asked.of(problem), METHODS)
    run_phases(session, ORDERS[order])
    # what a deadline cut short is asked again with the time of the checks
    again = order == "auto" and "search.exact_seconds=1e-9" in overrides
    unable = order == "exact" and session.asked.simulated
    assert len(asked_for) == 2 * again or len(asked_for) == (0 if unable else 1)


def test_a_method_of_another_file_takes_part_by_its_entry() -> None:
    def guess(session: Session, deadline: float) -> None:
        session.record("guess", "uniform", replace(known, proven=False), 0.0)

    known = asked("exact").found.answers["exhaustive"]
    question = Asked.of(load_problem([*TOY, "search=exact"]))
    session = Session(question, {"guess": Method("guess", guess)})
    run_phases(session, (replace(CHECKS, methods=("guess",)),))
    assert search_result(session).method == "guess"


def test_tables_alone_are_solved_optimally_whether_or_not_the_proof_comes_in_time() -> None:
    problem = load_problem(["experiment=quick"])
    tables = tuple(build_tables(problem))
    best = find_layerwise_plan(tables, "layerwise")
    settings = replace(problem.config.search, method="auto", num_steps=5, num_restarts=2)
    proven = solve(tables, "layerwise", settings)
    late = solve(tables, "layerwise", replace(settings, exact_seconds=0.0))
    assert proven.proven
    assert proven.found.result is None
    assert late.found.result is not None
    for session in (proven, late):
        plan = session.best.plan
        assert evaluate(plan, problem).iteration_time_s == pytest.approx(best.cost, rel=1e-9)
        bound = session.found.answers["dynamic_programming"].lower_bound_s
        assert bound == pytest.approx(best.cost, rel=1e-9)
    assert late.found.plans_evaluated > 0


def test_half_of_a_time_limit_is_left_for_polishing() -> None:
    config = load_problem(["experiment=quick"]).config.search
    limited = replace(config, max_seconds=8.0)
    assert descent_seconds(limited) == 4.0
    assert descent_seconds(replace(limited, polish=False)) == 8.0


def test_plans_next_to_an_exact_one_have_stages_of_their_own() -> None:
    """The head takes seconds of the last stage, so even stages are slower."""
    words = ["model.num_layers=8", "model.vocab_size=16384", "space.pp=2", "space.tp=1"]
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", *words])
    tables = build_tables(problem)
    pool = even_pool(tables, 4)
    for entry in pool.by_outer():
        plan = entry.to_plan(tables)
        assert entry.time == pytest.approx(evaluate(plan, problem).iteration_time_s, rel=1e-9)
    even = inf
    for table in tables:
        cost = evaluate_batch(table, even_uniform_plans(table))
        even = min(even, float(cost.fitting_seconds.min()))
    assert pool.best_time < even
