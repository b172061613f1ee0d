"""Live curves of a search: how likely every strategy is, and what the search itself does.

A series cannot be taken back from an event file. So a strategy gets one when it first leads, with
its earlier points. TensorBoard is imported where it is first needed.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from pathlib import Path

import numpy as np

from darts_parallel.errors import Amounts
from darts_parallel.gradient import StepRecord
from darts_parallel.report.journey import COLOURS, Pixels, rgb, short_names, thinned

MOST_SERIES = 64
"""Series of single layers, so that TensorBoard stays quick."""
ROOM = 4
"""Strategies of a layer that need room for each layer to have its series while the search runs."""
MOST_ROWS = 24
"""Strategies that a picture shows."""
CELL = 14
"""Pixels of a layer in a picture."""
LETTER = 7
"""Pixels of a letter in a picture."""
NOTABLE = 2.0
"""A pipeline configuration gets a curve once it weighs this many times an even share."""
QUANTITIES = ("loss", "surrogate_time_s", "best_time_s", "memory_violation", "entropy", "pp")
"""Fields of a record that have a curve."""
EACH_LAYER = "probability/layer_"
Series = tuple[int, str]
"""A layer and a strategy."""
MEANS = r"probability/(?!layer_)[^/]+$"
"""Tags of the means over layers, as TensorBoard's custom layout matches them."""


@dataclass(frozen=True)
class Weights:
    """Probabilities of strategies at one step."""

    step: int
    rows: Sequence[str]
    """Names of the layers, L."""
    choices: Sequence[str]
    """Names of the strategies, C."""
    values: Pixels
    """Shape `(L, C)`; a row sums to 1."""
    moment: float = field(default_factory=time.time)
    """Time of day, seconds."""

    @staticmethod
    def of_names(step: int, probabilities: Mapping[tuple[str, str], float]) -> "Weights":
        """Return probabilities that are given by layer and strategy; layers may have different ones."""
        rows = list(dict.fromkeys(row for row, _ in probabilities))
        choices = list(dict.fromkeys(choice for _, choice in probabilities))
        values = np.zeros((len(rows), len(choices)))
        for (row, choice), probability in probabilities.items():
            values[rows.index(row), choices.index(choice)] = probability
        return Weights(step, rows, choices, values)

    def of(self, choice: str) -> Pixels:
        """Return the probability of a strategy in every layer, `(L,)`; 0 where it is not offered."""
        if choice not in self.choices:
            return np.zeros(len(self.rows))
        return self.values[:, self.choices.index(choice)]

    @property
    def leaders(self) -> list[Series]:
        """List every layer with its most likely strategy."""
        best = self.values.argmax(1).tolist()
        return [(row, self.choices[choice]) for row, choice in enumerate(best)]


