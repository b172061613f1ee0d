"""The TensorBoard run of a job: live curves of the search, then the plan and what sweeps compare."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import isfinite
from pathlib import Path

from darts_parallel.errors import Amounts
from darts_parallel.gradient import StepRecord
from darts_parallel.problem import Problem
from darts_parallel.report.curves import SearchCurves
from darts_parallel.report.outcome import Outcome

RESULTS = "z_results"
"""Group of the single points, last on the page."""
READING = """The curves show the relaxed plan that leads; another plan may take the lead. The final plan is
the best rounded plan of the search, improved further. `report.html` shows all layers by step.

Untick *Ignore outliers in chart scaling* to see whole curves. Tick *Show actual image size* to read the
names in the picture."""


class Tracker:
    """Writes one TensorBoard run.

    Args:
        folder: Of the run; made at the first record.
        overrides: What the command changed, `key=value`: the columns of the HPARAMS tab.
    """

    def __init__(self, folder: Path, problem: Problem, overrides: Sequence[str] = ()) -> None:
        self.folder = folder
        self.problem = problem
        self.overrides = overrides
        self._earlier: list[Path] = []
        """Curves of the plan that lies in the run's folder; they go when this run has its own plan."""
        self._step = 0
        self._begin = 0
        """Steps of the earlier searches of this job."""

    @cached_property
    def _curves(self) -> SearchCurves:
        """The file, opened at its first use."""
        if self.folder.with_name("plan.json").exists():
            self._earlier = list(self.folder.glob("events.out.tfevents.*"))
        kinds = [replace(layer, name="") for layer in self.problem.model.layers]
        return SearchCurves(self.folder, kinds)

    def record(self, record: StepRecord) -> None:
        """Write one step of a search; searches with other memory left free follow one another."""
        if record.step < self._step - self._begin:
            self._begin = self._step + 1
        self._step = self._begin + record.step
        self._curves.record(replace(record, step=self._step), self.problem.model.layer_names)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write other values by tag; they are on disk afterwards."""
        self._curves.scalars(values, step)
        self._curves.writer.flush()

    def finish(self, outcome: Outcome) -> None:
        """Write what the whole search decides, and name the final plan."""
        words = outcome.plan.describe(self.problem.training.global_batch_size)
        self._curves.writer.add_text("plan", f"**{words}**\n\n{READING}", self._step)
        self._curves.finish()
        self._hyperparameters(outcome)
        self._curves.writer.flush()
        for file in self._earlier:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if "_curves" in vars(self):
            self._curves.writer.close()

    def _hyperparameters(self, outcome: Outcome) -> None:
        """Write the row of this run in the HPARAMS tab: overrides, plan, and what sweeps compare.

        `SummaryWriter.add_hparams` would open a run of its own in a subfolder for it.
        """
        from torch.utils.tensorboard.summary import hparams

        values = override_values(self.overrides)
        values["plan"] = outcome.plan.describe(self.problem.training.global_batch_size)
        metrics = {f"{RESULTS}/{name}": value for name, value in _measures(outcome).items()}
        file_writer = self._curves.writer.file_writer
        assert file_writer is not None
        for summary in hparams(values, metrics):
            file_writer.add_summary(summary)
        self._curves.scalars(metrics, self._step)


def override_values(overrides: Sequence[str]) -> dict[str, bool | str | float | int]:
    """Return keys and values of overrides; numbers and truth values as such."""
    found = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[key] = value if isinstance(value, bool | int | float) else text
    return found


def _measures(outcome: Outcome) -> Amounts:
    """Return the figures that sweeps compare: speed, memory of the fullest stage, risk, gaps, seconds."""
    cost = outcome.cost
    result = outcome.result
    measures = {
        "iteration_time_s": cost.iteration_time_s,
        "tokens_per_s": cost.tokens_per_s,
        "mfu": cost.mfu,
        "memory_over_capacity": max(cost.fullness),
    }
    if outcome.sure is not None:
        measures["out_of_memory_probability"] = outcome.sure.any_out_of_memory
    if result is not None:
        measures["search_seconds"] = result.seconds
    for stage in outcome.stages:
        gap = outcome.gap(stage)
        if gap is not None:
            measures[f"gap_{stage.name}"] = gap
    return {name: value for name, value in measures.items() if isfinite(value)}
