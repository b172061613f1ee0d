import json
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from darts_parallel import Plan, evaluate, load_problem, search
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.pipeline import by_device
from darts_parallel.cost.simulation import PassSeconds, device_ends
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import PlanError, UnsupportedError
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.plans.space import schedule_choices
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem
from darts_parallel.schedules import NAMES, find

TOY = ["model=toy", "cluster=toy", "training=toy"]
SMALL = [
    "space.kind=uniform",
    "space.zero_stage=[0,1]",
    "space.recompute=none",
    "space.sequence_parallel=false",
]
FOLDED = [name for name in NAMES if find(name).folded]
ALL = f"space.schedules=[{','.join(NAMES)}]"


def tables_of(*overrides: str) -> tuple[Problem, list[CostTable]]:
    problem = load_problem([*TOY, ALL, *overrides])
    return problem, build_tables(problem)


@pytest.mark.parametrize(
    ("schedule", "chunks", "seconds", "held"),
    [
        ("1f1b", 1, 117.0, 8.0),
        ("zero_bubble_h1", 1, 103.0, 8.0),
        ("interleaved", 2, 106.5, 11.5),
        ("zero_bubble_v", 2, 99.5, 8.0),
        ("v_half", 2, 104.5, 5.0),
        ("v_min", 2, 109.0, 4.0),
    ],
)
def test_equal_passes_take_published_figures(
    schedule: str, chunks: int, seconds: float, held: float
) -> None:
    # AMD's simulator, pp 8 and 32 micro-batches (Primus, docs: primus_pipeline.md, simulator_shell.png)
    passes = torch.full((1, 8 * chunks), 1.0 / chunks, dtype=torch.float64)
    given = PassSeconds(
        passes, 2 * passes, passes, torch.zeros(1, 8 * chunks - 1, dtype=torch.float64)
    )
    assert float(device_ends(given, schedule, 8, 32).amax()) == pytest.approx(seconds)
    stages = float_tensor(find(schedule).in_flight(8, 32, chunks)) / chunks
    assert (
        float(by_device(stages, torch.tensor(find(schedule).devices(8, len(stages))), 8).amax())
        == held
    )


def test_between_two_backward_passes_the_loss_keeps_a_third_and_blocks_everything() -> None:
    problem, tables = tables_of("space.pp=4", "space.axis_order=tp-dp-pp", *SMALL)
    whole = next(table for table in tables if table.pipeline.schedule == "1f1b")
    loss = [layer.kind for layer in problem.model.layers].index("loss")
    for table in tables:
        name, chunks = table.pipeline.schedule, table.virtual_stages
        others = torch.arange(table.num_layers) != loss
        assert torch.equal(table.activation[:, others], whole.activation[:, others])
        counts = table.num_micro_batches.tolist()
        for outer, count in enumerate(counts):
            held, most = 0.0, 0.0
            device = find(name).devices(4, 4 * chunks)[-1]
            for kind, stage, _ in find(name).orders(4, count, chunks)[device]:
                split = find(name).split
                step = {"F": 1.0, "B": -2.0 / 3.0 if split else -1.0, "W": -1.0 / 3.0}[kind]
                held += step if stage == 4 * chunks - 1 else 0.0
                most = max(most, held)
            share = table.activation[outer, loss] / whole.activation[outer, loss]
            flying = float(table.in_flight[outer, -1])
            expected = min(most / flying, 1.0) if find(name).split else 1.0
            assert share.tolist() == pytest.approx([expected] * len(share))
            if name == "zero_bubble_h1":
                assert expected == pytest.approx((1 + (min(4, count) - 1) / 3) / min(4, count))


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_block_computed_again_is_whole_between_its_two_backward_passes(pp: int) -> None:
    given = ("space.kind=uniform", "space.recompute=[none,full]", "space.sequence_parallel=false")
    given += ("space.axis_order=tp-dp-pp",)
    problem, tables = tables_of(
        f"space.pp={pp}", "model.num_layers=24", "space.zero_stage=0", *given
    )
    block = [layer.kind for layer in problem.model.layers].index("block")
    whole = next(table for table in tables if table.pipeline.schedule == "1f1b")
    unsplit = dict(
        zip(whole.num_micro_batches.tolist(), whole.activation[:, block].tolist(), strict=True)
    )
    for table in tables:
        name, chunks = table.pipeline.schedule, table.virtual_stages
        for outer, count in enumerate(table.num_micro_batches.tolist()):
            orders = find(name).orders(pp, count, chunks)
            for choice, before in enumerate(unsplit[count]):
                after = float(table.for_weights[outer, block, choice])
                assert before <= min(after, float(table.activation[outer, block, choice]))
                between = (after - before, -after) if find(name).split else (-before, 0.0)
                step = {"F": before, "B": between[0], "W": between[1]}
                most = [max(accumulate(step[kind] for kind, _, _ in order)) for order in orders]
                held = by_device(
                    table.in_flight[outer] * table.activation[outer, block, choice],
                    torch.tensor(
                        find(name).devices(
                            pp, len(table.in_flight[outer] * table.activation[outer, block, choice])
                        )
                    ),
                    pp,
                )
                shares = torch.tensor(most, dtype=torch.float64) / held
                assert (shares <= 1.0 + 1e-12).all()
                assert not find(name).split or float(shares.max()) == pytest.approx(1.0)


