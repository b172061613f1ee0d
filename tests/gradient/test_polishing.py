import time
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from darts_parallel.config.schema import SpaceConfig
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, PricedPlan, even_uniform_plans, round_edges
from darts_parallel.cost.pruning import canonical, without_dominated, without_needless_simulation
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.bounds import outer_lower_bounds
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.exact.outer_choice import OuterChoiceSolver
from darts_parallel.exact.result import DeadlineError
from darts_parallel.exact.uniform import find_uniform_plan
from darts_parallel.gradient import polishing, pool_polishing
from darts_parallel.gradient.polishing import _adopt, _every_run, _runs, polish, repartitioned
from darts_parallel.gradient.pool import PlanPool
from darts_parallel.gradient.pool_polishing import Work, polish_pool
from darts_parallel.gradient.rounding import harden, repair
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table
from tests.support.spaces import is_in_space


def _tables(seed: int) -> list[CostTable]:
    return [random_table(seed, pp=1 + seed % 3, tightness=0.5 + 0.1 * (seed % 6))]


@pytest.mark.parametrize("seed", range(3))
def test_rounded_edges_leave_every_stage_a_layer(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    edges = (12 * torch.rand(50, 6, generator=rng, dtype=torch.float64)).sort(1).values
    starts = round_edges(edges, 12)
    assert (starts[:, 0] == 0).all()
    assert (starts.diff(dim=1) > 0).all()
    assert (starts[:, -1] < 12).all()


@pytest.mark.parametrize("seed", range(2))
def test_hardened_plans_are_legal(toy_problem: Problem, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for table in build_tables(toy_problem):
        weights = torch.rand(
            table.num_outer,
            3,
            table.num_layers,
            len(table.choices),
            generator=rng,
            dtype=torch.float64,
        )
        weights = weights * table.allowed[:, None, None, :]
        edges = (
            (6 * torch.rand(table.num_outer, 3, table.pp - 1, generator=rng, dtype=torch.float64))
            .sort(-1)
            .values
        )
        plans = harden(weights, edges, table)
        assert table.allowed[plans.outer.unsqueeze(1), plans.choices].all()
        assert not table.fused_to_previous[plans.first_layers].any()


@pytest.mark.parametrize("seed", range(10))
def test_polish_never_makes_a_plan_slower_or_illegal(seed: int) -> None:
    (table,) = _tables(seed)
    rng = torch.Generator().manual_seed(seed)
    plans = random_plans(table, 8, rng)
    cost = evaluate_batch(table, plans)
    for index in torch.nonzero(cost.feasible).flatten().tolist()[:2]:
        for kind in ("uniform", "stagewise", "layerwise"):
            plan = plans[index : index + 1]
            if not is_in_space(plan, SpaceConfig(kind=kind)):
                continue
            better, seconds, _ = polish(table, plan, kind)
            again = evaluate_batch(table, better)
            assert bool(again.feasible[0])
            assert seconds == float(again.iteration_time[0])
            assert seconds <= float(cost.iteration_time[index]) * (1 + 1e-12)
            assert is_in_space(better, SpaceConfig(kind=kind))


@pytest.mark.parametrize(
    ("starts", "adopted"),
    [
        # a layer that moves to a later stage takes the strategy which that stage began with
        ([0, 1, 4], [0, 2, 2, 3, 4, 5]),
        # one that moves to an earlier stage takes the strategy which that stage ended with
        ([0, 3, 4], [0, 1, 1, 3, 4, 5]),
        # two boundaries at once; layers that stay keep their own
        ([0, 3, 5], [0, 1, 1, 3, 3, 5]),
        ([0, 1, 3], [0, 2, 2, 4, 4, 5]),
        ([0, 2, 4], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_that_change_stage_adopt_the_strategy_next_to_the_boundary(
    starts: list[int], adopted: list[int]
) -> None:
    choices = torch.arange(6).unsqueeze(0)
    plan = HardPlans(torch.tensor([0]), choices, torch.tensor([[0, 2, 4]]))
    moved = HardPlans(torch.tensor([0]), choices, torch.tensor([starts]))
    assert _adopt(plan, moved).tolist() == [adopted]


def _all_starts(table: CostTable) -> list[list[int]]:
    layers = range(table.num_layers)
    return [
        list(starts)
        for starts in product(layers, repeat=table.pp)
        if starts[0] == 0
        and all(a < b for a, b in pairwise(starts))
        and not any(bool(table.fused_to_previous[s]) for s in starts)
    ]


@pytest.mark.parametrize("seed", range(15))
def test_repartition_finds_the_smallest_bottleneck_of_given_strategies(seed: int) -> None:
    (table,) = _tables(seed)
    plan = random_plans(table, 1, torch.Generator().manual_seed(seed))
    starts = torch.tensor(_all_starts(table))
    every = HardPlans(plan.outer.expand(len(starts)), plan.choices.expand(len(starts), -1), starts)
    exact = evaluate_batch(table, every)
    if not exact.feasible.any():
        return
    found = evaluate_batch(table, repartitioned(table, plan))
    best = exact.stage_seconds.amax(1).masked_fill(~exact.feasible, torch.inf).min()
    slowest = found.stage_seconds.amax(1).masked_fill(~found.feasible, torch.inf).min()
    assert float(slowest) == pytest.approx(float(best), rel=1e-9)


def test_repair_brings_an_overfull_plan_under_the_memory() -> None:
    device = "cluster.devices.a10"
    tight = [f"{device}.memory_GiB=5.5", f"{device}.reserved_GiB=1"]
    problem = load_problem(["model=gpt2_xl", "training=gpt2_xl", *tight])
    (table,) = build_tables(problem, [s for s in outer_spaces(problem) if s.pp == 8])
    heavy = next(
        i for i, c in enumerate(table.choices) if c.zero_stage == 0 and c.recompute == "none"
    )
    starts = torch.tensor([[0, 7, 13, 19, 25, 31, 37, 43]])
    outer = int((table.num_micro_batches == 16).nonzero()[0])
    plan = HardPlans(torch.tensor([outer]), torch.full((1, table.num_layers), heavy), starts)
    assert not bool(evaluate_batch(table, plan).feasible[0])
    fixed, cost = repair(table, plan, float("inf"))
    assert bool(cost.feasible[0])
    assert fixed.first_layers.tolist() == starts.tolist()


def test_dominated_strategies_are_dropped_without_loss(llama_problem: Problem) -> None:
    from darts_parallel.exact.layerwise import find_layerwise_plan

    tables = build_tables(llama_problem)
    fewer = [without_dominated(table) for table in tables]
    assert sum(len(t.choices) for t in fewer) < sum(len(t.choices) for t in tables)
    whole = find_layerwise_plan(tables, "layerwise")
    assert find_layerwise_plan(fewer, "layerwise").cost == pytest.approx(whole.cost, rel=1e-12)


def test_tidying_changes_names_but_not_the_cost(default_problem: Problem) -> None:
    for table in build_tables(default_problem):
        plans = random_plans(table, 4, torch.Generator().manual_seed(3))
        for index in range(4):
            plan = plans[index : index + 1]
            canonicalized = canonical(table, plan)
            before, after = evaluate_batch(table, plan), evaluate_batch(table, canonicalized)
            assert float(after.iteration_time[0]) == float(before.iteration_time[0])
            assert after.memory.tolist() == before.memory.tolist()
        pool = PlanPool([table], "layerwise")
        pool.add(0, plans)
        assert all(
            pool.plan(e) == canonical(table, e.plan).to_plan(0, table) for e in pool.by_outer()
        )
        stagewise = PlanPool([table], "stagewise")  # whose layers follow their stage
        given = PricedPlan(0, plans[:1], 1.0)
        assert stagewise.plan(given) == plans.to_plan(0, table)
        same = HardPlans(plans.outer[:1], plans.choices[:1] * 0, plans.first_layers[:1])
        assert canonical(table, same).choices.tolist() == same.choices.tolist()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble_h1"])
def test_a_single_stage_needs_no_simulation(schedule: str) -> None:
    free = ["model=toy", "cluster=toy", "training=toy", "cost.pipeline=simulated"]
    problem = load_problem([*free, f"space.schedules=[{schedule}]", "space.pp=[1,2]"])
    alone, two, inside = build_tables(problem)
    closed = without_needless_simulation(alone)
    assert alone.pipeline.simulated
    assert not closed.pipeline.simulated
    for several in (two, inside):
        assert without_needless_simulation(several) is several
    plans = random_plans(alone, 100, torch.Generator().manual_seed(0))
    costs = [evaluate_batch(table, plans) for table in (alone, closed)]
    torch.testing.assert_close(
        costs[1].iteration_time, costs[0].iteration_time, rtol=1e-12, atol=0.0
    )
    assert torch.equal(costs[1].feasible, costs[0].feasible)


def test_the_finalists_share_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(0, num_outer=3, tightness=2.0)
    pool = PlanPool([table], "layerwise")
    pool.add(0, even_uniform_plans(table))
    left = []

    def asked(case: OuterChoiceSolver, kind: str, limit: float, work: Work) -> None:
        left.append((case.outer, work.left))
        work(10)

    monkeypatch.setattr(OuterChoiceSolver, "solve", asked)
    monkeypatch.setattr(pool_polishing, "FINALISTS", 6)
    monkeypatch.setattr(pool_polishing, "POLISH_STARTS", 1)
    config = SearchConfig(polish_labels=100)
    bounds = [torch.zeros(table.num_outer)]
    assert polish_pool(pool, "layerwise", config, hurry=False, bounds=bounds) is None
    assert len({outer for outer, _ in left}) == len(left) > 1
    assert [labels for _, labels in left] == [100 - 10 * place for place in range(len(left))]


@pytest.mark.parametrize("kind", ["uniform", "stagewise"])
def test_a_pool_keeps_no_plan_outside_of_its_space(kind: str) -> None:
    space = SpaceConfig(kind=kind)
    for seed in range(6):
        [table] = _tables(seed)
        plans = random_plans(table, 50, torch.Generator().manual_seed(seed))
        assert plans.within(kind).tolist() == [
            is_in_space(plans[i : i + 1], space) for i in range(50)
        ]
        pool = PlanPool([table], kind)
        pool.add(0, plans, torch.zeros(len(plans), dtype=torch.float64))
        pool.add_balanced(0, range(table.num_outer))
        for entry in pool.by_outer():
            assert is_in_space(entry.plan, space)
            assert pool.plan(entry).within(kind)


def test_all_of_the_labels_may_be_made() -> None:
    work = Work(3, lambda: False)
    work(3)
    with pytest.raises(DeadlineError):
        work(1)


@pytest.mark.parametrize("pp", [1, 3])
def test_runs_of_layers_lie_in_one_stage(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(0, pp=pp, num_layers=12)
    plan = random_plans(table, 1, torch.Generator().manual_seed(0))
    ends = [*plan.first_layers[0].tolist(), 12]
    inside = [
        [first, last + 1]
        for begin, end in pairwise(ends)
        for first in range(begin, end)
        for last in range(first, end)
    ]
    assert sorted(_runs(table, plan).tolist()) == sorted(inside)
    neighbours = {
        tuple(choice if first <= layer < end else own for layer, own in enumerate(present))
        for present in [plan.choices[0].tolist()]
        for first, end in [*inside, [0, 12]]
        for choice in range(len(table.choices))
    }
    assert set(map(tuple, _every_run(table, plan).tolist())) == neighbours
    most = len(inside) * len(table.choices)
    monkeypatch.setattr(polishing, "MAX_RUNS", most)
    assert len(_runs(table, plan)) == len(inside)
    monkeypatch.setattr(polishing, "MAX_RUNS", most - 1)
    few = [run for run in inside if run[1] - run[0] <= 2 or set(run) & set(ends)]
    assert len(few) < len(inside)
    assert sorted(_runs(table, plan).tolist()) == sorted(few)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_pool_is_polished_by_layers_where_no_program_knows_its_plans(simulated: bool) -> None:
    table = random_table(1, pp=2, num_layers=6, num_outer=1, tightness=3.0)
    table = replace(table, pipeline=replace(table.pipeline, simulated=simulated))
    plans = even_uniform_plans(table)
    pool = PlanPool([table], "layerwise")
    pool.add(0, plans)
    start = pool.best
    bounds = [outer_lower_bounds(table, "layerwise")]
    polisher = pool_polishing._PoolPolisher(pool, "layerwise", SearchConfig(), bounds)
    polisher.improve(start)
    best = pool.best
    layers = torch.eye(6, dtype=torch.bool).repeat_interleave(3, 0)
    changed = torch.where(layers, torch.arange(3).repeat(6).unsqueeze(1), best.plan.choices)
    neighbours = replace(best.plan.repeated(18), choices=changed)
    single = float(evaluate_batch(table, neighbours).fitting_seconds.min())
    if not simulated:  # the programs choose strategies of layers
        assert single < best.time
        polisher.by_programs()
        optimum = find_layerwise_plan([table], "layerwise").cost
        assert pool.best_time == pytest.approx(optimum, rel=1e-12)
    else:
        assert single >= best.time * (1 - 1e-9)
        evaluated = pool.evaluated
        polisher.improve(best)
        assert pool.evaluated == evaluated, "a local optimum is not polished again"


def test_ctrl_c_ends_polishing_with_what_was_found() -> None:
    table = random_table(1, pp=2, num_layers=6, num_outer=1, tightness=3.0)
    pool = PlanPool([table], "layerwise")
    pool.add(0, even_uniform_plans(table))
    before = pool.best_time

    class Interrupted:
        asked = 0

        @property
        def seconds(self) -> float:
            self.asked += 1
            if self.asked > 3:
                raise KeyboardInterrupt
            return 0.0

    pool.clock = Interrupted()
    bounds = [torch.zeros(1)]
    assert polish_pool(pool, "layerwise", SearchConfig(), hurry=False, bounds=bounds) == "user"
    assert pool.best_time <= before


@pytest.mark.parametrize("simulated", [True, False])
def test_nothing_is_polished_after_the_deadline(simulated: bool) -> None:
    table = random_table(1, pp=2, num_layers=6, num_outer=1, tightness=3.0)
    table = replace(table, pipeline=replace(table.pipeline, simulated=simulated))
    pool = PlanPool([table], "layerwise")
    pool.add(0, even_uniform_plans(table))
    before, evaluated = pool.best_time, pool.evaluated
    config = SearchConfig(max_seconds=0.001)
    time.sleep(0.002)
    bounds = [torch.zeros(1)]
    assert polish_pool(pool, "layerwise", config, hurry=True, bounds=bounds) == "time_limit"
    assert pool.best_time == before
    # each plan that was to be polished is priced once more
    assert pool.evaluated - evaluated <= 5


@pytest.mark.parametrize("seed", [5, 19, 20, 23, 26, 28, 35])
def test_a_uniform_space_gets_the_best_stages_of_every_strategy(seed: int) -> None:
    """Moves alone end up to 20 % above the optimum here; Llama 3 8B on L40S was 4.5 % above it."""
    table = random_table(seed, pp=3, num_layers=16, tightness=0.65)
    pool = PlanPool([table], "uniform")
    pool.add(0, even_uniform_plans(table))
    bounds = [outer_lower_bounds(table, "uniform")]
    assert polish_pool(pool, "uniform", SearchConfig(), hurry=False, bounds=bounds) is None
    known = sorted({entry.outer[1] for entry in pool.by_outer()})
    best = find_uniform_plan([table.select(known)]).best
    assert best is not None
    assert pool.best_time == pytest.approx(best.time, rel=1e-12)
