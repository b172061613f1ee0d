import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, DartsParallelError, PlanError
from darts_parallel.exact.result import Verification
from darts_parallel.plans._fields import Fields
from darts_parallel.plans.file import read_plan, write_json
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.plan_json import plan_dict
from darts_parallel.schedules import find

PLAN = Plan(4, (0, 3, 7), (LayerStrategy(2, 2, 1),) * 7)


def content(problem: Problem) -> dict[str, Any]:
    return plan_dict(Outcome(problem, PLAN, evaluate(PLAN, problem)))


def written(folder: Path, data: Any) -> str:
    path = folder / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_a_written_plan_is_read_back(toy_problem: Problem, tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", content(toy_problem))
    assert read_plan(str(tmp_path / "plan.json"), toy_problem.model) == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_whole_numbers_of_a_file_are_below_two_to_the_31() -> None:
    assert Fields({"pp": 2**31 - 1}).read("pp", int) == 2**31 - 1
    with pytest.raises(PlanError, match="pp=2147483648 must be at most 2147483647; try 2147483647"):
        Fields({"pp": 2**31}).read("pp", int)


@pytest.mark.parametrize("model", [None, "toy", ["toy"]])
def test_a_plan_that_names_no_model_is_read(
    toy_problem: Problem, tmp_path: Path, model: Any
) -> None:
    data = content(toy_problem) | {"model": model}
    assert read_plan(written(tmp_path, data), toy_problem.model) == PLAN


def test_layers_that_agree_have_common_degrees_and_others_null(toy_problem: Problem) -> None:
    expected = {"dp": 2, "tp": 2, "pp": 2, "cp": 1, "virtual_stages": 1, "micro_batch_size": 2}
    assert content(toy_problem)["parallelism"] == expected
    mixed = Plan(4, (0, 3, 7), (LayerStrategy(2, 2), LayerStrategy(1, 4), *PLAN.layers[2:]))
    data = plan_dict(Outcome(toy_problem, mixed, evaluate(mixed, toy_problem)))
    assert data["parallelism"] == expected | {"dp": None, "tp": None, "micro_batch_size": None}


def test_a_value_that_is_not_finite_is_written_as_null(
    toy_problem: Problem, tmp_path: Path
) -> None:
    unknown = Verification(
        "oracle", None, math.inf, math.nan, 1.0, 0, False, "layerwise", math.inf, "gave up"
    )
    data = plan_dict(Outcome(toy_problem, PLAN, evaluate(PLAN, toy_problem), None, [unknown]))
    write_json(tmp_path / "plan.json", data)
    entry = json.loads((tmp_path / "plan.json").read_text())["verification"]["oracle"]
    assert entry["iteration_time_s"] is None
    assert entry["gap"] is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": math.nan})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DartsParallelError, match="cannot be written"):
        write_json(tmp_path / "nowhere" / "a.json", {})


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2", "[" * 100_000, "null", "3", "[]", "{}", '{"schema": 3}']
)
def test_a_broken_or_foreign_file_is_refused_by_path(
    toy_problem: Problem, tmp_path: Path, text: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PlanError) as caught:
        read_plan(path, toy_problem.model)
    assert str(caught.value).startswith(f"plan={path}")
    assert "; try " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_binary_a_missing_and_a_truncated_file_are_refused(
    toy_problem: Problem, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    text = json.dumps(content(toy_problem))
    (tmp_path / "half").write_text(text[: len(text) // 2])
    for name in ("binary", "half", "missing", "."):
        with pytest.raises(PlanError, match="; try "):
            read_plan(str(tmp_path / name), toy_problem.model)


def test_a_plan_of_another_model_is_refused(toy_problem: Problem, tmp_path: Path) -> None:
    path = written(tmp_path, content(toy_problem))
    with pytest.raises(PlanError, match="made for model=toy, but this problem has model=gpt2_xl"):
        read_plan(path, load_problem(["model=gpt2_xl", "training=gpt2_xl"]).model)
    renamed = content(toy_problem)
    renamed["layers"][1]["name"] = "encoder.0"
    with pytest.raises(PlanError, match=r"layers\[1\]\.name='encoder.0'.*try layers\.0\."):
        read_plan(written(tmp_path, renamed), toy_problem.model)


def test_the_seed_reports_model_states_no_stage_seconds() -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy", "cost=searcher"])
    assert not content(problem)["predicted"]["stage_times_s"]


@pytest.mark.parametrize(("batch", "count"), [(16, 4), (32, 8), (4, 1), (12, 3)])
def test_under_another_batch_micro_batches_keep_their_size(
    toy_problem: Problem, tmp_path: Path, batch: int, count: int
) -> None:
    """Their number stayed, and their size and memory changed in silence."""
    path = written(tmp_path, content(toy_problem))
    given = read_plan(path, toy_problem.model, batch=batch)
    assert given == replace(PLAN, num_micro_batches=count)


def test_a_batch_of_no_whole_micro_batches_is_refused(toy_problem: Problem, tmp_path: Path) -> None:
    path = written(tmp_path, content(toy_problem))
    sentence = r"training\.global_batch_size=18 must be a multiple of 4 with .*; try 16\."
    with pytest.raises(ConfigError, match=sentence):
        read_plan(path, toy_problem.model, batch=18)
    chunks = replace(PLAN, boundaries=(0, 2, 3, 4, 7), virtual_stages=2)
    cost = evaluate(chunks, toy_problem)
    path = written(tmp_path, plan_dict(Outcome(toy_problem, chunks, cost)))
    with pytest.raises(ConfigError, match=r"must be a multiple of 8 with .*; try 16\."):
        read_plan(path, toy_problem.model, batch=12)


def test_a_batch_whose_order_of_passes_is_listed_cannot_change(
    toy_problem: Problem, tmp_path: Path
) -> None:
    order = find("1f1b").code(2, 4, 1)
    plan = replace(PLAN, schedule=order)
    path = written(tmp_path, plan_dict(Outcome(toy_problem, plan, evaluate(plan, toy_problem))))
    assert read_plan(path, toy_problem.model, batch=16) == plan
    with pytest.raises(ConfigError, match=r"=32 must be 16, for whose micro-batches .*; try 16\."):
        read_plan(path, toy_problem.model, batch=32)
