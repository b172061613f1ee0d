from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from darts_parallel import evaluate, load_problem, plots, search
from darts_parallel.cost import CostBreakdown
from darts_parallel.gantt import Event, forward_backward_seconds, makespan, schedule_1f1b
from darts_parallel.problem import Problem
from darts_parallel.records import SearchResult
from darts_parallel.strategy import Plan


@pytest.fixture(scope="module")
def problem() -> Problem:
    overrides = ["model=toy", "cluster=toy", "training=toy", "space.pp=4"]
    return load_problem([*overrides, "search.num_steps=20", "search.num_restarts=2"])


@pytest.fixture(scope="module")
def result(problem: Problem) -> SearchResult:
    return search(problem, seed=0)


@pytest.fixture(scope="module")
def cost(problem: Problem, result: SearchResult) -> CostBreakdown:
    return evaluate(result.plan, problem)


def random_stages(rng: Random, ratio: float | None) -> list[tuple[float, float]]:
    forwards = [rng.uniform(0.1, 1.0) for _ in range(rng.randint(1, 8))]
    return [(forward, forward * ratio if ratio else rng.uniform(0.1, 2.0)) for forward in forwards]


@pytest.mark.parametrize(("pp", "count"), [(1, 1), (1, 7), (2, 1), (4, 2), (4, 4), (4, 9), (16, 32)])
def test_equal_stages_take_exactly_the_closed_form(pp: int, count: int) -> None:
    forward, backward = 1.0, 2.0
    events = schedule_1f1b([(forward, backward)] * pp, count)
    assert makespan(events) == (count + pp - 1) * (forward + backward)


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_finishes_before_its_own_passes_and_those_of_the_stages_before_it(seed: int) -> None:
    rng = Random(seed)
    stages, count = random_stages(rng, None), rng.randint(1, 20)
    totals = [forward + backward for forward, backward in stages]
    bound = max(sum(totals[:k]) + count * total for k, total in enumerate(totals))
    assert makespan(schedule_1f1b(stages, count)) >= bound * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_closed_form_is_an_upper_bound_where_backward_is_a_fixed_multiple_of_forward(seed: int) -> None:
    rng = Random(seed)
    stages, count = random_stages(rng, 2.0), rng.randint(1, 20)
    totals = [forward + backward for forward, backward in stages]
    closed = sum(totals) + (count - 1) * max(totals)
    assert makespan(schedule_1f1b(stages, count)) <= closed * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_every_pass_runs_once_after_its_input_and_no_stage_does_two_things_at_once(seed: int) -> None:
    rng = Random(seed)
    stages, count = random_stages(rng, None), rng.randint(1, 9)
    events = schedule_1f1b(stages, count)
    by_key = {(event.kind, event.stage, event.micro_batch): event for event in events}
    assert len(by_key) == len(events) == 2 * len(stages) * count
    for stage in range(len(stages)):
        mine = sorted((e for e in events if e.stage == stage), key=lambda event: event.start)
        assert all(a.end <= b.start for a, b in pairwise(mine))
    for event in events:
        assert all(source.end <= event.start for source in inputs(event, len(stages), by_key))


def inputs(event: Event, pp: int, by_key: dict[tuple[str, int, int], Event]) -> list[Event]:
    batch = event.micro_batch
    if event.kind == "F":
        return [by_key["F", event.stage - 1, batch]] if event.stage else []
    last = event.stage == pp - 1
    return [by_key["F", event.stage, batch]] + ([] if last else [by_key["B", event.stage + 1, batch]])


@pytest.mark.parametrize("count", [1, 3, 4, 11])
def test_at_most_pp_minus_k_micro_batches_are_in_flight(count: int) -> None:
    pp = 4
    events = schedule_1f1b([(1.0, 2.0)] * pp, count)
    for stage in range(pp):
        held = peak = 0
        for event in sorted((e for e in events if e.stage == stage), key=lambda e: e.start):
            held += 1 if event.kind == "F" else -1
            peak = max(peak, held)
        assert peak == min(pp - stage, count)


def test_forward_and_backward_sum_to_the_stage_times(
    problem: Problem, result: SearchResult, cost: CostBreakdown
) -> None:
    pairs = forward_backward_seconds(result.plan, cost, problem)
    assert [sum(pair) for pair in pairs] == pytest.approx(list(cost.stage_times_s), rel=1e-12)
    assert all(0 < forward < backward for forward, backward in pairs)


def test_the_gantt_shows_the_first_micro_batches_of_many_and_says_so(
    problem: Problem, result: SearchResult
) -> None:
    plan = Plan(16, result.plan.boundaries, tuple(replace(layer, dp=1, tp=2) for layer in result.plan.layers))
    figure = plots.gantt_figure(plan, evaluate(plan, problem), problem)
    title = figure.axes[0].get_title(loc="left")
    assert "the first 8 of 16 micro-batches" in title


def test_the_heatmap_leaves_out_strategies_that_no_layer_considers(result: SearchResult) -> None:
    record = result.history[-1]
    chosen = torch.zeros_like(record.probabilities)
    chosen[:, 3] = 1.0
    names = [f"layers.{i}" for i in range(len(chosen))]
    axes = plots.probability_figure(replace(record, probabilities=chosen), names).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [record.choices[3]]
    assert f"{chosen.shape[1] - 1} of {chosen.shape[1]} strategies are below 1%" in axes.get_title(loc="left")


def test_a_heatmap_of_128_layers_and_84_strategies_has_few_labels(result: SearchResult) -> None:
    record = replace(
        result.history[0],
        probabilities=torch.softmax(torch.randn(128, 84, generator=torch.Generator().manual_seed(0)), 1),
        choices=tuple(f"tp{i}" for i in range(84)),
    )
    axes = plots.probability_figure(record, [f"layers.{i}" for i in range(128)]).axes[0]
    assert len(axes.get_yticks()) <= plots.MAX_ROW_LABELS
    assert len(axes.get_xticks()) <= plots.MAX_LABELS


def test_a_flat_heatmap_shows_every_strategy(result: SearchResult) -> None:
    record = replace(
        result.history[0],
        probabilities=torch.full((4, 200), 1 / 200),
        choices=tuple(f"tp{i}" for i in range(200)),
    )
    image = plots.probability_figure(record, ["a", "b", "c", "d"]).axes[0].images[0]
    assert image.get_array().shape == (200, 4)


def test_every_picture_has_units_and_pixels(
    problem: Problem, result: SearchResult, cost: CostBreakdown
) -> None:
    names = [layer.name for layer in problem.model.layers]
    full = replace(cost, memory_bytes=tuple(1.1 * size for size in cost.capacity_bytes))
    figures = [
        plots.gantt_figure(result.plan, cost, problem),
        plots.memory_figure(cost),
        plots.memory_figure(full),
        plots.probability_figure(result.history[0], names),
        plots.strategies_figure(result.plan, names),
        plots.convergence_figure(result.history),
    ]
    for figure in figures:
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        image = plots.to_image(figure)
        assert image.shape[2] == 3
        assert image.min() < 100 < image.max()
