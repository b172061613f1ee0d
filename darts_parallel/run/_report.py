"""Output of a run: the comparison with one process, and measured next to predicted."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

from darts_parallel.cost import CostBreakdown
from darts_parallel.run._verify import Bytes, StepComparison
from darts_parallel.run.measure import Measurement, RunOutcome

PHASES = ("forward", "backward", "waiting", "synchronisation", "optimizer")


def render(outcome: RunOutcome, cost: CostBreakdown | None, console: Console) -> None:
    """Print all that was measured.

    Args:
        outcome: Of the run.
        cost: What the cost model says of the plan in float32; None where it cannot price it.
    """
    if outcome.verdict is not None:
        _render_verdict(outcome.verdict, console)
    if outcome.measurement is not None:
        _render_measurement(outcome.measurement, cost, console)


def _table(
    title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], justify: JustifyMethod
) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="dim")
    for column in columns:
        table.add_column(column, justify=justify)
    for row in rows:
        table.add_row(*row)
    return table


def _render_verdict(verdict: StepComparison, console: Console) -> None:
    name, error = verdict.worst
    few = ", which rounds as the plan's ranks do" if verdict.few_bits else ""
    rows = []
    for label, mine, reference in (
        ("loss", verdict.loss, verdict.reference_loss),
        ("loss of the next step", verdict.second_loss, verdict.second_reference_loss),
    ):
        judged = _judged(abs(mine / reference - 1.0), verdict.limits[0])
        rows.append((label, f"{mine:.7f}", f"{reference:.7f}", *judged))
    judged = _judged(error, verdict.limits[1])
    rows.append((f"{len(verdict.gradients)} gradients, worst {name}", "", "", *judged))
    columns = ("", "plan", "one process", "difference", "limit", "")
    console.print(_table(f"Against one process, float32{few}", columns, rows, "left"))
    console.print()
    console.print(_bytes_table(verdict.bytes))
    extra = sum(entry.extra for entry in verdict.bytes)
    if extra:
        console.print(
            f"fully_shard keeps {extra:,.0f} bytes in all next to the parameters gathered for ZeRO-2: the "
            "parts that the optimizer steps, which the model does not count.",
            soft_wrap=True,
        )
    console.print()


def _bytes_table(entries: tuple[Bytes, ...]) -> Table:
    rows = []
    for rank in sorted({entry.rank for entry in entries}):
        mine = [entry for entry in entries if entry.rank == rank]
        cells = [f"{value:,.0f}" for entry in mine for value in (entry.measured, entry.predicted)]
        rows.append((str(rank), *cells, _word(all(entry.passed for entry in mine))))
    kinds = [column for kind in ("parameters", "gradients", "optimizer") for column in (kind, "predicted")]
    return _table("Bytes of state, rank by rank", ("rank", *kinds, ""), rows, "right")


def _judged(difference: float, limit: float) -> tuple[str, str, str]:
    return f"{difference:.1e}", f"{limit:g}", _word(difference <= limit)


def _word(passed: bool) -> str:
    return "[green]equal[/green]" if passed else "[red]differs[/red]"


def _render_measurement(measured: Measurement, cost: CostBreakdown | None, console: Console) -> None:
    seconds, steps = measured.iteration_time_s, measured.seconds
    spread = f"median of {len(steps)}, {min(steps):.4f} to {max(steps):.4f}"
    console.print(f"measured {seconds:.4f} s per iteration ({spread})")
    predicted = "predicted: the cost model cannot price this plan yet"
    if cost is not None:
        ratio = seconds / cost.iteration_time_s
        predicted = f"predicted {cost.iteration_time_s:.4f} s; measured / predicted = {ratio:.2f}"
    console.print(predicted, highlight=False)
    rows = [
        (str(stage), *(f"{phases[phase]:.4f}" for phase in PHASES), f"{peak / 2**20:,.0f} MiB")
        for stage, (phases, peak) in enumerate(zip(measured.phases, measured.peak_bytes, strict=True))
    ]
    console.print(_table("Seconds of a step by stage", ("stage", *PHASES, "peak memory"), rows, "right"))


def outcome_dict(outcome: RunOutcome, cost: CostBreakdown | None) -> dict[str, Any]:
    """Return all results for a JSON file."""
    verdict, measured = outcome.verdict, outcome.measurement
    return {
        "verify": verdict and asdict(verdict) | {"passed": verdict.passed, "loss_error": verdict.loss_error},
        "measured": measured and asdict(measured) | {"iteration_time_s": measured.iteration_time_s},
        "predicted_iteration_time_s": cost and cost.iteration_time_s,
    }
