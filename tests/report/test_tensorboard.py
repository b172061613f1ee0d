import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darts_parallel import evaluate, load_problem, search
from darts_parallel.gradient.result import SearchResult
from darts_parallel.planner.verification import Verification
from darts_parallel.problem.problem import Problem
from darts_parallel.report.tensorboard import Tracker

SMALL = ["space.pp=2", "space.dp=4", "space.tp=1", "space.recompute=none", "space.zero_stage=[0,1]"]


def load(*overrides: str) -> Problem:
    job = ["model=toy", "cluster=toy", "training=toy", "search.num_steps=21", "search.num_restarts=2"]
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
    means = record.probabilities.mean(0)
    tag = "strategy/" + record.choices[0].replace(" ", "_").replace("+", "_")
    assert last(run, tag) == pytest.approx(float(means[0]), abs=1e-6)


def test_stages_have_memory_ratios_and_multipliers(small: Tracked) -> None:
    result, run = small.result, small.run
    ratios = result.history[-1].memory / result.history[-1].capacity
    assert len(ratios) == 2
    for stage, ratio in enumerate(ratios.tolist()):
        assert last(run, f"memory/stage_{stage:02d}") == pytest.approx(ratio)
        assert f"multiplier/stage_{stage:02d}" in run.Tags()["scalars"]


def test_small_problems_have_a_curve_for_every_probability_and_no_live_heatmap(small: Tracked) -> None:
    result, run = small.result, small.run
    value = float(result.history[-1].probabilities[1, 0])
    name = result.history[-1].choices[0].replace(" ", "_")
    assert last(run, f"layer/layers.0/{name}") == pytest.approx(value, abs=1e-6)
    assert len(run.Images("search/probabilities")) == 1


def test_large_problems_have_heatmaps_instead(whole: Tracked) -> None:
    assert not [tag for tag in whole.run.Tags()["scalars"] if tag.startswith("layer/")]
    assert len(whole.run.Images("search/probabilities")) == 2


def test_the_end_has_pictures_text_and_figures(whole: Tracked) -> None:
    problem, result, run = whole.problem, whole.result, whole.run
    cost = evaluate(result.plan, problem)
    pictures = {"plan/schedule", "plan/memory", "plan/strategies", "search/convergence"}
    assert pictures | {"search/probabilities"} <= set(run.Tags()["images"])
    text = run.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith(f"**{result.plan.describe(problem.training.global_batch_size)}**")
    assert "Time per iteration" in text
    assert last(run, "final/iteration_time_s") == pytest.approx(cost.iteration_time_s)
    assert last(run, "final/breakdown_s/compute") == pytest.approx(cost.breakdown_s["compute"])
    assert last(run, "final/gap_exhaustive") == 0.0


def test_hyperparameters_stay_in_the_one_run(whole: Tracked) -> None:
    assert [path.name.split(".")[0] for path in whole.folder.rglob("*")] == ["events"]
    content = whole.run.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"num_steps", b"temperature", b"2 to 0.05", b"layerwise", b"softmax", b"toy"):
        assert word in content


def test_a_gap_that_is_not_a_number_is_left_out(small: Tracked, tmp_path: Path) -> None:
    finish(Tracker(tmp_path, small.problem), small.problem, small.result, gap=float("nan"))
    assert "final/gap_exhaustive" not in read(tmp_path).Tags()["scalars"]


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
