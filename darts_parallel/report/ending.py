"""The end of the report: what else is known of a plan, and where everything lies."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from darts_parallel.planner import CHOSEN, MOST_EXTRA, SURE, Planned, Rung, StateTransfer
from darts_parallel.problem import Problem
from darts_parallel.report.explanation import explain, render_explanation
from darts_parallel.report.format import fits_label, seconds, size, table_of


def transfer_label(moves: StateTransfer) -> str:
    """Say in one clause how many bytes of state move, come from a checkpoint, and stay."""
    kept, moved, restored = map(size, (moves.kept_bytes, moves.moved_bytes, moves.restored_bytes))
    return f"{moved} of state move between GPUs, {restored} come from a checkpoint, {kept} stay"


def origin_lines(planned: Planned) -> Iterator[str]:
    """Say where a plan comes from that was not simply searched."""
    if planned.moves is not None and planned.result is not None:
        yield f"replanned in {planned.result.seconds:.1f} s: {transfer_label(planned.moves)}"
    if planned.rental is not None:
        yield planned.rental.label()


def render_ladder(planned: Planned, rungs: Sequence[Rung], console: Console) -> list[Table]:
    """Print, and return, a table of the plans from the fastest to the safest, where there are several.

    Where no plan keeps the chance of running out of memory, say what would help.
    """
    if planned.warning:
        console.print(Text(f"{planned.warning}.", "red"))
    if len(rungs) < 2:
        return []
    chosen = next(rung for rung in rungs if rung.name == CHOSEN)
    table = table_of("\nLadder", ("plan", "left"), ("seconds", "right"), ("against chosen", "right"),
                     ("fits", "right"), ("file", "left"))  # fmt: skip
    for rung in rungs:
        change = "" if rung.name == CHOSEN else f"{100 * (rung.seconds / chosen.seconds - 1):+.1f} %"
        table.add_row(rung.name, seconds(rung.seconds), change, fits_label(rung.chance), rung.file)
    if all(rung.name != "safe" for rung in rungs) and chosen.chance > SURE:
        table.add_row("safe", "none found", f"up to +{100 * MOST_EXTRA:.0f} %", "", "")
    console.print(table)
    return [table]


def render_ending(planned: Planned, problem: Problem, folder: Path, console: Console) -> None:
    """Print where the plan comes from, the files of the run, and the explanation where it is asked for."""
    output = problem.config.output
    lines = [*origin_lines(planned), f"plan: {folder / 'plan.json'}"]
    if (page := folder / "report.html").exists():
        lines.append(f"page: {page}")
    if output.tensorboard:
        lines.append(f"curves: tensorboard --logdir {folder / 'tensorboard'}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if problem.config.explain:
        render_explanation(explain(problem, planned.plan), console)
