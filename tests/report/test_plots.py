from dataclasses import replace

import torch

from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.report import html
from darts_parallel.report.journey import (
    COLOURS,
    OTHERS,
    Journey,
    hardened_at,
    journey,
    short_names,
    thinned,
)
from darts_parallel.report.outcome import Outcome
from tests.report.conftest import FoundPlan


def searched(found: FoundPlan) -> Journey:
    return journey(found.result, found.plan)


def test_the_journey_ends_in_the_plan_s_colours_and_marks_where_edges_harden(
    found: FoundPlan,
) -> None:
    search = searched(found)
    colours = [search.colours[layer.label()] for layer in found.plan.layers]
    assert OTHERS not in colours
    shown = [
        "#" + "".join(f"{round(255 * c):02x}" for c in rgb) for rgb in search.plan[:, 0].tolist()
    ]
    assert shown == colours
    assert search.pixels.shape == (len(colours), len(search.steps), 3)
    assert search.hardened == next(r.step for r in found.result.history if r.schedules.hard_stages)


def test_one_stage_has_no_edges_that_harden(found: FoundPlan) -> None:
    alone: list[StepRecord] = [replace(record, pp=1) for record in found.result.history]
    assert hardened_at(alone) is None


def test_strategies_beyond_the_palette_share_a_colour(found: FoundPlan) -> None:
    layers, names = len(found.plan.layers), tuple(f"s{i}" for i in range(12))
    many = [
        replace(
            found.result.history[0],
            step=step,
            choices=names,
            probabilities=torch.eye(12)[step % 12].expand(layers, 12),
        )
        for step in range(40)
    ]
    search = journey(replace(found.result, history=tuple(many)), found.plan)
    legend = search.legend()
    assert len({colour for _, colour in legend}) == len(legend) == len(COLOURS) + 1
    assert legend[-1] == (f"{len(search.colours) - len(COLOURS)} more", OTHERS)


def test_few_of_many_labels_stand_and_blocks_are_numbers() -> None:
    assert len(thinned(128, 42)) <= 42
    assert list(thinned(3, 42)) == [0, 1, 2]
    assert short_names(["embedding", "layers.0", "mtp.0", "head"]) == [
        "embedding",
        "0",
        "mtp.0",
        "head",
    ]


def test_a_picture_of_another_pipeline_degree_says_so(found: FoundPlan) -> None:
    assert searched(found).own
    for pp in (found.plan.pp, 2 * found.plan.pp):
        *others, last = found.result.history
        result = replace(found.result, history=(*others, replace(last, pp=pp)))
        page = html.report_page(Outcome(found.problem, found.plan, found.cost, result), [], [])
        assert ("which left the descent earlier" in page) == (pp != found.plan.pp)


def test_a_search_without_layers_has_no_picture(found: FoundPlan) -> None:
    factors = [replace(record, rows=("factor 2",)) for record in found.result.history]
    assert journey(replace(found.result, history=tuple(factors)), found.plan) is None
    assert journey(None, found.plan) is None
