"""The comparison of all methods: standings, duels at equal wall-clock, anytime curves."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from baselines import PLANNERS, Planner
from darts_parallel.config.search import SearchConfig
from darts_parallel.errors import UnsupportedError
from experiments.comparison.anytime import anytime_figure, write_curves
from experiments.comparison.gaps import Findings
from experiments.comparison.picture import save
from experiments.comparison.problems import LARGE, suite
from experiments.comparison.runs import AUTO, ORACLE, SEARCH, Run, Work, run_case
from experiments.comparison.standings import RAW, best_known, default_verdict, duels, standings


def run(problem: str, method: str, cost: float, seed: int | None = None, **changes: object) -> Run:
    base = Run(problem, method, seed, cost, 2.0, 100, method == ORACLE, cost - 1.0, None, ((0.5, cost),))
    return replace(base, **changes)  # type: ignore[arg-type]


RUNS = [
    run("a", ORACLE, 1.0),
    *(run("a", SEARCH, cost, seed, raw_gap=0.3) for seed, cost in enumerate((1.1, 1.0, 1.2))),
    *(run("a", "annealing", cost, seed, curve=((0.1, 1.4), (1.9, 1.05), (2.5, cost)))
      for seed, cost in enumerate((1.0, 1.0, 1.0))),
    run("a", "amp", float("inf")),
    run("b", ORACLE, 2.0, gap=0.0),
    run("b", SEARCH, 1.9, 0, gap=-0.05, raw_gap=0.0),
    run("b", "annealing", 3.0, 0, curve=()),
    run("b", "amp", 2.0),
]  # fmt: skip


def test_the_best_known_plan_is_anybodys() -> None:
    assert best_known(RUNS) == {"a": 1.0, "b": 1.9}


def test_standings_take_medians_over_seeds_and_count_missing_plans() -> None:
    table = {entry.method: entry for entry in standings(RUNS)}
    assert table[SEARCH].gaps == pytest.approx((0.1, 0.0))
    assert table[RAW].gaps == pytest.approx((0.3, 2.0 / 1.9 - 1.0))
    assert table[ORACLE].gaps == pytest.approx((0.0, 2.0 / 1.9 - 1.0))
    assert table["amp"].cells()[:4] == ["amp", "2", "1", "0"]
    assert table[ORACLE].cells()[3] == "1"


def test_a_duel_reads_the_rivals_curve_at_the_searchs_own_seconds() -> None:
    # after 2 s annealing stood at 1.05, better than the search's median 1.1; on b it had nothing yet
    assert duels(RUNS) == [
        "- gradient search against annealing at the gradient search's own seconds: better on 1, equal on 0, "
        "worse on 1 problems; worse on a by 4.762 %."
    ]


def test_curves_are_written_and_drawn(tmp_path: Path) -> None:
    write_curves(tmp_path / "curves.csv", RUNS)
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(entry.curve) for entry in RUNS)
    assert rows[0]["problem"] == "a"
    save(anytime_figure(RUNS), tmp_path / "anytime.png")
    assert (tmp_path / "anytime.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_with_one_plan_at_its_end_is_drawn_as_a_point() -> None:
    ended = run("a", ORACLE, 1.0, curve=((2.0, 1.0),))
    lines = {line.get_label(): line for line in anytime_figure([ended, *RUNS[1:4]]).axes[0].get_lines()}
    assert lines[ORACLE].get_marker() == "s"
    assert lines[SEARCH].get_marker() == "None"


def test_every_rival_answers_a_problem_of_the_suite_and_none_beats_the_proof() -> None:
    case = suite(["toy on toy, loose"])[0]
    work = Work(case, ("amp", "annealing", "megatron_rule"), (0, 1), SearchConfig(), 60.0, budget=0.3)
    rows = run_case(work)
    assert [(row.method, row.seed) for row in rows] == [
        (ORACLE, None), ("annealing", 0), ("annealing", 1), ("megatron_rule", None), ("amp", None),
    ]  # fmt: skip
    assert all(row.gap > -1e-9 for row in rows)
    assert all(row.curve[-1][1] == row.iteration_time_s for row in rows)
    assert not Findings.of(rows).contradictions


def test_a_rival_without_its_extra_is_refused_with_the_way_to_get_it() -> None:
    assert set(PLANNERS) >= {"megatron_rule", "amp", "alpa", "pipedream", "dapple", "piper", "flexflow",
                           "galvatron", "hetpipe", "random_search", "annealing", "evolution"}  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"pip install 'darts-parallel\[rivals\]'"):
        Planner("no_such_module", extra="rivals").solve([], "layerwise")


def test_the_suite_reaches_4096_gpus_and_126_layers() -> None:
    names = [case.name for case in suite()]
    assert "llama3_405b on h100_128x8 x 512 nodes, loose" in names
    assert len([name for name in names if any(name.startswith(model) for model, *_ in LARGE)]) >= 10
    assert len(set(names)) == len(names)


def row(method: str, cost: float, seconds: float, seed: int | None = None) -> Run:
    """A row of one problem."""
    return Run("p", method, seed, cost, seconds, 1, False, 0.0)


def test_a_default_that_is_best_and_fast_is_said_to_be_so() -> None:
    lines = default_verdict([row(AUTO, 1.0, 2.0), row("amp", 1.0, 3.0), row("alpa", 2.0, 0.1)])
    assert "best plan on 1 of 1 problems." in lines[0]
    assert "on 0 problems." in lines[1]


def test_a_default_that_is_beaten_or_slower_is_named_with_the_figures() -> None:
    rows = [row(AUTO, 1.1, 2.0), row("amp", 1.0, 1.0), row(ORACLE, 0.9, 60.0)]
    beaten, slower = default_verdict(rows)
    assert "0 of 1 problems; worse on p by 10.000 % (amp)." in beaten
    assert "on 1 problems: p (2.0 s against 1.0 s)" in slower


def test_seeds_count_by_their_medians_and_no_match_means_nothing_to_be_slower_than() -> None:
    rows = [
        row(AUTO, 1.0, 50.0),
        *(row(SEARCH, cost, 1.0, seed) for seed, cost in enumerate((0.9, 1.2, 1.3))),
    ]
    beaten, slower = default_verdict(rows)
    assert "1 of 1" in beaten
    assert "on 0 problems" in slower


@pytest.mark.parametrize("rows", [[], [row("amp", 1.0, 1.0)]])
def test_without_the_default_there_is_no_verdict(rows: list[Run]) -> None:
    assert default_verdict(rows) == []
