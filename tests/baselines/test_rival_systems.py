"""Planners of published systems: legal plans, never below the optimum, and cases worked out by hand."""

from dataclasses import replace
from itertools import combinations
from types import ModuleType

import numpy as np
import pytest
import torch

from baselines import (
    PLANNERS,
    alpa,
    amp,
    annealing,
    dapple,
    fasop,
    flexflow,
    galvatron,
    hetpipe,
    megatron_rule,
    mist,
    pipedream,
    piper,
    random_search,
)
from baselines._stage_costs import STEP, cheapest_split
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.result import TableResult
from darts_parallel.exact.segments import StageSegments
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.exact_check import check
from tests.support.few_steps import solved
from tests.support.random_tables import random_table
from tests.support.rivals import answer


def hand_table(seconds: list[float], pp: int, count: int, **changes: object) -> CostTable:
    """One strategy, `count` micro-batches, the given seconds of the layers, and nothing else that costs."""
    layers = len(seconds)
    zero = torch.zeros(1, layers, 1, dtype=torch.float64)
    pairs = torch.zeros(1, 1, layers - 1, 1, 1, dtype=torch.float64)
    stages = torch.zeros(pp, dtype=torch.long)
    table = replace(
        random_table(0, pp=pp, num_layers=layers, num_choices=1, num_layouts=1, num_outer=1),
        num_micro_batches=torch.tensor([count]),
        choices=(LayerStrategy(1, 1),),
        layout=torch.tensor([0]),
        allowed=torch.ones(1, 1, dtype=torch.bool),
        stage_kind=stages,
        boundary_kind=stages[1:],
        fused_to_previous=torch.zeros(layers, dtype=torch.bool),
        capacity=torch.ones(pp, dtype=torch.float64),
        forward=torch.tensor(seconds).double().view(1, 1, -1, 1),
        reshard=pairs,
        p2p=pairs,
        **dict.fromkeys(("backward", "sync"), zero.unsqueeze(1)),
        **dict.fromkeys(("per_iteration", "static", "activation", "working"), zero),
    )
    return replace(table, **changes)  # type: ignore[arg-type]


def starts_of(result: TableResult) -> list[int]:
    return list(result.best.plan.first_layers[0].tolist())


@pytest.mark.parametrize("module", [alpa, galvatron])
def test_without_a_pipeline_the_programs_inside_a_stage_reach_the_optimum(
    module: ModuleType,
) -> None:
    for seed in range(6):
        # no joined layers: Alpa's clusters are single ones
        table = random_table(seed, pp=1, num_layers=5, num_choices=3, tightness=0.9)
        tables = [replace(table, fused_to_previous=torch.zeros(5, dtype=torch.bool))]
        best = brute_force(tables, "layerwise")
        if best.best is not None:
            assert module.solve(tables).cost == pytest.approx(best.cost, rel=1e-6)


def test_splits_are_the_best_of_all_splits() -> None:
    rng = np.random.default_rng(0)
    segments = StageSegments.legal(3, np.zeros(6, dtype=bool))
    splits = [[0, *cut] for cut in combinations(range(1, 6), 2)]
    for _ in range(40):
        seconds, rest = rng.random(len(segments)), float(rng.integers(0, 9))
        values = [seconds[segments.rows_of(split)] for split in splits]
        found = cheapest_split(segments, seconds, rest)
        assert found[0] == pytest.approx(
            min(sum(v) + rest * max(v) for v in values), rel=STEP * (1 + rest)
        )
        slowest = segments.even_split(seconds)
        assert slowest is not None
        assert max(values[splits.index(slowest)]) == min(max(v) for v in values)
    nothing = np.full(len(segments), np.inf)
    assert cheapest_split(segments, nothing, 1.0) is None
    assert segments.even_split(nothing) == []


def test_pipedream_balances_the_slowest_stage_by_hand() -> None:
    # 1 + 2 + 3 against 4 is better than 1 + 2 against 3 + 4
    assert starts_of(pipedream.solve([hand_table([1, 2, 3, 4], 2, 8)])) == [0, 3]
    # an expensive boundary after the third layer: 6 | 4 + 4 is slower than 3 | 7
    expensive = torch.zeros(1, 1, 3, 1, 1, dtype=torch.float64)
    expensive[:, :, 2] = 4.0
    assert starts_of(pipedream.solve([hand_table([1, 2, 3, 4], 2, 8, p2p=expensive)])) == [0, 2]


