"""The report for people: the plan, where its time and memory go, and what is proven about it."""

from collections.abc import Callable, Iterator, Sequence
from math import exp, isfinite

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from darts_parallel.config import OFFLOADS, SPACES
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.errors import Amounts
from darts_parallel.exact import USEFUL_SLACK, Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner import STEP, offload_slopes, out_of_memory
from darts_parallel.plans import Plan, left_out
from darts_parallel.problem import GIB, Problem, order_label
from darts_parallel.report.format import fits_label, table_of, term_words
from darts_parallel.report.format import number as _number
from darts_parallel.report.format import percent as _percent
from darts_parallel.report.format import seconds as _seconds
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.stages import stage_table
from darts_parallel.report.switches import averaged_switches

Takers = Callable[[Plan], Sequence[str]]
"""Names the trainers that take a plan."""
MAX_ALTERNATIVES = 6
MOST_SHOWN = 6
"""Figures of the hardware whose worth is printed."""


def why_it_loses(cost: CostBreakdown, alternative: CostBreakdown) -> str:
    """Return the term that grows most from the plan to a slower one, e.g. `+0.112 s bubble`."""
    grown = dict(alternative.breakdown_s)
    for term, seconds in cost.breakdown_s.items():
        grown[term] = grown.get(term, 0.0) - seconds
    if not grown or max(grown.values()) <= 0:
        return "it is as fast"
    name = max(grown, key=lambda term: grown[term])
    return f"+{_seconds(grown[name])} {term_words(name)}"


def alternatives_table(outcome: Outcome, takers: Takers | None = None) -> Table | None:
    """Return the best plans of other pipeline configurations; None where none was met.

    Args:
        outcome: The chosen plan; its search met the others.
        takers: Names the trainers that take a plan; None: no trainer is named.
    """
    if outcome.result is None:
        return None
    met = [pair for pair in outcome.result.alternatives if pair[1] != outcome.plan]
    if not met:
        return None
    table = table_of(
        "\nAlternatives",
        "slower by>",
        "plan",
        "fits>",
        "why it loses",
    )
    best = outcome.cost
    for seconds, other in met[:MAX_ALTERNATIVES]:
        slower = f"{100 * (seconds / best.iteration_time_s - 1):.2f} %"
        if outcome.sure and outcome.sure.indistinguishable(best.iteration_time_s, seconds):
            slower = f"≈ {slower}"
        words = _alternative_words(outcome, other, takers)
        fits = fits_label(out_of_memory(other, outcome.problem))
        reason = why_it_loses(best, evaluate(other, outcome.problem))
        table.add_row(slower, escape(words), fits, reason)
    return table


def _alternative_words(outcome: Outcome, other: Plan, takers: Takers | None) -> str:
    """Describe another plan, its order of nodes where that differs, and the trainers that take it."""
    problem = outcome.problem
    words = other.describe(problem.training.global_batch_size)
    placed = order_label(problem.cluster.arranged(other.node_order))
    if placed and other.node_order != outcome.plan.node_order:
        words = f"{words} · {placed}"
    if takers is not None:
        words = f"{words} · for {', '.join(takers(other)) or 'no trainer'}"
    return words


NOTABLE = 5e-4
"""Relative differences below this read as none."""
STOPPED = {
    None: "",
    "user": "; stopped early, best plan so far",
    "time_limit": "; stopped by search.max_seconds, best plan so far",
}
"""Sentences of the report by what stopped a search."""


def claim(problem: Problem, cost: CostBreakdown, verifications: Sequence[Verification]) -> str:
    """Say what is proven of the plan over the whole space, in one clause."""
    kind = problem.config.space.kind
    answers = [v for v in verifications if v.space == kind or v.space not in SPACES]
    bounds = [entry.lower_bound_s for entry in answers if isfinite(entry.lower_bound_s)]
    bound = max(bounds, default=0.0)
    if bound <= 0:
        return "best found; no lower bound is known"
    space = _space_words(problem, answers[0].space)
    gap = cost.iteration_time_s / bound - 1.0
    proven = any(v.proven for v in answers)
    if proven and abs(gap) <= 1e-9:
        return f"optimal in the model ({space})"
    if gap < -1e-9:  # it lies next to the space: the first blocks of stages are recomputed
        reference = "the optimal uniform plan" if proven else "a proven bound of uniform plans"
        return f"best found; {_percent(-gap, 2)} faster than {reference} ({space})"
    above = _percent(gap, 2) if gap >= 1e-4 else "<0.01 %"
    if not proven and gap > USEFUL_SLACK:
        return f"best found; no useful bound: {above} above the proven one ({space})"
    reference = "optimal in the model" if proven else "a proven lower bound"
    return f"best found; {above} above {reference} ({space})"