def test_schedules_are_outer_choices_and_the_plan_names_its_own(tmp_path: object) -> None:
    problem, tables = tables_of("space.pp=2", "space.num_micro_batches=[4,8]", *SMALL)
    assert {table.pipeline.schedule for table in tables} == set(NAMES)
    settings = SearchConfig(num_steps=20, num_restarts=4)
    result = search(problem, seed=0, config=settings)
    best = brute_force(tables, "uniform")
    assert result.iteration_time_s == pytest.approx(best.cost, rel=1e-9)
    names = tuple(layer.name for layer in problem.model.layers)
    ranks = problem.cluster.arranged(result.plan.node_order).pipeline_ranks
    data = json.loads(json.dumps(result.plan.to_dict(names, ranks)))
    data["cluster"] = {"nodes": [{"count": 2, "gpus": 4}]}
    assert data["schedule"] == result.plan.schedule_name
    again = Plan.from_dict(data)
    assert again == result.plan
    assert evaluate(again, problem).iteration_time_s == pytest.approx(
        result.iteration_time_s, rel=1e-12
    )


def test_plans_name_schedules_that_fit_them() -> None:
    layer = LayerStrategy(1, 4)
    plan = Plan(4, (0, 2, 3, 4, 7), (layer,) * 7, virtual_stages=2, schedule="zero_bubble_v")
    assert plan.stage_of_layer == (0, 0, 1, 1, 0, 0, 0)
    with pytest.raises(PlanError, match="virtual_stages=2 must be 1"):
        replace(plan, schedule="gpipe")
    with pytest.raises(PlanError, match="try v_half"):
        replace(plan, schedule="v_halve")
    with pytest.raises(PlanError, match=r"2 \* pp"):
        evaluate(replace(plan, num_micro_batches=2, schedule="dualpipe"), load_problem(TOY))
    with pytest.raises(UnsupportedError, match="at least"):
        find("dualpipe").orders(2, 3, 2)


def test_one_device_has_the_lightest_schedule_in_every_order_of_the_list() -> None:
    for names in ("gpipe,1f1b", "1f1b,gpipe", "zero_bubble_h1,gpipe,1f1b"):
        problem = load_problem([*TOY, f"space.schedules=[{names}]"])
        assert schedule_choices(problem.config.space, problem.model, 1) == [(1, "1f1b")]
    problem = load_problem(
        [*TOY, "space.schedules=[gpipe,zero_bubble_h2]"]
    )  # fewer, but more of each
    assert schedule_choices(problem.config.space, problem.model, 1) == [
        (1, "gpipe"),
        (1, "zero_bubble_h2"),
    ]
