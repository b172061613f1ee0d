"""Cost terms of the user's own: priced alike everywhere, checked, bounded without them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from darts_parallel import ConfigError, LayerStrategy, Plan, evaluate, load_problem, plan
from darts_parallel.cost import (
    CostTable,
    OwnTerms,
    canonical,
    evaluate_batch,
    pass_seconds,
    table_reading,
    without_dominated,
)
from darts_parallel.cost.own_terms import load_terms
from darts_parallel.cost.table import build_tables
from darts_parallel.exact import outer_lower_bounds
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.gradient import search_tables
from darts_parallel.report.explanation import explain
from tests.support.random_plans import assert_surrogate_is_exact, random_plans
from tests.support.random_tables import random_table

HERE = "tests.support.own_terms"
TOY = ["model=toy", "cluster=toy", "training=toy"]
QUICK = ["search.num_steps=40", "search.num_restarts=4", "output.tensorboard=false"]


def with_terms(table: CostTable, *names: str) -> CostTable:
    """A random table with terms of the user's, and its seconds split into compute and the rest."""
    terms = load_terms(tuple(f"{HERE}:{name}" for name in names))
    nodes = torch.arange(table.num_stages) // 2
    parts = {"compute": 0.5 * table.time, "recompute": 0.2 * table.time}
    return replace(table, causes=parts, own=OwnTerms(terms, nodes))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("simulated", [False, True])
def test_one_hot_surrogate_equals_the_price_of_the_plan(seed: int, simulated: bool) -> None:
    table = with_terms(random_table(seed, pp=3, num_layers=6), "links", "heat", "discount")
    pipeline = replace(table.pipeline, simulated=simulated)
    table = replace(table, pipeline=pipeline)
    table = table.select(list(range(table.num_outer)) * 4)
    plans = random_plans(table, table.num_outer, torch.Generator().manual_seed(seed))
    priced = assert_surrogate_is_exact(table, plans)
    without = evaluate_batch(replace(table, own=None), plans)
    assert (priced.iteration_time - without.iteration_time).abs().min() > 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_passes_grow_by_what_the_term_adds_to_their_stage_in_proportion(seed: int) -> None:
    table = with_terms(random_table(seed, pp=3, num_layers=6), "links")
    plans = random_plans(table, table.num_outer, torch.Generator().manual_seed(seed))
    # without messages and resharding, which stand apart from the passes
    still = replace(table, reshard=0 * table.reshard, p2p=0 * table.p2p)
    long = pass_seconds(still, plans)
    short = pass_seconds(replace(still, own=None), plans)
    added = table_reading(still, plans).own[f"{HERE}:links"]
    grown = long.forward + long.backward - short.forward - short.backward
    assert added.min() > 0
    assert torch.allclose(grown, added, rtol=1e-12)
    assert torch.allclose(long.forward * short.backward, long.backward * short.forward, rtol=1e-12)


