"""TensorBoard: live curves of the search, then pictures and figures of the plan it found.

TensorBoard and matplotlib are imported where they are first needed: together they cost more than a second.
The curves of a search that ends within `LIVE_AFTER` seconds are held until its plan is on the screen.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darts_parallel.cost import CostBreakdown
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult, StepRecord, WinnerHistory
from darts_parallel.plan import Plan
from darts_parallel.planner import Intervals, intervals
from darts_parallel.problem import Problem
from darts_parallel.report.tables import markdown_table
from darts_parallel.report.text import render_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

LIVE_AFTER = 10.0
"""Seconds of a search from which on somebody may be watching: its curves are written as they come."""
MOST_POINTS = 60
"""Points of a curve."""
NOTABLE = 0.01
"""A strategy whose mean probability never reaches this gets no curve."""
MOST_STAGES = 32


class Tracker:
    """Writes one TensorBoard run.

    Args:
        folder: Of the run; made if it is not there.
        problem: What is searched for.
        overrides: What the command changed, `key=value`: the columns of the HPARAMS tab.
    """

    def __init__(self, folder: Path, problem: Problem, overrides: Sequence[str] = ()) -> None:
        self.folder, self.problem, self.overrides = folder, problem, overrides
        self._names = tuple(layer.name for layer in problem.model.layers)
        self._opened: SummaryWriter | None = None
        self._held: list[tuple[dict[str, float], int, float]] = []
        """Curves that are not written yet: values, step and the time of day."""
        self._step = 0
        self._outer: set[str] = set()
        """Outer choices that the search was still in when it was last recorded."""

    @property
    def _writer(self) -> "SummaryWriter":
        """Return the file, opened at its first use, with the curves that were held until then."""
        if self._opened is None:
            from torch.utils.tensorboard import SummaryWriter

            self._opened = SummaryWriter(log_dir=str(self.folder))
            for values, step, moment in self._held:
                self._scalars(values, step, moment)
            self._held.clear()
        return self._opened

    def record(self, record: StepRecord) -> None:
        """Write the curves of one step of the search."""
        self._step = record.step
        values = {
            "search/temperature": record.schedules.temperature,
            "search/boundary_temperature": record.schedules.boundary_temperature,
            "search/sharpness": record.schedules.sharpness,
            "search/loss": record.loss,
            "search/surrogate_time_s": record.surrogate_time_s,
            "search/best_time_s": record.best_time_s,
            "search/entropy": record.entropy,
            "search/pp": record.pp,
        }
        # a choice that has left weighs nothing; said once, so that no curve is a single point
        weights = dict.fromkeys(self._outer, 0.0) | record.outer_weights
        values |= {f"outer/{name}": value for name, value in weights.items()}
        self._outer = set(record.outer_weights)
        values |= {f"cost_terms/{name}": value for name, value in record.terms.items()}
        if self._opened is None and record.seconds < LIVE_AFTER:
            self._held.append((values, self._step, time.time()))
        else:
            self._scalars(values, self._step)

    def finish(
        self,
        result: SearchResult | None,
        plan: Plan,
        cost: CostBreakdown,
        verifications: Sequence[Verification],
        elasticities: dict[str, float] | None = None,
    ) -> None:
        """Write the pictures, the text and the figures of the final plan.

        Args:
            result: None where the plan was given and not searched.
            plan: The final plan.
            cost: Of that plan.
            verifications: Answers of the baselines; may be empty.
            elasticities: What `sensitivity` says of the plan; may be missing.
        """
        from darts_parallel.report.plots import gantt_figure, memory_figure, strategies_figure

        self._text(result, plan, cost, verifications)
        sure = _interval_scalars(intervals(plan, self.problem, cost, elasticities or {}))
        self._figures(cost, _metrics(result, cost, verifications) | sure, elasticities or {})
        if cost.stage_times_s:
            self._picture("plan/schedule", gantt_figure(plan, cost, self.problem))
        self._picture("plan/memory", memory_figure(cost))
        self._picture("plan/strategies", strategies_figure(plan, self._names))
        if result is not None and result.history:
            self._search(result, result.history, plan)
        self._hyperparameters(result, cost)
        self._writer.flush()

    def _search(self, result: SearchResult, history: Sequence[StepRecord], plan: Plan) -> None:
        """Write pictures and curves of the whole search, and the layout of its charts."""
        from darts_parallel.report._plots_winner import journey_figure
        from darts_parallel.report.plots import convergence_figure, probability_figure

        self._picture("search/convergence", convergence_figure(history))
        self._picture(
            "search/probabilities", probability_figure(history[-1], history[-1].rows or self._names)
        )
        charts = {
            "outer choices": ["Multiline", ["outer/.*"]],
            "seconds per iteration": ["Multiline", ["search/(surrogate|best)_time_s"]],
        }
        layout: dict[str, dict[str, list[Any]]] = {"search": charts}
        if result.winner is not None and len(result.winner.steps) > 1:
            self._picture("search/layers_by_steps", journey_figure(result.winner, plan, self._names))
            layout["winner"] = write_winner(result.winner, self._scalars)
        self._writer.add_custom_scalars(layout)

    def forget(self) -> None:
        """Drop what is still held: a run that failed has no use for it, and perhaps no room."""
        self._held.clear()

    def close(self) -> None:
        """Write what is still held and close the file."""
        if self._held or self._opened is not None:
            self._writer.close()

    def _scalars(self, values: dict[str, float], step: int, moment: float | None = None) -> None:
        """Write values of one step as one event, of `moment` or now: thousands of events take seconds."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        file_writer = self._writer.file_writer
        assert file_writer is not None
        points = [Summary.Value(tag=_tag(tag), simple_value=value) for tag, value in values.items()]
        file_writer.add_summary(Summary(value=points), step, moment)

    def _picture(self, tag: str, figure: "Figure") -> None:
        from darts_parallel.report.plots import to_image

        self._writer.add_image(tag, to_image(figure), self._step, dataformats="HWC")

    def _text(
        self,
        result: SearchResult | None,
        plan: Plan,
        cost: CostBreakdown,
        verifications: Sequence[Verification],
    ) -> None:
        line = plan.describe(self.problem.training.global_batch_size)
        text = render_text(self.problem, result, plan, cost, verifications)
        self._writer.add_text("plan", f"**{line}**\n\n```\n{text}```", self._step)

    def _figures(
        self, cost: CostBreakdown, metrics: dict[str, float], elasticities: dict[str, float]
    ) -> None:
        """Write all figures of the plan in one table: a chart of one point says nothing."""
        rows = {**metrics, "tokens_per_s": cost.tokens_per_s, "mfu": cost.mfu}
        rows |= {f"{name}, seconds": seconds for name, seconds in cost.breakdown_s.items()}
        rows |= {f"sensitivity to {name}": change for name, change in elasticities.items()}
        cells = [(name.replace("_", " "), f"{value:.6g}") for name, value in rows.items()]
        lines = markdown_table(("figure", "value"), cells)
        self._writer.add_text("figures", "\n".join(lines), self._step)

    def _hyperparameters(self, result: SearchResult | None, cost: CostBreakdown) -> None:
        """Write the row of this run in the HPARAMS tab; nothing where nothing was changed.

        `SummaryWriter.add_hparams` would open a run of its own in a subfolder for it.
        """
        from torch.utils.tensorboard.summary import hparams

        values = override_values(self.overrides)
        if not values:
            return
        metrics = {f"metrics/{name}": value for name, value in _measures(result, cost).items()}
        file_writer = self._writer.file_writer
        assert file_writer is not None
        for summary in hparams(values, metrics):
            file_writer.add_summary(summary)
        self._scalars(metrics, self._step)