@pytest.mark.parametrize("module", [dapple, alpa])
def test_dapple_and_alpa_weigh_the_sum_against_the_bottleneck_by_hand(module: ModuleType) -> None:
    # cut after layer 1: 1 | 9, after 3: 6 | 4 + 3; one micro-batch counts the sum, many the slowest stage
    boundary = torch.tensor([0.0, 9.0, 3.0]).double().view(1, 1, 3, 1, 1)
    few, many = (hand_table([1, 2, 3, 4], 2, count, p2p=boundary) for count in (1, 8))
    assert starts_of(module.solve([few])) == [0, 1]
    result = module.solve([many])
    assert starts_of(result) == [0, 3]
    assert result.cost == pytest.approx(6 + 7 + 7 * 7)


def test_amp_finds_out_about_memory_only_when_it_runs_and_dapple_knows_it() -> None:
    # the balanced cut 6 | 4 needs 3 units of the first device's 2.5
    static = torch.ones(1, 4, 1, dtype=torch.float64)
    table = hand_table(
        [1, 2, 3, 4], 2, 8, static=static, capacity=torch.tensor([2.5, 2.5]).double()
    )
    assert amp.solve([table]).best is None
    assert starts_of(dapple.solve([table])) == [0, 2]
    roomy = replace(table, capacity=torch.tensor([3.5, 3.5]).double())
    assert starts_of(amp.solve([roomy])) == [0, 3]


def test_hetpipe_takes_throughput_and_does_not_see_synchronisation_and_the_bubble() -> None:
    flat = hand_table([5.0, 5.0], 1, 4)
    sync = torch.full((1, 1, 2, 1), 50.0, dtype=torch.float64)
    piped = hand_table([5.0, 5.0], 2, 4, sync=sync)
    result = hetpipe.solve([flat, piped])
    assert result.best.table == 1
    assert result.cost == pytest.approx(5 + 5 + 3 * 5 + 50)
    assert pipedream.solve([flat, piped]).cost == pytest.approx(40.0)


def test_hetpipe_gives_the_slower_gpu_fewer_layers() -> None:
    seconds = (
        torch.tensor([[1.0] * 6, [2.0] * 6]).double().view(1, 2, 6, 1)
    )  # the second kind: half as fast
    kinds = {
        "stage_kind": torch.tensor([0, 1]),
        "forward": seconds,
        "backward": torch.zeros(1, 2, 6, 1, dtype=torch.float64),
        "sync": torch.zeros(1, 2, 6, 1, dtype=torch.float64),
        "reshard": torch.zeros(1, 2, 5, 1, 1, dtype=torch.float64),
    }
    assert starts_of(hetpipe.solve([hand_table([1.0] * 6, 2, 8, **kinds)])) == [0, 4]


def recompute_table(slower: list[float], freed: list[float], capacity: float) -> CostTable:
    """Three layers of one second and 8 bytes; recomputed they take `slower` more and keep `freed` less."""
    forward = torch.stack([torch.ones(3), 1.0 + torch.tensor(slower)], -1).double()
    activation = torch.stack([torch.full((3,), 8.0), 8.0 - torch.tensor(freed)], -1).double()
    return replace(
        random_table(0, pp=1, num_layers=3, num_choices=2, num_layouts=1, num_outer=1),
        num_micro_batches=torch.tensor([1]),
        layout=torch.tensor([0, 0]),
        choices=(LayerStrategy(1, 1), LayerStrategy(1, 1, recompute="full")),
        allowed=torch.ones(1, 2, dtype=torch.bool),
        stage_kind=torch.tensor([0]),
        fused_to_previous=torch.zeros(3, dtype=torch.bool),
        forward=forward.view(1, 1, 3, 2),
        activation=activation.view(1, 3, 2),
        **{
            n: torch.zeros(1, 3, 2, dtype=torch.float64)
            for n in ("per_iteration", "static", "working")
        },
        **{name: torch.zeros(1, 1, 3, 2, dtype=torch.float64) for name in ("backward", "sync")},
        reshard=torch.zeros(1, 1, 2, 1, 1, dtype=torch.float64),
        in_flight=torch.ones(1, 1).double(),
        capacity=torch.tensor([capacity]).double(),
    )


def choices_of(result: TableResult) -> list[int]:
    return list(result.best.plan.choices[0].tolist())


def test_piper_recomputes_the_layer_that_frees_most_bytes_per_second() -> None:
    # 6 bytes are wanted: 8 bytes for a second against 4 and 2
    result = piper.solve([recompute_table([1.0, 1.0, 0.5], [4.0, 8.0, 1.0], 18.0)])
    assert choices_of(result) == [0, 1, 0]
    assert result.cost == pytest.approx(4.0)


