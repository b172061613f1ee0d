"""TensorBoard: live curves of the search, then pictures of the whole search.

TensorBoard and matplotlib are imported where they are first needed: together they cost more than a second.
The curves of a search that ends within `LIVE_AFTER` seconds are held until its plan is on the screen.
"""

import json
import re
import time
from collections.abc import Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from darts_parallel.cost import CostBreakdown
from darts_parallel.gradient import SearchResult, StepRecord
from darts_parallel.planner import intervals
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.report.journey import journey, memory_shares
from darts_parallel.report.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter

LIVE_AFTER = 10.0
"""Seconds of a search from which on somebody may be watching: its curves are written as they come."""
NOTABLE = 2.0
"""An outer choice gets a curve once it weighs this many times an even share."""


class Tracker:
    """Writes one TensorBoard run.

    Args:
        folder: Of the run; made if it is not there.
        overrides: What the command changed, `key=value`: the columns of the HPARAMS tab.
    """

    def __init__(self, folder: Path, problem: Problem, overrides: Sequence[str] = ()) -> None:
        self.folder = folder
        self.problem = problem
        self.overrides = overrides
        self._names = tuple(layer.name for layer in problem.model.layers)
        self._opened: SummaryWriter | None = None
        self._held: list[tuple[dict[str, float], int, float]] = []
        """Curves that are not written yet: values, step and the time of day."""
        self._step = 0
        self._outer: set[str] = set()
        """Outer choices with a curve that the search was still in when it was last recorded."""

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
        notable = min(1.0, NOTABLE / max(len(record.outer_weights), 1))
        kept = {}
        for name, value in weights.items():
            if value >= notable or name in self._outer:
                kept[name] = value
        values |= {f"outer/{name}": value for name, value in kept.items()}
        self._outer = set(record.outer_weights) & set(kept)
        if self._opened is None and record.seconds < LIVE_AFTER:
            self._held.append((values, self._step, time.time()))
        else:
            self._scalars(values, self._step)

    def finish(self, outcome: Outcome) -> None:
        """Write the pictures of the search, and name the final plan."""
        words = outcome.plan.describe(self.problem.training.global_batch_size)
        told = f"**{words}**; report.html in the run's folder has the rest"
        self._writer.add_text("plan", told, self._step)
        if outcome.result is not None and outcome.result.history:
            self._search(outcome.result, outcome.plan, outcome.cost)
        self._hyperparameters(outcome)
        self._writer.flush()

    def _search(self, result: SearchResult, plan: Plan, cost: CostBreakdown) -> None:
        """Draw the whole search: lines in colours, whole, as no chart of TensorBoard shows them."""
        from darts_parallel.report.plots import READING, curves_figure, journey_figure

        whole = "Untick *Ignore outliers* under SCALARS, or see `search/curves` under IMAGES."
        self._writer.add_text("reading", f"{READING}\n\n{whole}", self._step)
        found = journey(result, plan)
        shares = None
        if found is not None:
            shares = memory_shares(found.winner.memory, plan, self.problem)
            self._picture("search/layers_by_steps", journey_figure(found, plan, self._names))
        final = [
            used / most for used, most in zip(cost.memory_bytes, cost.capacity_bytes, strict=True)
        ]
        self._picture("search/curves", curves_figure(result.history, found, shares, final))

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
        points = []
        for tag, value in values.items():
            points.append(Summary.Value(tag=_tag(tag), simple_value=value))
        file_writer.add_summary(Summary(value=points), step, moment)

    def _picture(self, tag: str, figure: "Figure") -> None:
        from darts_parallel.report.plots import to_image

        self._writer.add_image(tag, to_image(figure), self._step, dataformats="HWC")

    def _hyperparameters(self, outcome: Outcome) -> None:
        """Write the row of this run in the HPARAMS tab: overrides, plan, and what sweeps compare.

        `SummaryWriter.add_hparams` would open a run of its own in a subfolder for it.
        """
        from torch.utils.tensorboard.summary import hparams

        values = override_values(self.overrides)
        values["plan"] = outcome.plan.describe(self.problem.training.global_batch_size)
        metrics = {f"metrics/{name}": value for name, value in _measures(outcome).items()}
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


def _measures(outcome: Outcome) -> dict[str, float]:
    """Return what sweeps compare: speed, memory of the fullest stage, risk, gaps, search seconds."""
    cost = outcome.cost
    result = outcome.result
    shares = zip(cost.memory_bytes, cost.capacity_bytes, strict=True)
    measures = {
        "iteration_time_s": cost.iteration_time_s,
        "tokens_per_s": cost.tokens_per_s,
        "mfu": cost.mfu,
        "memory_over_capacity": max(used / most for used, most in shares),
    }
    known = intervals(outcome.plan, outcome.problem, cost, outcome.elasticities or {})
    if known is not None:
        measures["out_of_memory_probability"] = known.any_out_of_memory
    if result is not None:
        measures["seconds"] = result.seconds
    if result is not None and result.gradient_iteration_time_s is not None:
        measures["raw_gap"] = result.raw_iteration_time_s / result.iteration_time_s - 1.0
        measures["gap"] = result.gradient_iteration_time_s / result.iteration_time_s - 1.0
    return {name: value for name, value in measures.items() if isfinite(value)}


@cache
def _tag(name: str) -> str:
    """Replace the characters that TensorBoard's tags may not hold."""
    return re.sub(r"[^\w/.-]", "_", name, flags=re.ASCII)