def _space_words(problem: Problem, name: str) -> str:
    """Describe the space that was searched: its name, what was left out, the memory left free."""
    missing = left_out(problem.config, problem.model, problem.cluster, problem.measured)
    words = [name, *problem.config.space.pins, *missing]
    if problem.headroom:
        words.append(f"{_percent(problem.headroom, 0)} of memory free")
    return ", ".join(words)


def known_of(outcome: Outcome) -> str:
    """Say what is proven of the plan, or that it was given."""
    if outcome.result is None:
        if outcome.warning:
            return "no plan with these settings fits; this one needs least memory"
        return "given plan, not searched"
    return claim(outcome.problem, outcome.cost, outcome.answers)


def report_tables(outcome: Outcome, takers: Takers | None = None) -> list[Table]:
    """Return all tables of the report, the one of stages first.

    Args:
        outcome: The plan and what is known of it.
        takers: Names the trainers that take a plan, for the table of alternatives.
    """
    elasticities = outcome.elasticities or {}
    tables = [stage_table(outcome, every=True)]
    if outcome.plan.offload:
        tables.append(_offload_table(outcome.problem, outcome.plan))
    tables.append(_time_table(outcome.cost))
    if strongest(elasticities):
        tables.append(_sensitivity_table(elasticities))
    if outcome.answers:
        tables.append(checks_table(outcome.answers, every=True))
    others = alternatives_table(outcome, takers)
    return tables if others is None else [*tables, others]


def report_notes(outcome: Outcome) -> Iterator[str]:
    """Yield the lines below the tables: how the search went, and what signs in the tables mean."""
    yield from _indistinguishable(outcome)
    if outcome.problem.training.software:
        yield from averaged_switches(outcome.problem)
    if outcome.result is not None:
        yield from _search_lines(outcome, outcome.result)


def _indistinguishable(outcome: Outcome) -> Iterator[str]:
    """Say what the sign next to an alternative means, where one has it."""
    known = outcome.sure
    if known is None or outcome.result is None:
        return
    best = outcome.cost.iteration_time_s
    if any(known.indistinguishable(best, seconds) for seconds, _ in outcome.result.alternatives):
        width = 100 * (exp(known.difference) - 1.0)
        yield f"≈ too close to call: below {width:.0f} % the model may rank plans wrongly"


def _offload_table(problem: Problem, plan: Plan) -> Table:
    """Return shares in host memory, and what one more percent of each costs."""
    table = table_of(
        "\nIn host memory",
        "k>",
        *(f"{kind}>" for kind in OFFLOADS),
        *(f"1 % more {kind}" for kind in OFFLOADS),
    )
    slopes = offload_slopes(plan, problem)
    for stage, shares in enumerate(plan.offload):
        worth = []
        for kind in OFFLOADS:
            seconds = slopes[stage][kind]["iteration_time_s"] / 100
            gib = slopes[stage][kind]["memory_bytes"] / 100 / GIB
            worth.append(f"{seconds:+.2g} s, {gib:+.2g} GiB")
        table.add_row(str(stage), *(f"{100 * share:.1f} %" for share in shares), *worth)
    return table


def _time_table(cost: CostBreakdown) -> Table:
    table = table_of(
        "\nTime per iteration",
        "cause",
        "seconds>",
        "share>",
        "",
    )
    for name, seconds in cost.breakdown_s.items():
        share = seconds / cost.iteration_time_s
        style = "dim" if seconds == 0 else ""
        bar = "█" * round(40 * share)
        cells = (term_words(name), _number(seconds, cost.iteration_time_s), _percent(share), bar)
        table.add_row(*cells, style=style)
    table.add_row("total", _number(cost.iteration_time_s), "100.0 %", "", style="bold")
    return table


