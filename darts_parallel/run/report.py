"""Output of a run: the comparison with one process, and measured next to predicted."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from darts_parallel.cost.evaluation import CostBreakdown
from darts_parallel.run.measure import Measurement, RunOutcome
from darts_parallel.run.verify import Bytes, StepComparison

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


def _render_verdict(verdict: StepComparison, console: Console) -> None:
    name, error = verdict.worst
    few = ", which rounds as the plan's ranks do" if verdict.few_bits else ""
    table = Table(
        title=f"Against one process, float32{few}", title_justify="left", box=None, header_style="dim"
    )
    for column in ("", "plan", "one process", "difference", "limit", ""):
        table.add_column(column)
    for label, mine, reference in (
        ("loss", verdict.loss, verdict.reference_loss),
        ("loss of the next step", verdict.second_loss, verdict.second_reference_loss),
    ):
        difference = abs(mine / reference - 1.0)
        verdict_word, limit = _word(difference <= verdict.loss_limit), f"{verdict.loss_limit:g}"
        table.add_row(label, f"{mine:.7f}", f"{reference:.7f}", f"{difference:.1e}", limit, verdict_word)
    gradients = f"{len(verdict.gradients)} gradients, worst {name}"
    allowed = verdict.gradient_limit
    table.add_row(gradients, "", "", f"{error:.1e}", f"{allowed:g}", _word(error <= allowed))
    console.print(table)
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


def _bytes_table(rows: tuple[Bytes, ...]) -> Table:
    table = Table(title="Bytes of state, rank by rank", title_justify="left", box=None, header_style="dim")
    table.add_column("rank", justify="right")
    for kind in ("parameters", "gradients", "optimizer"):
        table.add_column(kind, justify="right")
        table.add_column("predicted", justify="right")
    table.add_column("")
    for rank in sorted({row.rank for row in rows}):
        mine = [row for row in rows if row.rank == rank]
        cells = [f"{value:,.0f}" for row in mine for value in (row.measured, row.predicted)]
        table.add_row(str(rank), *cells, _word(all(row.passed for row in mine)))
    return table


def _word(passed: bool) -> str:
    return "[green]equal[/green]" if passed else "[red]differs[/red]"


def _render_measurement(measured: Measurement, cost: CostBreakdown | None, console: Console) -> None:
    seconds = measured.iteration_time_s
    low, high = min(measured.seconds), max(measured.seconds)
    console.print(
        f"measured {seconds:.4f} s per iteration (median of {len(measured.seconds)}, {low:.4f} to {high:.4f})"
    )
    if cost is None:
        console.print("predicted: the cost model cannot price this plan yet")
    else:
        ratio = seconds / cost.iteration_time_s
        console.print(
            f"predicted {cost.iteration_time_s:.4f} s; measured / predicted = {ratio:.2f}", highlight=False
        )
    table = Table(title="Seconds of a step by stage", title_justify="left", box=None, header_style="dim")
    table.add_column("stage", justify="right")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("peak memory", justify="right")
    for stage, (phases, peak) in enumerate(zip(measured.phases, measured.peak_bytes, strict=True)):
        cells = [f"{phases[phase]:.4f}" for phase in PHASES]
        table.add_row(str(stage), *cells, f"{peak / 2**20:,.0f} MiB")
    console.print(table)


def outcome_dict(outcome: RunOutcome, cost: CostBreakdown | None) -> dict[str, Any]:
    """Return all results for a JSON file."""
    verdict = outcome.verdict
    measurement = outcome.measurement
    return {
        "verify": None
        if verdict is None
        else asdict(verdict) | {"passed": verdict.passed, "loss_error": verdict.loss_error},
        "measured": None
        if measurement is None
        else asdict(measurement) | {"iteration_time_s": measurement.iteration_time_s},
        "predicted_iteration_time_s": None if cost is None else cost.iteration_time_s,
    }
