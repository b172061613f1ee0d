"""The study of what the gradient is worth counts what it says."""

from dataclasses import replace
from math import inf

from experiments.comparison.runs import ORACLE, MethodRun
from experiments.gradient_share import LOOPS, NO_DESCENT, RIVALS, report


def row(problem: str, variant: str, seed: int, seconds: float) -> MethodRun:
    return replace(MethodRun(problem, variant, seed, seconds, 2.0, 0), cpu_s=2.0)


def test_the_page_counts_polished_plans_at_the_optimum_and_shows_the_largest_gap() -> None:
    rows = [row("one", ORACLE, 0, 1.0)]
    for variant in (*LOOPS, NO_DESCENT, *RIVALS):
        for seed, polished in enumerate((1.0, 1.0 + 1e-8, 1.05)):
            own = row("one", variant, seed, polished)
            rows.append(replace(own, repaired_time_s=1.2, raw_time_s=1.1))
    lines = report(rows).splitlines()
    (cells,) = [line.split(" | ") for line in lines if line.startswith("| descent |")]
    assert cells[1:] == ["no plan", "20.000 %", "10.000 %", "1e-06 %", "2 of 3", "5.000 %", "2.0 |"]
    (rival,) = [line.split(" | ") for line in lines if line.startswith("| annealing |")]
    assert rival[1:4] == ["-", "-", "-"]


def test_problems_without_a_proof_are_compared_with_the_best_plan_of_all() -> None:
    descent = replace(row("free", "descent", 0, 1.0), raw_time_s=inf)
    text = report([descent, row("free", NO_DESCENT, 0, 1.01)])
    assert "| free | descent | no plan | no plan | no plan | 0 | 1 of 1 | 0 | 2.0 |" in text
    assert "| free | no descent | - | - | - | 1.000 % | 0 of 1 | 1.000 % | 2.0 |" in text