def test_alpa_and_galvatron_recompute_what_costs_least_not_what_frees_most_per_second() -> None:
    # 6 bytes are wanted: the first layer frees just that for 1.25 s, the second 8 bytes for 1.5 s
    table = recompute_table([1.25, 1.5, 9.0], [6.0, 8.0, 8.0], 18.0)
    assert choices_of(piper.solve([table])) == [0, 1, 0]
    for module in (alpa, galvatron):
        result = module.solve([table])
        assert choices_of(result) == [1, 0, 0]
        assert result.cost == pytest.approx(4.25)


def test_galvatron_takes_the_best_of_even_stages_and_of_stages_of_equal_time_by_hand() -> None:
    # even 3 | 7, by time 6 | 4: 10 + 7 * 6
    result = galvatron.solve([hand_table([1, 2, 3, 4], 2, 8)])
    assert starts_of(result) == [0, 3]
    assert result.cost == pytest.approx(10 + 7 * 6)
    # the third layer's 2 bytes do not fit beside those of the first two: 3 | 7 does
    static = torch.tensor([1.0, 1.0, 2.0, 1.0]).double().view(1, 4, 1)
    table = hand_table(
        [1, 2, 3, 4], 2, 8, static=static, capacity=torch.tensor([3.0, 3.0]).double()
    )
    result = galvatron.solve([table])
    assert starts_of(result) == [0, 2]
    assert result.cost == pytest.approx(10 + 7 * 7)


@pytest.mark.parametrize("module", [annealing, flexflow, random_search])
def test_random_planners_find_the_balanced_cut_by_hand(module: ModuleType) -> None:
    result = solved(module.solve, [hand_table([1, 2, 3, 4], 2, 8)], 0, 5)
    assert starts_of(result) == [0, 3]
    assert result.cost == pytest.approx(52.0)


def test_the_megatron_rule_fills_the_node_with_tensor_parallelism_then_the_fewest_stages_that_fit() -> (
    None
):
    small = ["model=bert_345m", "training=bert_345m", "cluster=a10_4x4", "space.tp=[1,2,4]"]
    problem = load_problem([*small, "space=uniform"])
    plan = answer(megatron_rule.solve, problem).plan
    assert {(s.tp, s.dp, s.zero_stage, s.sequence_parallel) for s in plan.layers} == {
        (4, 4, 0, False)
    }
    assert plan.pp == 1
    # with less memory the same rule needs stages: the fewest with which it fits
    less = ["cluster.devices.a10.memory_GiB=1.8", "cluster.devices.a10.reserved_GiB=0.5"]
    tight = load_problem([*small, *less, "space=uniform"])
    result = answer(megatron_rule.solve, tight)
    assert result.plan.pp > 1
    assert {s.tp for s in result.plan.layers} == {4}
    assert evaluate(result.plan, tight).feasible
    plain = ["space.tp=4", "space.zero_stage=0", "space.sequence_parallel=false"]
    fewer = load_problem(
        [*small, *less, *plain, "space=uniform", f"space.pp={result.plan.pp // 2}"]
    )
    assert answer(megatron_rule.solve, fewer).plan is None


@pytest.fixture(scope="module")
def mixed() -> tuple[Problem, float]:
    """Two node types, and the proven seconds of an iteration."""
    problem = load_problem(["model=toy", "training=toy", "cluster=toy_mixed", "space.pp=2"])
    best = check(problem)
    assert best.proven
    return problem, best.iteration_time_s


@pytest.mark.parametrize("name", [name for name, planner in PLANNERS.items() if not planner.seeded])
def test_mixed_nodes_plans_are_legal_and_above_the_optimum(
    name: str, mixed: tuple[Problem, float]
) -> None:
    problem, best = mixed
    result = answer(PLANNERS[name].solve, problem)
    cost = evaluate(result.plan, problem)
    assert cost.feasible
    assert cost.iteration_time_s == pytest.approx(result.iteration_time_s, rel=1e-9)
    assert cost.iteration_time_s >= best * (1 - 1e-9)


