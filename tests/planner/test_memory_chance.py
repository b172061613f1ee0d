"""Memory as a chance constraint: what is promised holds for the plan, and what cannot be is said."""

from dataclasses import replace
from functools import partial
from itertools import count, pairwise, product
from math import exp
from random import Random
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.errors import InfeasibleError
from darts_parallel.exact import TableResult
from darts_parallel.gradient import SearchResult
from darts_parallel.planner import _exact_methods, memory_chance, planning
from darts_parallel.planner._session import Asked, Session
from darts_parallel.planner._simplest import TIE, effort
from darts_parallel.planner.figure_posterior import posterior
from darts_parallel.planner.memory_chance import (
    MOST_EXTRA,
    SAFER,
    SURE,
    always_fits,
    ladder,
    looser_levels,
    tightened,
)
from darts_parallel.planner.planning import plan, plan_at_limits
from darts_parallel.planner.prediction_intervals import any_above, free_share, out_of_memory
from darts_parallel.planner.result import Planned, Rung
from darts_parallel.planner.watcher import Watcher
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table

TOY = ["model=toy", "training=toy", "cluster=toy", "search=exact", "training.global_batch_size=16"]


def tight_toy(gib: float, *more: str) -> Problem:
    return load_problem([*TOY, f"cluster.devices.toy.memory_GiB={gib}", *more])


def test_more_memory_never_gives_a_slower_plan_where_no_plan_fits_at_the_usual_headroom() -> None:
    """The safest plan was kept although faster ones keep the chance: 12.3 ms at 0.135 GiB, 2.7 ms at 0.2."""
    job = [
        "model=toy",
        "training=toy",
        "cluster=toy",
        "search.num_steps=20",
        "search.num_restarts=4",
    ]
    seconds = []
    for gib in (0.115, 0.135, 0.2):
        found = plan(load_problem([*job, f"cluster.devices.toy.memory_GiB={gib}"]))
        assert found.warning is None or not found.warning
        seconds.append(found.result.iteration_time_s)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("checked", "limits"), [(False, (0.02, 0.4)), (True, (0.05, 0.2))])
def test_the_descent_is_not_slower_at_a_looser_limit_where_no_plan_fits_at_its_headroom(
    checked: bool, limits: tuple[float, float]
) -> None:
    """Unverified, 0.4 gave a plan of 12.3 ms and 0.02 one of 2.8 ms: each bisected from its own level.

    Verified, 0.2 gave 3.25 ms and 0.05 gave 2.67 ms: all plans fit in all memory, and not at the level of
    the limit.
    """
    job = ["model=toy", "training=toy", "cluster=toy", "cluster.devices.toy.memory_GiB=0.1176"]
    few = ["search.num_steps=20", "search.num_restarts=4", "search.tie=0"]
    problem = load_problem([*job, *few, f"verification.enabled={checked}"])
    best = float("inf")
    for found in plan_at_limits(problem, limits):
        assert found is not None
        assert found.result is not None
        assert not found.warning
        assert found.result.iteration_time_s <= best * 1.01
        best = min(best, found.result.iteration_time_s)


