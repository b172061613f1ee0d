from dataclasses import replace

import pytest
import torch

from darts_parallel import evaluate, load_problem
from darts_parallel.plan.strategy import Plan
from darts_parallel.report.plots import (
    MAX_LABELS,
    MAX_ROW_LABELS,
    convergence_figure,
    gantt_figure,
    memory_figure,
    probability_figure,
    short_names,
    strategies_figure,
    to_image,
)
from darts_parallel.schedules import find
from tests.report.conftest import Found


def test_the_gantt_shows_the_first_micro_batches_of_many_and_says_so(found: Found) -> None:
    plan = Plan(16, found.plan.boundaries, tuple(replace(layer, dp=1, tp=2) for layer in found.plan.layers))
    figure = gantt_figure(plan, evaluate(plan, found.problem), found.problem)
    title = figure.axes[0].get_title(loc="left")
    assert "the first 8 of 16 micro-batches" in title


@pytest.mark.parametrize(("schedule", "words"), [("zero_bubble", "Zero-bubble"), ("gpipe", "GPipe")])
def test_the_gantt_names_its_schedule(found: Found, schedule: str, words: str) -> None:
    cost = ["cost.pipeline=simulated", f"cost.schedule={schedule}"]
    problem = load_problem(["model=toy", "cluster=toy", "training=toy", "space.pp=4", *cost])
    figure = gantt_figure(found.plan, evaluate(found.plan, problem), problem)
    assert figure.axes[0].get_title(loc="left").startswith(words)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert ("weight gradient" in labels) == (schedule == "zero_bubble")


def test_the_gantt_of_a_searched_order_shows_the_closest_rule_below(found: Found) -> None:
    code = find("zero_bubble_h1").code(found.plan.pp, found.plan.num_micro_batches)
    plan = replace(found.plan, schedule=code)
    figure = gantt_figure(plan, evaluate(plan, found.problem), found.problem)
    titles = [axes.get_title(loc="left").split()[0] for axes in figure.axes]
    assert titles == ["Searched", "1F1B"]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_the_heatmap_leaves_out_strategies_that_no_layer_considers(found: Found) -> None:
    record = found.result.history[-1]
    chosen = torch.zeros_like(record.probabilities)
    chosen[:, 3] = 1.0
    names = [f"layers.{i}" for i in range(len(chosen))]
    axes = probability_figure(replace(record, probabilities=chosen), names).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [record.choices[3]]
    assert f"{chosen.shape[1] - 1} of {chosen.shape[1]} strategies are below 1%" in axes.get_title(loc="left")


def test_a_heatmap_of_128_layers_and_84_strategies_has_few_labels(found: Found) -> None:
    record = replace(
        found.result.history[0],
        probabilities=torch.softmax(torch.randn(128, 84, generator=torch.Generator().manual_seed(0)), 1),
        choices=tuple(f"tp{i}" for i in range(84)),
    )
    axes = probability_figure(record, [f"layers.{i}" for i in range(128)]).axes[0]
    assert len(axes.get_yticks()) <= MAX_ROW_LABELS
    assert len(axes.get_xticks()) <= MAX_LABELS


def test_a_flat_heatmap_shows_every_strategy(found: Found) -> None:
    record = replace(
        found.result.history[0],
        probabilities=torch.full((4, 200), 1 / 200),
        choices=tuple(f"tp{i}" for i in range(200)),
    )
    image = probability_figure(record, ["a", "b", "c", "d"]).axes[0].images[0]
    assert image.get_array().shape == (200, 4)


def test_every_picture_has_units_and_pixels(found: Found) -> None:
    names = [layer.name for layer in found.problem.model.layers]
    full = replace(found.cost, memory_bytes=tuple(1.1 * size for size in found.cost.capacity_bytes))
    figures = [
        gantt_figure(found.plan, found.cost, found.problem),
        memory_figure(found.cost),
        memory_figure(full),
        probability_figure(found.result.history[0], names),
        strategies_figure(found.plan, names),
        convergence_figure(found.result.history),
    ]
    for figure in figures:
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        image = to_image(figure)
        assert image.shape[2] == 3
        assert image.min() < 100 < image.max()


@pytest.mark.parametrize("stages", [1, 3, 50])
def test_stages_are_numbered_by_whole_numbers(found: Found, stages: int) -> None:
    many = replace(found.cost, memory_bytes=(1e9,) * stages, capacity_bytes=(2e9,) * stages)
    ticks = memory_figure(many).axes[0].get_xticks()
    assert set(ticks) <= set(range(stages))
    assert 0 < len(ticks) <= MAX_LABELS


def test_blocks_are_numbers_and_other_layers_keep_their_names() -> None:
    names = ["embedding", "layers.0", "mtp.0", "head"]
    assert short_names(names) == ["embedding", "0", "mtp.0", "head"]
