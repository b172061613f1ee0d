"""The best use of a budget: convexity, the bound, slopes, memory, discrete choices and refusals."""

import json
from itertools import pairwise, product
from math import inf, log, log1p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from darts_parallel import plan
from darts_parallel.cli._design import _interval, design_dict, main
from darts_parallel.config import group_files
from darts_parallel.cost import build_tables, evaluate, evaluate_batch, even_uniform_plans
from darts_parallel.design import (
    FIGURES,
    Answer,
    Design,
    Designer,
    products,
    read_design,
    scaled_config,
    upgrades,
)
from darts_parallel.design.bound import Array, Knobs, log_tangents
from darts_parallel.design.figures import Factor, sense
from darts_parallel.design.pricing import Pricing, _Factors
from darts_parallel.problem import Problem, load_problem
from tests.support.commands import alias_bomb

JOB = [
    "model=toy",
    "training=toy",
    "space=uniform",
    "space.zero_stage=1",
    "space.out_of_memory=0.5",
]
TOY: dict[str, Any] = {
    "unit": "USD",
    "budget": 900.0,
    "jobs": [{"overrides": JOB}],
    "options": {"two": {"overrides": ["cluster=toy"], "fixed": {"gpu": 10, "node": 5}}},
    "knobs": {
        "device.peak_flops": {"price": 40, "exponent": 1.3},
        "device.memory": {"price": 30},
        "device.memory_bandwidth": {"price": 20, "exponent": 1.2},
        "intra_node.bandwidth": {"price": 15, "exponent": 1.1},
        "inter_node.bandwidth": {"price": 25, "per": "node", "exponent": 1.1},
        "inter_node.latency": {"price": 10, "per": "node"},
    },
}
MIXTURE = ["model=toy_moe", "training=toy_moe", "cluster=toy", "space=uniform"]


def written(folder: Path, **changes: Any) -> Design:
    file = folder / "mine.yaml"
    file.write_text(json.dumps(TOY | changes))
    return read_design(str(file))


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Designer, Answer]:
    """The design of the tests, solved for its budget; later budgets add tangents to it."""
    designer = Designer(written(tmp_path_factory.mktemp("design")))
    return designer, designer.solve(designer.design.budget)


def log_seconds(pricing: Pricing, z: Array) -> Array:
    return pricing.at(z).heights


KINDS = [
    [],
    ["space.recompute=[none,full]", "cost.schedule=1f1b"],
    MIXTURE,
    ["space.virtual_stages=[1,2]", "space.pp=2"],
]


@pytest.mark.parametrize("more", KINDS)
def test_plans_are_convex_and_fall_with_goodness_by_exact_slopes(
    tmp_path: Path, more: list[str]
) -> None:
    job = more if more == MIXTURE else [*JOB, *more]
    (pricing,) = Designer(written(tmp_path, jobs=[{"overrides": job}])).branches[0].pricings
    rng = np.random.default_rng(1)
    z = rng.normal(size=5) * 0.3
    priced = pricing.at(z)
    here, slopes = priced.heights, priced.slopes
    assert (slopes <= 1e-12).all()
    for knob, step in enumerate(np.eye(5) * 1e-5):
        central = (log_seconds(pricing, z + step) - log_seconds(pricing, z - step)) / 2e-5
        np.testing.assert_allclose(slopes[:, knob], central, atol=1e-6)
    touching = log_tangents(here, slopes, z, z)
    assert touching.heights + touching.slopes @ z == pytest.approx(here, abs=1e-9)
    for y in rng.normal(size=(8, 5)):
        there = log_seconds(pricing, y)
        for at in (z, y, rng.normal(size=5)):
            b, a = log_tangents(here, slopes, z, at)
            assert (there >= b + a @ y - 1e-9).all()


