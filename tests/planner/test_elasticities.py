"""Elasticities of a plan's time: finite differences, zero where irrelevant, and where they are shown."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from darts_parallel.cli._job import Job
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.planner.elasticities import sensitivity, time_elasticities
from darts_parallel.planner.memory_chance import tightened
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.screen import render
from darts_parallel.report.text import effect
from tests.support.hardware import scaled

TOY = ["model=toy", "cluster=toy", "training=toy"]
LAYERS = 7
MIXED = (
    LayerStrategy(2, 2, 1),
    LayerStrategy(2, 2, 1, "full", True),
    *(LayerStrategy(1, 4, 3),) * 5,
)
PLANS = {
    "two stages": Plan(4, (0, 3, LAYERS), (LayerStrategy(2, 2, 1),) * LAYERS),
    "mixed": Plan(4, (0, 3, LAYERS), MIXED),
    "interleaved": Plan(4, (0, 2, 3, 4, LAYERS), (LayerStrategy(1, 4),) * LAYERS, virtual_stages=2),
    "context": Plan(2, (0, LAYERS), (LayerStrategy(2, 2, 2),) * LAYERS, cp=2),
}

SIMULATED = ["cost.pipeline=simulated"]
CASES = [(name, []) for name in PLANS] + [("mixed", SIMULATED), ("interleaved", SIMULATED)]


@pytest.mark.parametrize(("name", "cost"), CASES)
def test_every_figure_agrees_with_finite_differences(name: str, cost: list[str]) -> None:
    problem, plan = load_problem([*TOY, *cost]), PLANS[name]
    seconds = evaluate(plan, problem).iteration_time_s
    found = time_elasticities(plan, problem)
    assert {"devices.toy.peak_flops", "intra_node.latency", "inter_node.bandwidth"} <= set(found)
    step = 1e-7
    for figure, value in found.items():
        above = evaluate(plan, scaled(problem, figure, 1 + step)).iteration_time_s
        assert value == pytest.approx((above / seconds - 1) / step, abs=1e-6), figure


def test_what_the_plan_does_not_use_has_no_weight() -> None:
    one_node = load_problem(["model=toy", "cluster=toy", "training=toy", "cluster.nodes.0.count=1"])
    alone = sensitivity(Plan(4, (0, LAYERS), (LayerStrategy(4, 1),) * LAYERS), one_node)
    assert alone["inter_node.bandwidth"] == alone["inter_node.latency"] == 0.0
    assert alone["intra_node.bandwidth"] < 0.0 < alone["intra_node.latency"]


def test_memory_is_worth_something_only_where_it_binds() -> None:
    plan = Plan(4, (0, 3, LAYERS), (LayerStrategy(1, 4, 0, "full"),) * LAYERS)
    need = max(evaluate(plan, load_problem(TOY)).memory_bytes) / 2**30
    tight = load_problem(
        [
            *TOY,
            "space.pp=2",
            f"cluster.devices.toy.memory_GiB={1.001 * need}",
            "space.tp=1",
            "space.zero_stage=0",
        ]
    )
    loose = load_problem([*TOY, "space.pp=2", "space.tp=1", "space.zero_stage=0"])
    assert sensitivity(plan, tight)["memory"] < 0.0
    assert sensitivity(plan, loose)["memory"] == 0.0
    small = load_problem([*TOY, f"cluster.devices.toy.memory_GiB={0.999 * need}"])
    assert "memory" not in sensitivity(plan, small)


def test_memory_is_worth_as_much_to_a_plan_of_a_file_as_to_the_search_that_found_it() -> None:
    plan = Plan(4, (0, 3, LAYERS), (LayerStrategy(1, 4, 0, "full"),) * LAYERS)
    reserve = "cluster.devices.toy.reserved_GiB=0.001"
    need = max(evaluate(plan, load_problem([*TOY, reserve])).memory_bytes) / 2**30
    pins = ["space.pp=2", "space.tp=1", "space.zero_stage=0"]
    read = load_problem([*TOY, *pins, reserve, f"cluster.devices.toy.memory_GiB={need / 0.8}"])
    searched = tightened(read)
    assert 0.0 < searched.headroom < 0.2
    worth = sensitivity(plan, read)["memory"]
    assert worth == sensitivity(plan, searched)["memory"] < -0.01
    fuller = load_problem([*TOY, *pins, reserve, f"cluster.devices.toy.memory_GiB={1.001 * need}"])
    assert sensitivity(plan, fuller)["memory"] < 0.0  # it leaves less free than the search would


def test_memory_beside_a_margin_is_worth_what_as_much_less_memory_is_worth() -> None:
    plan = Plan(4, (0, 3, LAYERS), (LayerStrategy(1, 4, 0, "full"),) * LAYERS)
    job = [
        *TOY,
        "cluster.devices.toy.reserved_GiB=0.001",
    ]  # a tenth more memory must not buy everything
    need = 1.001 * max(evaluate(plan, load_problem(job)).memory_bytes) / 2**30
    pins = ["space.pp=2", "space.tp=1", "space.zero_stage=0"]
    less = load_problem([*job, *pins, f"cluster.devices.toy.memory_GiB={need}"])
    given = [f"cluster.devices.toy.memory_GiB={need / 0.5}", "space.memory_margin=0.5"]
    worth = sensitivity(plan, load_problem([*job, *pins, *given]))["memory"]
    assert worth < 0.0
    assert worth == pytest.approx(sensitivity(plan, less)["memory"], rel=1e-9)


def test_a_long_simulated_plan_is_not_moved_about(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, plan = load_problem([*TOY, *SIMULATED, "space.pp=2"]), PLANS["mixed"]
    monkeypatch.setattr("darts_parallel.planner.elasticities.MOST_SIMULATED", 8)
    assert "memory" in sensitivity(plan, problem)
    monkeypatch.setattr("darts_parallel.planner.elasticities.MOST_SIMULATED", 7)
    assert set(sensitivity(plan, problem)) == set(time_elasticities(plan, problem))


def test_the_seed_reports_model_has_no_figures() -> None:
    assert sensitivity(PLANS["two stages"], load_problem([*TOY, "cost=searcher"])) == {}


def test_figures_of_unequal_nodes_are_told_apart() -> None:
    problem = load_problem(["model=toy", "training=toy", "cluster=toy_mixed"])
    size = problem.cluster.num_devices // 2
    even = Plan(4, (0, 3, LAYERS), (LayerStrategy(1, size),) * LAYERS)
    names = {name for name in sensitivity(even, problem) if name.startswith("devices.")}
    assert len({name.split(".")[1] for name in names}) == 2


def test_the_effect_of_ten_percent_more() -> None:
    assert effect(-1.0) == pytest.approx(1 / 1.1 - 1)
    assert effect(0.0) == 0.0


def test_the_report_names_what_matters_most_first() -> None:
    problem, plan = load_problem([*TOY, "output.verbose=true"]), PLANS["two stages"]
    console = Console(record=True, width=120, file=StringIO())
    values = {
        "inter_node.bandwidth": -0.33,
        "devices.toy.peak_flops": -0.6,
        "intra_node.latency": 1e-6,
    }
    render(Outcome(problem, plan, evaluate(plan, problem), elasticities=values), console)
    lines = [line.split() for line in console.export_text().splitlines()]
    first, second = (
        ["toy", "peak", "flops", "-5.56", "%"],
        ["inter", "node", "bandwidth", "-3.10", "%"],
    )
    assert lines.index(second) == lines.index(first) + 1
    assert not any("latency" in line for line in lines)


def test_the_command_writes_them_into_the_plan_and_the_page(tmp_path: Path) -> None:
    problem = load_problem(
        [
            *TOY,
            "space.pp=2",
            "search.num_steps=5",
            "verification.enabled=false",
            "space.tp=1",
            "space.recompute=none",
            "search.num_restarts=2",
            "search.polish=false",
            "output.tensorboard=false",
        ]
    )
    Job(problem, tmp_path, Console(quiet=True)).run()
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["sensitivity"] == sensitivity(Plan.from_dict(data), problem)
    change = 100 * (1.1 ** data["sensitivity"]["devices.toy.peak_flops"] - 1)
    assert (
        f'<td>toy peak flops</td><td class="r">{change:+.2f} %'
        in (tmp_path / "report.html").read_text()
    )


def test_the_worth_of_memory_is_left_out_where_moves_would_be_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, plan = load_problem(TOY), PLANS["two stages"]
    assert "memory" in sensitivity(plan, problem)
    monkeypatch.setattr("darts_parallel.planner.elasticities.MOST_LAYERS", LAYERS - 1)
    assert set(sensitivity(plan, problem)) == set(time_elasticities(plan, problem))