def test_a_search_starts_where_the_optimum_keeps_the_chance_and_is_not_proven_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default job left 15 % of the memory free, and was 2.2 % slower than a plan with 10 %."""
    few = ["search.num_steps=5", "search.num_restarts=2"]
    problem = load_problem(few)
    best = plan(load_problem([*few, "search=exact"]))
    solve = _exact_methods.find_layerwise_plan
    calls = []

    def counted(*asked: Any, **more: Any) -> TableResult:
        calls.append(solve(*asked, **more))
        return calls[-1]

    monkeypatch.setattr(_exact_methods, "find_layerwise_plan", counted)
    found = plan(problem)
    assert found.out_of_memory is not None
    assert found.out_of_memory <= 0.2
    assert found.problem.headroom == best.problem.headroom < tightened(problem).headroom
    proof = found.answers[-1]
    assert proof.proven
    assert proof.iteration_time_s == pytest.approx(best.result.iteration_time_s, rel=1e-12)
    # at the usual headroom, and at two looser ones; the search itself solves nothing again
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ([], 5.0),
        (["search.max_seconds=10"], 1.0),
        (["verification.max_seconds=2"], 2.0),
        (["verification.max_seconds=0"], 0.0),
    ],
)
def test_exact_methods_take_a_share_of_the_search_before_it(
    monkeypatch: pytest.MonkeyPatch, limits: list[str], most: float
) -> None:
    asked = Asked.of(load_problem(["model=toy", "training=toy", "cluster=toy", *limits]))
    given = []
    answered = memory_chance._answered

    def timed(question: Asked, known: SearchResult | None, seconds: float) -> Session:
        given.append(seconds)
        return answered(question, known, seconds)

    monkeypatch.setattr(memory_chance, "_answered", timed)
    level = memory_chance._ChanceSearch(plan, asked, (0.0, 0.1)).loosest(1)
    assert set(given) == {most}
    assert (level is None) == (most == 0.0)


def test_limits_that_no_headroom_keeps_meet_the_same_safest_plan() -> None:
    job = ["model=toy", "training=toy", "cluster=toy", "cluster.devices.toy.memory_GiB=0.1176"]
    few = ["search.num_steps=20", "search.num_restarts=4", "verification.enabled=false"]
    limits = (0.001, 0.003, 0.005)
    found = plan_at_limits(load_problem([*job, *few]), limits)
    assert len({own.plan for own in found if own is not None}) == 1


def with_capacity(found: Planned, share: float) -> Planned:
    """Return what was found, as if its tables had a share of the memory."""
    assert found.asked is not None
    tables = [replace(table, capacity=share * table.capacity) for table in found.asked.tables]
    return replace(found, asked=replace(found.asked, tables=tables))


def test_memory_that_no_plan_fills_is_solved_once() -> None:
    asked = Asked.of(load_problem(["model=toy", "training=toy", "cluster=toy"]))
    search = memory_chance._ChanceSearch(plan, asked, (0.0, 0.1))
    assert search.loosest(1) == 1
    assert list(asked.proofs) == [0.1]
    best = search._optimum(1, None)
    assert best is not None
    half = 0.5 * best.seconds
    assert search._optimum(0, SearchResult(best.plan, half, half)) is None


@pytest.mark.parametrize(("share", "searches"), [(1.0, 1), (0.001, 2)])
def test_memory_that_no_plan_fills_is_not_loosened(share: float, searches: int) -> None:
    job = ["model=toy", "training=toy", "cluster=toy", "search=gradient", "search.num_steps=2"]
    problem = load_problem([*job, "verification.enabled=false"])
    known = replace(with_capacity(plan(problem), share), out_of_memory=0.0)
    asked = []

    def find(headroom: float) -> Planned:
        asked.append(headroom)
        return replace(known, interrupted=len(asked) > 1)

    memory_chance.within_chance(Asked.of(problem, ()), find)
    assert len(asked) == searches


def test_memory_in_which_no_plan_fits_is_searched_once() -> None:
    """It was searched again for the sentence that names what a plan takes."""
    job = ["model=toy", "training=toy", "cluster=toy", "search=gradient", "search.num_steps=2"]
    problem = load_problem([*job, "verification.enabled=false"])
    known = replace(plan(problem), out_of_memory=0.9)
    asked = []

    def find(headroom: float) -> Planned:
        asked.append(headroom)
        if headroom > 0.05:
            raise InfeasibleError("smallest changes that help: more memory.")
        return known

    found = memory_chance.within_chance(Asked.of(problem), find)
    assert len(set(asked)) == len(asked) > 1
    assert found.warning == "no plan keeps space.out_of_memory=0.2; it takes more memory"


@pytest.mark.parametrize(
    ("chances", "level"),
    [
        ({}, 5),
        ({0: 0.1, 2: 0.1}, 0),
        ({0: 0.3, 1: 0.1, 2: 0.1}, 1),
        ({2: 0.3, 3: 0.1, 4: 0.1}, 3),
        ({2: 0.3, 3: 0.3, 4: 0.1}, 4),
        ({2: 0.3, 3: 0.3, 4: 0.3}, 5),
    ],
)
def test_the_loosest_level_keeps_the_chance_and_gains_more_than_the_ties_of_two_plans(
    monkeypatch: pytest.MonkeyPatch, chances: dict[int, float], level: int
) -> None:
    job = ["model=toy", "training=toy", "cluster=toy", "cluster.devices.toy.memory_GiB=0.05"]
    asked = Asked.of(load_problem(job))
    assert asked.settings.tie + memory_chance.GAIN == pytest.approx(0.012)
    own = Plan(16, (0, 7), (LayerStrategy(1, 1),) * 7)

    def optimum(search: object, at: int, known: SearchResult | None) -> Rung | None:
        if known is None:
            return Rung("", own, 2.0, 0.0)  # plans next to the limit may be faster
        assert known.iteration_time_s == pytest.approx(2.0 * (1.0 - 0.012))
        return Rung("", own, 1.9, chances[at]) if at in chances else None

    monkeypatch.setattr(memory_chance._ChanceSearch, "_optimum", optimum)
    assert memory_chance._ChanceSearch(plan, asked, [0.0] * 6).loosest(5) == level


@pytest.mark.parametrize(
    "overrides",
    [
        ["verification.enabled=false"],
        ["cost.pipeline=simulated", "cluster.devices.toy.memory_GiB=0.1176"],
    ],
)
def test_a_sure_plan_is_loosened_where_no_exact_method_says_that_nothing_is_gained(
    overrides: list[str],
) -> None:
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", *overrides])
    some = with_capacity(plan(tight_toy(1.0)), 0.001)
    assert some.result is not None
    fast = replace(some, out_of_memory=0.05)
    slow = replace(fast, result=replace(some.result, iteration_time_s=1.0), out_of_memory=0.0)

    most = 1.0 if "verification.enabled=false" in overrides else tightened(problem).headroom * 0.99

    def find(headroom: float) -> Planned:
        if headroom >= most:
            raise InfeasibleError("no plan fits")
        return slow if headroom else fast

    assert memory_chance.within_chance(Asked.of(problem), find) is fast


@pytest.mark.parametrize(
    ("stopped", "kept"),
    [
        ({0.0: "time_limit"}, True),
        ({0.0: "user"}, True),
        ({"limit": "time_limit"}, True),
        ({"limit": "user"}, True),
        ({0.0: "time_limit"}, False),
        ({}, True),
    ],
)
def test_exact_search_asks_for_the_level_of_the_limit_first(
    monkeypatch: pytest.MonkeyPatch, stopped: dict[float | str, str], kept: bool
) -> None:
    """512 layers had no plan of the limit's level: all memory alone took the 120 s."""
    problem = tight_toy(0.14)
    known = plan(tight_toy(0.14, "space.out_of_memory=0.5"))
    limit = tightened(problem).headroom
    asked = []

    def find(headroom: float) -> Planned:
        asked.append(headroom)
        by = stopped.get("limit" if headroom == limit else headroom)
        seconds = 2.0 if headroom == limit else 2.1
        result = replace(known.result, stopped_by=by, iteration_time_s=seconds, why="asked")
        chance = 0.0 if kept or headroom >= limit else 0.9
        return replace(known, result=result, out_of_memory=chance, interrupted=by == "user")

    monkeypatch.setattr(memory_chance, "evaluate", lambda *_: SimpleNamespace(feasible=False))
    found = memory_chance.within_chance(Asked.of(problem, ()), find)
    assert found.result is not None
    assert found.result.iteration_time_s == 2.0
    assert found.interrupted == ("user" in stopped.values())
    assert asked == ([limit] if "limit" in stopped else [limit, 0.0])
    late = stopped.get(0.0) == "time_limit"
    assert found.result.why.startswith("time ended" if late else "asked")


