"""The report for people: the plan, where its time and memory go, and what is proven about it."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, isfinite

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from darts_parallel.config import OFFLOADS, SPACES
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner import STEP, Intervals, intervals, offload_slopes, out_of_memory
from darts_parallel.plans import Plan, batch_note, left_out
from darts_parallel.problem import GIB, Problem, bill, memory_unit, order_label
from darts_parallel.report.format import fits_label, kind_counts, rank_ranges, table_of, term_words
from darts_parallel.report.format import layer_ranges as layer_ranges
from darts_parallel.report.format import number as _number
from darts_parallel.report.format import percent as _percent
from darts_parallel.report.format import run_lengths as run_lengths
from darts_parallel.report.format import seconds as _seconds

Takers = Callable[[Plan], Sequence[str]]
"""Names the trainers that take a plan."""
MAX_ALTERNATIVES = 6
MOST_SHOWN = 6
"""Figures of the hardware whose worth is printed."""


def why_it_loses(cost: CostBreakdown, alternative: CostBreakdown) -> str:
    """Return the term that grows most from the plan to a slower one, e.g. `+0.112 s pipeline bubble`."""
    terms = dict.fromkeys((*cost.breakdown_s, *alternative.breakdown_s))
    grown = {t: alternative.breakdown_s.get(t, 0.0) - cost.breakdown_s.get(t, 0.0) for t in terms}
    if not grown or max(grown.values()) <= 0:
        return "it is as fast"
    name = max(grown, key=lambda term: grown[term])
    return f"+{_seconds(grown[name])} {term_words(name)}"


def alternatives_table(
    problem: Problem,
    result: SearchResult,
    plan: Plan,
    cost: CostBreakdown,
    known: Intervals | None = None,
    takers: Takers | None = None,
) -> Table | None:
    """Return the best plans of other outer choices; None where none was met.

    Args:
        known: Its intervals, which say what differences mean nothing.
        takers: Names the trainers that take a plan; None: they are not named.
    """
    others = [(seconds, other) for seconds, other in result.alternatives if other != plan][
        :MAX_ALTERNATIVES
    ]
    if not others:
        return None
    table = table_of(
        "\nAlternatives",
        ("slower by", "right"),
        ("plan", "left"),
        ("fits", "right"),
        ("why it loses", "left"),
    )
    for seconds, other in others:
        slower = f"{100 * (seconds / cost.iteration_time_s - 1):.2f} %"
        if known is not None and known.indistinguishable(cost.iteration_time_s, seconds):
            slower = f"≈ {slower}"
        words = other.describe(problem.training.global_batch_size)
        if other.node_order != plan.node_order:
            words = f"{words} · {order_label(problem.cluster.arranged(other.node_order))}"
        if takers is not None:
            words = f"{words} · for {', '.join(takers(other)) or 'no trainer'}"
        fits = fits_label(out_of_memory(other, problem))
        table.add_row(slower, escape(words), fits, why_it_loses(cost, evaluate(other, problem)))
    return table


NOTABLE = 5e-4
"""Relative differences below this read as none."""
MEMORY_WARNING = 0.95
NOTABLE_RISK = 0.05
"""Chance of running out of memory from which on the table of stages says it."""
STOPPED = {
    None: "",
    "user": "; stopped early, best plan so far",
    "time_limit": "; stopped by search.max_seconds, best plan so far",
}
"""Sentences of the report by what stopped a search."""


def layerwise_sentence(
    problem: Problem, cost: CostBreakdown, verifications: Sequence[Verification]
) -> str | None:
    """Say what the freedom of the space saves over uniform plans; None where nothing was compared."""
    kind = problem.config.space.kind
    known = [v for v in verifications if v.space == "uniform" and isfinite(v.iteration_time_s)]
    if kind == "uniform" or not known:
        return None
    freedom = {"layerwise": "layer-wise", "stagewise": "stage-wise"}[kind] + " freedom"
    best = min(known, key=lambda v: v.iteration_time_s)
    uniform = "the best uniform plan" + ("" if best.proven else " found")
    saved = 1.0 - cost.iteration_time_s / best.iteration_time_s
    if saved > NOTABLE:
        return f"{freedom} saves {_percent(saved)} over {uniform}"
    pace = f"is {_percent(-saved)} faster" if saved < -NOTABLE else "is as fast"
    return f"{freedom} brings nothing: {uniform} {pace}"


def claim(problem: Problem, cost: CostBreakdown, verifications: Sequence[Verification]) -> str:
    """Say what is proven of the plan over the whole space, in one clause."""
    kind = problem.config.space.kind
    without = " and ".join(
        left_out(problem.config, problem.model, problem.cluster, problem.measured)
    )
    free = ""
    if problem.headroom:
        chance = problem.config.space.out_of_memory
        free = f", {_percent(problem.headroom, 0)} of all memory left free (space.out_of_memory={chance:g})"
    mine = [v for v in verifications if v.space == kind or v.space not in SPACES]
    space = (
        f"the {mine[0].space if mine else kind} space"
        + (f" without {without}" if without else "")
        + free
    )
    bounds = [v.lower_bound_s for v in mine if isfinite(v.lower_bound_s) and v.lower_bound_s > 0]
    if not bounds:
        return "best found; no lower bound is known"
    slack = cost.iteration_time_s / max(bounds) - 1.0
    proven = any(v.proven for v in mine)
    if proven and abs(slack) <= 1e-9:
        return f"optimal in the model, over {space}"
    above = _percent(slack, 2) if slack >= 1e-4 else "less than 0.01 %"
    bound = "the plan that is optimal in the model" if proven else "a proven lower bound"
    return f"best found; {above} above {bound}, over {space}"


def render(
    problem: Problem,
    result: SearchResult | None,
    plan: Plan,
    cost: CostBreakdown,
    verifications: Sequence[Verification],
    console: Console,
    elasticities: dict[str, float] | None = None,
    takers: Takers | None = None,
) -> list[Table]:
    """Print the report, and return its tables.

    Args:
        console: Where to.
        elasticities: What `sensitivity` says of the plan; may be missing.
        takers: Names the trainers that take a plan, of alternatives.
    """
    shown: list[Table] = []

    def show(table: Table) -> None:
        shown.append(table)
        console.print(table)

    given = "given plan, not searched"
    known = given if result is None else claim(problem, cost, verifications)
    sure = intervals(plan, problem, cost, elasticities) if elasticities else None
    _headline(problem, plan, cost, known, console, sure)
    show(_stage_table(problem, plan, cost, sure))
    if plan.offload:
        show(_offload_table(problem, plan))
    show(_time_table(cost))
    if strongest(elasticities or {}):
        show(_sensitivity_table(elasticities or {}))
    if result is not None:
        _search_lines(result, console)
    if verifications:
        show(_verification_table(verifications))
        _verification_notes(verifications, console)
    if result is not None:
        others = alternatives_table(problem, result, plan, cost, sure, takers)
        if others is not None:
            show(others)
            _print_indistinguishable(result, cost, sure, console)
        console.print()
    sentence = layerwise_sentence(problem, cost, verifications)
    if sentence is not None:
        console.print(Text(sentence[0].upper() + sentence[1:] + "."))
    return shown


def _print_indistinguishable(
    result: SearchResult, cost: CostBreakdown, known: Intervals | None, console: Console
) -> None:
    """Say what the sign next to an alternative means, where one has it."""
    if known is None:
        return
    close = sum(known.indistinguishable(cost.iteration_time_s, s) for s, _ in result.alternatives)
    if close:
        width = 100 * (exp(known.difference) - 1.0)
        line = f"≈ indistinguishable: the model tells two plans of a job apart from {width:.0f} % on (80 %)"
        console.print(line, style="dim", highlight=False)


def _headline(
    problem: Problem,
    plan: Plan,
    cost: CostBreakdown,
    known: str,
    console: Console,
    sure: Intervals | None,
) -> None:
    config = problem.config
    size = f"{problem.model.num_parameters:,} parameters"
    if problem.training.lora_rank:
        size += f", {problem.model.num_trained_parameters:,} trained"
    job = (
        f"{config.model.name} ({size}) on {config.cluster.name}, {problem.cluster.num_devices} GPUs"
    )
    console.print(Text(job, "bold"))
    console.print(Text(plan.describe(problem.training.global_batch_size), "bold cyan"))
    placed = order_label(problem.cluster.arranged(plan.node_order))
    if placed:
        console.print(Text(f"nodes along the pipeline: {placed}"))
    within = f" {sure.label()}" if sure is not None else ""
    speed = f"{_seconds(cost.iteration_time_s)}{within} per iteration · {cost.tokens_per_s:,.0f} tokens/s"
    fits = f" · fits: {_percent(1.0 - sure.any_out_of_memory, 0)}" if sure is not None else ""
    console.print(Text(f"{speed} · MFU {_percent(cost.mfu)}{fits}"))
    amount = bill(config.objective, problem.cluster, cost.iteration_time_s)
    if amount is not None:
        nodes = ", ".join(f"{g.count} × {g.gpus} {g.device.name}" for g in problem.cluster.groups)
        console.print(
            Text(f"{amount.label()}, {config.objective.num_iterations:,.0f} iterations on {nodes}")
        )
    console.print(Text(known))
    training = problem.training
    figures = f"{training.software}'s figures"
    if training.software is None:
        figures = f"an average framework's figures (trainer={config.trainer.name})"
    batch = f"{training.global_batch_size:,} × {training.seq_len:,} tokens"
    console.print(Text(f"{batch} · {training.precision} · {training.optimizer} · {figures}"))
    note = batch_note(problem.cluster.num_devices, training.global_batch_size)
    if note:
        console.print(Text(note))
    if not cost.feasible:
        console.print(
            Text("This plan does not fit: a stage is over its memory or breaks a rule.", "red")
        )


def _stage_table(
    problem: Problem, plan: Plan, cost: CostBreakdown, sure: Intervals | None = None
) -> Table:
    # the chance of running out of memory is worth a column only where there is one
    risky = sure is not None and max(sure.out_of_memory) >= NOTABLE_RISK
    more = [("out of memory", "right")] if risky else []
    paced = [("s/micro-batch", "right")] if cost.stage_times_s else []
    table = table_of(
        "\nStages",
        ("k", "right"),
        ("ranks", "right"),
        ("layers", "left"),
        ("strategies", "left"),
        *paced,
        ("memory / capacity", "right"),
        *more,
    )
    names = [layer.name for layer in problem.model.layers]
    kinds = [layer.kind for layer in problem.model.layers]
    size, slowest = problem.cluster.num_devices // plan.pp, max(cost.stage_times_s, default=0.0)
    cluster = problem.cluster.arranged(plan.node_order)
    chunks = list(pairwise(plan.boundaries))
    for k in range(plan.pp):
        used, capacity = cost.memory_bytes[k], cost.capacity_bytes[k]
        share = used / capacity
        colour = "red" if share > 1 else "yellow" if share > MEMORY_WARNING else ""
        unit, size_of_unit = memory_unit(capacity)
        pair = f"{used / size_of_unit:.1f} / {capacity / size_of_unit:.1f}"
        memory = Text(f"{pair} {unit} {100 * share:>3.0f} %", colour)
        ranks = rank_ranges(cluster.pipeline_ranks[k * size : (k + 1) * size])
        if not cluster.homogeneous:
            ranks = f"{ranks} {escape(cluster.stage_group(k, plan.pp).device.name)}"
        mine, times = chunks[k :: plan.pp], cost.stage_times_s[k : k + 1]
        pace = [
            Text(_number(seconds, slowest), "bold" if seconds == slowest else "")
            for seconds in times
        ]
        layers = "; ".join(layer_ranges(names[a:b]) + kind_counts(kinds, a, b) for a, b in mine)
        strategies = run_lengths([s for first, end in mine for s in plan.layers[first:end]])
        chance = [f"{100 * sure.out_of_memory[k]:.0f} %"] if risky and sure is not None else []
        table.add_row(str(k), ranks, layers, strategies, *pace, memory, *chance)
    return table


def _offload_table(problem: Problem, plan: Plan) -> Table:
    """Return shares in host memory, and what one more percent of each costs."""
    table = table_of(
        "\nIn host memory",
        ("k", "right"),
        *((kind, "right") for kind in OFFLOADS),
        *((f"1 % more {kind}", "left") for kind in OFFLOADS),
    )
    for k, (shares, slopes) in enumerate(
        zip(plan.offload, offload_slopes(plan, problem), strict=True)
    ):
        pairs = [
            (slopes[kind]["iteration_time_s"], slopes[kind]["memory_bytes"]) for kind in OFFLOADS
        ]
        worth = [f"{seconds / 100:+.2g} s, {size / 100 / GIB:+.2g} GiB" for seconds, size in pairs]
        table.add_row(str(k), *(f"{100 * share:.1f} %" for share in shares), *worth)
    return table


def _time_table(cost: CostBreakdown) -> Table:
    table = table_of(
        "\nTime per iteration",
        ("cause", "left"),
        ("seconds", "right"),
        ("share", "right"),
        ("", "left"),
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


def strongest(elasticities: dict[str, float]) -> list[tuple[str, float]]:
    """Name the figures that matter most, and what 10 % more of each does to the seconds."""
    changes = sorted(
        ((effect(x), name) for name, x in elasticities.items()), key=lambda e: -abs(e[0])
    )
    return [
        (name.removeprefix("devices.").replace(".", " ").replace("_", " "), change)
        for change, name in changes[:MOST_SHOWN]
        if abs(change) >= NOTABLE
    ]


def _sensitivity_table(elasticities: dict[str, float]) -> Table:
    table = table_of("\nTen percent more of", ("figure", "left"), ("time", "right"))
    for words, change in strongest(elasticities):
        table.add_row(escape(words), f"{100 * change:+.2f} %")
    return table


def _search_lines(result: SearchResult, console: Console) -> None:
    console.print(Text("\nSearch", "bold"))
    descended = result.gradient_iteration_time_s
    if result.why:
        who = "" if descended is not None else f"{result.method.replace('_', ' ')}: "
        console.print(f"{who}{result.why}", highlight=False, markup=False)
    if descended is None:
        count = f"{result.plans_evaluated:,} plans or parts of plans"
        console.print(f"{count} in {result.seconds:.1f} s", highlight=False)
        return
    console.print(_taken_steps(result, descended), highlight=False)
    counts = f"{result.steps} steps × {result.restarts} restarts, seed {result.seed}"
    seconds = f"{result.plans_evaluated:,} plans evaluated in {result.seconds:.1f} s"
    console.print(f"{counts}, {seconds}{STOPPED[result.stopped_by]}", highlight=False)


def _taken_steps(result: SearchResult, descended: float) -> str:
    """Describe the rounded plan of the descent, the polished one, and the plan that was taken."""
    final = result.iteration_time_s

    def step(word: str, seconds: float) -> str:
        return f"{word} {_number(seconds)} s ({100 * (seconds / final - 1) + 0.0:+.2f} %)"

    way = f"{step('raw', result.raw_iteration_time_s)} → {step('polished', descended)}"
    if final > descended * (1.0 + 1e-9):
        return f"{way}; taken: one of fewer strategies or more even stages, {_number(final)} s"
    if result.method == "gradient":
        return f"{way}; taken: the polished plan of the gradient search"
    name = result.method.replace("_", " ")
    return f"{way} → {name} {_number(final)} s; taken: the plan of {name}, which is better"


def _verification_table(verifications: Sequence[Verification]) -> Table:
    table = table_of(
        "\nVerification",
        ("baseline", "left"),
        ("space", "left"),
        ("s/iteration", "right"),
        ("gap", "right"),
        ("claim", "left"),
        ("seconds", "right"),
        ("plans", "right"),
    )
    for v in verifications:
        # adding 0.0 turns -0.0 into 0.0
        gap = f"{round(100 * v.gap, 2) + 0.0:+.2f} %" if isfinite(v.gap) else "-"
        count = (
            f"{v.plans_evaluated:,}"
            if v.plans_evaluated < 1e6
            else f"{v.plans_evaluated / 1e6:.1f} M"
        )
        table.add_row(
            v.name.replace("_", " "),
            v.space,
            _number(v.iteration_time_s),
            gap,
            _baseline_claim(v),
            f"{v.seconds:.1f}",
            count,
        )
    return table


def _verification_notes(verifications: Sequence[Verification], console: Console) -> None:
    for v in verifications:
        if v.note and v.note != _baseline_claim(v):
            console.print(
                f"{v.name.replace('_', ' ')}: {escape(v.note)}", style="dim", highlight=False
            )
    console.print(
        "gap: this plan against the baseline's; negative where this plan is faster", style="dim"
    )


def _baseline_claim(entry: Verification) -> str:
    if entry.proven:
        return "optimal in the model" if entry.plan is not None else "no plan fits"
    found = "best found" if entry.plan is not None else "no plan found"
    return f"{found}, bound {_number(entry.lower_bound_s)}" if entry.lower_bound_s > 0 else found
