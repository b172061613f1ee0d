"""The comparison of all methods: standings and findings."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from darts_parallel.config.composition import load_config
from darts_parallel.config.options import parse
from darts_parallel.errors import ConfigError
from experiments import compare
from experiments.comparison.findings import (
    RAW,
    contradictions,
    gaps_table,
    medians,
    standings,
    verdict,
)
from experiments.comparison.methods import CompareOptions, run_case
from experiments.comparison.problems import suite
from experiments.comparison.quantiles import percent, quantile
from experiments.comparison.runs import ORACLE, SEARCH, UNIFORM, MethodRun, best_known


def run(
    problem: str, method: str, cost: float, seed: int | None = None, **changes: object
) -> MethodRun:
    base = MethodRun(problem, method, seed, cost, 2.0, 100, method == ORACLE, gap=cost - 1.0)
    return replace(base, **changes)  # type: ignore[arg-type]


RUNS = [
    run("a", ORACLE, 1.0),
    *(run("a", SEARCH, cost, seed, raw_time_s=1.3) for seed, cost in enumerate((1.1, 1.0, 1.2))),
    *(run("a", "annealing", cost, seed) for seed, cost in enumerate((1.0, 1.0, 1.0))),
    run("a", "amp", float("inf")),
    run("b", ORACLE, 2.0, gap=0.0),
    run("b", SEARCH, 1.9, 0, gap=-0.05, raw_time_s=2.0),
    run("b", "annealing", 3.0, 0),
    run("b", "amp", 2.0),
]


def test_the_suite_has_problems_of_every_kind_with_names_of_their_own() -> None:
    cases = suite()
    core = suite(["core"])
    names = {case.name for case in cases}
    assert len(names) == len(cases) == 48
    assert [case.seed for case in cases] == list(range(48))
    assert "llama3_405b on h100_128x8 x 512 nodes, loose" in names
    assert len(core) == 14
    assert {case.variant for case in core} == {case.variant for case in cases}
    with pytest.raises(ConfigError, match=r"problems=gpt9 is part of no problem's name.*gpt2_xl"):
        suite(["gpt9"])


def test_a_tight_problem_has_less_memory_and_an_uneven_one_other_layers() -> None:
    loose, tight, uneven = (case.tables()[0] for case in suite(["toy on toy"]))
    assert tight.capacity[0] < loose.capacity[0]
    ratio = uneven.forward / loose.forward
    factors = ratio[ratio.isfinite()]
    assert 0.5 <= float(factors.min()) < float(factors.max()) <= 2.0
    assert float(factors.std()) > 0.1


def test_standings_take_medians_over_seeds_and_count_missing_plans() -> None:
    assert best_known(RUNS) == {"a": 1.0, "b": 1.9}
    gaps = medians(RUNS, (ORACLE, SEARCH, "amp", "nobody"))
    assert gaps[SEARCH] == pytest.approx({"a": 0.1, "b": 0.0})
    assert gaps[ORACLE] == pytest.approx({"a": 0.0, "b": 2.0 / 1.9 - 1.0})
    assert gaps["nobody"] == {}
    rows = standings(RUNS, (ORACLE, SEARCH, "amp", "nobody"))
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        f"| {name}" for name in (ORACLE, SEARCH, "amp", RAW)
    ]
    assert rows[4] == "| amp | 2 | 1 | 0 | 5.263 % | 5.263 % | 5.263 % | 2.00 | 100 |"
    assert "| 5.263 % | 30.000 % | 30.000 %" in rows[5]


def test_findings_name_where_a_method_is_better_and_what_contradicts_the_proof() -> None:
    assert verdict(RUNS, SEARCH, ["annealing", "amp"]) == [
        "- The median plan of gradient_search is the best or equal on 1 of 2 problems.",
        "- a: better are annealing.",
    ]
    (line,) = contradictions(RUNS)
    assert line.startswith("- Contradiction: gradient_search is better than the proof on b, seed 0")
    assert gaps_table(RUNS, (SEARCH, "amp"))[2:] == [
        "| a | 10.000 % | no plan | 1 s | 1 s | 0 |",
        "| b | 0 | 5.263 % | 1.9 s | 2 s | -5.000 % |",
    ]


def test_quantiles_are_observed_values_and_failures_stay_infinite() -> None:
    values = [0.03, 0.0, float("inf"), 0.01, 0.02]
    assert [quantile(values, share) for share in (5, 20, 21, 50, 80, 81, 100)] == [
        0.0,
        0.0,
        0.01,
        0.02,
        0.03,
        float("inf"),
        float("inf"),
    ]
    assert [percent(x) for x in (0.0, 5e-10, 1e-8, 0.0123, float("inf"), None)] == [
        "0",
        "0",
        "1e-06 %",
        "1.230 %",
        "no plan",
        "-",
    ]


def test_gaps_of_an_oracle_that_stopped_early_are_from_its_bound() -> None:
    search = replace(load_config().search, num_steps=5, num_restarts=2)
    options = CompareOptions(methods=[UNIFORM], seeds=1, search=search, oracle_seconds=1e-9)
    rows = run_case(suite(["toy on toy, tight"])[0], options)
    assert not rows[0].proven
    assert min(row.gap for row in rows) > 0


def test_compare_leaves_rows_and_tables(tmp_path: Path) -> None:
    methods = "methods=[gradient_search,exhaustive_uniform,annealing,amp,megatron_rule]"
    given = ["problems=toy on toy, loose", "seeds=2", "jobs=1", "budget=0.2", "search.num_steps=20"]
    assert compare.run(parse(CompareOptions, [*given, methods, f"out={tmp_path}"])) == 0
    with (tmp_path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"]) for row in rows] == [
        (ORACLE, ""),
        (UNIFORM, ""),
        (SEARCH, "0"),
        (SEARCH, "1"),
        ("annealing", "0"),
        ("annealing", "1"),
        ("amp", ""),
        ("megatron_rule", ""),
    ]
    assert (rows[0]["proven"], float(rows[0]["gap"])) == ("True", 0.0)
    assert all(float(row["gap"]) > -1e-9 for row in rows)
    text = (tmp_path / "compare.md").read_text()
    assert "search.num_steps=20" in text
    assert "| annealing | 1 |" in text
    assert "Contradiction" not in text
