"""Dollars: bills, budgets, deadlines, the choice of nodes, and the batch of what-ifs behind it."""

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError, InfeasibleError, UnsupportedError
from darts_parallel.exact.uniform import find_uniform_plan
from darts_parallel.gradient import SearchResult
from darts_parallel.planner._session import Session
from darts_parallel.planner.methods import search_result
from darts_parallel.planner.node_choice import node_choices, offers, rent, rented
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.billing import Bill, bill, choose
from darts_parallel.problem.cluster import Cluster
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.commands import QUIET, Command

TOY = [
    "model=toy",
    "cluster=toy_mixed",
    "training=toy",
    "space=uniform",
    "space.num_micro_batches=[2,8]",
    "space.recompute=none",
    "space.sequence_parallel=false",
]


def toy(*overrides: str) -> Problem:
    return load_problem([*TOY, *overrides])


@cache
def optima(*extra: str) -> list[tuple[Cluster, float]]:
    """Return the clusters of all choices, each with its optimal seconds; no objective changes them."""
    config = toy(*extra).config
    choices = node_choices(toy().cluster)
    every = [Problem.from_config(rented(config, counts)) for counts in choices]
    return [(each.cluster, exact(each)) for each in every]


def exact(problem: Problem) -> float:
    return find_uniform_plan(build_tables(problem)).cost


OBJECTIVES = [
    ["objective=cost"],
    ["objective=time_under_budget", "objective.budget_usd=40"],
    ["objective=cost_under_deadline", "objective.deadline_hours=0.5"],
]


@pytest.mark.parametrize("overrides", OBJECTIVES)
def test_the_choice_is_that_of_all_bills(overrides: list[str]) -> None:
    for extra in ([], ["cluster.inter_node.bandwidth_GBps=0.5", "space.tp=[1,2]"]):
        problem = toy(*overrides, "objective.num_iterations=1e5", *extra)
        objective = problem.config.objective
        bills = [
            bill(objective, own, seconds) for own, seconds in optima(*extra) if seconds < np.inf
        ]
        found, wanted = (
            rent(problem).bill,
            choose(objective, [b for b in bills if b], [""] * len(bills)),
        )
        assert found.dollars == pytest.approx(bills[wanted].dollars, rel=1e-9)
        assert found.hours == pytest.approx(bills[wanted].hours, rel=1e-9)


@pytest.mark.parametrize("overrides", OBJECTIVES)
def test_the_front_is_that_of_all_choices(overrides: list[str]) -> None:
    problem = toy(*overrides, "objective.num_iterations=1e5")
    objective = problem.config.objective
    pairs = []
    for cluster, seconds in optima():
        amount = bill(objective, cluster, seconds)
        if amount is not None and seconds < np.inf:
            pairs.append((seconds, amount.dollars))
    wanted = [
        own
        for own in sorted(set(pairs))
        if not any(other != own and np.less_equal(other, own).all() for other in pairs)
    ]
    front = [(rental.iteration_time_s, rental.bill.dollars) for rental in rent(problem).front]
    assert np.allclose(front, wanted, rtol=1e-9)
    assert len(front) > 1


def test_a_bill_is_price_times_hours() -> None:
    problem = toy("objective=cost", "objective.num_iterations=7200")
    amount = bill(problem.config.objective, problem.cluster, 0.5)
    assert amount == Bill(price_per_hour_usd=2 * 1.0 + 2 * 4.0, hours=1.0, dollars=10.0)
    assert bill(toy().config.objective, problem.cluster, 0.5) is None


BILLS = [Bill(10.0, 1.0, 10.0), Bill(2.0, 4.0, 8.0), Bill(6.0, 2.0, 12.0), Bill(1.0, 9.0, 9.0)]


@pytest.mark.parametrize(
    ("overrides", "index"),
    [
        ([], 0),
        (["objective=cost"], 1),
        (["objective=time_under_budget", "objective.budget_usd=9.5"], 1),
        (["objective=time_under_budget", "objective.budget_usd=10"], 0),
        (["objective=cost_under_deadline", "objective.deadline_hours=3"], 0),
        (["objective=cost_under_deadline", "objective.deadline_hours=20"], 1),
    ],
)
def test_every_objective_chooses_its_bill(overrides: list[str], index: int) -> None:
    assert choose(toy(*overrides).config.objective, BILLS, "abcd") == index


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["objective=time_under_budget", "objective.budget_usd=0.001"], "objective.budget_usd"),
        (
            ["objective=cost_under_deadline", "objective.deadline_hours=0.001"],
            "objective.deadline_hours",
        ),
    ],
)
def test_a_limit_that_no_plan_meets_names_the_plan_that_comes_closest_and_the_advice_works(
    overrides: list[str], key: str
) -> None:
    with pytest.raises(
        InfeasibleError, match=rf"{key}=0.001 must .*(cheapest|fastest).* for .* hours"
    ) as caught:
        rent(toy(*overrides))
    near = re.search(r"try (\S+)\.$", str(caught.value))
    assert rent(toy(*overrides, near.group(1))).name in str(caught.value)