def write_scalars(folder: Path, steps: Sequence[dict[str, float]]) -> None:
    """Write a TensorBoard run of curves alone: the values of every step, by tag."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(folder)) as writer:
        for step, values in enumerate(steps):
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)


def override_values(overrides: Sequence[str]) -> dict[str, bool | str | float | int]:
    """Return keys and values of overrides; numbers and truth values as such."""
    found: dict[str, bool | str | float | int] = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[key] = value if isinstance(value, bool | int | float) else text
    return found


def _measures(result: SearchResult | None, cost: CostBreakdown) -> dict[str, float]:
    """Return what sweeps compare: seconds per iteration, gaps of raw and polished plan, seconds."""
    measures = {"iteration_time_s": cost.iteration_time_s}
    if result is not None:
        measures["seconds"] = result.seconds
    if result is not None and result.gradient_iteration_time_s is not None:
        measures["raw_gap"] = result.raw_iteration_time_s / result.iteration_time_s - 1.0
        measures["gap"] = result.gradient_iteration_time_s / result.iteration_time_s - 1.0
    return {name: value for name, value in measures.items() if isfinite(value)}


@cache
def _tag(name: str) -> str:
    """Replace the characters that TensorBoard's tags may not hold."""
    return "".join(c if c.isalnum() or c in "-/._" else "_" for c in name)


def _metrics(
    result: SearchResult | None, cost: CostBreakdown, verifications: Sequence[Verification]
) -> dict[str, float]:
    metrics = {"iteration_time_s": cost.iteration_time_s}
    if result is not None:
        metrics |= {"raw_iteration_time_s": result.raw_iteration_time_s, "search_seconds": result.seconds}
    metrics |= {f"gap_{entry.name}": entry.gap for entry in verifications}
    return {name: value for name, value in metrics.items() if isfinite(value)}


def _interval_scalars(known: Intervals | None) -> dict[str, float]:
    """Return the ends of the seconds, the largest end of the bytes, the chance of failure."""
    if known is None:
        return {}
    return {
        "iteration_time_low_s": known.iteration_time_s[0],
        "iteration_time_high_s": known.iteration_time_s[1],
        "memory_high_bytes": max(high for _, high in known.memory_bytes),
        "out_of_memory_probability": known.any_out_of_memory,
    }


def write_winner(
    winner: WinnerHistory, write: Callable[[dict[str, float], int], None]
) -> dict[str, list[Any]]:
    """Write all curves of the winning restart, and return the layout of their charts.

    Args:
        winner: Its history.
        write: Writes the values of a step.
    """
    every = -(-len(winner.steps) // MOST_POINTS)
    rows = sorted({*range(0, len(winner.steps), every), len(winner.steps) - 1})
    curves: dict[str, list[float]] = {}
    overall = winner.probabilities[rows].mean(1)
    for choice in (overall.amax(0) >= NOTABLE).nonzero().flatten().tolist():
        curves[f"strategy/{winner.choices[choice]}"] = overall[:, choice].tolist()
    for group, values in (("memory", winner.memory), ("multiplier", winner.multipliers)):
        for stage in range(min(values.shape[1], MOST_STAGES)):
            curves[f"{group}/stage_{stage:02d}"] = values[rows, stage].tolist()
    for place, row in enumerate(rows):
        write({tag: values[place] for tag, values in curves.items()}, winner.steps[row])
    return {
        "strategies, mean over layers": ["Multiline", ["strategy/.*"]],
        "memory over capacity": ["Multiline", ["memory/.*"]],
        "memory multipliers": ["Multiline", ["multiplier/.*"]],
    }
