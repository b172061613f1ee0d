import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from darts_parallel.cost.evaluation import CostBreakdown
from darts_parallel.exact.result import Verification
from darts_parallel.gradient.step_record import SearchResult
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report.format import layer_ranges, run_lengths
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.screen import render
from darts_parallel.report.text import (
    MAX_ALTERNATIVES,
    claim,
    why_it_loses,
)
from tests.report.conftest import FoundPlan

NAN, INF = float("nan"), float("inf")


def render_text(
    problem: Problem,
    result: SearchResult | None,
    plan: Plan,
    cost: CostBreakdown,
    verifications: Sequence[Verification],
) -> str:
    """The report with all its tables, as a pipe or a file gets it."""
    out = StringIO()
    output = replace(problem.config.output, verbose=True)
    verbose = replace(problem, config=replace(problem.config, output=output))
    outcome = Outcome(verbose, plan, cost, result, verifications)
    render(outcome, Console(file=out, width=100, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def entry(
    found: FoundPlan, space: str, factor: float, *, proven: bool = True, note: str = ""
) -> Verification:
    """An answer whose plan takes `factor` times as long; unproven ones have a bound 10 % lower."""
    seconds = found.result.iteration_time_s * factor
    name = "exhaustive" if space == "uniform" else "dynamic_programming"
    bound = seconds if proven else 0.9 * seconds
    return Verification(
        name, found.plan, seconds, 1 / factor - 1, 1.25, 12_345_678, proven, space, bound, note
    )


def test_the_report_says_everything_once(found: FoundPlan) -> None:
    answers = [
        entry(found, "uniform", 1.013),
        entry(found, "layerwise", 1.0, note="took [a] while."),
    ]
    text = " ".join(render_text(*found, answers).split())
    for words in (
        found.plan.describe(found.problem.training.global_batch_size),
        "MFU",
        "recomputation",
        "sharding (ZeRO-2/3)",
        f"repaired {found.result.raw_iteration_time_s:.6f} s",
        "-1.28 %",
        "· took [a] while.",
        "optimal in the model (layerwise, pp=4, cp 1, vpp 1)",
    ):
        assert text.count(words) == 1, words


def test_no_line_is_wider_than_100_columns_and_none_has_colour_codes(found: FoundPlan) -> None:
    answers = [entry(found, "uniform", 1.013), entry(found, "layerwise", 1.0, proven=False)]
    text = render_text(*found, answers)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text


def test_a_given_plan_is_reported_without_a_search(found: FoundPlan) -> None:
    text = render_text(*found._replace(result=None), [])
    assert "given plan, not searched" in text
    for words in ("polish", "Alternatives", "Verification"):
        assert words not in text


def test_alternatives_are_at_most_five_other_plans_with_a_reason(found: FoundPlan) -> None:
    same = (found.result.iteration_time_s, found.plan)
    several = replace(found.result, alternatives=(same, *found.result.alternatives * 9))
    text = render_text(*found._replace(result=several), [])
    shown = text[text.index("why it loses") :]
    assert (
        shown.count("s compute") + shown.count("s pipeline") + shown.count("sync")
        <= MAX_ALTERNATIVES
    )
    assert len(re.findall(r"%  dp \d", shown)) == MAX_ALTERNATIVES


def test_why_it_loses_names_the_term_that_grows_most(found: FoundPlan) -> None:
    terms = found.cost.breakdown_s
    slower = terms | {
        "pipeline_bubble": terms["pipeline_bubble"] + 0.112,
        "compute": terms["compute"] + 0.1,
    }
    assert why_it_loses(found.cost, replace(found.cost, breakdown_s=slower)) == "+0.112 s bubble"
    assert why_it_loses(found.cost, found.cost) == "it is as fast"


@pytest.mark.parametrize(
    ("factor", "proven", "words"),
    [
        (1.0, True, "optimal in the model"),
        (0.8, True, "best found; 25.00 % above optimal in the model"),
        (0.99999, True, "best found; <0.01 % above optimal in the model"),
        (1.0, False, "best found; no useful bound: 11.11 % above the proven one"),
    ],
)
def test_a_claim_is_optimal_only_where_proven(
    found: FoundPlan, factor: float, proven: bool, words: str
) -> None:
    assert (
        claim(found.problem, found.cost, [entry(found, "layerwise", factor, proven=proven)])
        == f"{words} (layerwise, pp=4, cp 1, vpp 1)"
    )


def test_a_close_lower_bound_is_named(found: FoundPlan) -> None:
    seconds = found.cost.iteration_time_s
    answer = replace(entry(found, "layerwise", 1.0, proven=False), lower_bound_s=seconds / 1.04)
    said = claim(found.problem, found.cost, [answer])
    assert said == "best found; 4.00 % above a proven lower bound (layerwise, pp=4, cp 1, vpp 1)"


def test_a_proof_over_the_uniform_space_proves_nothing_for_a_layerwise_plan(
    found: FoundPlan,
) -> None:
    said = claim(found.problem, found.cost, [entry(found, "uniform", 1.0)])
    assert said == "best found; no lower bound is known"


def test_a_note_that_repeats_the_claim_is_not_printed(found: FoundPlan) -> None:
    answer = entry(found, "uniform", 1.0, note="optimal in the model")
    text = render_text(*found, [answer])
    assert text.count("optimal in the model") == 1


def test_the_steps_of_a_job_are_hours_without_dollars_too(found: FoundPlan) -> None:
    config = found.problem.config
    long = replace(config, objective=replace(config.objective, num_iterations=1e9))
    text = render_text(replace(found.problem, config=long), *found[1:], [])
    hours = 1e9 * found.cost.iteration_time_s / 3600
    assert f"{hours:,.2f} hours for 1,000,000,000 iterations" in text
    assert "hours for" not in render_text(*found, [])


def test_a_baseline_without_a_plan_is_reported(found: FoundPlan) -> None:
    none = replace(
        entry(found, "layerwise", 1.0, proven=False),
        plan=None,
        iteration_time_s=INF,
        gap=NAN,
        lower_bound_s=0.0,
    )
    text = render_text(*found, [none])
    assert "no plan found" in text
    assert "nan" not in text
    assert "inf" not in text


def test_a_plan_over_its_memory_is_marked(found: FoundPlan) -> None:
    over = replace(
        found.cost,
        feasible=False,
        memory_bytes=tuple(1.5 * size for size in found.cost.capacity_bytes),
    )
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system="standard")
    render(Outcome(found.problem, found.plan, over), console)
    out = console.file
    assert isinstance(out, StringIO)
    assert "This plan does not fit" in out.getvalue()
    assert "150 %" in out.getvalue()
    assert "\x1b[31m" in out.getvalue()


def test_layers_are_named_compactly() -> None:
    names = ["embedding", "layers.0", "layers.1", "layers.2", "head", "loss"]
    assert layer_ranges(names) == "embedding, layers 0-2, head, loss"
    assert layer_ranges(["layers.7"]) == "layer 7"


def test_strategies_are_counted_in_runs() -> None:
    one, two = LayerStrategy(tp=1, dp=2, zero_stage=1), LayerStrategy(tp=2, dp=1)
    assert run_lengths([one, one, two, one]) == "2 × tp1 z1, 1 × tp2 z0, 1 × tp1 z1"
    full = replace(one, recompute="full")
    assert run_lengths([full] * 6 + [one] * 2 + [two]) == (
        "8 layers tp1 z1, 6 recomputed, 1 × tp2 z0"
    )
    assert run_lengths([one, full]) == "1 × tp1 z1, 1 × tp1 z1 full"
    assert run_lengths([full, full]) == "2 × tp1 z1 full"
