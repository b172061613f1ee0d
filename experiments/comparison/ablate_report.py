"""Tables and pictures of the ablation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from darts_parallel.exact import find_layerwise_plan
from darts_parallel.plan import write_text
from darts_parallel.report import csv_text, filled_table, markdown_table
from experiments.comparison.quantiles import percent, quantile, read_curve
from experiments.comparison.variants import (
    BILEVEL,
    BILEVEL_VARIANTS,
    DEFAULT,
    GRADIENT_VARIANTS,
    PROBLEMS,
    RIVALS,
    tables_of,
)
from experiments.results_page import publish
from experiments.study import save_png

Row = dict[str, Any]
COLUMNS = ("problem", "variant", "seed", "raw_gap", "gap", "gap_at_equal_seconds", "seconds", "cpu_seconds",
           "evaluations", "time_to_target_ratio")  # fmt: skip


def write_report(rows: Sequence[Row], folder: Path, note: str, console: Console, command: str | None) -> None:
    """Write `ablate.csv`, `summary.md`, `ablate.png`, and print the table on the terminal.

    Args:
        rows: As the jobs left them.
        folder: Where to write.
        note: How it was run, one line.
        console: For the table.
        command: What the page experiments/results/ablate.md shows; None: there is no page.
    """
    done = with_gaps(rows)
    write_text(
        folder / "ablate.csv", csv_text(COLUMNS, [[row.get(name) for name in COLUMNS] for row in done])
    )
    header, cells = table(done)
    title = "Gap to the optimum in the model, raw / polished: median over seeds (smallest to largest)"
    console.print(filled_table(title, header, cells))
    lines = [note, "", *markdown_table(header, cells, (0, 1)), "", *bilevel_lines(done)]
    text = "\n".join(lines).rstrip() + "\n"
    write_text(folder / "summary.md", text)
    save_png(figure(done), folder / "ablate.png")
    if command is not None:
        captions = {folder / "ablate.png": "gap of every run of every variant to the optimum"}
        publish("ablate", "What matters in the search?", command, text, captions)
    console.print(
        f"rows: {folder / 'ablate.csv'}, picture: {folder / 'ablate.png'}", soft_wrap=True, markup=False
    )


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """Add relative distances from the optimum, which dynamic programming proves, to the rows.

    `gap_at_equal_seconds` reads every curve at the median seconds of the default variant on the same
    problem, so that a rival has exactly the search's own time.
    """
    result = []
    for name in dict.fromkeys(row["problem"] for row in rows):
        mine = [row for row in rows if row["problem"] == name]
        if name == BILEVEL:
            result += mine
            continue
        best = find_layerwise_plan(tables_of(name), "layerwise").cost
        seconds = [row["seconds"] for row in mine if row["variant"] == DEFAULT]
        for row in mine:
            gaps = {"raw_gap": gap(row["raw_s"], best), "gap": gap(row["polished_s"], best)}
            if seconds:
                gaps["gap_at_equal_seconds"] = gap(read_curve(row["curve"], quantile(seconds, 50)), best)
            result.append(row | gaps)
    return result


def gap(seconds: float | None, best: float) -> float:
    """Return relative distance; infinite without a plan."""
    return float("inf") if seconds is None else seconds / best - 1.0


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Make a row for each variant, a column for each problem: medians (smallest to largest) over seeds."""
    problems = [name for name in PROBLEMS if any(row["problem"] == name for row in rows)]
    cells = []
    for variant in (*GRADIENT_VARIANTS, *RIVALS):
        mine = [row for row in rows if row["variant"] == variant]
        if mine:
            question = (
                GRADIENT_VARIANTS[variant].question
                if variant in GRADIENT_VARIANTS
                else "at the default's seconds"
            )
            here = [[row for row in mine if row["problem"] == problem] for problem in problems]
            cells.append([variant, question, *(_cell(part, variant) for part in here)])
    return ["variant", "question", *problems], cells


def _cell(rows: Sequence[Row], variant: str) -> str:
    if not rows:
        return "-"
    if variant in RIVALS:
        key = "gap_at_equal_seconds"
        gaps = [float(row[key] if key in row else row["gap"]) for row in rows]
        return _median(gaps)
    raw, polished = (_median([row[key] for row in rows]) for key in ("raw_gap", "gap"))
    seconds = quantile([row["seconds"] for row in rows], 50)
    return f"{raw} / {polished} in {seconds:.1f} s"


def _median(gaps: Sequence[float]) -> str:
    """Return median, and smallest to largest."""
    low, middle, high = (percent(value) for value in (min(gaps), quantile(gaps, 50), max(gaps)))
    return middle if low == high else f"{middle} ({low} to {high})"


def bilevel_lines(rows: Sequence[Row]) -> list[str]:
    """Compare first and second order, in a sentence each."""
    lines = []
    for variant in BILEVEL_VARIANTS:
        mine = [row for row in rows if row["variant"] == variant]
        ratios = [float(row["time_to_target_ratio"] or "inf") for row in mine]
        if ratios:
            seconds = quantile([row["cpu_seconds"] for row in mine], 50)
            lines.append(
                f"- {variant}: predicted time to the target loss {quantile(ratios, 50):.3f} times the "
                f"all-16-bit plan's ({min(ratios):.3f} to {max(ratios):.3f}); {seconds:.0f} CPU seconds."
            )
    return lines


def figure(rows: Sequence[Row]) -> Figure:
    """Draw every run of every variant, raw and polished, one panel for each problem."""
    problems = [name for name in PROBLEMS if any(row["problem"] == name for row in rows)]
    variants = [
        variant for variant in (*GRADIENT_VARIANTS, *RIVALS) if any(row["variant"] == variant for row in rows)
    ]
    size = (3.2 * max(len(problems), 1) + 1.5, 0.32 * len(variants) + 1.6)
    picture = Figure(figsize=size, layout="constrained")
    for number, problem in enumerate(problems):
        axes = picture.add_subplot(1, len(problems), number + 1)
        for key, colour, shift in (("raw_gap", "#e1973c", 0.15), ("gap", "#4878a8", -0.15)):
            mine = [row for row in rows if row["problem"] == problem]
            x = [100.0 * min(max(row[key], 0.0), 10.0) for row in mine]
            y = [variants.index(row["variant"]) + shift for row in mine]
            axes.scatter(x, y, s=12, c=colour, label="raw" if shift > 0 else "polished")
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_yticks(range(len(variants)), variants if number == 0 else [""] * len(variants), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(PROBLEMS[problem], fontsize=8, loc="left")
        axes.set_xlabel("gap to the optimum, %", fontsize=8)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
        if number == 0:
            axes.legend(fontsize=7)
    return picture
