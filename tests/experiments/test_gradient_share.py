"""The study of what the gradient is worth counts what it says."""

from math import inf

from experiments.gradient_share import LOOPS, NO_DESCENT, RIVALS, StageRow, report


def test_the_page_counts_polished_plans_at_the_optimum_and_shows_the_largest_gap() -> None:
    rows = []
    for variant in (*LOOPS, NO_DESCENT, *RIVALS):
        for seed, polished in enumerate((1.0, 1.0 + 1e-8, 1.05)):
            rows.append(StageRow("one", variant, seed, 2.0, 1.0, inf, 1.2, 1.1, polished))
    lines = report(rows).splitlines()
    (cells,) = [line.split(" | ") for line in lines if line.startswith("| descent |")]
    assert cells[1:] == ["no plan", "20.000 %", "10.000 %", "1e-06 %", "2 of 3", "5.000 %", "2.0 |"]
    (rival,) = [line.split(" | ") for line in lines if line.startswith("| annealing |")]
    assert rival[1:4] == ["-", "-", "-"]


def test_problems_without_a_proof_are_compared_with_the_best_plan_of_all() -> None:
    rows = [
        StageRow("free", variant, 0, 2.0, inf, polished=polished)
        for variant, polished in (("descent", 1.0), (NO_DESCENT, 1.01))
    ]
    text = report(rows)
    assert "| free | descent | no plan | no plan | no plan | 0 | 1 of 1 | 0 | 2.0 |" in text
    assert "| free | no descent | - | - | - | 1.000 % | 0 of 1 | 1.000 % | 2.0 |" in text