@pytest.mark.parametrize("seed", range(12))
def test_money_is_spent_where_a_line_is_lowest(seed: int) -> None:
    """Random lines of two knobs, against a grid of all that the money buys."""
    rng = np.random.default_rng(seed)
    price, exponent = rng.uniform(2.0, 6.0, 2), rng.uniform(0.7, 1.5, 2)
    low, high = rng.uniform(-1.5, -0.5, 2), rng.uniform(0.5, 1.5, 2)
    knobs = Knobs(("a", "b"), price, exponent, low, high, np.ones(2))
    slopes = -rng.uniform(0.0, 1.0, (3, 2)) * rng.integers(0, 2, (3, 2))
    money = knobs.cost(low).sum() * rng.uniform(1.1, 4.0, 3)
    spent = knobs.spend(slopes, money)
    axes = [np.linspace(*ends, 401) for ends in zip(low, high, strict=True)]
    z = np.array(list(product(*axes)))
    payable = knobs.cost(z).sum(1)[:, None] <= money
    least = np.where(payable, z @ slopes.T, np.inf).min(0)
    assert (least - 1e-2 <= spent.value).all()
    assert (spent.value <= least + 1e-9).all()
    assert (knobs.cost(spent.z).sum(1) <= money * (1 + 1e-9)).all()


def test_knobs_multiply_in_every_node_group_that_they_name() -> None:
    cluster = load_problem(["model=toy", "training=toy", "cluster=toy_mixed"]).cluster
    figure = "intra_node.bandwidth"
    factors = _Factors(Knobs((figure, f"nodes.0.{figure}"), *np.ones((5, 2))), cluster)
    assert factors.rows == [Factor(figure, 0, 0), Factor(figure, 1, 1)]
    assert factors.matrix.tolist() == [[1.0, 1.0], [1.0, 0.0]]


def test_without_a_knob_of_memory_the_plans_that_fit_are_priced() -> None:
    problem = load_problem([*JOB, "cluster=toy", "cluster.devices.toy.memory_GiB=0.102"])
    pricing = Pricing(problem, products.NO_KNOBS, products.NO_KNOBS)
    feasible = []
    for table in build_tables(problem):
        feasible += evaluate_batch(table, even_uniform_plans(table)).feasible.tolist()
    assert len(pricing.needs) == sum(feasible) < len(feasible)
    plans = [pricing.plan(number) for number in range(len(pricing.needs))]
    assert all(evaluate(own, problem).feasible for own in plans)


def test_money_that_nearly_buys_the_most_bounds_what_it_buys_from_below() -> None:
    knobs = Knobs(("a",), *np.array([[1.0], [1.0], [-1.0], [1.0], [1.0]]))
    slopes = np.array([[-1.0]])
    money = np.array([np.e * (1.0 + 5e-10)])
    spent = knobs.spend(slopes, money)
    assert knobs.cost(spent.z).sum() <= money
    assert spent.value <= (slopes * spent.z).sum()