def two_ways(count: int, pp: int = 2) -> CostTable:
    """Layers of 1 s that wait 9 s for gradients, or of 2 s that wait for none; `count` micro-batches."""
    table = hand_table([1.0, 1.0, 1.0, 1.0], pp, count)
    pair = {
        name: getattr(table, name).repeat_interleave(2, -1)
        for name in (
            "forward",
            "backward",
            "sync",
            "per_iteration",
            "static",
            "activation",
            "working",
        )
    }
    pair["forward"] = torch.tensor([1.0, 2.0]).double().expand(1, 1, 4, 2).clone()
    pair["sync"] = torch.tensor([9.0, 0.0]).double().expand(1, 1, 4, 2).clone()
    return replace(
        table,
        choices=(LayerStrategy(1, 2), LayerStrategy(1, 2, zero_stage=1)),
        layout=torch.tensor([0, 0]),
        allowed=torch.ones(1, 2, dtype=torch.bool),
        **pair,
    )


def test_mist_takes_the_sample_of_a_stage_that_its_number_of_micro_batches_pays_for() -> None:
    # two stages of two layers: 2 + 2 + (m - 1) 2 + 18 against 4 + 4 + (m - 1) 4
    few = mist.solve([two_ways(4)])
    assert choices_of(few) == [1, 1, 1, 1]
    assert few.cost == pytest.approx(20.0)
    many = mist.solve([two_ways(16)])
    assert choices_of(many) == [0, 0, 0, 0]
    assert many.cost == pytest.approx(2 + 2 + 15 * 2 + 18)


def test_mist_equals_its_programme_by_enumeration() -> None:
    """All splits, all strategies of a stage: sum + (m - 1) * largest + largest synchronisation."""
    rng = np.random.default_rng(0)
    for count in (1, 3, 9):
        table = two_ways(count, pp=3)
        forward = torch.from_numpy(rng.random((1, 1, 4, 2)) + 0.5)
        sync = torch.from_numpy(3.0 * rng.random((1, 1, 4, 2)))
        table = replace(table, forward=forward, sync=sync)
        best = np.inf
        for cut in combinations(range(1, 4), 2):
            edges = [0, *cut, 4]
            for ways in np.ndindex(2, 2, 2):
                stages = list(zip(edges, edges[1:], ways, strict=False))
                seconds = [float(forward[0, 0, a:b, way].sum()) for a, b, way in stages]
                once = [float(sync[0, 0, a:b, way].sum()) for a, b, way in stages]
                best = min(best, sum(seconds) + (count - 1) * max(seconds) + max(once))
        assert mist.solve([table]).cost == pytest.approx(best, rel=STEP * count)


def test_mist_recomputes_only_what_does_not_fit() -> None:
    result = mist.solve([recompute_table([1.0, 1.0, 0.5], [4.0, 8.0, 1.0], 18.0)])
    assert choices_of(result) == [0, 1, 0]


def test_fasop_moves_a_layer_from_the_slowest_stage_to_the_fastest_by_hand() -> None:
    # even stages take 3 and 6 s; a layer of 2 s moves: 5 and 4 s; it would come back, which is undone
    result = fasop.solve([hand_table([1, 1, 1, 2, 2, 2], 2, 8)])
    assert starts_of(result) == [0, 4]
    assert result.cost == pytest.approx(9 + 7 * 5)
    # an end stage of two layers gives none away, though 6 and 4 s would be better
    result = fasop.solve([hand_table([1, 2, 3, 4], 2, 8)])
    assert starts_of(result) == [0, 2]


PINS = {
    "alpa": test_dapple_and_alpa_weigh_the_sum_against_the_bottleneck_by_hand,
    "amp": test_amp_finds_out_about_memory_only_when_it_runs_and_dapple_knows_it,
    "annealing": test_random_planners_find_the_balanced_cut_by_hand,
    "dapple": test_dapple_and_alpa_weigh_the_sum_against_the_bottleneck_by_hand,
    "fasop": test_fasop_moves_a_layer_from_the_slowest_stage_to_the_fastest_by_hand,
    "flexflow": test_random_planners_find_the_balanced_cut_by_hand,
    "galvatron": test_galvatron_takes_the_best_of_even_stages_and_of_stages_of_equal_time_by_hand,
    "hetpipe": test_hetpipe_takes_throughput_and_does_not_see_synchronisation_and_the_bubble,
    "megatron_rule": (
        test_the_megatron_rule_fills_the_node_with_tensor_parallelism_then_the_fewest_stages_that_fit
    ),
    "mist": test_mist_equals_its_programme_by_enumeration,
    "pipedream": test_pipedream_balances_the_slowest_stage_by_hand,
    "piper": test_piper_recomputes_the_layer_that_frees_most_bytes_per_second,
    "random_search": test_random_planners_find_the_balanced_cut_by_hand,
}
"""For every rival a test in which the algorithm of its paper must be met."""


def test_every_rival_has_a_test_of_its_papers_algorithm() -> None:
    assert set(PINS) == set(PLANNERS)
