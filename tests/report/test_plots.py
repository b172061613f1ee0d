from dataclasses import replace

import pytest
import torch

from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.gradient.winner import WinnerHistory
from darts_parallel.report.journey import (
    COLOURS,
    OTHERS,
    Journey,
    hardened_at,
    journey,
    memory_shares,
    short_names,
    thinned,
)
from darts_parallel.report.plots import MEMORY, curves_figure, journey_figure, to_image
from tests.report.conftest import FoundPlan


def searched(found: FoundPlan) -> tuple[Journey, WinnerHistory]:
    search = journey(found.result, found.plan)
    return search, search.winner


def test_the_journey_ends_in_the_plan_s_colours_and_marks_where_edges_harden(
    found: FoundPlan,
) -> None:
    search, winner = searched(found)
    colours = [search.colours[layer.label()] for layer in found.plan.layers]
    assert OTHERS not in colours
    shown = [
        "#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in search.plan[:, 0].tolist()
    ]
    assert shown == colours
    assert search.pixels.shape == (len(colours), len(winner.steps), 3)
    assert search.hardened == next(r.step for r in found.result.history if r.schedules.hard_stages)
    axes = journey_figure(
        search, found.plan, [layer.name for layer in found.problem.model.layers]
    ).axes[0]
    assert {"plan", "edges harden"} <= {text.get_text() for text in axes.texts}
    assert search.hardened in axes.lines[-1].get_xdata()


def test_one_stage_has_no_edges_that_harden(found: FoundPlan) -> None:
    alone: list[StepRecord] = [replace(record, pp=1) for record in found.result.history]
    assert hardened_at(alone) is None


def test_strategies_beyond_the_palette_share_a_colour(found: FoundPlan) -> None:
    _, winner = searched(found)
    steps, layers = 40, len(found.plan.layers)
    leaders = torch.eye(12)[torch.arange(steps) % 12].unsqueeze(1).expand(steps, layers, 12)
    many = replace(
        winner,
        steps=tuple(range(steps)),
        choices=tuple(f"s{i}" for i in range(12)),
        probabilities=leaders,
    )
    search = journey(replace(found.result, winner=many), found.plan)
    legend = search.legend()
    assert len({colour for _, colour in legend}) == len(legend) == len(COLOURS) + 1
    assert legend[-1] == (f"{len(search.colours) - len(COLOURS)} more", OTHERS)


def test_lines_of_a_chart_have_their_own_colours_none_is_cut_and_memory_is_the_report_s(
    found: FoundPlan,
) -> None:
    search, winner = searched(found)
    shares = memory_shares(winner.memory, found.plan, found.problem)
    final = [a / b for a, b in zip(found.cost.memory_bytes, found.cost.capacity_bytes, strict=True)]
    figure = curves_figure(found.result.history, search, shares, final)
    for axes in figure.axes:
        lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
        if axes.get_visible():
            assert len({str(line.get_color()) for line in lines}) == len(lines) > 0
            low, high = axes.get_ylim()
            assert all(
                low <= min(line.get_ydata()) and max(line.get_ydata()) <= high for line in lines
            )
    assert MEMORY in {axes.get_title(loc="left") for axes in figure.axes}
    assert shares[-1] == pytest.approx(final, rel=0.02)  # soft strategies are not quite the plan's
    assert to_image(figure).min() < 100


def test_few_of_many_labels_stand_and_blocks_are_numbers() -> None:
    assert len(thinned(128, 42)) <= 42
    assert list(thinned(3, 42)) == [0, 1, 2]
    assert short_names(["embedding", "layers.0", "mtp.0", "head"]) == [
        "embedding",
        "0",
        "mtp.0",
        "head",
    ]
