"""The whole search as pixels: which strategy leads in every layer at every step, and how clearly.

Every picture takes its colours from here; matplotlib is not needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.gradient import SearchResult, StepRecord
from darts_parallel.plans import Plan

COLOURS = (
    "#4878a8",
    "#e1973c",
    "#6a9a58",
    "#c23b3b",
    "#8465a8",
    "#7a5544",
    "#d27ab0",
    "#b0a83c",
    "#3ca3b0",
)
OTHERS = "#777777"
"""Strategies that lead less often than those with a colour of their own."""
Pixels = NDArray[np.float64]


@dataclass(frozen=True)
class Journey:
    """The leading restart of each recorded step, S, and its layers, L."""

    steps: tuple[int, ...]
    colours: dict[str, str]
    """Colour of a strategy, those that lead at the end and that the plan takes first."""
    pixels: Pixels
    """Red, green and blue from 0 to 1, shape `(L, S, 3)`; pale is undecided."""
    plan: Pixels
    """Colours of the plan, `(L, 1, 3)`."""
    hardened: int | None
    """Step from which on stage boundaries are whole layers in the seconds."""

    own: bool
    """Whether the last one has the plan's pipeline degree."""

    @property
    def end(self) -> int:
        """Return the step at which the last recorded one ends."""
        steps = self.steps
        return steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)

    def legend(self) -> list[tuple[str, str]]:
        """Return names and colours; strategies without a colour of their own in one entry."""
        own = [(name, colour) for name, colour in self.colours.items() if colour != OTHERS]
        others = len(self.colours) - len(own)
        return own + [(f"{others} more", OTHERS)] * bool(others)


def hardened_at(history: Sequence[StepRecord]) -> int | None:
    """Return the first recorded step with whole layers in every stage; None: one stage, or from the start."""
    hard = [r.step for r in history if r.schedules.hard_stages and r.pp > 1]
    return hard[0] if hard and hard[0] > history[0].step else None


def journey(result: SearchResult | None, plan: Plan) -> Journey | None:
    """Return the picture of a search; None without a history of layers."""
    history = () if result is None else result.history
    layers = len(plan.layers)
    records = [own for own in history if not own.rows and len(own.probabilities) == layers]
    if not records:
        return None
    leaders = []
    weights = []
    for record in records:
        largest, best = record.probabilities.max(-1)
        weights.append(largest.numpy())
        leaders.append([record.choices[choice] for choice in best.tolist()])
    labels = [layer.label() for layer in plan.layers]
    colours = _colours(leaders, labels)
    shades = np.array([[rgb(colours[name]) for name in names] for names in leaders])
    weight = np.stack(weights)[..., None]
    shown = (weight * shades + (1.0 - weight)).transpose(1, 0, 2)
    final = np.array([[rgb(colours[label])] for label in labels])
    steps = tuple(record.step for record in records)
    own = records[-1].pp == plan.pp
    return Journey(steps, colours, shown.clip(0.0, 1.0), final, hardened_at(records), own)


def _colours(leaders: Sequence[Sequence[str]], labels: Sequence[str]) -> dict[str, str]:
    """Give a colour to every strategy that leads somewhere or that the plan takes.

    Args:
        leaders: Leading strategy by step and layer.
        labels: Strategies of the plan's layers; they come first, the most common one at the head.
    """
    counts = Counter(name for names in leaders for name in names)
    leading = sorted(counts, key=lambda name: (name not in leaders[-1], -counts[name]))
    names = sorted(labels, key=lambda label: -labels.count(label)) + leading
    colours = {}
    for place, name in enumerate(dict.fromkeys(names)):
        colours[name] = COLOURS[place] if place < len(COLOURS) else OTHERS
    return colours


def rgb(colour: str) -> tuple[float, ...]:
    """Return red, green and blue of `#rrggbb`, from 0 to 1."""
    return tuple(value / 255 for value in bytes.fromhex(colour[1:]))


def thinned(count: int, limit: int) -> range:
    """Thin the places of axis labels to at most `limit`."""
    return range(0, count, -(-count // limit))


def short_names(names: Sequence[str]) -> list[str]:
    """Return numbers of the blocks; whole names of all other layers (`mtp.0`)."""
    return [name.removeprefix("layers.") for name in names]
