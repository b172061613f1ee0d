"""Interleaved stages: the theory at equal stages, memory by the schedule's own order, search and proofs."""

import pytest
import torch

from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate, evaluate_batch, pass_seconds
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.gradient.descent import search
from darts_parallel.planner import plan as find_plan
from darts_parallel.plans.space import left_out
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.schedules import find
from tests.support.event_queue import event_queue_ends
from tests.support.exact_check import check
from tests.support.random_plans import random_plans

TOY = ["model=toy", "cluster=toy", "training=toy", "space.pp=2"]
LAYERS = 7


def interleaved(*overrides: str, virtual_stages: str = "2") -> tuple[Problem, list[CostTable]]:
    problem = load_problem([*TOY, f"space.virtual_stages={virtual_stages}", *overrides])
    return problem, build_tables(problem)


EIGHTEEN = [
    *TOY[:3],
    "model.num_layers=18",
    "model.vocab_size=128",
    "training.global_batch_size=16",
]


def of_chunks(problem: Problem, *inner: int) -> Plan:
    layers = (LayerStrategy(1, 2),) * problem.num_layers
    return Plan(8, (0, *inner, problem.num_layers), layers, virtual_stages=2)


def test_chunks_of_unequal_work_are_no_faster_than_their_schedule() -> None:
    # devices have equal work, chunks of 0, 2, 3, 5, 4, 2, 2 and 0 blocks have not
    problem = load_problem(EIGHTEEN)
    uneven = evaluate(of_chunks(problem, 1, 3, 6, 11, 15, 17, 19), problem)
    even = evaluate(of_chunks(problem, 4, 6, 8, 10, 12, 14, 17), problem)
    assert max(uneven.stage_times_s) == pytest.approx(max(even.stage_times_s), rel=0.05)
    assert even.iteration_time_s < 0.9 * uneven.iteration_time_s


@pytest.mark.parametrize("seed", range(4))
def test_random_chunks_take_the_seconds_of_an_event_queue_and_synchronise_together(
    seed: int,
) -> None:
    problem = load_problem([*EIGHTEEN, f"space.virtual_stages={seed % 2 + 2}", "space.pp=[2,4]"])
    for table in build_tables(problem):
        plans = random_plans(table, 4, torch.Generator().manual_seed(seed))
        cost, passes = evaluate_batch(table, plans), pass_seconds(table, plans).blocking()
        for plan in range(len(plans)):
            outer = plans.outer[plan]
            orders = find("interleaved").orders(
                table.pp, int(table.num_micro_batches[outer]), table.virtual_stages
            )
            seconds = {"F": passes.forward[plan].tolist(), "B": passes.backward[plan].tolist()}
            ends, _ = event_queue_ends(orders, seconds, passes.message[plan].tolist())
            once = table.per_iteration[
                outer, torch.arange(table.num_layers), plans.choices[plan]
            ].sum()
            expected = max(ends) + float(cost.sync_seconds[plan].max() + once)
            assert float(cost.iteration_time[plan]) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("pp", "v", "m"), [(2, 2, 2), (4, 2, 8), (4, 3, 16), (4, 2, 4), (8, 2, 32)]
)
def test_stages_in_flight_are_those_of_the_schedule_at_its_peak(pp: int, v: int, m: int) -> None:
    held = float_tensor(find("interleaved").in_flight(pp, m, v))
    for device, order in enumerate(find("interleaved").orders(pp, m, v)):
        now, peak = 0, 0
        first: list[int] = []
        counts = [0] * (pp * v)
        for operation in order:
            sign = 1 if operation.kind == "F" else -1
            now += sign
            counts[operation.stage] += sign
            if now > peak:
                peak, first = now, counts.copy()
        mine = held[device::pp].tolist()
        assert sum(mine) == peak
        assert mine == first[device::pp]


def test_more_stages_a_device_send_more_messages_and_wait_less() -> None:
    strategy = (LayerStrategy(1, 4),) * LAYERS
    problem = load_problem([*TOY, "model.vocab_size=128"])
    whole = evaluate(Plan(4, (0, 3, LAYERS), strategy), problem)
    parts = evaluate(Plan(4, (0, 2, 3, 4, LAYERS), strategy, virtual_stages=2), problem)
    assert parts.breakdown_s["pipeline_bubble"] < whole.breakdown_s["pipeline_bubble"]
    assert parts.breakdown_s["p2p_and_resharding"] > whole.breakdown_s["p2p_and_resharding"]
    assert sum(parts.memory_bytes) > sum(whole.memory_bytes)