def test_nodes_that_do_not_pay_are_left_unrented() -> None:
    problem = toy(
        "objective=cost", "objective.num_iterations=1e6", "cluster.nodes.1.price_per_hour_usd=1000"
    )
    (cheap,) = rent(problem).config.cluster.nodes
    assert cheap.device == "toy"
    assert cheap.count <= 2
    assert Problem.from_config(rented(problem.config, (1, 2))).cluster.num_devices == 6


def test_the_fastest_nodes_need_no_price_and_leave_the_ones_that_slow_them_down() -> None:
    problem = toy("cluster.nodes.0.price_per_hour_usd=null")
    fastest = rent(problem)
    every = [seconds for _, seconds in optima()]
    assert fastest.iteration_time_s == pytest.approx(min(every), rel=1e-9)
    assert fastest.iteration_time_s < exact(problem)
    assert fastest.counts == (0, 2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["objective=cost", "cluster=toy"],
            r"price of every node, and cluster\.nodes\[0\]\..* is missing",
        ),
        (["objective=time_under_budget"], r"objective\.budget_usd must be given .*budget_usd=100"),
        (
            ["objective=cost", "objective.num_iterations=null"],
            r"objective\.num_iterations must be given",
        ),
        (
            ["objective=cost", "objective.num_iterations=-1"],
            r"num_iterations=-1 must be at least 1e-06",
        ),
        (["objective.name=price"], r"objective\.name=price must be one of .*try time"),
    ],
)
def test_what_a_bill_lacks_is_said_in_one_sentence(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rent(toy(*overrides))


def test_an_offer_with_too_many_choices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"offers 10200 choices .* at most 4096.*\[0\]\.count=39"):
        node_choices(toy("cluster.nodes.0.count=100", "cluster.nodes.1.count=100").cluster)
    near = toy("cluster.nodes.0.count=39", "cluster.nodes.1.count=100")
    assert len(node_choices(near.cluster)) == 4039


def test_nodes_are_chosen_for_interleaved_plans_too() -> None:
    rental = rent(toy("space.virtual_stages=2", "space.pp=2"))
    assert rental.plan.virtual_stages == 2
    assert evaluate(rental.plan, Problem.from_config(rental.config)).feasible


def test_the_simulated_schedule_is_not_compared_over_clusters() -> None:
    with pytest.raises(UnsupportedError, match="try cost=analytic"):
        rent(toy("cost.pipeline=simulated"))


def test_the_command_rents_bills_and_writes_the_bill(command: Command) -> None:
    flags = ["search.num_steps=10", "search.num_restarts=2", "objective.choose_nodes=true"]
    outcome = command(*TOY, *QUIET, *flags, "objective=cost")
    assert outcome.status == 0, outcome.err
    data = json.loads(command.plan_file().read_text())
    job = data["predicted"]["job"]
    assert job["dollars"] == pytest.approx(job["hours"] * job["price_per_hour_usd"])
    assert f"${job['dollars']:,.2f} for" in outcome.out
    nodes = data["cluster"]["nodes"]
    assert sum(n["count"] * n["gpus"] for n in nodes) == sum(
        len(stage["ranks"]) for stage in data["stages"]
    )
    assert "nodes: the best of 8 choices of the offer" in outcome.out
    assert data["rental"]["choices"] == 8


def test_a_search_that_ends_above_the_plan_of_its_nodes_takes_that_plan(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(session: Session) -> SearchResult:
        result = search_result(session)
        return replace(result, iteration_time_s=1.01 * result.iteration_time_s)

    monkeypatch.setattr("darts_parallel.planner.planning.search_result", slower)
    flags = [
        "search=gradient",
        "search.num_steps=1",
        "search.num_restarts=1",
        "search.polish=false",
    ]
    job = [
        "objective=cost_under_deadline",
        "objective.choose_nodes=true",
        "space.pp=4",
        "model.num_layers=6",
    ]
    rental = rent(toy(*job, "objective.deadline_hours=1"))
    tight = f"objective.deadline_hours={rental.bill.hours * (1 + 1e-9)}"
    outcome = command(*TOY, *QUIET, *flags, *job, tight)
    assert outcome.status == 0, outcome.err
    data = json.loads(command.plan_file().read_text())
    assert data["predicted"]["iteration_time_s"] == pytest.approx(rental.iteration_time_s, rel=1e-9)
    assert data["search"]["taken_from"] == "uniform plan that chose the nodes"


def test_the_command_refuses_a_budget_that_its_plan_exceeds(command: Command) -> None:
    limit = ["objective=time_under_budget", "objective.budget_usd=0.001"]
    outcome = command(*TOY, *QUIET, "search.num_steps=5", "search.num_restarts=2", *limit)
    assert outcome.status == 2
    assert re.search(r"the cheapest \(dp .* ZeRO-.*\) costs \$", outcome.err)
    assert outcome.files == ()


def test_choices_of_nodes_are_compared_by_plans_with_one_stage_a_device() -> None:
    both = toy("space.virtual_stages=[1,2]", "space.num_micro_batches=8")
    assert {space.virtual_stages for space in outer_spaces(both)} == {1, 2}
    choices = [(1, 1), (2, 0)]
    alone, compared = (
        [len(offer.tables) for offer in offers(problem, choices)]
        for problem in (toy("space.num_micro_batches=8"), both)
    )
    assert alone == compared
    assert all(t.virtual_stages == 1 for offer in offers(both, choices) for t in offer.tables)
