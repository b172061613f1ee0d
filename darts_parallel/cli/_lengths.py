"""Plans for `training.lengths`: their table, and the first one's file."""

from pathlib import Path

from rich.console import Console

from darts_parallel.cli._trainers import start_command
from darts_parallel.cost import evaluate
from darts_parallel.planner import plan_lengths
from darts_parallel.plans import write_json
from darts_parallel.problem import Problem
from darts_parallel.report import Outcome, fits_label, plan_dict, table_of
from darts_parallel.report import seconds as seconds_label


def run_lengths(problem: Problem, folder: Path, console: Console) -> float:
    """Write and print the plans for `training.lengths`; return the best expected seconds."""
    found = plan_lengths(problem)
    training = problem.training
    file = folder / "plan.json"
    entries = []
    kind = "packed" if training.packed else "padded"
    by = training.software or "a generic framework"
    title = (
        f"{problem.config.model.name} on {problem.config.cluster.name}, {training.global_batch_size:,} "
        f"sequences of {training.lengths}, {kind} · {training.precision} · {training.optimizer} · by {by}\n"
        "seconds of a step, memory of its longest micro-batch: mean, 95 %, most drawn; fits: the longest"
    )
    names = ("seconds", "95 %", "memory", "95 %", "most", "fits")
    table = table_of(title, *((name, "right") for name in names), ("plan", "left"))
    for own in found:
        words = own.plan.describe(training.global_batch_size)
        shares = (f"{100 * share:.0f} %" for share in own.memory)
        table.add_row(*map(seconds_label, own.seconds), *shares, fits_label(own.chance), words)
        figures = {"seconds": own.seconds, "memory": own.memory, "chance": own.chance}
        entries.append({"plan": words, **figures})
    data = plan_dict(Outcome(problem, found[0].plan, evaluate(found[0].plan, problem)))
    write_json(file, data | {"lengths": {"packed": training.packed, "plans": entries}})
    console.print(table)
    start = start_command(problem, found[0].plan, file)
    console.print(f"start it: {start}", soft_wrap=True, highlight=False, markup=False)
    return found[0].seconds[0]