@pytest.mark.parametrize("kind", ["uniform", "stagewise", "layerwise"])
def test_the_search_finds_interleaved_plans_near_the_optimum(kind: str) -> None:
    pins = [
        "space.tp=1",
        "space.zero_stage=1",
        "space.recompute=[none,full]",
        "space.num_micro_batches=4",
    ]
    problem, tables = interleaved(
        *pins, f"space={kind}", "search.num_steps=30", "search.num_restarts=4"
    )
    optimum = brute_force(tables, kind).cost
    found = search(problem)
    assert found.plan.virtual_stages == 2
    assert evaluate(found.plan, problem).feasible
    assert optimum * (1 - 1e-12) <= found.iteration_time_s <= optimum * 1.02


def test_tight_memory_is_repaired_in_interleaved_plans() -> None:
    short = ("search.num_steps=10", "search.num_restarts=2")
    loose = search(interleaved(*short)[0])
    need = max(evaluate(loose.plan, load_problem(TOY)).memory_bytes) / 2**30
    memory = f"cluster.devices.toy.memory_GiB={0.999 * need}"
    tight = interleaved(memory, *short)[0]
    assert evaluate(search(tight).plan, tight).feasible


def test_baselines_say_how_far_their_proof_reaches() -> None:
    problem, tables = interleaved(
        "space.zero_stage=1", "space.recompute=none", virtual_stages="[1,2]"
    )
    best = brute_force(tables, "uniform").cost
    for method in ("exhaustive", "dynamic_programming"):
        answer = check(problem, method)
        assert not answer.proven
        assert answer.lower_bound_s <= best
        assert "interleaved" in answer.note
        assert evaluate(answer.plan, problem).iteration_time_s == pytest.approx(
            answer.iteration_time_s
        )


@pytest.mark.parametrize("blocks", [5, 8])
def test_equal_chunks_are_proven_over_the_uniform_space(blocks: int) -> None:
    given = (f"model.num_layers={blocks}", "space.zero_stage=1", "space=uniform", "search=exact")
    problem, tables = interleaved(*given, virtual_stages="[1,2]")
    expected = brute_force([table for table in tables if table.virtual_stages == 1], "uniform").cost
    for table in (table for table in tables if table.virtual_stages == 2):
        for ends_apart in (False, True):
            even = evaluate_batch(table, even_uniform_plans(table, ends_apart=ends_apart))
            expected = min(expected, float(even.iteration_time[even.feasible].min()))
    answer = check(problem, "exhaustive")
    assert answer.proven
    assert answer.iteration_time_s == pytest.approx(expected, rel=1e-12)
    assert answer.lower_bound_s == answer.iteration_time_s
    omitted = left_out(problem.config, problem.model, problem.cluster, problem.measured)
    assert "no unequal chunks of interleaved stages" in omitted


def test_search_exact_proves_uniform_interleaved_plans_and_refuses_others() -> None:
    given = [
        *TOY,
        "space.zero_stage=1",
        "space.recompute=none",
        "space.virtual_stages=2",
        "search=exact",
    ]
    found = find_plan(load_problem([*given, "space=uniform"])).result
    assert found.stopped_by is None
    assert all(seconds >= found.iteration_time_s for seconds, _ in found.alternatives)
    with pytest.raises(
        ConfigError, match="interleaved plans, but those of search=exact space=uniform"
    ):
        find_plan(load_problem(given))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            Plan(3, (0, 2, 3, 4, LAYERS), (LayerStrategy(1, 4),) * LAYERS, virtual_stages=2),
            "multiple of pp",
        ),
        (
            Plan(4, (0, 3, LAYERS), (LayerStrategy(1, 8),) * LAYERS, virtual_stages=2),
            "must be 1 where pp",
        ),
    ],
)
def test_a_plan_that_cannot_be_interleaved_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        evaluate(plan, load_problem(TOY))


def test_a_table_names_chunks_only_where_a_device_has_several() -> None:
    _, tables = interleaved("space.cp=[1,2]", virtual_stages="[1,2]")
    names = {table.name.partition(" (")[0] for table in tables}  # without the order of axes
    assert names == {"pp2", "pp2 cp2", "pp2 v2", "pp2 v2 cp2"}
