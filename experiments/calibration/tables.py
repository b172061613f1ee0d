"""Tables of a validation for the terminal and for Markdown."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.table import Table

from darts_parallel.report.tables import filled_table, markdown_table
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.families import names_experts
from experiments.calibration.held_out import HeldOutReport
from experiments.calibration.outcome import Outcome
from experiments.calibration.ranking import TRIALS, JobRanking, mean
from experiments.calibration.rows import Row

OVERALL = "all"
HEADERS = ("source", "rows", "s: used", "median %", "mean %", "bias %", "90 % below",
           "memory: used", "median %", "mean %", "bias %", "90 % below")  # fmt: skip


def pairs(outcomes: Sequence[Outcome], what: str) -> tuple[list[float], list[float]]:
    """Predicted and measured `seconds` or `memory` where both are known."""
    found = []
    for outcome in outcomes:
        if outcome.case is None or outcome.skipped:
            continue
        run = outcome.case.run
        predicted, measured = (
            (outcome.seconds, run.iteration_s)
            if what == "seconds"
            else (outcome.memory_bytes, run.memory_bytes)
        )
        if predicted is not None and measured is not None:
            found.append((predicted, measured))
    return [p for p, _ in found], [m for _, m in found]


def by_file(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes of every file, and of all."""
    files: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        files[outcome.row.file].append(outcome)
    return dict(files) | {OVERALL: list(outcomes)}


def error_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """One line a file: rows, seconds errors, memory errors."""
    lines = []
    for name, members in by_file(outcomes).items():
        seconds = summarise(*pairs(members, "seconds"))
        memory = summarise(*pairs(members, "memory"))
        cells = (str(len(members)), *_cells(seconds), *_cells(memory))
        lines.append((name.removesuffix(".csv"), *cells))
    return lines


def _cells(errors: ErrorSummary) -> list[str]:
    return errors.cells() if errors.count else ["0", "", "", "", ""]


def error_table(outcomes: Sequence[Outcome]) -> Table:
    """Errors by source and overall, percent."""
    title = "Error of the prediction, % (bias: median of predicted / measured - 1)"
    return filled_table(title, HEADERS, error_rows(outcomes))


ORDERS = ("", "roofline", "smallest")
"""Orders that the tables compare, beside chance."""


def ranking_rows(jobs: Sequence[JobRanking]) -> list[tuple[str, ...]]:
    """One line a job and one of means: plans, Spearman, regrets of one and of three trials by order."""
    lines = []
    for job in jobs:
        regrets = [_percent(job.regret[order, k]) for order in ORDERS for k in TRIALS]
        regrets += [_percent(job.random[k]) for k in TRIALS]
        lines.append((job.name, str(job.plans), f"{job.spearman['']:.2f}", *regrets))
    if jobs:
        means = [_percent(mean([j.regret[order, k] for j in jobs])) for order in ORDERS for k in TRIALS]
        means += [_percent(mean([j.random[k] for j in jobs])) for k in TRIALS]
        plans = str(sum(job.plans for job in jobs))
        lines.append(
            (f"mean of {len(jobs)} jobs", plans, f"{mean([j.spearman[''] for j in jobs]):.2f}", *means)
        )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


RANKING_HEADERS = ("plans", "Spearman", "model 1", "model 3", "roofline 1", "roofline 3", "smallest 1",
                   "smallest 3", "chance 1", "chance 3")  # fmt: skip


def ranking_table(jobs: Sequence[JobRanking]) -> Table:
    """Rank correlation and regret, percent, of every job."""
    title = "Orders of plans within one job: regret of the first choice and of the best of three, %"
    return filled_table(title, ("job", *RANKING_HEADERS), ranking_rows(jobs))


def skipped_lines(outcomes: Sequence[Outcome], other_files: Sequence[tuple[str, str]]) -> list[str]:
    """Every row that was not used: file, line, reason; then files of another schema."""
    lines = [f"{o.row.file}:{o.row.line}: {o.skipped}" for o in outcomes if o.skipped]
    return lines + [f"{name}: {reason}" for name, reason in other_files]


def skipped_summary(outcomes: Sequence[Outcome]) -> str:
    """How many rows were used and how many not, by what is missing; dense models and mixtures apart."""
    reasons = Counter(o.skipped.split(":")[0].split("=")[0] for o in outcomes if o.skipped)
    used = sum(not o.skipped for o in outcomes)
    most = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4))
    shares = []
    for name, members in (
        ("dense models", [o for o in outcomes if not names_experts(o.row)]),
        ("mixtures of experts", [o for o in outcomes if names_experts(o.row)]),
    ):
        measured = [o for o in members if not _nothing_measured(o.row, o.skipped)]
        expressed = sum(not o.skipped for o in measured)
        if measured:
            share = 100.0 * expressed / len(measured)
            shares.append(f"of {len(measured)} of {name} {share:.1f} % are expressible")
    without = sum(_nothing_measured(o.row, o.skipped) for o in outcomes)
    return (
        f"{used} of {len(outcomes)} rows used; {without} have no measured seconds or bytes; "
        f"{', '.join(shares) or 'none is expressible'}. Most frequent reasons: {most or 'none'}."
    )


def _nothing_measured(row: Row, reason: str) -> bool:
    return reason.startswith(("no seconds", "out of memory", "a relative figure")) or (
        bool(reason) and not any(row.text(k) for k in ("iteration_s", "memory_gb", "tokens_per_s_per_gpu"))
    )


def markdown(
    outcomes: Sequence[Outcome], jobs: Sequence[JobRanking], held_out: Sequence[HeldOutReport] = ()
) -> str:
    """The error and ranking tables as Markdown."""
    lines = markdown_table(HEADERS, error_rows(outcomes))
    for report in held_out:
        lines += ["", *report.markdown()]
    return "\n".join([*lines, "", *markdown_table(("job", *RANKING_HEADERS), ranking_rows(jobs))])
