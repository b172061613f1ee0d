"""Plans for sequences of many lengths: what they must share with the plain job, and with a simulation."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from darts_parallel import plan as find_plan
from darts_parallel.config import PACKINGS
from darts_parallel.cost import HardPlans, build_tables, evaluate, evaluate_batch, pass_seconds
from darts_parallel.errors import ConfigError, InfeasibleError, UnsupportedError
from darts_parallel.planner import _length_draws, lengths
from darts_parallel.planner._length_draws import DRAWS, Draws, Load, read_lengths
from darts_parallel.planner._pass_prices import PlanAtLengths, least_path, path_seconds
from darts_parallel.planner.lengths import plan_lengths
from darts_parallel.planner.memory_chance import tightened
from darts_parallel.planner.prediction_intervals import out_of_memory
from darts_parallel.planner.sequence_packing import Group, Packing
from darts_parallel.plans import LayerStrategy, OuterSpace, Plan, outer_spaces
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report import seconds
from tests.support.commands import QUIET, Command
from tests.support.packed_steps import simulated_step

RANDOM = range(3)


def job(folder: Path, rows: dict[int, float], *more: str) -> Problem:
    lines = ["length,count", *(f"{length},{count}" for length, count in rows.items())]
    (folder / "lengths.csv").write_text("\n".join(lines) + "\n")
    words = [f"training.lengths={folder / 'lengths.csv'}", "model.max_seq_len=512"]
    return load_problem(["model=toy", "cluster=toy", *words, *more])


def random_job(folder: Path, seed: int, values: Sequence[int], *more: str) -> Problem:
    """A toy job of random batch, memory, shares and pipeline degree."""
    rng = np.random.default_rng(seed)
    rows = {length: float(rng.integers(1, 100)) for length in values}
    pins = [
        f"training.global_batch_size={8 * rng.integers(1, 5)}",
        f"search.seed={seed}",
        f"space.pp={[1, 2, 4][seed % 3]}",
        f"cluster.devices.toy.memory_GiB={rng.choice([0.11, 0.5])}",
        "space.cp=null",
    ]
    return job(folder, rows, "training.seq_len=512", *pins, *more)


def main_plans(monkeypatch: pytest.MonkeyPatch, plans: list[Plan]) -> None:
    """Let the main search find these plans."""
    monkeypatch.setattr(lengths, "_main_plans", lambda problem: (plans, ""))


@pytest.fixture
def no_main_search(monkeypatch: pytest.MonkeyPatch) -> None:
    main_plans(monkeypatch, [])


def searched(problem: Problem) -> tuple[lengths._PackingSearch, list[PlanAtLengths]]:
    draws = Draws.of(problem)
    prices = lengths._prices(problem, draws, [])
    plans = [PlanAtLengths(own, [number]) for own in prices for number in range(len(own.plans))]
    return lengths._PackingSearch(problem, draws, prices), plans


@pytest.mark.parametrize("seed", RANDOM)
def test_one_length_is_plain(tmp_path: Path, seed: int) -> None:
    length = [64, 128, 512][seed]
    problem = random_job(tmp_path, seed, [length])
    plain = replace(problem.training, lengths=None, seq_len=length)
    usual = Problem.from_config(replace(problem.config, training=plain))
    search, plans = searched(problem)
    batch = problem.training.global_batch_size
    compared = 0
    for own in plans[:: max(1, len(plans) // 20)]:
        for cp in own.degrees:
            dp = own.ranks // cp
            for packing in (Packing("padded", cp), Packing("dp_balanced", cp, budget=length // cp)):
                cost = evaluate(own.to_plan(cp, batch // dp), usual)
                found = search._seconds(own, packing, DRAWS)
                assert found == pytest.approx(cost.iteration_time_s, rel=2e-3)
                (bytes_,) = own.memory(cp, length / cp)
                reserved = np.array(cost.memory_bytes) - bytes_
                if own.prices.space.pp <= batch // dp:
                    assert np.ptp(reserved) <= 2e-3 * max(cost.memory_bytes)
                compared += 1
    assert compared > 20


def exact_seconds(problem: Problem, own: PlanAtLengths, stages: int) -> Any:
    """Return the seconds of a pass of a group from tables of its own tokens and lengths."""
    space = own.prices.space

    @cache
    def of_length(cp: int, tokens: int, length: int) -> dict[str, list[float]]:
        # `tokens` of all ranks of a group; `length` micro-batches of them
        batch = tokens * own.ranks // cp
        training = replace(problem.training, lengths=None, seq_len=length, global_batch_size=batch)
        plain = Problem.from_config(replace(problem.config, training=training))
        layers: tuple[LayerStrategy, ...] = own.to_plan(cp, 1).layers
        choices = tuple(dict.fromkeys(layers))
        (table,) = build_tables(plain, [OuterSpace(space.pp, (length,), choices, cp)])
        plan = own.prices.plans[own.number : own.number + 1]
        row = replace(plan, choices=torch.tensor([[choices.index(layer) for layer in layers]]))
        passes = pass_seconds(table, row).blocking()
        return {"F": passes.forward[0].tolist(), "B": passes.backward[0].tolist()}

    def seconds(
        every: Sequence[int], cp: int, numbers: tuple[int, ...], kind: str, k: int
    ) -> float:
        own_lengths = [every[number] for number in numbers]
        tokens = sum(own_lengths)
        parts = [n / tokens * of_length(cp, tokens, n)[kind][k] for n in own_lengths]
        return sum(parts)

    return seconds


def large_job(folder: Path, seed: int, tp: int, pp: int) -> Problem:
    """A model of billions of parameters on 16 GPUs, or a toy on 8, with a random histogram."""
    shares = np.random.default_rng(seed).dirichlet([8, 4, 2, 1])
    if seed % 3 == 2:
        rows = dict(zip([32, 64, 192, 512], shares.tolist(), strict=True))
        return random_job(folder, seed, list(rows), f"space.tp={tp}", f"space.pp={pp}")
    rows = dict(zip([1024, 2048, 6144, 16384], shares.tolist(), strict=True))
    model = ["model=llama3_8b", "model=qwen3_30b_a3b"][seed % 2]
    sizes = ["model.max_seq_len=16384", "training.seq_len=16384", "training.global_batch_size=32"]
    pins = [f"space.tp={tp}", f"space.pp={pp}", "space.cp=null", "space.recompute=full"]
    pins += ["space.ep=null", f"search.seed={seed}", "cluster.nodes.0.count=2"]
    return job(folder, rows, model, "cluster=h100_8x8", "training=any", *sizes, *pins)


@pytest.mark.parametrize(
    ("seed", "tp", "pp", "any_size"),
    [
        (0, 1, 2, False),
        (1, 2, 2, False),
        (2, 2, 2, True),
        (3, 1, 4, False),
        (4, 4, 1, True),
        (5, 1, 4, False),
        (6, 2, 4, True),
        (7, 4, 2, False),
    ],
)
def test_seconds_are_those_of_an_event_simulation(
    tmp_path: Path, seed: int, tp: int, pp: int, any_size: bool
) -> None:
    # 16 batches for each seed: 12 draws under dynamic context parallelism, 4 under a fixed degree.
    # Shared: the draws, the groups, and the cost tables of a pass, which are made for its own
    # tokens and lengths. Not shared: interpolation, mixing of lengths, and the pipeline.
    problem = large_job(tmp_path, seed, tp, pp)
    search, plans = searched(problem)
    several = [one for one in plans if one.ranks > 1]
    own = several[seed * len(several) // 8]
    assert (own.layers[0].tp, len(own.prices.limit)) == (tp, pp)
    exact = exact_seconds(problem, own, pp)
    longest = search.draws.longest_length
    least = max(longest // own.ranks, longest // 2)
    for packing, draws in (
        (Packing("default_dynamic_cp", 1, budget=least, any_size=any_size), 12),
        (Packing("dp_balanced", 2, budget=5 * longest // 8), 4),
    ):
        waits = own.waits or packing.scheduler == "default_dynamic_cp"
        load = search.draws.load(packing.settings, own.ranks, draws)
        found = own.seconds(load, waits=waits) - own._once(load, own._by_group(load))
        for draw in range(draws):
            every = search.draws.lengths[search.draws.picks[draw]].tolist()
            waves = packing.function(own.ranks)(every)
            simulated = simulated_step(waves, pp, partial(exact, every), waits=waits)
            assert found[draw] == pytest.approx(simulated, rel=0.01)


def test_the_path_through_unequal_micro_batches_is_that_of_1f1b() -> None:
    rng = np.random.default_rng(0)
    for stages, count in ((1, 3), (2, 5), (4, 3), (3, 7)):
        passes = rng.random((count + 1, 2, 2, stages))
        waves = [[Group(1, (2 * w,)), Group(1, (2 * w + 1,))] for w in range(count)]

        def seconds(
            ranks: int, own: tuple[int, ...], kind: str, stage: int, passes: Any = passes
        ) -> float:
            return float(passes[own[0] // 2, own[0] % 2, "FB".index(kind), stage])

        counts = np.array([count, 1])
        found = path_seconds(passes, counts)
        assert (least_path(passes, counts) <= found * (1.0 + 1e-12)).all()
        if stages == 1:
            assert least_path(passes, counts) == pytest.approx(found)
        expected = simulated_step(waves, stages, seconds, waits=False)
        assert found == pytest.approx([expected, passes[-1].sum((1, 2)).max()])
        slowest = passes.max(1, keepdims=True)
        waiting = simulated_step(waves, stages, seconds, waits=True)
        assert path_seconds(slowest, np.array([count, 1]))[0] == pytest.approx(waiting)
        assert waiting >= expected


@pytest.mark.parametrize("seed", RANDOM)
@pytest.mark.usefixtures("no_main_search")
def test_no_packing_beats_the_bound_and_packed_memory_knows_no_lengths(
    tmp_path: Path, seed: int
) -> None:
    values = [32, 96, 256, 512] if seed % 2 else list(range(16, 513, 31))
    problem = random_job(tmp_path, seed, values)
    found = plan_lengths(problem)
    for own in found.plans:
        assert own.packing.min_cp == 1 or own.packing.scheduler == "default_dynamic_cp"
        if own.packing.scheduler != "padded":
            assert own.bound <= own.seconds[0]
    best = {
        name: [own for own in found.plans if own.packing.scheduler == name] for name in PACKINGS
    }
    assert min(own.seconds for own in best["dp_balanced"]) < min(
        own.seconds for own in best["padded"]
    )
    (tmp_path / "lengths.csv").write_text("length,count\n16,1\n")
    for own in found.plans:
        if own.packing.scheduler != "padded":
            assert lengths._chance(problem, own, 16) == own.chance


@pytest.mark.usefixtures("no_main_search")
def test_a_plan_that_the_main_search_meets_too_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_job(tmp_path, 0, [32, 512])
    found = plan_lengths(problem)
    main_plans(monkeypatch, [own.plan for own in found.plans if own.plan.pp == 1])
    again = plan_lengths(problem)
    met = [(own.plan, own.packing) for own in again.plans]
    assert len(met) == len(set(met))
    assert {(own.plan, own.packing) for own in found.plans} <= set(met)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_of_every_draw_holds_for_random_packings(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # with few, unequal sequences the longest one alone is the bound, with many their work is
    batch = f"training.global_batch_size={[8, 64][seed % 2]}"
    problem = random_job(tmp_path, seed, [16, 48, 512], batch)
    search, plans = searched(problem)
    longest = 0
    for _ in range(30):
        own = plans[rng.integers(len(plans))]
        sizes = [size for size in (1, 2, 4, 8) if size <= own.ranks]
        budget = int(rng.integers(512 // own.ranks, 1024))
        chosen = Packing("default_dynamic_cp", own.degrees[-1], 1, budget, int(rng.choice(sizes)))
        if rng.random() < 0.5:
            cp = int(rng.choice(own.degrees))
            chosen = Packing("dp_balanced", cp, budget=max(budget, 512 // cp))
        seconds = search._seconds(own, chosen, DRAWS)
        (bound,) = own.least_seconds(chosen.budget)
        assert (bound <= seconds * (1.0 + 1e-9)).all()
        alone = own.prices.longest_alone[own.number]
        once = own.prices.at(1)[own.number, :, -1].min()
        longest += int((bound == alone + once).any())
    assert longest > 0 or seed % 2


def test_seconds_are_nearly_linear_between_degrees(tmp_path: Path) -> None:
    # groups of any size are interpolated between divisors of the ranks, here 12
    pins = ["training.seq_len=512", "cluster.nodes.0.gpus=12", "cluster.nodes.0.count=1"]
    pins += ["training.global_batch_size=24", "space.pp=1", "space.tp=1"]
    _, plans = searched(job(tmp_path, {512: 1.0}, *pins))
    prices = plans[0].prices
    between = (2.0 * prices.at(3) + prices.at(6)) / 3.0
    assert between[:, :, :-1] == pytest.approx(prices.at(4)[:, :, :-1], rel=0.01)
    load = Load(np.array([5]), np.array([100.0]), np.array([[1.0]]), np.array([0]), np.array([1]))
    fours = load._replace(ranks=np.array([4]))
    sixes = load._replace(ranks=np.array([6]))
    mean = (plans[0]._by_group(fours) + plans[0]._by_group(sixes)) / 2.0
    assert plans[0]._by_group(load) == pytest.approx(mean)


@pytest.mark.usefixtures("no_main_search")
def test_groups_of_any_size_run_on_ranks_that_are_no_power_of_two(tmp_path: Path) -> None:
    pins = ["training.seq_len=512", "cluster.nodes.0.gpus=6", "cluster.nodes.0.count=1"]
    pins += ["training.global_batch_size=24", "space.pp=1", "space.tp=1"]
    pins.append("training.sequence_packing_scheduler=default_dynamic_cp")
    rows = {32: 9.0, 400: 1.0}
    with pytest.raises(InfeasibleError):
        plan_lengths(job(tmp_path, rows, *pins))
    pins.append("training.dynamic_context_parallel_sizes=any")
    problem = job(tmp_path, rows, *pins)
    best = plan_lengths(problem).plans[0]
    assert best.packing.any_size
    assert best.bound <= best.seconds[0]


@pytest.mark.usefixtures("no_main_search")
def test_pinned_settings_are_kept(tmp_path: Path) -> None:
    pins = [
        "training.sequence_packing_scheduler=default_dynamic_cp",
        "training.max_seqlen_per_dp_cp_rank=300",
        "training.min_dynamic_context_parallel_size=2",
        "training.global_batch_size=16",
    ]
    found = plan_lengths(job(tmp_path, {32: 9.0, 400: 1.0}, *pins, "training.seq_len=512"))
    assert found.plans
    for own in found.plans:
        assert own.packing.scheduler == "default_dynamic_cp"
        assert own.packing.budget == 300
        assert own.packing.min_cp >= 2
        assert own.plan.cp * 300 >= 512
    with pytest.raises(ConfigError, match="must be a power of two; try 1"):
        job(tmp_path, {32: 9.0}, "training.min_dynamic_context_parallel_size=3")


@pytest.mark.usefixtures("no_main_search")
def test_settings_are_near_the_best_of_a_grid_of_200(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(80), 0.8, 500).clip(16, 512).astype(int) // 16 * 16
    values, counts = np.unique(drawn, return_counts=True)
    rows = {int(value): float(count) for value, count in zip(values, counts, strict=True)}
    pins = ["training.global_batch_size=64", "training.seq_len=512", "space.pp=1", "space.tp=1"]
    problem = job(tmp_path, rows, *pins)
    search, plans = searched(problem)
    own = plans[0]
    tried = search._tried(own, search._first(own, "default_dynamic_cp"))
    assert tried is not None
    chosen = search._refined(tried).packing
    budgets = np.geomspace(64, 1024, 50).astype(int).tolist()
    grid = [chosen._replace(budget=b, min_cp=cp) for b in budgets for cp in (1, 2, 4, 8)]
    assert len(grid) == 200
    best = min(search._seconds(own, packing, DRAWS).mean() for packing in grid)
    assert search._seconds(own, chosen, DRAWS).mean() <= 1.02 * best


@pytest.mark.parametrize("seed", range(10))
def test_the_fastest_sets_of_plans_are_listed_in_whatever_order_they_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    seconds = np.random.default_rng(seed).uniform(1.0, 3.0, 8).tolist()
    sets = [SimpleNamespace(plans=(own,)) for own in seconds]

    def tried(_: Any, plans: Any, packings: Any, limit: float) -> SimpleNamespace | None:
        (own,) = plans.plans
        return SimpleNamespace(seconds=own) if own < limit else None

    monkeypatch.setattr(lengths, "_bounds", lambda plans, most: np.zeros(1))
    monkeypatch.setattr(lengths._PackingSearch, "_tried", tried)
    prices: Any = [SimpleNamespace(uniform=sets)]
    problem = job(tmp_path, {16: 1.0})
    search = lengths._PackingSearch(problem, Draws.of(problem), prices)
    monkeypatch.setattr(lengths._PackingSearch, "_first", lambda *_: ())
    listed = [own.seconds for own in search._best_uniform("padded")]
    assert listed == sorted(seconds)[: lengths.LISTED]


def test_the_best_settings_over_few_draws_are_compared_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "FEW", 1)
    pins = ["training.global_batch_size=64", "training.seq_len=512", "space.pp=1", "space.tp=1"]
    search, plans = searched(job(tmp_path, {16: 20.0, 96: 9.0, 512: 1.0}, *pins))
    own = plans[0]
    budgets = [packing.budget for packing in search._first(own, "default_dynamic_cp")]
    assert budgets[0] == 1024
    assert budgets == sorted(budgets, reverse=True)
    tried = search._tried(own, search._first(own, "default_dynamic_cp"))
    assert tried is not None
    smallest = tried._replace(packing=tried.packing._replace(min_cp=1))
    assert {near.min_cp for near in search._budgets_near(smallest, [0.5])} == {1}
    assert [near.min_cp for near in search._groups_near(smallest)] == [2, 4]
    compared = []
    real = lengths._PackingSearch._over_all

    def over_all(search: lengths._PackingSearch, tried: Any) -> Any:
        compared.append(real(search, tried))
        return compared[-1]

    monkeypatch.setattr(lengths._PackingSearch, "_over_all", over_all)
    refined = search._refined(tried)
    assert len({one.packing for one in compared}) == lengths.FINALISTS
    assert refined.seconds == min(one.seconds for one in compared)
    assert refined.seconds == search._seconds(refined.own, refined.packing, DRAWS).mean()


def test_the_chance_to_fit_is_that_of_the_fullest_micro_batch(tmp_path: Path) -> None:
    pins = ["training.global_batch_size=16", "training.seq_len=512", "space.cp=[1,2]"]
    for longest, cp, sequences in ((512, 1, 1), (512, 1, 2), (512, 2, 2), (256, 1, 2)):
        problem = job(tmp_path, {longest: 1.0}, *pins, "cluster.devices.toy.memory_GiB=0.2")
        plan = Plan(8 * cp // 4 // sequences, (0, 7), (LayerStrategy(1, 8 // cp, 1),) * 7, cp=cp)
        plain = problem.with_training(lengths=None, seq_len=longest)
        own = lengths.LengthPlan(
            plan, Packing("padded", cp, sequences), (1.0, 1.0), tokens_per_s=1.0, bound=1.0
        )
        chance = lengths._chance(problem, own, longest)
        assert chance == pytest.approx(out_of_memory(plan, plain))
        if longest == 512:
            packed = own._replace(packing=Packing("dp_balanced", cp, budget=512 * sequences // cp))
            assert lengths._chance(problem, packed, longest) == pytest.approx(chance)


def test_a_packing_fits_where_it_keeps_the_chance_of_running_out(tmp_path: Path) -> None:
    pins = ["training.global_batch_size=16", "training.seq_len=512", "space.cp=[1,2]"]
    plan = Plan(2, (0, 7), (LayerStrategy(1, 8, 1),) * 7)
    packings = [Packing("dp_balanced", 1, budget=budget) for budget in range(512, 8192, 256)]
    fitting = []
    for chance in (0.01, 0.5):
        memory = ["cluster.devices.toy.memory_GiB=0.15", f"space.out_of_memory={chance}"]
        problem = tightened(job(tmp_path, {64: 3.0, 512: 1.0}, *pins, *memory))
        every = lengths._prices(problem, Draws.of(problem), [plan])
        (own,) = [prices.given_plan(plan) for prices in every if plan in prices.given]
        fits = [own.fits(1, packing.tokens(512))[0] for packing in packings]
        fitting.append(sum(map(bool, fits)))
    assert fitting[0] < fitting[1] < len(packings)


def test_plans_of_the_main_search_are_priced_over_the_same_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = ["training.global_batch_size=16", "training.seq_len=512", "space.pp=[1,2]"]
    problem = job(tmp_path, {32: 9.0, 400: 1.0}, *pins)
    light, heavy = (LayerStrategy(1, 4, 1, kind) for kind in ("none", "full"))
    even = Plan(4, (0, 3, 7), (light,) * 7)
    uneven = Plan(4, (0, 2, 7), (light,) * 3 + (heavy,) * 4)
    chunks = Plan(4, (0, 2, 4, 5, 7), (light,) * 7, virtual_stages=2)
    result = SimpleNamespace(alternatives=[(1.0, chunks), (2.0, uneven)])
    planned = SimpleNamespace(plan=even, result=result)
    monkeypatch.setattr(lengths, "find_plan", lambda given: planned)
    found = plan_lengths(problem)
    assert found.refused == {"interleaved": 1}
    assert sum(own.plan.boundaries == uneven.boundaries for own in found.plans) == 1
    assert all(own.plan.virtual_stages == 1 for own in found.plans)
    assert any(own.plan.boundaries == even.boundaries for own in found.plans)

    def none(given: Problem) -> None:
        raise InfeasibleError("no plan.")

    monkeypatch.setattr(lengths, "find_plan", none)
    assert plan_lengths(problem).why == "no plan."


@pytest.mark.parametrize("cp", [1, 2])
def test_layers_on_different_ranks_are_priced_padded_over_the_same_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cp: int
) -> None:
    pins = ["training.global_batch_size=16", "training.seq_len=512", "space.pp=2", "space.cp=[1,2]"]
    problem = job(tmp_path, {64: 3.0, 512: 1.0}, *pins)
    four, two = LayerStrategy(1, 4 // cp, 1), LayerStrategy(2, 2 // cp, 1)
    mixed = Plan(4, (0, 3, 7), (four,) * 4 + (two,) * 3, cp=cp)
    even = Plan(4, (0, 3, 7), (four,) * 7, cp=cp)
    main_plans(monkeypatch, [mixed, even])
    found = plan_lengths(problem)
    (mine,) = (own for own in found.plans if len(set(own.plan.layers)) == 2)
    assert mine.packing == Packing("padded", cp, micro_batch_size=cp)
    passes = {}
    once = 0.0
    for length in (64, 512):
        plain = problem.with_training(lengths=None, seq_len=length)
        (table,) = build_tables(plain, [OuterSpace(2, (4,), (four, two), cp)])
        layers = torch.tensor([[0] * 4 + [1] * 3])
        plan = HardPlans(torch.zeros(1, dtype=torch.long), layers, torch.tensor([[0, 3]]))
        blocking = pass_seconds(table, plan).blocking()
        passes[length] = {"F": blocking.forward[0].tolist(), "B": blocking.backward[0].tolist()}
        cost = evaluate_batch(table, plan)
        once = float(cost.iteration_time[0] - cost.pipeline_end[0, 0])
        assert cost.iteration_time[0] == pytest.approx(evaluate(mixed, plain).iteration_time_s)
    draws = Draws.of(problem)
    simulated = []
    for picks in draws.picks:
        every = draws.lengths[picks].tolist()

        def seconds(
            ranks: int,
            own: tuple[int, ...],
            kind: str,
            stage: int,
            every: Sequence[int] = every,
        ) -> float:
            return float(passes[max(every[number] for number in own)][kind][stage])

        waves = mine.packing.function(4)(every)
        simulated.append(simulated_step(waves, 2, seconds, waits=True) + once)
    assert mine.seconds[0] == pytest.approx(np.mean(simulated), rel=1e-3)
    assert mine.seconds[1] == pytest.approx(np.quantile(simulated, 0.95), rel=1e-3)
    # the even plan is packed, since all its layers have equal ranks
    twins = [own for own in found.plans if own.plan.boundaries == even.boundaries and own != mine]
    assert any(own.packing.scheduler != "padded" for own in twins)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the column length is missing; try the columns length,count."),
        ("length,count\n", "it must hold at least one row; try the columns length,count."),
        ("len,count\n3,4\n", "the column length is missing; try the columns length,count."),
        ("length;count\n3;4\n", "commas must divide its columns, not semicolons; try the columns"),
        ("length,count\n8,1\n0,1\n", "line 3: length=0 must be a whole number of at least 1; try"),
        ("length,count\n-8,1\n", "line 2: length=-8 must be a whole number of at least 1; try 1."),
        ("length,count\n600,1\n", "line 2: length=600 must be at most training.seq_len=512; try"),
        (
            "length,count\n8,0\n",
            "line 2: count=0 must be a finite number of at least 1e-09; try 1e-09.",
        ),
        ("length,count\n8,2e15\n", "line 2: count=2e+15 must be at most 1e+15; try 1."),
        ("length,count\n8,-3\n", "line 2: count=-3 must be a finite number of at least 1e-09; try"),
        (
            "length,count\n8,nan\n",
            "line 2: count=nan must be a finite number of at least 1e-09; try",
        ),
        (
            "length,count\n8.5,1\n",
            "line 2: length=8.5 must be a whole number of at least 1; try 1.",
        ),
        ("length,count\n8\n", "line 2: the row must have 2 fields; try length,count."),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_lengths(str(path), 512)
    sentence = str(caught.value)
    assert sentence.startswith(f"training.lengths={path}")
    assert words in sentence


@pytest.mark.usefixtures("no_main_search")
def test_equal_lengths_count_together_and_no_memory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("length,count,more\n8,1,x\n4,2,y\n8,1,z\n")
    found, shares = read_lengths(str(tmp_path / "twice.csv"), 8)
    assert found.tolist() == [4, 8]
    assert shares.tolist() == [0.5, 0.5]
    small = job(
        tmp_path, {512: 1.0}, "training.seq_len=512", "cluster.devices.toy.memory_GiB=0.1001"
    )
    with pytest.raises(InfeasibleError, match="no even uniform plan holds its longest sequence"):
        plan_lengths(small)
    with pytest.raises(
        ConfigError, match=r"must go with plans of 1f1b .* not gpipe and tp-pp-dp; try"
    ):
        plan_lengths(job(tmp_path, {8: 1.0}, "space.schedules=[gpipe]"))


@pytest.mark.usefixtures("no_main_search")
def test_the_command_writes_the_best_plan_and_names_what_runs_it(command: Command) -> None:
    (command.folder / "lengths.csv").write_text("length,count\n16,5\n64,1\n")
    words = ["model=toy", "cluster=toy", "training=toy", "training.lengths=lengths.csv"]
    words += ["cluster.devices.toy.memory_GiB=8"]
    done = command(*words, *QUIET, "trainer=megatron", "hydra.run.dir=own")
    assert done.status == 0, done.err
    data = json.loads((command.folder / "own/plan.json").read_text())
    page = (command.folder / "own/report.html").read_text()
    assert "training.lengths=lengths.csv is not priced here" in page
    assert "<td>dp_balanced" in page
    plans = data["lengths"]["plans"]
    assert {entry["packing"]["scheduler"] for entry in plans} == set(PACKINGS)
    assert [entry["seconds"] for entry in plans] == sorted(entry["seconds"] for entry in plans)
    assert all(entry["chance"] <= 0.2 for entry in plans)
    assert "own/plan.json export=megatron" in done.out
    assert "dp_balanced: its first plan runs with megatron.\n" in done.out
    rows = [line for line in done.out.splitlines() if re.match(r"\d+\.\d+ m?s ", line)]
    assert len(rows) <= 3 * len(PACKINGS)
    assert rows[0].startswith(seconds(plans[0]["seconds"][0]))
    training = data["config"]["training"]
    for entry in plans:
        versions = {"padded": 0, "dp_balanced": 1}.get(entry["packing"]["scheduler"])
        assert len(entry["flags"]) == versions or (versions is None and entry["flags"])
        assert all(str(entry["packing"]["budget"]) in text for text in entry["flags"].values())
    assert training["sequence_packing_scheduler"] == plans[0]["packing"]["scheduler"]
    priced = command("own/plan.json", *QUIET, "hydra.run.dir=priced")
    assert "given plan, not searched" in priced.out, priced.err
    written = command("plan=own/plan.json", *QUIET, "export=megatron", "hydra.run.dir=written")
    assert written.status == 0, written.err
    script = (command.folder / "written/megatron.sh").read_text()
    budget = training["max_seqlen_per_dp_cp_rank"]
    if training["sequence_packing_scheduler"] != "padded":
        assert f"--max-seqlen-per-dp-cp-rank {budget}\n" in script
    refused = command(*words, "model=toy", "training.seq_len=32", *QUIET)
    assert refused.status == 2
    assert refused.err.count("\n") == 1


@pytest.mark.usefixtures("no_main_search")
def test_what_prices_full_sequences_says_so_or_refuses_them(command: Command) -> None:
    file = command.folder / "lengths.csv"
    file.write_text("length,count\n16,5\n64,1\n")
    words = ["model=toy", "cluster=toy", "training=toy", f"training.lengths={file}"]
    words += ["cluster.devices.toy.memory_GiB=0.11"]
    swept = "training.sequence_packing_scheduler=padded,dp_balanced"
    done = command("--multirun", *words, *QUIET, swept, "hydra.sweep.dir=swept")
    assert done.status == 0, done.err
    (table,) = command.folder.rglob("results.csv")
    with table.open() as results:
        rows = list(csv.DictReader(results))
    for row, plan_file in zip(rows, sorted(command.folder.rglob("plan.json")), strict=True):
        data = json.loads(plan_file.read_text())
        best = data["lengths"]["plans"][0]
        assert float(row["iteration_time_s"]) == best["seconds"][0]
        assert float(row["tokens_per_s"]) == best["tokens_per_s"]
        assert float(row["out_of_memory_probability"]) == best["chance"]
        assert data["predicted"]["iteration_time_s"] > best["seconds"][0]
    priced = command("explain", str(plan_file), *QUIET, "hydra.run.dir=priced")
    full = "is not priced here: all sequences have 64 tokens"
    assert full in " ".join(priced.out.split())
    tuned = command("tune", str(plan_file), *QUIET)
    assert tuned.err.endswith(
        "must not go with tune, whose steps are of full sequences; try null.\n"
    )
    with pytest.raises(UnsupportedError, match=r"by the command alone; try training\.lengths=null"):
        find_plan(load_problem(words))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cluster.mtbf_hours_per_gpu=100", "cluster.checkpoint_GBps=1"], "failures"),
        (["objective=cost"], "objective=cost"),
        (["cost=searcher"], "cost=searcher"),
    ],
)
def test_what_is_known_of_full_sequences_alone_is_refused(
    tmp_path: Path, words: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"lengths.csv must not go with {named}.*; try null"):
        job(tmp_path, {8: 1.0}, *words)


def test_a_packing_without_a_plan_names_the_trainer_and_one_that_was_not_asked_for_is_silent(
    command: Command,
) -> None:
    (command.folder / "lengths.csv").write_text("length,count\n16,5\n64,1\n")
    words = ["model=toy", "cluster=toy", "training=toy", "training.lengths=lengths.csv", *QUIET]
    words += ["cluster.devices.toy.memory_GiB=8", "space.pp=1"]
    every = command(*words, "trainer=deepspeed")
    assert "dp_balanced: no plan fits that trainer=deepspeed runs.\n" in every.out, every.err
    one = command(*words, "training.sequence_packing_scheduler=padded")
    assert "padded: " in one.out, one.err
    assert "no plan fits" not in one.out


@pytest.mark.usefixtures("no_main_search")
def test_many_lengths_cost_nearly_what_all_of_them_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {32 * n: 1.0 for n in range(1, 17)}
    pins = ["training.seq_len=512", "space.pp=1", "space.tp=1", "training.global_batch_size=16"]
    problem = job(tmp_path, rows, *pins)

    def seconds() -> dict[Any, float]:
        return {(own.plan, own.packing): own.seconds[0] for own in plan_lengths(problem).plans}

    few = seconds()
    monkeypatch.setattr(_length_draws, "LENGTHS", len(rows))
    every = seconds()
    assert few.keys() & every.keys()
    for key in few.keys() & every.keys():
        assert few[key] == pytest.approx(every[key], rel=0.01)


def test_stages_on_parts_of_every_node_are_left_out_and_refused_where_nothing_else_is(
    tmp_path: Path,
) -> None:
    nodes = ("cluster.nodes.0.count=2", "cluster.nodes.0.gpus=4", "space.pp=2")
    free = job(tmp_path, {64: 3.0, 512: 1.0}, *nodes)
    assert any(own.node_order for own in outer_spaces(free))
    assert all(own[0].node_order == () for own in lengths._usual_spaces(free))
    pinned = job(tmp_path, {64: 3.0, 512: 1.0}, *nodes, "space.axis_order=tp-pp-dp")
    with pytest.raises(ConfigError, match=r"not tp-pp-dp; try .* space.axis_order=null\.$"):
        lengths._usual_spaces(pinned)
