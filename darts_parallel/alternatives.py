"""Other good plans in the report, and why each of them loses."""

from rich.table import Table

from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.formatting import seconds as _seconds
from darts_parallel.formatting import table_of, term_words
from darts_parallel.placement import order_label
from darts_parallel.problem import Problem
from darts_parallel.records import SearchResult
from darts_parallel.strategy import Plan

MAX_ALTERNATIVES = 5


def why_it_loses(cost: CostBreakdown, alternative: CostBreakdown) -> str:
    """The breakdown term that grows most from the plan to a slower one, e.g. `+0.112 s pipeline bubble`.

    Args:
        cost: Of the plan.
        alternative: Of the slower plan.
    """
    terms = dict.fromkeys((*cost.breakdown_s, *alternative.breakdown_s))
    grown = {t: alternative.breakdown_s.get(t, 0.0) - cost.breakdown_s.get(t, 0.0) for t in terms}
    if not grown or max(grown.values()) <= 0:
        return "it is as fast"
    name = max(grown, key=lambda term: grown[term])
    return f"+{_seconds(grown[name])} {term_words(name)}"


def alternatives_table(
    problem: Problem, result: SearchResult, plan: Plan, cost: CostBreakdown
) -> Table | None:
    """The best plans of other outer choices; None where none was met.

    Args:
        problem: What the plans are for.
        result: Of the search.
        plan: The plan that the report is about.
        cost: Of that plan.
    """
    others = [(seconds, other) for seconds, other in result.alternatives if other != plan][:MAX_ALTERNATIVES]
    if not others:
        return None
    table = table_of("\nAlternatives", ("slower by", "right"), ("plan", "left"), ("why it loses", "left"))
    for seconds, other in others:
        slower = f"{100 * (seconds / cost.iteration_time_s - 1):.2f} %"
        words = other.describe(problem.training.global_batch_size)
        if other.node_order != plan.node_order:
            words = f"{words} · {order_label(problem.cluster.arranged(other.node_order))}"
        table.add_row(slower, words, why_it_loses(cost, evaluate(other, problem)))
    return table
