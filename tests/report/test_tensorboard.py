import importlib
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from darts_parallel import evaluate, load_problem, search
from darts_parallel.gradient.step_record import SearchResult, StepRecord
from darts_parallel.planner import time_elasticities
from darts_parallel.problem.problem import Problem
from darts_parallel.report.curves import (
    CELL,
    LETTER,
    MEANS,
    MOST_SERIES,
    NOTABLE,
    SearchCurves,
    Weights,
    heat_map,
)
from darts_parallel.report.journey import COLOURS
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.tensorboard import Tracker, override_values

SMALL = ["space.pp=2", "space.dp=4", "space.tp=1", "space.recompute=none", "space.zero_stage=[0,1]"]


def load(*overrides: str) -> Problem:
    job = [
        "model=toy",
        "cluster=toy",
        "training=toy",
        "search.num_steps=21",
        "search.num_restarts=2",
    ]
    return load_problem([*job, *overrides])


@dataclass(frozen=True)
class Tracked:
    """A search and what TensorBoard reads of it."""

    folder: Path
    problem: Problem
    result: SearchResult
    run: Any


def finish(tracker: Tracker, problem: Problem, result: SearchResult) -> None:
    elasticities = time_elasticities(result.plan, problem)
    cost = evaluate(result.plan, problem)
    tracker.finish(Outcome(problem, result.plan, cost, result, (), elasticities))
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
    assert [point.step for point in run.Scalars("search/loss")] == [
        entry.step for entry in result.history
    ]
    notable = {
        name: w
        for name, w in record.outer_weights.items()
        if w * len(record.outer_weights) >= NOTABLE
    }
    for name, weight in (notable or record.outer_weights).items():
        assert last(run, f"search/configuration/{name.replace(' ', '_')}") == pytest.approx(weight)


def test_searches_of_one_job_follow_one_another(small: Tracked, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, small.problem)
    for record in (*small.result.history, *small.result.history):
        tracker.record(record)
    tracker.close()
    own = [record.step for record in small.result.history]
    steps = [point.step for point in read(tmp_path).Scalars("search/loss")]
    assert steps == [*own, *(own[-1] + 1 + step for step in own)]


def test_a_second_run_in_a_folder_replaces_the_curves_of_the_first(
    tmp_path: Path, small: Tracked
) -> None:
    """Both files lay on top of each other, and every curve had two lines."""
    folder = tmp_path / "tensorboard"
    counts = []
    for earlier in (False, False, True):
        if earlier:
            (tmp_path / "plan.json").touch()  # without it the files are somebody else's
        tracker = Tracker(folder, small.problem)
        tracker.record(small.result.history[0])
        counts.append(len(list(folder.iterdir())))
        finish(tracker, small.problem, small.result)
    assert counts == [1, 2, 3]
    assert len(list(folder.iterdir())) == 1


def test_probabilities_are_in_the_file_before_the_search_has_ended(
    tmp_path: Path, small: Tracked
) -> None:
    tracker = Tracker(tmp_path, small.problem)
    seen: list[dict[str, Any]] = []

    def watch(record: StepRecord) -> None:
        tracker.record(record)
        seen.append(read(tmp_path).Tags())

    search(small.problem, seed=3, on_record=watch)
    for tags in seen:
        assert any(tag.startswith("probability/layer_0/") for tag in tags["scalars"])
        assert "probability/all_layers" in tags["images"]
        assert {"search/entropy", "search/memory_violation"} <= set(tags["scalars"])
    tracker.close()


def test_probabilities_are_those_of_the_records_from_the_first_step_on(small: Tracked) -> None:
    run, history = small.run, small.result.history
    names = [layer.name for layer in small.problem.model.layers]
    for tag in run.Tags()["scalars"]:
        group, *rest = tag.split("/")
        if group == "probability":
            choice = rest[-1]
            rows = [names.index("layers.0")] if rest[0] == "layer_0" else range(len(names))
            found = [point.value for point in run.Scalars(tag)]
            if rest[0] == "layer_0" or len(rest) == 1:
                wanted = []
                for record in history:
                    labels = [label.replace(" ", "_") for label in record.choices]
                    columns = record.probabilities[list(rows)].mean(0)
                    wanted.append(float(columns[labels.index(choice)]))
                assert found == pytest.approx(wanted, rel=1e-5)
    leaders = [record.choices[int(record.probabilities[1].argmax())] for record in history]
    led = {f"probability/layer_0/{name.replace(' ', '_')}" for name in leaders}
    assert led == {t for t in run.Tags()["scalars"] if t.startswith("probability/layer_0/")}