@pytest.fixture(scope="module")
def unsure() -> Planned:
    """Return a plan whose tables have too little memory for all plans to fit."""
    return with_capacity(plan(tight_toy(1.0)), 0.001)


@pytest.mark.parametrize("method", ["gradient", "exact"])
@pytest.mark.parametrize("seed", range(10))
def test_of_the_plans_met_the_fastest_that_keeps_the_chance_is_given(
    monkeypatch: pytest.MonkeyPatch, unsure: Planned, method: str, seed: int
) -> None:
    """Random seconds that rise with the headroom, and chances that fall; Ctrl-C ends all searches."""
    rng = Random(seed)
    allowed = rng.choice((0.4, 0.2, 0.1, 0.01))
    problem = tight_toy(
        1.0,
        f"search={method}",
        "verification.enabled=false",
        f"space.out_of_memory={allowed}",
    )
    known = unsure
    assert known.result is not None
    tight = tightened(problem).headroom
    most = rng.choice((1.0, tight * rng.uniform(0.5, 1.5)))
    slope, safer, risk = rng.uniform(0.01, 3.0), rng.uniform(0.0, 40.0), rng.uniform(0.0, 0.5)
    last = rng.choice((99, 99, rng.randint(0, 3)))
    met: list[Planned] = []
    asked = []

    def find(headroom: float) -> Planned:
        asked.append(headroom)
        if headroom > most:
            raise InfeasibleError("memory: fits in no plan; smallest changes that help: more.")
        result = replace(known.result, iteration_time_s=1.0 + slope * headroom)
        chance = risk * exp(-safer * headroom)
        met.append(
            replace(known, result=result, out_of_memory=chance, interrupted=len(met) >= last)
        )
        return met[-1]

    monkeypatch.setattr(memory_chance, "evaluate", lambda *_: SimpleNamespace(feasible=False))
    found = memory_chance.within_chance(Asked.of(problem), find)
    chances = [own.out_of_memory or 0.0 for own in met]
    assert not any(own.interrupted for own in met[:-1])
    keeping = [own for own in met if (own.out_of_memory or 0.0) <= allowed]
    if keeping:
        assert found.out_of_memory <= allowed
        assert not found.warning
        fastest = min(own.result.iteration_time_s for own in keeping)
        assert found.result.iteration_time_s <= fastest / (1.0 - TIE)
    elif met[-1].interrupted and len(met) == len(asked):
        assert not found.warning  # whose advice would be searched
    elif not found.interrupted:
        assert found.out_of_memory == min(chances)
        assert "keeps space.out_of_memory" in found.warning
    if method == "gradient":  # the levels of exact methods
        levels = [tightened(problem, chance).headroom for chance in memory_chance.EXACT_LEVELS]
        assert not set(levels) & set(asked)


