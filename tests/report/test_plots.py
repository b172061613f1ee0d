from dataclasses import replace

import torch

from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.gradient.winner import WinnerHistory
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


def test_few_of_many_labels_stand_and_blocks_are_numbers() -> None:
    assert len(thinned(128, 42)) <= 42
    assert list(thinned(3, 42)) == [0, 1, 2]
    assert short_names(["embedding", "layers.0", "mtp.0", "head"]) == [
        "embedding",
        "0",
        "mtp.0",
        "head",
    ]


def test_a_picture_of_another_pipeline_configuration_says_so(found: FoundPlan) -> None:
    search, winner = searched(found)
    own = f"pp{found.plan.pp} m{found.plan.num_micro_batches}"
    assert search.own == (winner.name == own)
    others = {
        own: True,
        f"{own} (nodes 1 0)": True,
        f"pp{found.plan.pp} 1f1b m{found.plan.num_micro_batches}": True,
        f"pp{found.plan.pp} m1": False,
        f"pp{found.plan.pp} v2 m{found.plan.num_micro_batches}": False,
        f"pp{found.plan.pp} gpipe m{found.plan.num_micro_batches}": False,
    }
    for name, same in others.items():
        result = replace(found.result, winner=replace(winner, name=name))
        drawn = journey(result, found.plan)
        assert drawn is not None
        assert drawn.own == same, name
        page = html.report_page(Outcome(found.problem, found.plan, found.cost, result), [], [])
        assert ("which left the descent earlier" in page) != same
