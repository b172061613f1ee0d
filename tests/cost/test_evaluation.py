"""Check what `evaluate` says next to seconds, by its definition."""

from dataclasses import replace

import pytest
import torch

from darts_parallel import evaluate, load_problem
from darts_parallel.cost import build_tables, evaluate_batch, even_uniform_plans, hard_plan
from darts_parallel.exact import find_uniform_plan
from darts_parallel.plans import LayerStrategy, Plan
from tests.support.random_plans import random_plans


@pytest.mark.parametrize("cluster", ["a10_8x4", "a10_a100_mixed"])
def test_utilization_is_six_flop_a_parameter_and_token_over_all_peaks(cluster: str) -> None:
    problem = load_problem(
        ["model=gpt2_xl", "training=gpt2_xl", f"cluster={cluster}", "space=uniform"]
    )
    tables = build_tables(problem)
    best = find_uniform_plan(tables).best
    cost = evaluate(best.to_plan(tables), problem)
    peak = sum(g.count * g.gpus * g.device.peak_flops for g in problem.cluster.groups)
    model = 6 * problem.model.num_parameters * cost.tokens_per_s / peak
    # attention over 1,024 tokens adds a tenth
    assert cost.mfu == pytest.approx(1.08 * model, rel=0.08)
    assert cost.tokens_per_s == pytest.approx(problem.tokens_per_iteration / cost.iteration_time_s)


@pytest.mark.parametrize(
    "job",
    [
        ["model=llama3_8b", "cluster=h100_1x8", "space.cp=null"],
        ["model=toy_moe", "training=toy", "cluster=toy"],
        ["model=toy", "training=toy", "cluster=toy_mixed"],
        ["model=toy", "training=toy", "cluster=toy", "space.virtual_stages=null"],
    ],
)
def test_a_plan_costs_the_same_read_from_the_tables_of_its_space(job: list[str]) -> None:
    problem = load_problem(job)
    tables = build_tables(problem)
    known = problem.leaving_free(0.3)
    assert known.tables == tables
    read = 0
    for table in tables:
        plans = random_plans(table, 2, torch.Generator().manual_seed(0))
        for row in range(len(plans)):
            plan = plans.to_plan(row, table)
            part, _, cost = hard_plan(plan, known)
            read += part.pipeline is table.pipeline
            _, _, alone = hard_plan(plan, replace(problem, headroom=0.3))
            for name, value in vars(alone).items():
                torch.testing.assert_close(getattr(cost, name), value, rtol=1e-12, atol=0.0)
    assert read > 0


@pytest.mark.parametrize("peak", ["1e-6", "1e-3", "1e3"])
def test_a_single_stage_of_one_strategy_has_no_seconds_between_layers(peak: str) -> None:
    overrides = ["model=toy", "training=toy", "cluster=toy"]
    problem = load_problem([*overrides, f"cluster.devices.toy.peak_TFLOPs.bf16={peak}"])
    for strategy in (LayerStrategy(1, 8), LayerStrategy(2, 4, 1, "selective", True)):
        layers = problem.num_layers
        plan = Plan(2, (0, layers), (strategy,) * layers)
        assert evaluate(plan, problem).breakdown_s["p2p_and_resharding"] == 0.0


def test_a_plan_fits_only_if_every_kind_of_stage_runs_its_strategies() -> None:
    (table, *_) = build_tables(load_problem(["model=toy", "training=toy", "cluster=toy_mixed"]))
    plans = even_uniform_plans(table)
    plans = plans[evaluate_batch(table, plans).feasible]
    runs = torch.ones(int(table.stage_kind.max()) + 1, len(table.choices), dtype=torch.bool)
    runs[-1, plans.choices[0, 0]] = False
    found = evaluate_batch(replace(table, kind_allowed=runs), plans).feasible
    assert found.tolist() == (plans.choices[:, 0] != plans.choices[0, 0]).tolist()
