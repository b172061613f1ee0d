"""The report on the terminal: the answer in few lines, or all tables where `output.verbose` asks for them."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from darts_parallel.gradient import SearchResult
from darts_parallel.planner import uncalibrated
from darts_parallel.plans import batch_note
from darts_parallel.problem import HOUR, Problem, bill, memory_unit, order_label
from darts_parallel.report.failures import failure_lines
from darts_parallel.report.format import (
    percent,
    seconds,
    term_words,
)
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.stages import stage_table
from darts_parallel.report.switches import averaged_switches, switch_savings
from darts_parallel.report.text import (
    STOPPED,
    Takers,
    checks_table,
    known_of,
    report_notes,
    report_tables,
    stages_line,
)

NOTABLE_TIME = 0.01
"""Share of the iteration from which on a cause is printed."""
NEARLY_ALL = 0.85
"""Share of the FLOP outside of the causal mask from which on two counts of FLOP are near."""


def render(outcome: Outcome, console: Console, takers: Takers | None = None) -> list[Table]:
    """Print the report, and return all its tables.

    Args:
        outcome: The plan and what is known of it.
        console: Where the report is printed.
        takers: Names the trainers that take a plan, for the table of alternatives.
    """
    tables = report_tables(outcome, takers)
    for line in headline(outcome):
        console.print(line)
    if outcome.problem.config.output.verbose:
        for shown in tables:
            console.print(shown)
        console.print()
        for note in report_notes(outcome):
            console.print(Text(note))
        return tables
    console.print()
    console.print(stage_table(outcome))
    console.print(Text(_times(outcome)))
    if outcome.answers:
        console.print(checks_table(outcome.answers))
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
    problem = outcome.problem
    plan = outcome.plan
    cost = outcome.cost
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
        yield Text(_unfit_words(outcome), "red")
    yield Text(known_of(outcome))
    yield Text(_training_words(problem))
    yield from (Text(note) for note in _job_notes(outcome) if note)


def _unfit_words(outcome: Outcome) -> str:
    """Name the stage that is over its memory most, with its bytes, or the key that the plan breaks."""
    cost = outcome.cost
    space = outcome.problem.config.space
    limits = [whole * (1.0 - outcome.problem.margin) for whole in cost.capacity_bytes]
    shares = [used / most for used, most in zip(cost.memory_bytes, limits, strict=True)]
    stage = shares.index(max(shares))
    if shares[stage] > 1.0:
        unit, size = memory_unit(limits[stage])
        needs = f"{cost.memory_bytes[stage] / size:.2f} of {limits[stage] / size:.2f} {unit}"
        return f"This plan does not fit: stage {stage} needs {needs}."
    key = f"space.micro_batch_size={space.micro_batch_size}"
    return f"This plan breaks a rule: its micro-batch is not that of {key} in its own file."


def mask_note(problem: Problem) -> str:
    """Say how far below the printed MFU is one that leaves out masked scores; empty where near."""
    length = problem.training.seq_len
    whole, half = (problem.model.flops_per_token(keys) for keys in (length, length // 2))
    if not problem.config.model.causal or half >= NEARLY_ALL * whole:
        return ""
    less = percent(1.0 - half / whole)
    return f"MFU counts attention without its causal mask; with it (Megatron-LM) it is {less} lower"


def _job_notes(outcome: Outcome) -> Iterator[str]:
    """Yield what is averaged, and lines that few jobs need: nodes, dollars, failures, batches, savings."""
    problem = outcome.problem
    if problem.training.software is None:
        yield from averaged_switches(problem)
    yield outcome.not_priced
    if lengths := problem.training.lengths:
        full = f"{problem.training.seq_len:,} tokens"
        yield f"training.lengths={lengths} is not priced here: all sequences have {full}"
    yield mask_note(problem)
    if outcome.cost.mfu > 1.0:
        yield "an MFU above 100 % contradicts the peak of the GPU: check peak_TFLOPs and the profile"
    placed = order_label(problem.cluster.arranged(outcome.plan.node_order))
    yield placed and f"nodes along the pipeline: {placed}"
    objective = problem.config.objective
    amount = bill(objective, problem.cluster, outcome.cost.iteration_time_s)
    if amount is not None:
        nodes = ", ".join(f"{g.count} × {g.gpus} {g.device.name}" for g in problem.cluster.groups)
        iterations = f"{objective.num_iterations:,.0f} iterations"
        yield f"{amount.label()}, {iterations} on {nodes}"
    elif objective.num_iterations and outcome.failures is None:
        hours = objective.num_iterations * outcome.cost.iteration_time_s / HOUR
        yield f"{hours:,.2f} hours for {objective.num_iterations:,.0f} iterations, without failures"
    if outcome.failures is not None:
        yield from failure_lines(outcome.failures)
    yield batch_note(problem.cluster.num_devices, problem.training.global_batch_size)
    yield from switch_savings(problem, outcome.plan)


def _job_words(problem: Problem) -> str:
    """Name the model with its size, and the cluster."""
    size = f"{problem.model.num_parameters:,} parameters"
    if problem.training.lora_rank:
        size += f", {problem.model.num_trained_parameters:,} trained"
        if {"linear_qkv", "linear_fc1"} & {*problem.training.lora_targets}:
            size += ", fused qkv and fc1"
    config = problem.config
    count = problem.cluster.num_devices
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    return f"{config.model.name} ({size}) on {config.cluster.name}, {gpus}"


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


def _times(outcome: Outcome) -> str:
    """Return the seconds of every cause that takes a notable share, and the sum of all other seconds."""
    cost = outcome.cost
    least = NOTABLE_TIME * cost.iteration_time_s
    causes = sorted(cost.breakdown_s.items(), key=lambda entry: -entry[1])
    shown = {name: time for name, time in causes if abs(time) >= least}
    others = cost.iteration_time_s - sum(shown.values())
    if abs(others) > 0.1 * least:
        shown["others"] = others
    return " · ".join(f"{seconds(time)} {term_words(name)}" for name, time in shown.items())


def _search_words(outcome: Outcome, result: SearchResult) -> str:
    """Say what was found on the way, what was kept, and how long it took."""
    took = f"{result.seconds:.1f} s{STOPPED[result.stopped_by]}"
    if result.gradient_iteration_time_s is None:
        return f"{result.method.replace('_', ' ')}: {result.why}; {took}"
    return f"{stages_line(outcome, seconds=False)} %; {took}"