def effect(elasticity: float) -> float:
    """Return the relative change of the seconds when a figure grows by a factor of `STEP`, e.g. -0.031."""
    return float(STEP**elasticity) - 1.0


def strongest(elasticities: Amounts) -> list[tuple[str, float]]:
    """Name the figures that matter most, and what 10 % more of each does to the seconds."""
    changes = [(effect(elasticity), name) for name, elasticity in elasticities.items()]
    changes.sort(key=lambda entry: -abs(entry[0]))
    found = []
    for change, name in changes[:MOST_SHOWN]:
        if abs(change) >= NOTABLE:
            words = name.removeprefix("devices.").replace(".", " ").replace("_", " ")
            found.append((words, change))
    return found


def _sensitivity_table(elasticities: Amounts) -> Table:
    table = table_of("\nIf 10 % larger", "quantity", "iteration changes by>")
    for words, change in strongest(elasticities):
        table.add_row(escape(words), f"{100 * change:+.2f} %")
    return table


def _search_lines(outcome: Outcome, result: SearchResult) -> Iterator[str]:
    descended = result.gradient_iteration_time_s
    if result.why:
        who = "" if descended is not None else f"{result.method.replace('_', ' ')}: "
        yield f"{who}{result.why}"
    if not result.plans_evaluated:
        return
    if descended is None:
        yield f"{result.plans_evaluated:,} plans or parts of plans in {result.seconds:.1f} s"
        return
    yield f"{stages_line(outcome)}; kept: {kept_words(result)}"
    counts = f"{result.steps} steps × {result.restarts} restarts, seed {result.seed}"
    seconds = f"{result.plans_evaluated:,} plans evaluated in {result.seconds:.1f} s"
    yield f"{counts}, {seconds}{STOPPED[result.stopped_by]}"


def stages_line(outcome: Outcome, *, seconds: bool = True) -> str:
    """Return the gap of every stage of the search to the best known plan, and its seconds if asked."""
    stages = []
    for stage in outcome.stages:
        gap = outcome.gap(stage)
        state = "no fit" if gap is None else f"{100 * gap + 0.0:+.2f}"
        time = f"{_number(stage.iteration_time_s)} s, " if seconds else ""
        stages.append(f"{stage.name} {time}{state}{' %' * seconds}")
    return " → ".join(stages)


def kept_words(result: SearchResult) -> str:
    """Say which plan of the search was kept."""
    descended = result.gradient_iteration_time_s
    if descended is not None and result.iteration_time_s > descended * (1.0 + 1e-9):
        return "a simpler plan"
    if result.method == "gradient":
        return "the polished plan"
    return f"the plan of {result.method.replace('_', ' ')}"


def checks_table(answers: Sequence[Verification], *, every: bool = False) -> Table:
    """Return a line for every exact method; `every` adds what it took, and a title."""
    title = "\nVerification" if every else None
    table = table_of(title, "method", "answer")
    table.show_header = every
    for entry in answers:
        words = Text(_check_words(entry), no_wrap=not every, overflow="ellipsis")
        if every:
            words.append(f" · {entry.seconds:.1f} s, {entry.plans_evaluated:,} plans")
        table.add_row(entry.name.replace("_", " "), words)
    return table


def _check_words(entry: Verification) -> str:
    """Say over which space a method searched, what it found, how far the plan is, and what is proven."""
    words = [entry.space]
    if entry.plan is not None:
        words.append(f"{_number(entry.iteration_time_s)} s")
    if isfinite(entry.gap):
        # adding 0.0 turns -0.0 into 0.0
        words.append(f"gap {round(100 * entry.gap, 2) + 0.0:+.2f} %")
    claim = baseline_claim(entry)
    words.append(claim)
    if entry.note and entry.note != claim:
        words.append(entry.note)
    return " · ".join(words)


def baseline_claim(entry: Verification) -> str:
    """Say what a method knows of its own plan."""
    if entry.proven:
        return "optimal in the model" if entry.plan is not None else "no plan fits"
    found = "best found" if entry.plan is not None else "no plan found"
    return f"{found}, bound {_number(entry.lower_bound_s)}" if entry.lower_bound_s > 0 else found