def test_a_strategy_gets_a_series_with_earlier_points_when_it_first_leads(tmp_path: Path) -> None:
    curves = SearchCurves(tmp_path)
    for step, share in enumerate([0.2, 0.3, 0.6]):
        weights = Weights(step, ["0"], ["a", "b"], np.array([[1 - share, share]]))
        curves.add(weights, {})
        assert ("probability/b" in read(tmp_path).Tags()["scalars"]) == (step == 2)
    curves.writer.close()
    for tag in ("probability/b", "probability/layer_0/b"):
        assert [point.value for point in read(tmp_path).Scalars(tag)] == pytest.approx(
            [0.2, 0.3, 0.6]
        )


def test_many_layers_have_a_series_of_each_kind_then_of_those_that_led_longest(
    tmp_path: Path,
) -> None:
    layers, choices = 40, ["a", "b", "c"]
    curves = SearchCurves(tmp_path, ["first", *["block"] * (layers - 1)])
    rows = [str(layer) for layer in range(layers)]
    led = torch.randint(3, (9, layers), generator=torch.Generator().manual_seed(0))
    for step, leaders in enumerate(led):
        values = np.eye(3)[leaders.numpy()]
        curves.add(Weights(step, rows, choices, values), {})
        live = {tag.split("/")[1] for tag in tags_of_layers(tmp_path)}
        assert live == {"layer_0", "layer_1"}
    curves.finish()
    curves.writer.close()
    shown = tags_of_layers(tmp_path)
    assert len(shown) == MOST_SERIES
    times = {
        f"probability/layer_{layer}/{choices[choice]}": int((led[:, layer] == choice).sum())
        for layer in range(2, layers)
        for choice in range(3)
    }
    least = min(times[tag] for tag in shown if tag in times)
    assert all(count <= least for tag, count in times.items() if tag not in shown)
    run = read(tmp_path)
    assert all([point.step for point in run.Scalars(tag)] == list(range(9)) for tag in shown)


def tags_of_layers(folder: Path) -> list[str]:
    return [tag for tag in read(folder).Tags()["scalars"] if tag.startswith("probability/layer_")]


def test_the_custom_page_draws_the_means_without_the_layers(small: Tracked) -> None:
    content = small.run.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    means = [tag for tag in small.run.Tags()["scalars"] if re.match(MEANS, tag)]
    assert MEANS.encode() in content
    assert means
    assert not any("layer_" in tag for tag in means)


def test_squares_are_as_dark_as_their_probability() -> None:
    pixels = heat_map(np.array([[0.0, 1.0], [0.5, 0.5]]), ["a", "b"], ["0", "1"])
    corner = LETTER + CELL
    middle = corner + CELL // 2
    dark = [int(pixels[y, x, 0]) for y in (7, 7 + CELL) for x in (middle, middle + CELL)]
    assert dark[0] == 255
    assert dark[1] == int(COLOURS[0][1:3], 16)
    assert dark[2] == dark[3] == pytest.approx((dark[0] + dark[1]) / 2, abs=1)


def test_names_of_layers_do_not_overlap() -> None:
    names = ["embedding", *map(str, range(31)), "head"]
    pixels = heat_map(np.ones((1, len(names))), ["a"], names)
    inked = np.flatnonzero((pixels[CELL:, :, 0] < 128).any(axis=0))
    gaps = np.diff(inked)
    assert (gaps > LETTER).sum() == 5  # six of 33 names have room