@pytest.mark.parametrize(("later", "best"), [(1.2, 1.1), (1.1005, 1.1005), (1.05, 1.05)])
def test_a_plan_next_to_the_best_of_an_earlier_search_may_keep_the_chance(
    monkeypatch: pytest.MonkeyPatch, later: float, best: float
) -> None:
    job = ["model=toy", "training=toy", "cluster=toy", "verification.enabled=false"]
    problem = load_problem(job)
    known = with_capacity(plan(problem), 1.0)
    assert known.result is not None
    first, risky, safe, last = (
        Plan(micro_batches, (0, 7), (LayerStrategy(1, 1),) * 7) for micro_batches in (1, 2, 4, 8)
    )
    chances = {first: 0.9, risky: 0.4, safe: 0.1, last: 0.1}
    monkeypatch.setattr(memory_chance, "out_of_memory", lambda own, problem: chances[own])
    monkeypatch.setattr(memory_chance, "evaluate", lambda *_: SimpleNamespace(feasible=False))
    alternatives = ((1.01, risky), (1.1, safe), (1.15, safe))
    seconds = {first: 1.0, last: later}
    left = iter((first, last))

    def find(headroom: float) -> Planned:
        own = next(left)
        result = replace(known.result, iteration_time_s=seconds[own], alternatives=alternatives)
        return replace(known, plan=own, result=result, out_of_memory=chances[own])

    found = memory_chance.within_chance(Asked.of(problem), find)
    assert found.result is not None
    assert found.result.iteration_time_s == best
    assert found.plan == (safe if best == 1.1 else last)
    assert found.out_of_memory == 0.1