def test_tangents_that_move_bound_more_tightly(
    solved: tuple[Designer, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    designer, answer = solved
    (branch,), budget = designer.branches, designer.design.budget
    known = branch.lowest(budget, np.inf)
    assert known.value == pytest.approx(answer.log_bound, abs=designer.design.tolerance)
    assert branch.knobs.cost(known.z).sum() <= budget
    monkeypatch.setattr(branch, "points", branch.points[:1])
    moved = branch.lowest(budget, np.inf)
    assert moved.value <= known.value
    monkeypatch.setattr("darts_parallel.design.search.ROUNDS", 1)
    assert branch.lowest(budget, np.inf).value < moved.value - 0.01


@pytest.mark.parametrize("twice", [False, True])
def test_the_bound_is_below_and_near_what_random_search_finds(
    tmp_path: Path, twice: bool, solved: tuple[Designer, Answer]
) -> None:
    designer, answer = solved
    if twice:  # two knobs of one place multiply
        knobs = TOY["knobs"] | {"nodes.0.device.peak_flops": {"price": 9}}
        designer = Designer(written(tmp_path, knobs=knobs))
        answer = designer.solve(designer.design.budget)
    design = designer.design
    assert 0.0 <= answer.gap <= 1e-3
    assert answer.spent <= design.budget * (1 + 1e-9)
    assert answer.planner_calls <= 12
    (branch,), money = designer.branches, design.budget - design.options[0].fixed
    knobs, memory, rng = branch.knobs, branch.memory, np.random.default_rng(2)
    for _ in range(20):
        shares = rng.dirichlet(np.ones(len(knobs.names))) * (
            money - np.quantile(memory, rng.random())
        )
        z = np.log(np.maximum(shares, 1e-9) / knobs.price) / knobs.exponent
        z = np.clip(z, knobs.low, knobs.high)
        found = log_seconds(branch.pricings[0], z)[memory <= money - knobs.cost(z).sum()]
        assert found.min(initial=np.inf) >= np.log(answer.bound_iteration_time_s) - 1e-9


def test_more_money_never_costs_seconds_and_tangents_stay(
    solved: tuple[Designer, Answer],
) -> None:
    designer, _ = solved
    design = designer.design
    seconds = [designer.solve(factor * design.budget).iteration_time_s for factor in design.budgets]
    assert all(more <= less * (1 + design.tolerance) for less, more in pairwise(seconds))
    assert designer.solve(design.budget).planner_calls == 0


def test_discrete_choices_are_pruned_by_their_bounds(
    tmp_path: Path, solved: tuple[Designer, Answer]
) -> None:
    options = {
        "dear": {"overrides": ["cluster=toy"], "fixed": {"gpu": 60}},
        "cheap": TOY["options"]["two"],
    }
    answer = Designer(written(tmp_path, options=options)).solve(900.0)
    _, single = solved
    assert answer.option.name == "cheap"
    assert answer.iteration_time_s == pytest.approx(single.iteration_time_s, rel=1e-3)
    assert answer.planner_calls <= single.planner_calls + 4


def test_two_jobs_share_one_cluster(tmp_path: Path) -> None:
    job = [*JOB[:4], "space.pp=2"]
    jobs = [{"overrides": job}, {"overrides": [*job, "training.seq_len=32"], "weight": 3}]
    answer = Designer(written(tmp_path, jobs=jobs)).solve(900.0)
    assert (len(answer.plans), answer.gap <= 1e-3) == (2, True)
    assert np.log(answer.iteration_time_s) == pytest.approx(
        0.25 * np.log(answer.job_iteration_times_s[0])
        + 0.75 * np.log(answer.job_iteration_times_s[1])
    )


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    out = tmp_path / "run"
    main([f"design={tmp_path / 'mine.yaml'}", "budgets=[1.2]", f"hydra.run.dir={out}"])
    found = json.loads((out / "design.json").read_text())
    assert found["bound_iteration_time_s"] <= found["iteration_time_s"]
    assert found["spent"] <= found["budget"] == 900.0
    assert set(found["knobs"]) == set(TOY["knobs"]) == set(found["elasticities"])
    plan = json.loads((out / found["plan"]).read_text())
    assert plan["predicted"]["iteration_time_s"] == pytest.approx(
        found["iteration_time_s"], rel=1e-9
    )
    assert plan["predicted"]["feasible"]
    name = "inter_node.bandwidth"
    assert found["elasticities"][name] == pytest.approx(plan["sensitivity"][name], abs=1e-9)
    assert found["layerwise_iteration_time_s"] <= found["iteration_time_s"] * (1 + 1e-9)
    assert len((out / "pareto.csv").read_text().splitlines()) == 3
    assert "planner calls" in capsys.readouterr().out
    assert list((out / "tensorboard").iterdir())
    upgrades_are_of_the_plan(out / found["plan"], found["iteration_time_s"], tmp_path / "up")


def upgrades_are_of_the_plan(file: Path, seconds: float, out: Path) -> None:
    main([f"design={file}", f"hydra.run.dir={out}"])
    rows = {row["figure"]: row for row in json.loads((out / "upgrades.json").read_text())[::-1]}
    assert set(rows) == set(FIGURES)
    for name, row in rows.items():
        assert row["replanned"] >= row["saved"] - 1e-9, (
            name
        )  # the plan is the best even uniform one here
    worth = json.loads(file.read_text())["sensitivity"].get("memory", 0.0)
    assert rows["device.memory"]["replanned"] >= 1.0 - 1.1**worth, "as the report has it"
    row = rows["inter_node.bandwidth"]
    better = f"cluster.inter_node.bandwidth_GBps={row['after'] / 1e9}"
    again = load_problem([*JOB, "cluster=toy", better])
    assert row["to"] == "10 % better"
    assert again.cluster.inter_node.bandwidth == pytest.approx(row["before"] * 1.1)
    assert 0.0 < row["saved"] < 0.1


def test_more_memory_is_worth_what_the_report_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even uniform plans leave it unused, local moves may use it."""
    problem = load_problem([*JOB, "cluster=toy"])
    found = plan(problem).plan
    before = {row["figure"]: row["replanned"] for row in upgrades(found, problem)[::-1]}
    monkeypatch.setattr(products, "sensitivity", lambda *given: {"memory": -0.3})
    after = {row["figure"]: row["replanned"] for row in upgrades(found, problem)[::-1]}
    assert after.pop("device.memory") == pytest.approx(1.0 - 1.1**-0.3)
    before.pop("device.memory")
    assert after == before


@pytest.mark.parametrize("device", ["a10", "h100"])
def test_the_next_product_is_the_smallest_step_up_of_all_presets(device: str) -> None:
    cluster = {"a10": "a10_4x4", "h100": "h100_1x8"}[device]
    problem = load_problem(["model=toy", "training=toy", f"cluster={cluster}"])
    files = [file for file in group_files("device") if not file.stem.startswith(products.INVENTED)]
    presets = {file.stem: OmegaConf.load(file) for file in files}
    for key in ("memory_GiB", "memory_bandwidth_GBps"):
        values = {name: float(preset[key]) for name, preset in presets.items()}
        present = values[device]
        larger = min(value for value in values.values() if value > present)
        figure = next(name for name in FIGURES if FIGURES[name] == key)
        ((product, factor),) = products._next_product(figure, problem)
        assert (values[product], factor) == (larger, pytest.approx(larger / present))
    assert list(products._next_product("inter_node.bandwidth", problem)) == [
        ("next generation", 2.0)
    ]
    assert not list(products._next_product("inter_node.latency", problem))


def test_figures_of_an_answer_are_those_of_its_hardware(tmp_path: Path) -> None:
    knobs = TOY["knobs"] | {"device.peak_flops": {"price": 1, "bounds": [0.5, 1.5]}}
    design = written(tmp_path, knobs=knobs)
    designer = Designer(design)
    answer = designer.solve(design.budget)
    (option,) = design.options
    assert (answer.at_bound, answer.factors["device.peak_flops"]) == (
        ["device.peak_flops"],
        pytest.approx(1.5),
    )
    assert answer.spent == pytest.approx(option.fixed + sum(answer.costs.values()))
    assert option.fixed == 8 * 10 + 2 * 5
    cluster = option.problems[0].cluster
    assert answer.knobs["inter_node.latency"] == pytest.approx(
        answer.factors["inter_node.latency"] * cluster.inter_node.latency
    )
    # twice the goodness of a latency is half of it; its price is per node
    latency = 1.0 / answer.factors["inter_node.latency"]
    assert answer.costs["inter_node.latency"] == pytest.approx(2 * 10 * latency)
    assert answer.gap == pytest.approx(
        answer.iteration_time_s / answer.bound_iteration_time_s - 1.0
    )
    (pricing,) = designer.branches[0].pricings
    bought = designer.branches[0].knobs
    z = np.array([sense(name) * np.log(answer.factors[name]) for name in bought.names])
    row = [pricing.plan(number) for number in range(len(pricing.needs))].index(answer.plans[0])
    assert answer.seconds_saved_per_unit["device.peak_flops"] == 0.0
    for index, name in enumerate(bought.names):
        step = 1e-5 * np.eye(len(z))[index]
        seconds = [np.exp(log_seconds(pricing, z + own)[row]) for own in (-step, step)]
        slope = np.log(seconds[1] / seconds[0]) / 2e-5
        assert answer.elasticities[name] == pytest.approx(sense(name) * slope, abs=1e-6)
        if name not in answer.at_bound:
            paid = bought.cost(z + step)[index] - bought.cost(z - step)[index]
            saved = (seconds[0] - seconds[1]) / paid
            assert answer.seconds_saved_per_unit[name] == pytest.approx(saved, rel=1e-3, abs=1e-9)


def test_several_jobs_are_as_unsure_as_the_least_sure_one() -> None:
    predicted = [
        {"iteration_time_s": 2.0, "iteration_time_interval_s": [1.0, 3.0]},
        {"iteration_time_s": 4.0, "iteration_time_interval_s": [2.0, 8.0]},
        {"iteration_time_s": 1.0},
    ]
    assert _interval(3.0, predicted) == [1.5, 6.0]
    assert _interval(3.0, predicted[2:]) is None


def test_layer_by_layer_seconds_and_the_front_are_those_of_all_jobs(tmp_path: Path) -> None:
    jobs = [{"overrides": JOB}, {"overrides": [*JOB, "training.seq_len=32"], "weight": 3}]
    design = written(tmp_path, jobs=jobs)
    designer = Designer(design)
    answer = designer.solve(design.budget)
    names = ("plan.json", "layerwise.json", "plan_2.json", "layerwise_2.json")
    seconds = (1.0, 2.0, 1.0, 16.0)
    plans = {
        name: {"predicted": {"iteration_time_s": own}}
        for name, own in zip(names, seconds, strict=True)
    }
    found = design_dict(design, answer, plans)
    assert found["layerwise_iteration_time_s"] == pytest.approx(2.0**0.25 * 16.0**0.75)
    assert (found["plan"], found["fixed"]) == ("plan.json", design.options[0].fixed)
    assert (found["design"], found["unit"]) == ("mine", TOY["unit"])


@pytest.mark.slow
def test_the_least_budget_for_a_target(solved: tuple[Designer, Answer]) -> None:
    designer, best = solved
    design, target = designer.design, best.iteration_time_s
    answer = Designer(design).reach(target)
    assert answer.iteration_time_s <= target
    assert answer.budget == pytest.approx(design.budget, rel=5e-3)
    assert designer.solve(answer.budget * 0.98).bound_iteration_time_s > target
    # a search of the budget stops within a tenth of the tolerance
    high = max(branch.most for branch in designer.branches)
    for slower in (1.0, 1.003, 1.01):
        goal = log(target * slower)
        less = designer._least_allowed(designer.least, high, goal) / (1.0 + design.tolerance / 5.0)
        bounds = [branch.lowest(less, inf).value for branch in designer._payable(less)]
        assert min(bounds) > goal - log1p(design.tolerance / 2.0)
    assert any(designer._payable(designer.least))


@pytest.mark.parametrize(("name", "least"), [("buyers", 1), ("architects", 7)])
def test_shipped_designs_are_read(name: str, least: int) -> None:
    assert min(len(option.knobs.names) for option in read_design(name).options) >= least


BAD = [
    ({"budget": 100.0}, "design.budget=100 must be above the fixed part"),
    ({"budget": "much"}, "budget=much must be a number"),
    ({"budget": "1M"}, "budget=1M must be a number; try 1e+06"),
    ({"knobs": {"device.colour": {"price": 1}}}, "design.knobs.device.colour must be one of"),
    ({"knobs": {"device.memory": {}}}, "price is missing"),
    ({"knobs": {"device.memory": {"price": 1, "bounds": [2, 1]}}}, "factors that rise"),
    ({"target": 1.0}, "design.budget or design.target must be given"),
    ({"budget": None, "target": 1e-9}, "must be above what the highest of every knob reaches"),
    ({"knobs": {"device.memory": {"price": 1, "per": "rack"}}}, "per=rack must be one of"),
    ({"knobs": {"nodes.7.device.memory": {"price": 1}}}, "counted from 0"),
    ({"knobs": {"device.memory": {"price": 1, "prize": 2}}}, "prize is not a key"),
    ({"knobs": {}}, "design.knobs must be given"),
    ({"jobs": [{"overrides": ["model=toy", "training=toy", "space=layerwise"]}]}, "space=uniform"),
    ({"jobs": [{"overrides": ["model=toy", "training=tou"]}]}, "training=tou"),
    (
        {"jobs": [{"overrides": [*JOB, "training.lengths=x.csv"]}]},
        "x.csv must be null in design.jobs",
    ),
    (
        {
            "jobs": [{"overrides": ["model=llama3_70b", "training=toy", "space=uniform"]}],
            "knobs": {"device.peak_flops": {"price": 1}},
        },
        "fits nowhere",
    ),
    ({"knobs": {"device.memory": {"price": 1e6, "bounds": [1e-9, 4.0]}}}, "try a larger budget"),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], said: str
) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps(TOY | changes))
    with pytest.raises(SystemExit) as ended:
        main([f"design={tmp_path / 'mine.yaml'}", f"hydra.run.dir={tmp_path / 'run'}"])
    assert ended.value.code == 2
    sentence = capsys.readouterr().err
    assert (said in sentence, "try" in sentence, sentence.count("\n")) == (True, True, 1)


def test_a_key_of_the_planner_is_answered_with_the_command_that_takes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key in ("search.seed=1", "output.verbose=true"):
        with pytest.raises(SystemExit) as ended:
            main([key])
        assert ended.value.code == 2
        assert f"{key} is a key of the command that plans" in (said := capsys.readouterr().err)
        assert f"try darts-parallel {key}, or --help" in said
    with pytest.raises(SystemExit):
        main(["budgte=2"])
    assert "budgte=2 is not a key of the configuration; try budget." in capsys.readouterr().err


@pytest.mark.slow
def test_words_of_the_planner_change_all_jobs_of_a_design(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    more = {"jobs": [{"overrides": JOB}, {"overrides": [*JOB, "tp=1", "gbs=32"]}]}
    mine.write_text(json.dumps(TOY | more))
    design = read_design(str(mine), {}, ["tp=2", "gbs=8"])
    found = {
        (problem.config.space.tp, problem.training.global_batch_size)
        for option in design.options
        for problem in option.problems
    }
    assert found == {(2, 8)}
    main([f"design={mine}", "gbs=8", "budgets=[1]", f"hydra.run.dir={tmp_path / 'run'}"])
    written = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert written["training"]["global_batch_size"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["design=buyers", "nodes=4"], "nodes=4 must be of a machine of the design; try overrides"),
        (["design=plan.json", "tp=2"], "tp=2 must be of a design, and not of a plan"),
    ],
)
def test_words_that_a_design_cannot_take_are_answered(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (alias_bomb(), "must hold at most 100,000 values"),
        ("[" * 2000, "cannot be read (maximum recursion depth"),
    ],
)
def test_a_file_without_an_end_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([f"design={file}"])
    assert ended.value.code == 2
    assert f"design={file} {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument",
    [
        "budget=3",
        "design=nobody",
        "budgit=3",
        "design=buyers plan=p",
        "design=no.json",
        "design=no.yaml",
    ],
)
def test_bad_arguments_are_one_sentence(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argument.split())
    assert ended.value.code == 2
    assert "try" in capsys.readouterr().err


def test_every_combination_of_factors_is_priced_like_the_configuration(tmp_path: Path) -> None:
    (branch,) = Designer(written(tmp_path)).branches
    (pricing,), (problem,) = branch.pricings, branch.option.problems
    for z in list(product([-0.4, 0.4], repeat=5))[::9]:
        factors = {
            n: float(np.exp(sense(n) * y)) for n, y in zip(branch.knobs.names, z, strict=True)
        }
        changed = Problem.from_config(scaled_config(problem, factors))
        seconds = evaluate(pricing.plan(0), changed).iteration_time_s
        assert np.log(seconds) == pytest.approx(log_seconds(pricing, np.array(z))[0], abs=1e-9)
