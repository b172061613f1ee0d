"""The search of orders of passes: its kernels against the simulation, its answers against enumeration."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from darts_parallel import Plan, evaluate, load_problem, search
from darts_parallel.config import SearchConfig
from darts_parallel.cost import (
    CostTable,
    HardPlans,
    PipelineModel,
    PricedPlan,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
)
from darts_parallel.gradient import orders
from darts_parallel.gradient.orders import KEPT, Order, OrderProblem, OrderSearch
from darts_parallel.gradient.pool import PlanPool
from darts_parallel.schedules import NAMES, find
from tests.support.random_tables import random_table

TOY = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.zero_stage=0", "space.tp=1"]
SHORT = ["search.num_steps=10", "search.num_restarts=4", "search.order_passes=2000000"]


def free_table(
    seed: int, schedule: str, pp: int, count: int, *, tightness: float = 8.0
) -> CostTable:
    """A random table whose order is free, of one outer choice."""
    rule, rng = find(schedule), torch.Generator().manual_seed(seed)
    chunks = rule.chunks or 2
    stages = pp * chunks
    table = random_table(seed, pp=stages, num_layers=stages + 3, num_outer=1, tightness=tightness)
    kept = table.activation * (0.2 + 1.6 * torch.rand(table.activation.shape, generator=rng))
    model = PipelineModel(True, schedule, bool(seed % 2), free=True)
    table = replace(
        table,
        pipeline=model,
        num_micro_batches=torch.tensor([count]),
        for_weights=kept,
        weight_gradient=table.backward * 0.4,
        capacity=table.capacity[:pp] * chunks,
    )
    return table.with_schedule_memory()


def first_plan(table: CostTable) -> HardPlans:
    plans = even_uniform_plans(table)
    cost = evaluate_batch(table, plans)
    runs = table.runs(table.stage_kind[plans.stages()], plans.choices).all(1)
    return plans[int(cost.memory.amax(1).masked_fill(~runs, torch.inf).argmin()) :][:1]


@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "gpipe"])
@pytest.mark.parametrize("seed", range(3))
def test_kernels_and_simulation_agree_on_seconds_and_on_what_fits(schedule: str, seed: int) -> None:
    table, state = free_table(seed, schedule, 3, 6), np.array([seed + 1], dtype=np.uint64)
    problem, plan = OrderProblem(table, 0, "layerwise"), first_plan(table)
    starts = problem.starts(plan)
    assert starts
    own = evaluate_batch(table.with_order(0, find(schedule).code(3, 6, table.virtual_stages)), plan)
    seconds = float(evaluate_batch(table, plan).iteration_time[0])
    assert float(own.iteration_time[0]) == pytest.approx(seconds, rel=1e-12)
    for order in [starts[0], *(problem.annealed(starts[place], 300, state) for place in (0, -1))]:
        cost = evaluate_batch(table.with_order(0, problem.code(order)), hard(order))
        assert bool(cost.feasible[0])
        assert float(cost.iteration_time[0]) == pytest.approx(order.seconds, rel=1e-12)
        # without what is left of its room no device can run it
        less = replace(table, capacity=cost.memory[0] * (1 - 1e-9))
        assert (
            OrderProblem(less, 0, "layerwise").timed(replace(order, seconds=np.inf)).seconds
            == np.inf
        )
        assert (
            OrderProblem(less, 0, "layerwise").annealed(order, 9, state).seconds
            == problem.kernel.NEVER
        )


@pytest.mark.parametrize("seed", range(4))
def test_a_rules_order_that_does_not_fit_begins_with_lighter_layers(seed: int) -> None:
    table = free_table(seed, "v_half", 3, 6)
    assert table.before is not None
    # the last strategy holds nothing, and no layer may take it
    legal = torch.arange(len(table.choices)) < len(table.choices) - 1
    before = table.before * legal
    table = replace(
        table,
        allowed=legal.expand_as(table.allowed),
        kind_allowed=None,
        static=0 * table.static,
        working=0 * table.working,
        for_weights=0.5 * before,
        activation=before,
        before=before,
    )
    code = find("v_half").code(3, 6, 2)
    even = torch.arange(6) * table.num_layers // 6
    lightest, heaviest = before[0, :, legal].argmin(1), before[0].argmax(1)
    light = HardPlans(torch.zeros(1, dtype=torch.long), lightest[None], even[None])
    heavy = replace(light, choices=heaviest[None])
    by_order = table.with_order(0, code)
    roomy = replace(by_order, capacity=torch.full_like(by_order.capacity, 1e18))
    least, most = (evaluate_batch(roomy, plan).memory[0] * (1 + 1e-6) for plan in (light, heavy))
    # the first device has room for all strategies, the others for the lightest alone
    capacity = torch.cat([most[:1], least[1:]])
    problem = OrderProblem(replace(table, capacity=capacity), 0, "layerwise")
    starts = [order for order in problem.starts(heavy) if problem.code(order) == code]
    device = table.stage_device[heavy.stages()[0]]
    wanted = torch.where(device == 0, heaviest, lightest)
    assert starts
    assert all(order.choices.tolist() == wanted.tolist() for order in starts)
    for space, room in (("layerwise", 0.99 * least), ("uniform", capacity)):
        full = OrderProblem(replace(table, capacity=room), 0, space)
        assert all(full.code(order) != code for order in full.starts(heavy))


@pytest.mark.parametrize(("pp", "rule", "least"), [(4, 30, 27), (8, 62, 55)])
def test_the_search_closes_the_gap_of_zb_v_where_micro_batches_are_few(
    pp: int, rule: int, least: int
) -> None:
    table = free_table(0, "zero_bubble_v", pp, pp, tightness=0.0)
    ones, table = torch.ones_like(table.forward), table.keep_choices(table.allowed[0].nonzero()[0])
    ones[:, :, 2 * pp :] = 0.0  # the last stage holds these layers, too
    none = {
        name: 0 * getattr(table, name)
        for name in ("sync", "per_iteration", "reshard", "p2p", "static")
    }
    ones = ones[..., :1]
    table = replace(
        table,
        forward=ones,
        backward=2 * ones,
        weight_gradient=ones,
        **none,
        capacity=torch.full((pp,), 1e12, dtype=torch.float64),
    )
    zero = torch.zeros(1, table.num_layers, dtype=torch.long)
    plan = HardPlans(zero[0, :1], zero, torch.arange(2 * pp)[None])
    assert float(evaluate_batch(table, plan).iteration_time[0]) == rule
    assert (
        OrderProblem(table, 0, "uniform").starts(plan)[0].seconds == least
    )  # of 6 pp for the work


def hard(order: Order) -> HardPlans:
    first, choices = torch.from_numpy(order.first[:-1])[None], torch.from_numpy(order.choices)[None]
    return HardPlans(torch.zeros(1, dtype=torch.long), choices, first)


def words_of(symbols: list[tuple[int, ...]], count: int) -> Iterator[tuple[int, ...]]:
    """Every order of the passes of stages, each given by the symbols that follow each other."""

    def grow(ran: dict[int, int], word: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(word) == count * sum(map(len, symbols)):
            yield word
        for chain in symbols:
            for place, symbol in enumerate(chain):
                if ran[symbol] < (ran[chain[place - 1]] if place else count):
                    yield from grow(ran | {symbol: ran[symbol] + 1}, (*word, symbol))

    yield from grow({symbol: 0 for chain in symbols for symbol in chain}, ())


@pytest.mark.parametrize(
    ("schedule", "pp", "count", "split"),
    [
        ("zero_bubble_h1", 2, 3, True),
        ("zero_bubble_h1", 3, 2, True),
        ("1f1b", 3, 3, False),
        ("1f1b", 2, 4, False),
        ("zero_bubble_v", 2, 1, True),
    ],
)
@pytest.mark.parametrize("tightness", [0.9, 8.0])
def test_annealing_finds_the_best_of_all_orders(
    schedule: str,
    pp: int,
    count: int,
    split: bool,
    tightness: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orders, "LAYER_SHARE", 0.0)
    for seed in range(4):
        table = free_table(seed, schedule, pp, count, tightness=tightness)
        problem, plan, stages = (
            OrderProblem(table, 0, "layerwise"),
            first_plan(table),
            table.num_stages,
        )
        passes = (3 if split else 2) * count * stages // pp
        given = [o for o in problem.starts(plan) if (o.choices == plan.choices[0].numpy()).all()]
        starts = [order for order in given if order.lengths[0] == passes]
        kinds = (0, 1, 2) if split else (0, 1)
        each = [
            list(words_of([tuple(k * stages + s for k in kinds) for s in own], count))
            for own in (
                [s for s in range(stages) if int(table.stage_device[s]) == d] for d in range(pp)
            )
        ]
        first, choices = (
            np.append(plan.first_layers[0].numpy(), table.num_layers),
            plan.choices[0].numpy(),
        )
        lengths = np.full(pp, len(each[0][0]))
        every = (
            problem.timed(Order(problem, np.array(rows), lengths, first, choices, split))
            for rows in product(*each)
        )
        best = min(order.seconds for order in every)
        state = np.array([seed + 1], dtype=np.uint64)
        found = [problem.annealed(order, 4000, state).seconds for order in starts]
        if starts:
            assert min(found) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_passes_and_messages_of_a_longest_path_last_as_long_as_all(seed: int) -> None:
    table = free_table(seed, "1f1b", 3, 6)
    problem = OrderProblem(table, 0, "layerwise")
    plan = first_plan(table)
    first = np.append(plan.first_layers[0].numpy(), table.num_layers)
    whole, split = problem._rule_orders("1f1b", first, plan.choices[0].numpy())
    assert (whole.split, split.split) == (False, True)
    order = problem.starts(plan)[-1]
    figures = problem.figures[order.split]
    stages, once = problem.stages(order)
    end = np.zeros((len(figures.sources), figures.batches))
    problem.kernel.timed(figures, order.words, order.lengths, stages, once, end)
    path = np.zeros((order.lengths.sum() + 1, 2), dtype=np.int64)
    given = (order.words, order.lengths, stages, figures.sources, end, path)
    path = path[: problem.kernel.critical(*given)]
    device, place = path.T
    symbols = order.words[device, place]
    received = symbols[:-1][device[:-1] != device[1:]]  # the path runs backwards
    seconds = stages.seconds[symbols].sum() + stages.message[received].sum()
    assert seconds + stages.sync[device[0]] + once == pytest.approx(order.seconds, rel=1e-12)


def test_the_heuristic_closes_the_gap_of_zb_v_where_micro_batches_are_as_few_as_devices() -> None:
    table = free_table(0, "zero_bubble_v", 8, 8)
    shape, ones = table.forward.shape, torch.ones_like(table.forward)
    ones[:, :, 16:] = 0.0  # one layer a stage counts
    table = replace(
        table,
        forward=ones,
        backward=2 * ones,
        weight_gradient=ones,
        sync=0 * ones,
        reshard=0 * table.reshard,
        per_iteration=0 * table.static,
        p2p=0 * table.p2p,
        capacity=torch.full((8,), 1e9).double(),
    )
    plan = HardPlans(torch.zeros(1).long(), torch.zeros(1, shape[2]).long(), torch.arange(16)[None])
    table = replace(table, allowed=torch.ones_like(table.allowed), kind_allowed=None)
    rule = float(evaluate_batch(table, plan).iteration_time[0])
    problem = OrderProblem(table, 0, "uniform")
    first = np.append(plan.first_layers[0].numpy(), shape[2])
    best = problem.heuristic(first, plan.choices[0].numpy())[0].seconds
    assert problem.starts(plan)[0].seconds == best
    assert (rule, best) == (62.0, 55.0)  # bubbles of 22.6 and 12.7 % of an iteration


def test_a_searched_plan_is_no_slower_than_the_rules_and_its_file_says_every_pass(
    tmp_path: Path,
) -> None:
    overrides = [*TOY, *SHORT, "space.num_micro_batches=4", "space.axis_order=tp-dp-pp"]
    problem = load_problem([*overrides, "space.schedules=[1f1b,searched]"])
    found, again = (search(problem, seed=0) for _ in range(2))
    rules = search(load_problem([*overrides, "space.schedules=[1f1b]"]), seed=0)
    assert found.plan == again.plan
    assert found.plan.schedule_name == "searched"
    assert found.iteration_time_s < rules.iteration_time_s * 0.999
    names = tuple(layer.name for layer in problem.model.layers)
    data = found.plan.to_dict(names, range(problem.cluster.num_devices))
    assert data["schedule"] == "searched"
    assert data["placement"] in ("loop", "v")
    read = Plan.from_dict(data)
    assert read == found.plan
    assert evaluate(read, problem).iteration_time_s == pytest.approx(
        found.iteration_time_s, rel=1e-12
    )


def test_free_orders_are_searched_with_the_next_seeds_until_three_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = load_problem(
        [*TOY, *SHORT, "space.num_micro_batches=4", "space.schedules=[searched]"]
    )
    tables = build_tables(problem)
    seeds: list[int] = []
    run = OrderSearch.run

    def counted(self: OrderSearch, passes: int) -> None:
        seeds.append(self.seed)
        run(self, passes)

    def best(config: SearchConfig) -> float:
        pool = PlanPool(list(tables), "layerwise")
        for number, table in enumerate(tables):
            pool.add_balanced(number, range(table.num_outer))
        seeds.clear()
        bounds = [torch.zeros(table.num_outer) for table in tables]
        OrderSearch(pool, "layerwise", config, 5, bounds).search()
        return pool.best_time

    monkeypatch.setattr(OrderSearch, "run", counted)
    config = replace(problem.config.search, order_passes=20_000)
    several = best(config)
    assert seeds[:4] == [5, 6, 7, 8]
    tried = len(seeds)
    monkeypatch.setattr(orders, "STALE", 0)
    assert several <= best(config)
    assert len(seeds) == 1 < tried
    monkeypatch.setattr(orders, "STALE", 3)
    best(replace(config, max_seconds=1e-3))
    assert len(seeds) == 1, "no search begins when the time is over"


def test_a_search_begins_with_the_best_plans_and_with_one_of_every_placement() -> None:
    loop, folded = (free_table(0, name, 2, 4) for name in ("1f1b", "zero_bubble_v"))
    numbers = [0] * (orders.BASES + 2) + [1, 1]
    entries = [PricedPlan(number, first_plan(loop), 1.0) for number in numbers]
    pool = SimpleNamespace(tables=[loop, folded], by_outer=lambda: entries, best_time=1.0)
    bounds = [torch.zeros(loop.num_outer), torch.zeros(folded.num_outer)]
    search = OrderSearch(pool, "layerwise", SearchConfig(), 0, bounds)  # type: ignore[arg-type]
    assert [entry.table for entry in search._bases()] == [0] * orders.BASES + [1]


class Untimed(OrderSearch):
    """A search that keeps no orders, and whose time is never over."""

    late = False

    def _add(self, orders: list[Order]) -> None:
        pass


@pytest.mark.parametrize(
    ("ends", "settled"),
    [
        ([1.0] * 4 + [1.5] * 4, True),
        ([1.0] * 3 + [1.5] * 5, False),
        ([2.0] * 8, False),
    ],
)
def test_orders_settle_where_half_of_the_first_round_gains_the_same(
    ends: list[float], settled: bool
) -> None:
    """Starts at 2 s: an equal optimum counts only where it is better than the start."""

    def annealed(order: Any, moves: int, state: Any) -> Any:
        return SimpleNamespace(seconds=ends.pop(0)) if ends else order

    ends = list(ends)
    pool = PlanPool([], "layerwise")
    search = Untimed(pool, "layerwise", load_problem(TOY).config.search, 0, bounds=[])
    problem: Any = SimpleNamespace(work=1, annealed=annealed)
    orders: Any = [SimpleNamespace(seconds=2.0)]
    assert search._halve(problem, orders, 1000) == settled
    assert ends == []


@pytest.mark.parametrize("late", [True, False])
def test_no_order_is_annealed_again_after_the_deadline(late: bool) -> None:
    asked = []
    problem = SimpleNamespace(work=1, annealed=lambda *given: asked.append(given))
    found = [SimpleNamespace(problem=problem)]
    search: Any = SimpleNamespace(late=late, seed=0, found=found, state=None)
    search._add = lambda *given: None
    OrderSearch._anneal_again(search, 1000)
    assert len(asked) == (0 if late else orders.ROUNDS)


def test_no_order_is_searched_where_none_can_win() -> None:
    problem = load_problem(
        [*TOY, *SHORT, "space.num_micro_batches=4", "space.schedules=[searched]"]
    )
    tables = build_tables(problem)
    pool = PlanPool(list(tables), "layerwise")
    for number, table in enumerate(tables):
        pool.add_balanced(number, range(table.num_outer))
    for above, some in ((0.5, True), (1.0, False)):
        least = above * pool.best_time
        bounds = [torch.full((table.num_outer,), least) for table in tables]
        search = OrderSearch(pool, "layerwise", problem.config.search, 5, bounds)
        assert bool(search._bases()) == some
        # an order that is known already may be faster than all plans
        for known, wins in ((1.01 * least, some), (least, False), (2 * pool.best_time, some)):
            search.found = [SimpleNamespace(seconds=known)]  # type: ignore[list-item]
            assert bool(search._bases()) == wins


def test_the_best_orders_are_kept_once_and_the_best_of_every_table_is_added() -> None:
    table = free_table(0, "zero_bubble_h1", 2, 4)
    pool = PlanPool([table, table], "layerwise")
    bounds = [torch.zeros(1), torch.zeros(1)]
    search = OrderSearch(pool, "layerwise", SearchConfig(), 0, bounds)
    problems = [OrderProblem(table, 0, "layerwise", number) for number in range(2)]
    start = problems[0].starts(first_plan(table))[0]
    given = [
        replace(start, problem=problems[place % 2], seconds=float(seconds))
        for place, seconds in enumerate([9, 3, 8, 5, 3, 1, 7, 6, 2, 4])
    ]
    for order in given:
        search._add([order])
    assert [order.seconds for order in search.found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    search._add([replace(start, seconds=4.0), replace(start, seconds=0.5)])
    assert [order.seconds for order in search.found] == [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
    fast, *_, slow = problems[0].starts(first_plan(table))
    assert fast.seconds < slow.seconds
    search.found = [fast, slow, replace(slow, problem=problems[1])]
    search.keep()
    codes = [problems[0].code(order) for order in (fast, slow)]
    assert sorted(own.pipeline.schedule for own in pool.tables[2:]) == sorted(codes)
    assert pool.best is not None
    assert pool.best.time == pytest.approx(fast.seconds, rel=1e-12)


def test_halving_goes_on_with_the_better_half_and_keeps_the_two_best_of_every_round() -> None:
    ends = np.random.default_rng(0).permutation(15).tolist()
    given: list[list[float]] = [ends[:8], ends[8:12], ends[12:14], ends[14:]]
    asked, moves = [], []

    def annealed(order: Any, number: int, state: Any) -> Any:
        asked.append(order.seconds)
        moves.append(number)
        return SimpleNamespace(seconds=1.0 + ends[len(asked) - 1])

    pool = PlanPool([], "layerwise")
    search = OrderSearch(pool, "layerwise", SearchConfig(), 0, bounds=[])
    problem: Any = SimpleNamespace(work=10, annealed=annealed)
    orders: Any = [SimpleNamespace(seconds=100.0)]
    assert not search._halve(problem, orders, 4 * 8 * 10 * 5)
    best = [1.0 + end for row in given for end in sorted(row)[:2]]
    assert [order.seconds for order in search.found] == sorted(best)[:KEPT]
    assert asked[8:12] == sorted(1.0 + end for end in given[0])[:4]
    assert asked[12:14] == sorted(1.0 + end for end in given[1])[:2]
    assert asked[14] == min(1.0 + end for end in given[2])
    # every round has as many moves
    assert moves == [5] * 8 + [10] * 4 + [20] * 2 + [40]