def test_the_optimal_uniform_plan_may_keep_the_chance_where_the_evened_one_does_not() -> None:
    """Evening the stages raised the chance above the limit, and the plan given was 1.2 % slower."""
    few = ["search.num_steps=5", "search.num_restarts=2"]
    job = ["model=llama3_8b", "cluster=a10_8x4", "trainer=megatron", "space.pp=4", "space.tp=1"]
    found = plan(load_problem([*job, *few]))
    assert found.result is not None
    assert found.out_of_memory <= 0.2
    (exhaustive,) = found.answers
    assert found.result.iteration_time_s == pytest.approx(exhaustive.iteration_time_s, rel=1e-12)


def test_where_no_plan_fits_in_all_memory_no_other_level_is_searched() -> None:
    asked = []

    def find(headroom: float) -> Planned:
        asked.append(headroom)
        raise InfeasibleError("no plan fits")

    problem = tight_toy(0.104)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        memory_chance.within_chance(Asked.of(problem, ()), find)
    assert asked == [tightened(problem).headroom, 0.0]


def test_looser_levels_leave_free_what_the_residual_error_asks_for() -> None:
    problem = tight_toy(0.2, "space.out_of_memory=0.1")
    free = [own.problem.headroom for own in looser_levels(Asked.of(problem, ()))]
    assert free == sorted(set(free))
    assert len(free) > 1
    distance = -NormalDist().inv_cdf(0.1) * posterior(problem).residuals.memory
    assert free[0] / (1.0 - free[0]) == pytest.approx(distance)
    assert free[-1] < tightened(problem).headroom


def test_all_headrooms_share_the_seconds_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tight_toy(0.2, "search.max_seconds=50")
    known = plan(problem)
    clock = count(step=30)
    monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    given = []

    def searched(*asked: object, seconds: float) -> Planned:
        given.append(seconds)
        return replace(known, out_of_memory=0.9)

    monkeypatch.setattr(planning, "_searched", searched)
    planning.plan(problem)
    # the offers of less memory have seconds of their own
    assert given[:2] == [20.0, 5.0]


def test_a_search_stops_after_the_seconds_that_are_left() -> None:
    problem = tight_toy(0.2)
    asked = Asked.of(problem)
    for seconds, stopped in ((1e-9, "time_limit"), (60.0, None)):
        found = planning._searched(asked, None, Watcher(), 0.0, seconds=seconds)
        assert found.result is not None
        assert found.result.stopped_by == stopped
        assert found.problem is not None
        assert found.problem.config.search.max_seconds == 120.0


@pytest.mark.parametrize("gib", [0.16, 0.2, 0.3])
def test_a_plan_keeps_the_chance_and_a_smaller_one_is_never_faster(gib: float) -> None:
    before = 0.0
    for allowed in (0.5, 0.3, 0.1):
        problem = tight_toy(gib, f"space.out_of_memory={allowed}")
        found = plan(problem)
        chance = out_of_memory(found.plan, problem)
        assert chance is not None
        assert chance == pytest.approx(found.out_of_memory)
        assert found.warning or chance <= allowed or allowed == 0.5
        assert evaluate(found.plan, problem).feasible
        if found.warning:
            break
        assert found.result.iteration_time_s >= before * (1.0 - 1e-12)
        before = found.result.iteration_time_s
        rungs = ladder(found)
        assert [rung.seconds for rung in rungs] == sorted(rung.seconds for rung in rungs)
        assert sum(rung.plan == found.plan for rung in rungs) == 1
        chosen = found.result.iteration_time_s
        for rung in rungs:
            assert rung.chance == pytest.approx(out_of_memory(rung.plan, problem))
            assert rung.seconds == pytest.approx(evaluate(rung.plan, problem).iteration_time_s)
            if rung.name == "safe":
                assert chance > SURE
                assert rung.chance <= SAFER * chance
                assert chosen * (1.0 - 1e-9) <= rung.seconds <= chosen * (1.0 + MOST_EXTRA)
            if rung.name == "simplest":
                resolution = exp(posterior(problem).difference)
                assert rung.seconds <= chosen * resolution * (1.0 + 1e-9)
                assert rung.chance <= (allowed if allowed < 0.5 else chance)
                assert effort(rung.plan, found.asked) < effort(found.plan, found.asked)
            if rung.name == "fastest":
                assert rung.seconds < chosen * (1.0 - 2.0 * TIE)


