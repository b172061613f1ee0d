"""Check what `evaluate` says next to seconds, by its definition."""

from dataclasses import replace

import pytest
import torch

from darts_parallel import evaluate, load_problem
from darts_parallel.cost import (
    HardPlans,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
    hard_plan,
)
from darts_parallel.exact import find_uniform_plan
from darts_parallel.plans import LayerStrategy, Plan
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table


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


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_costs_what_its_layers_cost_one_by_one(seed: int) -> None:
    pp = 1 + seed % 3
    table = random_table(seed, pp=pp, num_layers=6, num_choices=4, num_layouts=3)
    rng = torch.Generator().manual_seed(seed)
    runs = torch.ones(table.forward.shape[1], 4, dtype=torch.bool)
    runs[0, seed % 4] = False
    blocking = seed % 2 == 0
    pipeline = replace(table.pipeline, blocking=blocking)
    table = replace(table, kind_allowed=runs, pipeline=pipeline)
    plans = random_plans(table, 60, rng)
    every = torch.randint(4, plans.choices.shape, generator=rng)
    plans = HardPlans.concatenate([plans, replace(plans, choices=every)])
    last_two = replace(plans, first_layers=plans.first_layers.clone())
    last_two.first_layers[:, 1:] = torch.arange(7 - pp, 6)
    plans = HardPlans.concatenate([plans, last_two])
    room = evaluate_batch(table, plans).memory.quantile(0.8, dim=0)
    table = replace(table, capacity=room)
    found = evaluate_batch(table, plans)
    feasible = []
    for row in range(len(plans)):
        outer, count = int(plans.outer[row]), int(table.num_micro_batches[plans.outer[row]])
        starts = [*plans.first_layers[row].tolist(), 6]
        choices = plans.choices[row].tolist()
        stages, sync, memory, once, legal = [], [], [], 0.0, True
        for stage in range(pp):
            kind = int(table.stage_kind[stage])
            seconds = updated = kept = 0.0
            working = []
            for layer in range(starts[stage], starts[stage + 1]):
                choice = choices[layer]
                place = (outer, kind, layer, choice)
                legal &= bool(table.allowed[outer, choice] & runs[kind, choice])
                seconds += float(table.forward[place] + table.backward[place])
                updated += float(table.sync[place])
                once += float(table.per_iteration[outer, layer, choice])
                held = table.in_flight[outer, stage] * table.activation[outer, layer, choice]
                kept += float(table.static[outer, layer, choice] + held)
                working.append(float(table.working[outer, layer, choice]))
                if layer:
                    pair = [int(table.layout[choices[layer - 1]]), int(table.layout[choice])]
                    inside = layer > starts[stage]
                    own = 0 if inside else int(table.boundary_kind[stage - 1])
                    between = table.reshard[outer, kind] if inside else table.p2p[outer, own]
                    # messages between stages take their time only where they block
                    seconds += float(between[layer - 1, pair[0], pair[1]]) * (inside or blocking)
            legal &= not (stage and bool(table.fused_to_previous[starts[stage]]))
            stages.append(seconds)
            sync.append(updated)
            memory.append(kept + max(working))
        total = sum(stages) + (count - 1) * max(stages) + max(sync) + once
        assert float(found.iteration_time[row]) == pytest.approx(total, rel=1e-12)
        assert found.stage_seconds[row].tolist() == pytest.approx(stages, rel=1e-12)
        assert found.sync_seconds[row].tolist() == pytest.approx(sync, rel=1e-12)
        assert found.memory[row].tolist() == pytest.approx(memory, rel=1e-12)
        fits = all(used <= float(most) for used, most in zip(memory, table.capacity, strict=True))
        feasible.append(legal and fits)
    assert found.feasible.tolist() == feasible
    assert 0 < sum(feasible) < len(feasible)


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_a_devices_bytes_are_all_of_its_memory_whatever_stays_free(margin: float) -> None:
    job = ["model=toy", "training=toy", "cluster=toy_mixed", f"space.memory_margin={margin}"]
    problem = load_problem(job)
    table = max(build_tables(problem), key=lambda table: table.pp)
    plans = even_uniform_plans(table)
    cost = evaluate_batch(table, plans)
    plan = plans.to_plan(0, table)
    priced = evaluate(plan, problem)
    devices = problem.cluster.arranged(plan.node_order).stage_devices(plan.pp)
    assert priced.capacity_bytes == pytest.approx([device.memory for device in devices])
    assert priced.memory_bytes == pytest.approx(
        [float(used) + own.reserved for used, own in zip(cost.memory[0], devices, strict=True)]
    )
    full = [used / device.memory for used, device in zip(priced.memory_bytes, devices, strict=True)]
    assert priced.fullness == pytest.approx(full)
    assert priced.feasible == (max(full) <= 1 - margin)


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
