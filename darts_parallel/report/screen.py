"""The report on the terminal: the answer in few lines, or all tables where `output.verbose` asks for them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner import uncalibrated
from darts_parallel.plans import Plan, batch_note
from darts_parallel.problem import Problem, bill, memory_unit, order_label
from darts_parallel.report.failures import failure_lines
from darts_parallel.report.format import (
    kind_counts,
    layer_ranges,
    number,
    one_line,
    percent,
    rank_ranges,
    seconds,
    table_of,
    term_words,
)
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.switches import switch_savings
from darts_parallel.report.text import (
    DOES_NOT_FIT,
    NOTABLE_RISK,
    STOPPED,
    Takers,
    baseline_claim,
    known_of,
    memory_colour,
    report_notes,
    report_tables,
    stages_line,
)

MOST_STAGES = 8
"""Different lines of stages up to which all are printed."""
NOTABLE_TIME = 0.01
"""Share of the iteration from which on a cause is printed."""


def render(outcome: Outcome, console: Console, takers: Takers | None = None) -> list[Table]:
    """Print the report, and return all its tables.

    Args:
        outcome: The plan and what is known of it.
        console: Where the report is printed.
        takers: Names the trainers that take a plan, for the table of alternatives.
    """
    tables = report_tables(outcome, outcome.sure, takers)
    for line in headline(outcome):
        console.print(line)
    if outcome.problem.config.output.verbose:
        for shown in tables:
            console.print(shown)
        console.print()
        for note in report_notes(outcome, outcome.sure):
            console.print(Text(note))
        return tables
    console.print()
    console.print(stage_lines(outcome))
    console.print(Text(_times(outcome)))
    if outcome.answers:
        console.print()
        console.print(_checks(outcome))
    if outcome.result is not None:
        console.print(Text(f"search: {_search_words(outcome, outcome.result)}"))
    return tables


def headline(outcome: Outcome) -> list[Text]:
    """Return the job, the plan, its seconds, what is proven, and what was assumed.

    That no plan keeps the memory is line 4, whatever was assumed.
    """
    lines = list(_headline(outcome))
    if outcome.warning:
        lines.insert(3, Text(f"{outcome.warning}.", "red"))
    return lines


def _headline(outcome: Outcome) -> Iterator[Text]:
    """Yield the lines of the headline but the warning."""
    problem, plan, cost = outcome.problem, outcome.plan, outcome.cost
    yield Text(_job_words(problem), "bold")
    yield from (Text(words, "yellow") for words in outcome.assumed)
    yield Text(plan.describe(problem.training.global_batch_size), "bold cyan")
    within = fits = ""
    if outcome.sure is not None:
        within = f" {outcome.sure.label()}"
        fits = f" · fits: {percent(1.0 - outcome.sure.any_out_of_memory, 0)}"
    time = f"{seconds(cost.iteration_time_s)}{within} per iteration"
    speed = f"{cost.tokens_per_s:,.0f} tokens/s · MFU {percent(cost.mfu)}"
    yield Text(f"{time} · {speed}{fits}")
    if not cost.feasible:
        yield Text(DOES_NOT_FIT, "red")
    yield Text(known_of(outcome))
    yield Text(_training_words(problem))
    yield from (Text(note) for note in _job_notes(outcome) if note)


def _job_notes(outcome: Outcome) -> Iterator[str]:
    """Yield what few jobs have: unequal nodes, dollars, failures, a batch that divides badly, savings."""
    problem = outcome.problem
    yield outcome.not_priced
    placed = order_label(problem.cluster.arranged(outcome.plan.node_order))
    yield placed and f"nodes along the pipeline: {placed}"
    objective = problem.config.objective
    amount = bill(objective, problem.cluster, outcome.cost.iteration_time_s)
    if amount is not None:
        nodes = ", ".join(f"{g.count} × {g.gpus} {g.device.name}" for g in problem.cluster.groups)
        iterations = f"{objective.num_iterations:,.0f} iterations"
        yield f"{amount.label()}, {iterations} on {nodes}"
    if outcome.failures is not None:
        yield from failure_lines(outcome.failures)
    yield batch_note(problem.cluster.num_devices, problem.training.global_batch_size)
    yield from switch_savings(problem, outcome.plan)


def _job_words(problem: Problem) -> str:
    """Name the model with its size, and the cluster."""
    size = f"{problem.model.num_parameters:,} parameters"
    if problem.training.lora_rank:
        size += f", {problem.model.num_trained_parameters:,} trained"
    config = problem.config
    gpus = problem.cluster.num_devices
    return f"{config.model.name} ({size}) on {config.cluster.name}, {gpus} GPUs"


def _training_words(problem: Problem) -> str:
    """Name batch, precision, optimizer, the framework, and what was calibrated without runs."""
    training = problem.training
    framework = f"efficiencies of {training.software}"
    if training.software is None:
        framework = f"a generic framework (trainer={problem.config.trainer.name})"
    batch = f"{training.global_batch_size:,} × {training.seq_len:,} tokens"
    words = f"{batch} · {training.precision} · {training.optimizer} · {framework}"
    missing = uncalibrated(problem)
    return f"{words} · no runs: {', '.join(missing)}" if missing else words


class _StageLine(NamedTuple):
    """A line of the table of stages; equal stages share it."""

    device: str
    counts: tuple[tuple[str, int], ...]
    """Layers of every kind."""
    strategies: str
    time: str
    memory: str
    chance: str


def stage_lines(outcome: Outcome) -> Table:
    """Return a line for all stages that are equal; of many lines the first, last, slowest and fullest."""
    cost = outcome.cost
    lines: dict[_StageLine, list[int]] = {}
    for stage in range(outcome.plan.pp):
        lines.setdefault(_stage_line(outcome, stage), []).append(stage)
    rows = list(lines.items())
    if len(rows) > MOST_STAGES:
        full = [
            used / most for used, most in zip(cost.memory_bytes, cost.capacity_bytes, strict=True)
        ]
        shown = {0, outcome.plan.pp - 1, full.index(max(full))}
        if cost.stage_times_s:
            shown.add(cost.stage_times_s.index(max(cost.stage_times_s)))
        rows = [row for row in rows if shown & set(row[1])]
    columns = [("stage", "right"), ("ranks", "right"), ("layers", "left"), ("strategies", "left")]
    columns += [("micro-batch", "right")] * bool(cost.stage_times_s)
    columns.append(("memory", "right"))
    risky = any(line.chance for line in lines)
    table = table_of(None, *columns, *[("risk", "right")] * risky)
    for line, stages in rows:
        table.add_row(*_stage_cells(outcome, line, stages)[: len(table.columns)])
    hidden = len(lines) - len(rows)
    if hidden:
        table.add_row("", "", one_line(f"{hidden} more in report.html"), style="dim")
    return table


def _stage_line(outcome: Outcome, stage: int) -> _StageLine:
    """Return what the report says of a stage."""
    plan, cost, sure = outcome.plan, outcome.cost, outcome.sure
    layers = _layers_of(plan, [stage])
    kinds = Counter(outcome.problem.model.layers[i].kind for i in layers)
    labels = Counter(plan.layers[i].label() for i in layers)
    time = chance = ""
    if cost.stage_times_s:
        time = seconds(cost.stage_times_s[stage])
    if sure is not None and max(sure.out_of_memory) >= NOTABLE_RISK:
        chance = percent(sure.out_of_memory[stage], 0)
    cluster = outcome.problem.cluster.arranged(plan.node_order)
    device = "" if cluster.homogeneous else f" {cluster.stage_group(stage, plan.pp).device.name}"
    strategies = ", ".join(f"{count} × {label}" for label, count in labels.most_common())
    unit, unit_bytes = memory_unit(cost.capacity_bytes[stage])
    used = cost.memory_bytes[stage]
    memory = f"{used / unit_bytes:.1f} {unit} {percent(used / cost.capacity_bytes[stage], 0):>5}"
    return _StageLine(device, tuple(kinds.items()), strategies, time, memory, chance)


def _stage_cells(outcome: Outcome, line: _StageLine, stages: Sequence[int]) -> list[str | Text]:
    """Return the cells of stages that share a line."""
    plan, cost, first = outcome.plan, outcome.cost, stages[0]
    cluster = outcome.problem.cluster.arranged(plan.node_order)
    size = cluster.num_devices // plan.pp
    ranks = [cluster.pipeline_ranks[k * size + i] for k in stages for i in range(size)]
    held = _layers_of(plan, stages)
    kinds = [outcome.problem.model.layers[i].kind for i in held]
    layers = one_line(_names(outcome, held) + kind_counts(kinds, 0, len(kinds)))
    cells: list[str | Text] = [
        rank_ranges(stages),
        rank_ranges(ranks) + line.device,
        layers,
        one_line(line.strategies),
    ]
    times: list[str | Text] = []
    if cost.stage_times_s:
        slowest = cost.stage_times_s[first] == max(cost.stage_times_s)
        times.append(Text(line.time, "bold" if slowest else ""))
    colour = memory_colour(cost.memory_bytes[first] / cost.capacity_bytes[first])
    return [*cells, *times, Text(line.memory, colour), line.chance]


def _layers_of(plan: Plan, stages: Iterable[int]) -> list[int]:
    """Return the layers of some stages, in the order of the model."""
    return [layer for layer, stage in enumerate(plan.stage_of_layer) if stage in stages]


def _names(outcome: Outcome, layers: Sequence[int]) -> str:
    """Return the names of layers, a range for every run without a hole."""
    runs = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    names = ([outcome.layer_names[layer] for _, layer in run] for _, run in runs)
    return "; ".join(map(layer_ranges, names))


def _times(outcome: Outcome) -> str:
    """Return the seconds of every cause that takes a notable share."""
    cost = outcome.cost
    least = NOTABLE_TIME * cost.iteration_time_s
    causes = sorted(cost.breakdown_s.items(), key=lambda entry: -entry[1])
    shown = [f"{seconds(time)} {term_words(name)}" for name, time in causes if time >= least]
    return " · ".join(shown)


def _checks(outcome: Outcome) -> Table:
    """Return a line for every exact method."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for entry in outcome.answers:
        table.add_row(entry.name.replace("_", " "), one_line(_check_words(entry)))
    return table


def _check_words(entry: Verification) -> str:
    """Say over which space a method searched, what it found, how far the plan is, and what is proven."""
    words = [entry.space]
    if entry.plan is not None:
        words.append(f"{number(entry.iteration_time_s)} s")
    if isfinite(entry.gap):
        words.append(f"gap {round(100 * entry.gap, 2) + 0.0:+.2f} %")
    claim = baseline_claim(entry)
    words.append(claim)
    if entry.note and entry.note != claim:
        words.append(entry.note)
    return " · ".join(words)


def _search_words(outcome: Outcome, result: SearchResult) -> str:
    """Say what was found on the way, what was kept, and how long it took."""
    took = f"{result.seconds:.1f} s{STOPPED[result.stopped_by]}"
    if result.gradient_iteration_time_s is None:
        return f"{result.method.replace('_', ' ')}: {result.why}; {took}"
    return f"{stages_line(outcome, seconds=False)} %; {took}"