def test_a_plan_no_easier_than_the_chosen_one_is_not_offered_as_simplest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Balancing costs the chosen plan a little, so that an equally easy one may be faster."""
    problem = tight_toy(0.3, "space.pp=2", "space=uniform")
    found = plan(problem)
    middle = found.plan.boundaries[1]
    other = replace(
        found.plan, boundaries=(0, len(found.plan.layers) - middle, len(found.plan.layers))
    )
    assert other != found.plan
    monkeypatch.setattr(memory_chance, "simplest_within", lambda *_: other)
    assert "simplest" not in {rung.name for rung in ladder(found)}


def test_the_simplest_plan_keeps_the_limit_and_is_no_riskier_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`price tp=2` offered a plan with a chance of 62 % as the simplest one."""
    for allowed, most in ((0.3, 0.3), (0.5, None)):
        problem = tight_toy(0.3, "space.pp=2", "space=uniform", f"space.out_of_memory={allowed}")
        found = plan(problem)
        assert found.asked is not None
        assert found.out_of_memory is not None
        limit = found.out_of_memory if most is None else most
        other = replace(found.plan, boundaries=(0, 2, len(found.plan.layers)))
        assert other != found.plan
        monkeypatch.setattr(memory_chance, "effort", lambda own, _, first=other: own != first)
        monkeypatch.setattr(memory_chance, "simplest_within", lambda *_, first=other: first)
        for chance, shown in ((limit - 0.001, True), (limit + 0.001, False)):
            monkeypatch.setattr(memory_chance, "out_of_memory", lambda *_, own=chance: own)
            names = {rung.name for rung in ladder(found)}
            assert ("simplest" in names) == shown


MONOTONE = [
    ["cluster.devices.toy.memory_GiB=0.13"],
    ["cluster.devices.toy.memory_GiB=0.16", "space=uniform"],
    ["cluster.devices.toy.memory_GiB=0.2", "space=uniform"],
    ["cluster.devices.toy.memory_GiB=0.2", "space.pp=2"],
    ["cluster.devices.toy.memory_GiB=0.25", "space=uniform", "training.seq_len=32"],
    ["cluster=toy_mixed", "cluster.devices.toy.memory_GiB=0.2", "space=uniform"],
]


@pytest.mark.parametrize("job", MONOTONE)
def test_with_a_looser_limit_seconds_never_rise_and_chances_never_fall(job: list[str]) -> None:
    few = ["space.zero_stage=[0,1]", "space.num_micro_batches=4", "space.sequence_parallel=false"]
    few += ["space.recompute=[none,full]", "verification.enabled=false"]
    problem = load_problem([*TOY, *few, *job])
    limits = (1e-3, 0.01, 0.05, 0.12, 0.2, 0.35, 0.5)
    seconds, chance = float("inf"), 0.0
    for allowed, found in zip(limits, plan_at_limits(problem, limits), strict=True):
        assert found is not None
        assert found.result is not None
        assert found.out_of_memory is not None
        assert found.result.iteration_time_s <= seconds * (1.0 + 1e-12)
        assert found.out_of_memory >= chance - 1e-12
        assert bool(found.warning) == (found.out_of_memory > allowed and allowed < 0.5)
        seconds, chance = found.result.iteration_time_s, found.out_of_memory