def test_an_outer_choice_that_left_ends_at_zero(tmp_path: Path, small: Tracked) -> None:
    first, then = small.result.history[0], small.result.history[-1]
    tracker = Tracker(tmp_path, small.problem)
    weights = {"pp1_m1": 0.6, "pp2_m2": 0.2, "pp4_m2": 0.1, "pp4_m4": 0.1}
    tracker.record(replace(first, outer_weights=weights))
    for step in (then.step, then.step + 1):
        tracker.record(replace(then, step=step, outer_weights={"pp2_m2": 1.0}))
    finish(tracker, small.problem, small.result)
    run = read(tmp_path)
    assert [point.value for point in run.Scalars("search/configuration/pp1_m1")] == pytest.approx(
        [0.6, 0.0]
    )
    assert [point.value for point in run.Scalars("search/configuration/pp2_m2")] == [1.0, 1.0]
    assert (
        "search/configuration/pp4_m2" not in run.Tags()["scalars"]
    )  # never weighed twice an even share


def test_pictures_show_the_whole_search_and_a_text_names_the_plan(whole: Tracked) -> None:
    problem, result, run = whole.problem, whole.result, whole.run
    pictures = run.Images("probability/all_layers")
    assert [picture.step for picture in pictures] == [0, 10, 20]
    text = run.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith(f"**{result.plan.describe(problem.training.global_batch_size)}**")
    assert "report.html" in text


def test_no_curve_has_one_point(whole: Tracked) -> None:
    tags = [
        tag for tag in whole.run.Tags()["scalars"] if not tag.startswith("z_results/")
    ]  # of HPARAMS
    assert all(len(whole.run.Scalars(tag)) > 1 for tag in tags)


def test_hyperparameters_are_what_the_command_changed_in_the_one_run(
    small: Tracked, tmp_path: Path
) -> None:
    tracker = Tracker(
        tmp_path, small.problem, ["search.num_steps=21", "space.recompute=none", "+a.b=true"]
    )
    finish(tracker, small.problem, small.result)
    run = read(tmp_path)
    assert [path.name.split(".")[0] for path in tmp_path.rglob("*")] == ["events"]
    content = run.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    plan = small.result.plan.describe(small.problem.training.global_batch_size)
    for word in (b"search.num_steps", b"space.recompute", b"none", b"a.b", plan.encode()):
        assert word in content
    assert b"temperature" not in content
    measures = {tag for tag in run.Tags()["scalars"] if tag.startswith("z_results/")}
    names = (
        "iteration_time_s",
        "tokens_per_s",
        "mfu",
        "memory_over_capacity",
        "out_of_memory_probability",
        "search_seconds",
        *(f"gap_{stage.name}" for stage in small.result.stages if stage.fits),
        "gap_chosen",
    )
    assert measures == {f"z_results/{name}" for name in names}
    cost = evaluate(small.result.plan, small.problem)
    used = max(a / b for a, b in zip(cost.memory_bytes, cost.capacity_bytes, strict=True))
    assert last(run, "z_results/memory_over_capacity") == pytest.approx(used)
    assert override_values(["a=2", "b=0.5", "c=x", "d=[1,2]"]) == {
        "a": 2,
        "b": 0.5,
        "c": "x",
        "d": "[1,2]",
    }


def test_without_changes_the_plan_and_its_measures_are_a_row(small: Tracked) -> None:
    assert "_hparams_/session_start_info" in small.run.summary_metadata


def test_a_given_plan_is_tracked_without_a_search(small: Tracked, tmp_path: Path) -> None:
    problem, plan = small.problem, small.result.plan
    tracker = Tracker(tmp_path, problem)
    tracker.finish(Outcome(problem, plan, evaluate(plan, problem)))
    tracker.close()
    tags = read(tmp_path).Tags()
    assert not tags["images"]
    assert "plan/text_summary" in tags["tensors"]


def test_an_interrupted_search_without_records_is_tracked(small: Tracked, tmp_path: Path) -> None:
    result = replace(small.result, history=(), stopped_by="user")
    finish(Tracker(tmp_path, small.problem), small.problem, result)
    assert not read(tmp_path).Tags()["images"]


def test_the_module_imports_neither_tensorboard_nor_matplotlib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "darts_parallel"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("tensorboard", "matplotlib", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    assert importlib.import_module("darts_parallel.report.tensorboard").Tracker is not Tracker