def test_many_plans_are_priced_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    table = with_terms(random_table(0), "links", "heat")
    plans = random_plans(table.select([0] * 30), 30, torch.Generator().manual_seed(0))
    plans = replace(plans, outer=torch.zeros(30, dtype=torch.long))
    whole = evaluate_batch(table, plans).iteration_time
    monkeypatch.setattr("darts_parallel.cost.own_terms.MOST_WEIGHTS", 100)
    assert torch.allclose(evaluate_batch(table, plans).iteration_time, whole, rtol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_and_the_search_is_near_the_best_of_all_plans(seed: int) -> None:
    table = with_terms(random_table(seed, num_layers=4), "links", "heat")
    best = brute_force([table], "layerwise").best
    assert best is not None
    assert float(outer_lower_bounds(table).min()) <= best.time * (1 + 1e-9)
    answer = find_layerwise_plan([table], "layerwise")
    assert answer.best is None
    assert not answer.proven
    assert "cost.term" in answer.note
    assert answer.lower_bound <= best.time * (1 + 1e-9)
    config = load_problem([*TOY, *QUICK]).config.search
    result = search_tables([table], "layerwise", config, 0)
    assert best.time * (1 - 1e-9) <= result.iteration_time_s <= best.time * 1.05


def test_strategies_that_cost_the_same_without_the_term_stay_as_they_are() -> None:
    table = random_table(1, num_choices=1, num_layouts=1).keep_choices([0, 0])
    plans = random_plans(table.select([0]), 1, torch.Generator().manual_seed(0))
    mixed = replace(plans, choices=torch.tensor([[0, 0, 0, 1, 1]]))
    assert canonical(table, mixed).choices.tolist() == [[0] * 5]
    assert canonical(with_terms(table, "discount"), mixed).choices.tolist() == [[0, 0, 0, 1, 1]]
    assert len(without_dominated(table).choices) == 1
    assert len(without_dominated(with_terms(table, "discount")).choices) == 2


def test_a_stage_lies_on_the_node_of_its_first_rank() -> None:
    words = ["model=llama2_7b", "cluster=a10_8x4", "space.pp=16", f"cost.term={HERE}:links"]
    for table in build_tables(load_problem(words)):
        assert table.own is not None
        assert table.own.stage_node.tolist() == [stage // 2 for stage in range(16)]


def test_a_term_below_zero_leaves_no_bound() -> None:
    table = with_terms(random_table(1), "discount")
    assert outer_lower_bounds(table).tolist() == [0.0] * table.num_outer


REFUSED = {
    "flat": "without a gradient",
    "list_of_seconds": "returns a list",
    "by_device": "returns the shape",
    "single": "returns a torch.float32",
    "endless": "not finite",
    "below_zero": "below 0",
    "counting": "on a second call",
    "of_all": "other plans stand next to it",
    "wrong_slope": "has other slopes",
    "failing": "no such sensor",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_term_that_breaks_its_contract_is_refused(name: str) -> None:
    table = with_terms(random_table(0), name)
    plans = random_plans(table, table.num_outer, torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=REFUSED[name]) as raised:
        evaluate_batch(table, plans)
    assert f"cost.term={HERE}:{name}" in str(raised.value)


@pytest.mark.parametrize(
    ("term", "more", "words"),
    [
        ("nowhere:term", [], "cannot be imported"),
        (f"{HERE}:no_such", [], "has no function no_such"),
        (f"{HERE}", [], "name a file and a function"),
        (f"{HERE}:links", ["space.schedules=[searched]"], "searched order"),
        (f"{HERE}:links", ["cost=searcher"], "knows no stages"),
        (f"{HERE}:links", ["objective.choose_nodes=true"], "choice of nodes"),
    ],
)
def test_what_cannot_price_a_term_is_refused(term: str, more: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_tables(load_problem([*TOY, *more, f"cost.term={term}"]))


def test_a_plan_is_found_priced_explained_and_named(tmp_path: Path) -> None:
    terms = f"cost.term=[{HERE}:links,examples.own_cost_term:power_cap]"
    problem = load_problem([*TOY, *QUICK, "space.pp=2", terms])
    found = plan(problem)
    cost = evaluate(found.plan, problem)
    plain = evaluate(found.plan, load_problem([*TOY, "space.pp=2"]))
    names = {f"{HERE}:links", "examples.own_cost_term:power_cap"}
    added = sum(cost.breakdown_s[name] for name in names)
    assert added > 0
    assert cost.iteration_time_s > plain.iteration_time_s
    assert sum(cost.breakdown_s.values()) == pytest.approx(cost.iteration_time_s, rel=1e-9)
    lines = explain(problem, found.plan)
    stages = [0.0] * found.plan.pp
    for line in lines.micro_batch:
        stages[line.stage or 0] += line.value
    assert stages == pytest.approx(list(cost.stage_times_s), rel=1e-9)
    assert names <= {line.term for line in lines.iteration}
    found.save(str(tmp_path))
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["predicted"]["breakdown_s"] == cost.breakdown_s


def test_terms_with_the_name_of_another_count_next_to_it() -> None:
    """A second `links`, and one called `compute`, as a cause of the cost model is."""
    pinned = [*TOY, "space=uniform", "space.pp=2"]
    mine = plan(load_problem([*pinned, *QUICK])).plan
    names = [f"{HERE}:links", "tests.support.more_own_terms:links"]
    names.append("tests.support.more_own_terms:compute")
    plain = evaluate(mine, load_problem(pinned))
    alone = [evaluate(mine, load_problem([*pinned, f"cost.term={name}"])) for name in names]
    added = sum(cost.iteration_time_s - plain.iteration_time_s for cost in alone)
    all_of_them = evaluate(mine, load_problem([*pinned, f"cost.term=[{','.join(names)}]"]))
    assert all_of_them.iteration_time_s == pytest.approx(plain.iteration_time_s + added, rel=1e-9)
    assert sum(all_of_them.breakdown_s.values()) == pytest.approx(all_of_them.iteration_time_s)
    assert all_of_them.breakdown_s["compute"] == pytest.approx(plain.breakdown_s["compute"])


@pytest.mark.parametrize("name", ["huge_discount", "stage_below_zero"])
def test_terms_that_leave_less_than_no_seconds_are_refused(name: str) -> None:
    problem = load_problem([*TOY, "space.pp=2", f"cost.term=tests.support.more_own_terms:{name}"])
    strategy = LayerStrategy(tp=1, dp=4)
    mine = Plan(2, (0, 3, problem.num_layers), (strategy,) * problem.num_layers)
    with pytest.raises(ConfigError, match="more than all other seconds"):
        evaluate(mine, problem)
