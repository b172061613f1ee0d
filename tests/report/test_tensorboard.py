import importlib
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from darts_parallel import evaluate, load_problem, search
from darts_parallel.exact.result import Verification
from darts_parallel.gradient.result import SearchResult
from darts_parallel.problem.problem import Problem
from darts_parallel.report.tensorboard import Tracker, override_values

SMALL = ["space.pp=2", "space.dp=4", "space.tp=1", "space.recompute=none", "space.zero_stage=[0,1]"]


def load(*overrides: str) -> Problem:
    job = ["model=toy", "cluster=toy", "training=toy", "search.num_steps=21", "search.num_restarts=2",
           "search.polish_starts=1"]  # fmt: skip
    return load_problem([*job, *overrides])


@dataclass(frozen=True)
class Tracked:
    """A search and what TensorBoard reads of it."""

    folder: Path
    problem: Problem
    result: SearchResult
    run: Any


def finish(tracker: Tracker, problem: Problem, result: SearchResult, gap: float = 0.0) -> None:
    entry = Verification("exhaustive", result.plan, result.iteration_time_s, gap, 0.1, 7, True, "uniform",
                         result.iteration_time_s, "")  # fmt: skip
    tracker.finish(result, result.plan, evaluate(result.plan, problem), [entry])
    tracker.close()


def track(folder: Path, problem: Problem) -> Tracked:
    tracker = Tracker(folder, problem)
    result = search(problem, seed=3, on_record=tracker.record)
    finish(tracker, problem, result)
    return Tracked(folder, problem, result, read(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """All strategies of the toy problem: too many for a curve each."""
    return track(tmp_path_factory.mktemp("whole"), load())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    return track(tmp_path_factory.mktemp("small"), load(*SMALL))


def read(folder: Path) -> Any:
    run = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    run.Reload()
    return run


def last(run: Any, tag: str) -> float:
    return float(run.Scalars(tag)[-1].value)


def test_the_curves_carry_the_records(whole: Tracked) -> None:
    result, run = whole.result, whole.run
    record = result.history[-1]
    assert last(run, "search/temperature") == pytest.approx(record.schedules.temperature)
    assert last(run, "search/best_time_s") == pytest.approx(record.best_time_s)
    assert [point.step for point in run.Scalars("search/loss")] == [entry.step for entry in result.history]
    for name, weight in record.outer_weights.items():
        assert last(run, f"outer/{name.replace(' ', '_')}") == pytest.approx(weight)


def test_an_outer_choice_that_left_ends_at_zero(tmp_path: Path, small: Tracked) -> None:
    first, then = small.result.history[0], small.result.history[-1]
    tracker = Tracker(tmp_path, small.problem)
    tracker.record(replace(first, outer_weights={"pp1_m1": 0.5, "pp2_m2": 0.5}))
    for step in (then.step, then.step + 1):
        tracker.record(replace(then, step=step, outer_weights={"pp2_m2": 1.0}))
    finish(tracker, small.problem, small.result)
    assert [point.value for point in read(tmp_path).Scalars("outer/pp1_m1")] == [0.5, 0.0]


def test_the_winning_restart_has_curves_from_the_first_step_to_the_last(small: Tracked) -> None:
    winner, run = small.result.winner, small.run
    assert winner is not None
    assert (winner.steps[0], winner.steps[-1]) == (0, 20)
    assert winner.probabilities.sum(-1).allclose(torch.ones(()))
    name = winner.choices[0].replace(" ", "_")
    points = run.Scalars(f"strategy/{name}")
    assert [point.step for point in points] == list(winner.steps)
    means = winner.probabilities[:, :, 0].mean(1)
    assert [point.value for point in points] == pytest.approx(means.tolist(), abs=1e-6)
    for stage in range(2):
        assert last(run, f"memory/stage_{stage:02d}") == pytest.approx(float(winner.memory[-1, stage]))
        assert f"multiplier/stage_{stage:02d}" in run.Tags()["scalars"]


def test_every_chart_of_the_layout_has_curves(whole: Tracked) -> None:
    content = whole.run.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(content)
    tags = whole.run.Tags()["scalars"]
    for category in layout.category:
        for chart in category.chart:
            for pattern in chart.multiline.tag:
                assert any(re.match(pattern, tag) for tag in tags), (category.title, chart.title)


def test_the_end_has_pictures_text_and_figures(whole: Tracked) -> None:
    problem, result, run = whole.problem, whole.result, whole.run
    cost = evaluate(result.plan, problem)
    pictures = {"plan/schedule", "plan/memory", "plan/strategies", "search/convergence"}
    assert pictures | {"search/probabilities"} <= set(run.Tags()["images"])
    text = run.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith(f"**{result.plan.describe(problem.training.global_batch_size)}**")
    assert "Time per iteration" in text
    figures = run.Tensors("figures/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| iteration time s | {cost.iteration_time_s:.6g} |" in figures
    assert f"| compute, seconds | {cost.breakdown_s['compute']:.6g} |" in figures
    assert "| gap exhaustive | 0 |" in figures


def test_no_curve_has_one_point(whole: Tracked) -> None:
    assert all(len(whole.run.Scalars(tag)) > 1 for tag in whole.run.Tags()["scalars"])


def test_hyperparameters_are_what_the_command_changed_and_stay_in_the_one_run(
    small: Tracked, tmp_path: Path
) -> None:
    tracker = Tracker(tmp_path, small.problem, ["search.num_steps=21", "space.recompute=none", "+a.b=true"])
    finish(tracker, small.problem, small.result)
    run = read(tmp_path)
    assert [path.name.split(".")[0] for path in tmp_path.rglob("*")] == ["events"]
    content = run.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"search.num_steps", b"space.recompute", b"none", b"a.b"):
        assert word in content
    assert b"temperature" not in content
    measures = {tag for tag in run.Tags()["scalars"] if tag.startswith("metrics/")}
    assert measures == {f"metrics/{name}" for name in ("iteration_time_s", "seconds", "raw_gap", "gap")}
    assert override_values(["a=2", "b=0.5", "c=x", "d=[1,2]"]) == {"a": 2, "b": 0.5, "c": "x", "d": "[1,2]"}


def test_without_changes_there_are_no_hyperparameters(small: Tracked) -> None:
    assert "_hparams_/session_start_info" not in small.run.summary_metadata


def test_a_gap_that_is_not_a_number_is_left_out(small: Tracked, tmp_path: Path) -> None:
    finish(Tracker(tmp_path, small.problem), small.problem, small.result, gap=float("nan"))
    assert "gap" not in str(read(tmp_path).Tensors("figures/text_summary")[0].tensor_proto.string_val[0])


def test_a_given_plan_is_tracked_without_a_search(small: Tracked, tmp_path: Path) -> None:
    problem, plan = small.problem, small.result.plan
    tracker = Tracker(tmp_path, problem)
    tracker.finish(None, plan, evaluate(plan, problem), [])
    tracker.close()
    tags = read(tmp_path).Tags()
    assert "plan/schedule" in tags["images"]
    assert "search/convergence" not in tags["images"]


def test_an_interrupted_search_without_records_is_tracked(small: Tracked, tmp_path: Path) -> None:
    result = replace(small.result, history=(), stopped_by="user")
    finish(Tracker(tmp_path, small.problem), small.problem, result)
    assert "search/convergence" not in read(tmp_path).Tags()["images"]


def test_importing_the_module_loads_neither_tensorboard_nor_matplotlib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "darts_parallel"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("tensorboard", "matplotlib", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    assert importlib.import_module("darts_parallel.report.tensorboard").Tracker is not Tracker
