"""Plans for `training.lengths`: their table, and the first one's file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from darts_parallel.cli._trainers import start_command
from darts_parallel.config import DYNAMIC, PADDED
from darts_parallel.cost import evaluate
from darts_parallel.errors import Entries
from darts_parallel.export import packing_flags, taken_by
from darts_parallel.planner import LengthPlan, LengthPlans, plan_lengths
from darts_parallel.plans import write_json, write_text
from darts_parallel.problem import Problem
from darts_parallel.report import (
    Outcome,
    fits_label,
    plan_dict,
    print_line,
    report_page,
    report_tables,
    table_of,
)
from darts_parallel.report import seconds as seconds_label

SHOWN = 3
"""Plans of a packing that the table shows."""
COLUMNS = ("seconds>", "95 %>", "tokens/s>", "bound>", "fits>")


def run_lengths(problem: Problem, folder: Path, console: Console) -> float:
    """Write and print the plans for `training.lengths`; return the best expected seconds."""
    found = plan_lengths(problem)
    training = problem.training
    by = training.software or "a generic framework"
    config = problem.config
    batch = f"{training.global_batch_size:,} sequences of {training.lengths}"
    title = (
        f"{config.model.name} on {config.cluster.name}, {batch} · {training.precision} · "
        f"{training.optimizer} · by {by}\n"
        "seconds of a step: mean, 95 %, bound of any packing; fits: its fullest micro-batch; packing: tokens "
        "of a rank"
    )
    table = table_of(title, *COLUMNS, "packing", "plan")
    rows: Counter[str] = Counter()
    for own in found.plans:
        rows[own.packing.scheduler] += 1
        if rows[own.packing.scheduler] <= SHOWN or config.output.verbose:
            table.add_row(*_cells(own, training.global_batch_size))
    console.print(table)
    best = found.plans[0]
    job = _job(problem, best)
    file = folder / "plan.json"
    outcome = Outcome(job, best.plan, evaluate(best.plan, job))
    entries = [_entry(problem, own) for own in found.plans]
    lengths = {"plans": entries, "refused": found.refused}
    write_json(file, plan_dict(outcome) | {"lengths": lengths})
    start = f"start it: {start_command(job, best.plan, file)}"
    for line in (*_remarks(problem, found.plans), *_main_search(found), start):
        print_line(console, line)
    page = report_page(outcome, [*report_tables(outcome), table], [start])
    write_text(folder / "report.html", page)
    return best.seconds[0]


def _cells(own: LengthPlan, batch: int) -> list[str]:
    """Return the row of a plan."""
    mean, quantile = map(seconds_label, own.seconds)
    speed = f"{own.tokens_per_s:,.0f}"
    bound = seconds_label(own.bound)
    fits = fits_label(own.chance)
    return [mean, quantile, speed, bound, fits, _knobs(own), own.plan.describe(batch)]


def _knobs(own: LengthPlan) -> str:
    """Return the settings of a packing in one line."""
    packing = own.packing
    if packing.scheduler == PADDED:
        return PADDED
    text = f"{packing.scheduler} {packing.budget:,}"
    if packing.scheduler != DYNAMIC:
        return text
    return f"{text}, cp ≥ {packing.min_cp}" + (", any size" if packing.any_size else "")


def _job(problem: Problem, own: LengthPlan) -> Problem:
    """Return the job with the settings of a packing."""
    packing = own.packing
    return problem.with_training(
        sequence_packing_scheduler=packing.scheduler,
        max_seqlen_per_dp_cp_rank=packing.budget or None,
        min_dynamic_context_parallel_size=packing.min_cp,
    )


def _entry(problem: Problem, own: LengthPlan) -> Entries:
    """Return a plan's entry in `plan.json`; its flags go by versions of Megatron-LM."""
    flags = packing_flags(_job(problem, own).training, own.plan.pp)
    words = own.plan.describe(problem.training.global_batch_size)
    return {**own._asdict(), "plan": words, "packing": own.packing._asdict(), "flags": flags}


def _remarks(problem: Problem, plans: Sequence[LengthPlan]) -> Iterator[str]:
    """Yield what holds of every packing, and the trainers that run it."""
    yield (
        "A packed micro-batch holds at most its budget, whatever the lengths: the chance to fit is the "
        "same in every step."
    )
    trainer = problem.config.space.trainer
    runs = f" that trainer={trainer} runs" if trainer else ""
    for scheduler in problem.training.packings:
        rows = [own for own in plans if own.packing.scheduler == scheduler]
        if not rows:
            yield f"{scheduler}: no plan fits{runs}."
            continue
        takers = taken_by(_job(problem, rows[0]), rows[0].plan)
        yield f"{scheduler}: its first plan runs with {', '.join(takers) or 'no trainer here'}."


def _main_search(found: LengthPlans) -> Iterator[str]:
    """Yield what is missing of the main search's plans."""
    if found.why:
        yield f"The main search has no plan to price: {found.why}"
    for schedule, count in found.refused.items():
        yield f"{schedule} is not priced over lengths, only 1f1b: {count} of the main search's plans."