def test_a_stricter_limit_gives_no_plan_that_is_slower_and_riskier() -> None:
    """At 0.003 this job had a plan 7 times slower, and riskier, than at 0.01."""
    job = ["model=bert_345m", "training=bert_345m", "cluster=a10_4x4", "model.num_layers=8"]
    memory = "cluster.devices.a10.memory_GiB=6.058"
    problem = load_problem([*job, memory, "space=layerwise", "search=exact"])
    strict, loose = plan_at_limits(problem, (0.003, 0.01))
    assert strict is not None
    assert loose is not None
    assert strict.out_of_memory is not None
    assert loose.out_of_memory is not None
    assert strict.out_of_memory <= loose.out_of_memory + 1e-12
    assert strict.warning or strict.out_of_memory <= 0.003
    assert strict.result is not None
    assert loose.result is not None
    assert loose.result.iteration_time_s <= strict.result.iteration_time_s * (1.0 + 1e-12)


def test_a_safe_plan_halves_the_chance_and_sure_ones_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = tight_toy(1.0)
    names = [rung.name for rung in ladder(plan(problem))]
    assert [name for name in names if name != "simplest"] == ["chosen"]
    monkeypatch.setattr("darts_parallel.planner.memory_chance.RUNG_SECONDS", 60.0)
    problem = load_problem(["model=llama2_7b", "cluster=a100_40_8x8", "search=exact"])
    rungs = {rung.name: rung for rung in ladder(plan(problem))}
    chosen, safe = rungs["chosen"], rungs["safe"]
    assert safe.chance <= 0.5 * chosen.chance
    problem = load_problem(["model=gpt2_xl", "cluster=a100_80_8x8", "search=exact"])
    names = [rung.name for rung in ladder(plan(problem))]
    assert [name for name in names if name != "simplest"] == ["chosen"]


@pytest.mark.parametrize(("gib", "own_error_is_wider"), [(0.107, False), (0.5, True)])
def test_a_safe_plan_is_first_looked_for_where_the_wider_error_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, gib: float, own_error_is_wider: bool
) -> None:
    problem = tight_toy(gib)
    strategy = LayerStrategy(1, 8)
    own = Plan(1, (0, problem.num_layers), (strategy,) * problem.num_layers)
    free = float(free_share(evaluate(own, problem), problem.usable).min())
    headrooms = []

    def answered(question: Asked, *more: object) -> None:
        headrooms.append(question.problem.headroom)

    monkeypatch.setattr(memory_chance, "_answered", answered)
    monkeypatch.setattr(memory_chance, "_rung", lambda *given: None)
    chosen = Rung("chosen", own, 1.0, 0.1)
    assert memory_chance._safe(Asked.of(problem, ()), chosen, "uniform") is None
    before, after = (-NormalDist().inv_cdf(chance) for chance in (0.1, 0.1 * SAFER))
    residual = posterior(problem).residuals.memory
    assert (free / before > residual) == own_error_is_wider
    distance = free + (after - before) * max(residual, free / before)
    assert headrooms == [pytest.approx(distance / (1.0 + distance))]


@pytest.mark.slow
def test_no_risk_level_breaks_the_deadline() -> None:
    """The safe plan was written whatever it took."""
    job = ["model=llama2_7b", "cluster=a100_40_8x8", "search=exact"]
    found = plan(load_problem(job))
    (safe,) = (rung for rung in ladder(found) if rung.name == "safe")
    assert found.result is not None
    hours = (safe.seconds + found.result.iteration_time_s) / 2
    job += ["objective=cost_under_deadline", "objective.num_iterations=3600"]
    job += ["cluster.nodes.0.price_per_hour_usd=1", f"objective.deadline_hours={hours}"]
    limited = ladder(plan(load_problem(job)))
    assert "chosen" in [rung.name for rung in limited]
    assert all(rung.seconds <= hours for rung in limited)


def test_the_safe_plan_may_be_a_split_of_equal_seconds() -> None:
    job = ["model=llama3_70b", "cluster=h100_8x8", "trainer=megatron", "search=exact"]
    problem = load_problem([*job, "space.pp=8", "space.tp=4", "space.recompute=none"])
    rungs = {rung.name: rung for rung in ladder(plan(problem))}
    chosen, safe = rungs["chosen"], rungs["safe"]
    assert safe.seconds == pytest.approx(chosen.seconds, rel=1e-9)
    assert safe.chance <= SAFER * chosen.chance
    assert safe.plan.boundaries != chosen.plan.boundaries