class SearchCurves:
    """Write the curves of one search.

    Args:
        folder: Of the TensorBoard run; made if it is not there.
        kinds: Something equal for equal layers; None takes every layer for a kind of its own.
    """

    def __init__(self, folder: Path, kinds: Sequence[object] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(folder))
        self._kinds = kinds
        self._live: Sequence[int] = ()
        """Layers that have series while the search runs."""
        self._history: list[Weights] = []
        self._leads: Counter[Series] = Counter()
        """Records in which a strategy led, by layer and strategy."""
        self._means: list[str] = []
        """Strategies whose mean over layers has a series."""
        self._series: list[Series] = []
        """Layers and strategies that have a series."""
        self._outer: set[str] = set()
        """Pipeline configurations with a curve that were searched at the last record."""

    def record(self, record: StepRecord, names: Sequence[str]) -> None:
        """Write one step of a search.

        Args:
            names: Names of the model's layers.
        """
        values = {name: getattr(record, name) for name in QUANTITIES}
        for name in ("temperature", "boundary_temperature", "sharpness"):
            values[name] = getattr(record.schedules, name)
        values |= {f"cause/{name}": seconds for name, seconds in record.terms.items()}
        values |= self._configurations(record.outer_weights)
        shown = {f"search/{name}": value for name, value in values.items()}
        rows = record.rows or short_names(names)
        probabilities = record.probabilities.numpy()
        self.add(Weights(record.step, rows, record.choices, probabilities), shown)

    def _configurations(self, weights: Mapping[str, float]) -> Amounts:
        """Return the weights of pipeline configurations that are, or have been, worth a curve."""
        # one that has left weighs nothing; said once, so that no curve is a single point
        known = dict.fromkeys(self._outer, 0.0) | dict(weights)
        notable = min(1.0, NOTABLE / max(len(weights), 1))
        shown = {name for name, value in known.items() if value >= notable} | self._outer
        self._outer = shown & set(weights)
        return {f"configuration/{name}": known[name] for name in known if name in shown}

    def add(self, weights: Weights, values: Mapping[str, float]) -> None:
        """Write probabilities, and other values by tag; everything is on disk afterwards."""
        if not self._history:
            self._live = self._live_rows(weights.rows)
            self._lay_out(weights.rows)
        self._leads.update(weights.leaders)
        self._open(self._live)
        self._history.append(weights)
        self.scalars(values, weights.step, weights.moment)
        self._write(weights, self._means, self._series)
        # 1, 2, 4, 8 and so on: probabilities change most at first
        if len(self._history).bit_count() == 1:
            self._picture(weights)
        self.writer.flush()

    def finish(self) -> None:
        """Give the series that are left to the pairs that led longest, and draw the last step."""
        if self._history:
            last = self._history[-1]
            self._open(range(len(last.rows)))
            self._picture(last)

    def _live_rows(self, rows: Sequence[str]) -> Sequence[int]:
        """Return layers that have series while the search runs: all, or one of each kind."""
        if ROOM * len(rows) <= MOST_SERIES:
            return range(len(rows))
        kinds = rows if self._kinds is None or len(self._kinds) != len(rows) else self._kinds
        return [row for row, kind in enumerate(kinds) if kind not in kinds[:row]]

    def _open(self, rows: Sequence[int]) -> None:
        """Open the series of the strategies that have led in some layers, with their earlier points."""
        waiting = [
            pair
            for pair, _ in self._leads.most_common()
            if pair[0] in rows and pair not in self._series
        ]
        series = waiting[: MOST_SERIES - len(self._series)]
        led = dict.fromkeys(choice for _, choice in self._leads)
        means = [choice for choice in led if choice not in self._means]
        for weights in self._history:
            self._write(weights, means, series)
        self._means += means
        self._series += series

    def _write(self, weights: Weights, means: Sequence[str], series: Sequence[Series]) -> None:
        """Write one step of some series."""
        values = {f"probability/{choice}": float(weights.of(choice).mean()) for choice in means}
        for row, choice in series:
            values[f"{EACH_LAYER}{weights.rows[row]}/{choice}"] = float(weights.of(choice)[row])
        self.scalars(values, weights.step, weights.moment)

    def _picture(self, weights: Weights) -> None:
        """Draw the strategies that have led, in every layer."""
        led: Counter[str] = Counter()
        for (_, choice), count in self._leads.items():
            led[choice] += count
        rows = [choice for choice, _ in led.most_common(MOST_ROWS)]
        values = np.stack([weights.of(choice) for choice in rows])
        pixels = heat_map(values, rows, weights.rows)
        self.writer.add_image("probability/all_layers", pixels, weights.step, dataformats="HWC")

    def _lay_out(self, rows: Sequence[str]) -> None:
        """Write the page of custom charts: several lines in one."""
        charts = {"mean over layers": ["Multiline", [MEANS]]}
        for row in self._live:
            tags = f"{EACH_LAYER}{re.escape(_tag(rows[row]))}/.*"
            charts[f"layer {rows[row]}"] = ["Multiline", [tags]]
        search = {
            "seconds per iteration": ["Multiline", ["search/surrogate_time_s", "search/best"]],
            "pipeline configurations": ["Multiline", ["search/configuration/.*"]],
            "seconds by cause": ["Multiline", ["search/cause/.*"]],
        }
        layout = {"probabilities": charts, "search": search}
        self.writer.add_custom_scalars(layout)

    def scalars(self, values: Mapping[str, float], step: int, moment: float | None = None) -> None:
        """Write values of one step as one event, of `moment` or now: thousands of events take seconds."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        file_writer = self.writer.file_writer
        assert file_writer is not None
        points = [
            Summary.Value(tag=_tag(tag), simple_value=value)
            for tag, value in values.items()
            if isfinite(value)
        ]
        file_writer.add_summary(Summary(value=points), step, moment)


def heat_map(values: Pixels, rows: Sequence[str], columns: Sequence[str]) -> Pixels:
    """Draw values from 0 (white) to 1 as squares with names, pixels `(height, width, 3)` of bytes."""
    from PIL import Image, ImageDraw

    left = LETTER * max(len(name) for name in rows) + CELL
    size = (CELL * len(columns), CELL * len(rows))
    image = Image.new("RGB", (left + size[0] + 2 * CELL, size[1] + 2 * CELL), "white")
    shades = 1.0 - values[..., None] * (1.0 - np.array(rgb(COLOURS[0])))
    squares = Image.fromarray(np.round(255 * shades).astype(np.uint8))
    image.paste(squares.resize(size, Image.Resampling.NEAREST), (left, 0))
    draw = ImageDraw.Draw(image)
    for place, name in enumerate(rows):
        draw.text((2, CELL * place), _tag(name), "black")
    widest = max(len(name) for name in columns)
    for place in thinned(len(columns), max(size[0] // (LETTER * (widest + 1)), 1)):
        draw.text((left + CELL * place, size[1] + 2), _tag(columns[place]), "black")
    return np.asarray(image)


@cache
def _tag(name: str) -> str:
    """Replace the characters that TensorBoard's tags may not hold."""
    return re.sub(r"[^\w/.-]", "_", name, flags=re.ASCII)
