"""A comparison as tables: tables for the terminal, Markdown for the README."""

from rich.console import Console

from darts_parallel.report.tables import filled_table, markdown_table
from experiments.comparison.gaps import SHARES, Distribution, Findings, ProblemSummary, percent
from experiments.comparison.quantiles import quantile
from experiments.comparison.runs import Run

COLUMNS = ("problem", "oracle s/iteration", "oracle seconds", "uniform gap", "raw median", "raw max",
           "polished median", "polished max", "search seconds")  # fmt: skip


def _cells(summary: ProblemSummary) -> list[str]:
    """One row of the table of problems, as `COLUMNS`."""
    spread = []
    for gaps in (summary.raw, summary.polished):
        spread += [percent(quantile(gaps, 50)), percent(max(gaps))] if gaps else ["-", "-"]
    seconds = "-" if summary.search_seconds is None else f"{summary.search_seconds:.1f}"
    mark = "" if summary.proven else " (bound)"
    oracle = [f"{summary.oracle_time_s:.5g}{mark}", f"{summary.oracle_seconds:.1f}"]
    return [summary.problem, *oracle, percent(summary.uniform), *spread, seconds]


def _distribution_rows(findings: Findings) -> list[list[str]]:
    named: list[tuple[str, Distribution | None]] = [("raw", findings.raw), ("polished", findings.polished)]
    return [
        [name, str(part.count), f"{part.exact:.1%}", *(percent(value) for value in part.quantiles)]
        for name, part in named
        if part is not None
    ]


def _distribution_header() -> list[str]:
    return ["gap", "runs", "exactly 0", *("max" if share == 100 else f"{share}%" for share in SHARES)]


def _miss(run: Run) -> str:
    return f"{run.problem}, seed {run.seed}: polished {percent(run.gap)}, raw {percent(run.raw_gap)}"


def _remarks(findings: Findings) -> list[str]:
    """Sentences on everything that is not as it should be."""
    remarks = [
        f"The oracle stopped early on {name}: its gaps are from the lower bound and count in no statistic."
        for name in findings.unproven
    ]
    remarks += [
        f"Contradiction: {run.method} beats the proven answer on {run.problem}, seed {run.seed}, "
        f"by {-run.gap:.1e}: the oracle or the cost is wrong."
        for run in findings.contradictions
    ]
    return remarks


def render(findings: Findings, console: Console) -> None:
    """Print the table of problems, the distribution, and every failure by name."""
    cells = [_cells(summary) for summary in findings.problems]
    console.print(filled_table("Gap to the exact oracle, layer-wise space", COLUMNS, cells))
    rows = _distribution_rows(findings)
    if rows:
        console.print(filled_table("Distribution over all runs", _distribution_header(), rows))
    for target, measured, met in findings.targets():
        console.print(f"{'met   ' if met else 'MISSED'}  {target}: {measured}", highlight=False)
    if findings.polished is not None:
        console.print(f"Runs above 0 % when polished: {len(findings.misses)}", highlight=False)
    for line in [f"  {_miss(run)}" for run in findings.misses] + _remarks(findings):
        console.print(line, highlight=False)


def markdown(findings: Findings, note: str) -> str:
    """Write the findings as Markdown.

    Args:
        findings: Of the comparison.
        note: How it was run: one line.
    """
    lines = [note, ""]
    rows = _distribution_rows(findings)
    if rows:
        lines += [*markdown_table(_distribution_header(), rows), ""]
        lines += [
            f"- {target}: {text}, {'met' if met else '**missed**'}"
            for target, text, met in findings.targets()
        ]
        lines += ["", f"Runs above 0 % when polished: {len(findings.misses)}.", ""]
        lines += [f"- {_miss(run)}" for run in findings.misses]
        lines += [""] if findings.misses else []
    remarks = _remarks(findings)
    lines += [f"- {remark}" for remark in remarks] + ([""] if remarks else [])
    lines += markdown_table(COLUMNS, [_cells(summary) for summary in findings.problems])
    return "\n".join(lines) + "\n"