def test_where_no_plan_keeps_the_chance_the_safest_is_given_with_what_would_help() -> None:
    found = plan(tight_toy(0.104))
    assert found.out_of_memory is not None
    assert 0.2 < found.out_of_memory <= 0.5
    assert found.warning.startswith(
        "no plan keeps space.out_of_memory=0.2; it takes cluster.devices.toy.mem"
    )
    assert 0.0 <= found.problem.headroom < tightened(tight_toy(0.104)).headroom
    with pytest.raises(InfeasibleError, match="fits in no"):
        plan(tight_toy(0.05))


def test_the_chance_of_a_job_is_between_that_of_its_worst_device_and_the_sum_of_all() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        root = 0.2 * torch.randn(4, 2, generator=rng, dtype=torch.float64)
        room, spread = 0.3 * torch.rand(4, generator=rng, dtype=torch.float64), 0.1
        covariance = root @ root.T
        alone = torch.special.ndtr(-room / (covariance.diagonal() + spread**2).sqrt())
        draws = torch.randn(200_000, 3, generator=rng, dtype=torch.float64)
        errors = draws[:, :2] @ root.T + spread * draws[:, 2:]
        expected = float((errors > room).any(1).double().mean())
        found = any_above(room, covariance, spread)
        assert float(alone.max()) - 2e-3 <= found <= float(alone.sum()) + 2e-3
        assert found == pytest.approx(expected, abs=6e-3)


def test_the_tightened_memory_holds_for_any_composition_of_a_device() -> None:
    problem = load_problem(["model=llama3_8b", "training=llama3_8b", "cluster=h100_8x8"])
    assert tightened(replace(problem, headroom=0.1), 0.5).headroom == 0.0
    assert tightened(problem, SURE).headroom > tightened(problem).headroom > 0.0


@pytest.mark.parametrize("framework", ["null", "megatron_core", "deepspeed_hf", "bigscience"])
def test_longer_sequences_never_lower_the_chance(framework: str) -> None:
    """The share of the reserve, whose error is wide, falls while activations grow."""
    jobs = []
    for length in (16, 256, 4096):
        sizes = [f"training.seq_len={length}", f"model.max_seq_len={length}"]
        jobs.append(tight_toy(64.0, f"training.software={framework}", *sizes))
    for zero, again in product((0, 1, 3), ("none", "full")):
        whole = Plan(1, (0, 7), (LayerStrategy(2, 4, zero, again),) * 7)
        enough = 1.2 * max(evaluate(whole, jobs[0]).memory_bytes)
        tight = [job.with_devices(partial(replace, memory=enough)) for job in jobs]
        chances = [out_of_memory(whole, job) or 0.0 for job in tight]
        assert chances[0] < chances[-1]
        assert all(a <= b + 1e-3 for a, b in pairwise(chances)), (zero, again, chances)


def test_a_table_of_which_all_plans_fit_has_no_plan_above_its_capacity() -> None:
    rng = torch.Generator().manual_seed(0)
    known = []
    for seed in range(40):
        table = random_table(seed, tightness=3.0 * (seed % 8))
        cost = evaluate_batch(table, random_plans(table, 200, rng))
        used = bool((cost.memory <= table.capacity).all())
        assert used or not always_fits(table)
        known.append(always_fits(table))
    assert set(known) == {True, False}


def test_one_stage_that_holds_all_layers_under_their_heaviest_strategies_is_what_is_asked() -> None:
    table = random_table(1, pp=2, num_outer=1)
    first, last = table.in_flight[0].tolist()
    assert first > last
    layers = table.static + first * table.activation + table.working
    heaviest = float(layers.amax(-1).sum())
    for share, fits in ((1.001, True), (0.999, False)):
        enough = torch.full_like(table.capacity, share * heaviest)
        assert always_fits(replace(table, capacity=enough)) is fits
    # an order of passes may hold more than a stage's usual micro-batches
    assert not always_fits(replace(table, capacity=2.0 * enough, moments=torch.zeros(1)))
