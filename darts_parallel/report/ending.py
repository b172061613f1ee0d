"""The end of the report: what else is known of a plan, and where everything lies."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.table import Table

from darts_parallel.planner import CHOSEN, MOST_EXTRA, SAFER, SURE, Planned, Rung
from darts_parallel.problem import Problem
from darts_parallel.report.explanation import explain, render_explanation
from darts_parallel.report.format import fits_label, print_line, seconds, table_of

FASTER_TOO = "safe is faster, too: seconds within search.tie of each other count as equal"


def render_ladder(rungs: Sequence[Rung], console: Console) -> list[Table]:
    """Print, and return, a table of the plans from the fastest to the safest, where there are several."""
    if len(rungs) < 2:
        return []
    chosen = next(rung for rung in rungs if rung.name == CHOSEN)
    columns = ["risk level", "seconds>", "against chosen>"]
    table = table_of(None, *columns, "fits>", "file")
    for rung in rungs:
        extra = 100 * (rung.seconds / chosen.seconds - 1)
        change = "" if rung.name == CHOSEN else f"{extra:+.1f} %"
        table.add_row(rung.name, seconds(rung.seconds), change, fits_label(rung.chance), rung.file)
    safer = min(rung.chance for rung in rungs) <= SAFER * chosen.chance
    if not safer and chosen.chance > SURE:
        table.add_row("safe", "none found", f"up to +{100 * MOST_EXTRA:.0f} %", "", "")
    console.print()
    console.print(table)
    if any(rung.name == "safe" and rung.seconds < chosen.seconds for rung in rungs):
        print_line(console, FASTER_TOO)
    return [table]


def render_ending(
    planned: Planned,
    problem: Problem,
    folder: Path,
    console: Console,
) -> None:
    """Print where the plan comes from, the files of the run, and the explanation where it is asked for."""
    output = problem.config.output
    if planned.rental is not None:
        print_line(console, planned.rental.label())
    if output.verbose and output.tensorboard:
        print_line(console, f"curves: tensorboard --logdir {shown_path(folder / 'tensorboard')}")
    page = " · report.html lies next to it" if (folder / "report.html").exists() else ""
    print_line(console, f"why: darts-parallel explain {shown_path(folder / 'plan.json')}{page}")
    if problem.config.explain:
        render_explanation(explain(problem, planned.plan), console)


def shown_path(path: Path) -> str:
    """Return a path as a shell takes it: quoted, and relative where it lies in the working folder."""
    here = Path.cwd()
    return quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
