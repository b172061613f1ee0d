"""The whole search as pixels: which strategy leads in every layer at every step, and how clearly.

Every picture takes its colours from here; matplotlib is not needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.gradient import SearchResult, StepRecord, WinnerHistory
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
    """The winning restart over the recorded steps, S, of the layers, L."""

    winner: WinnerHistory
    colours: dict[str, str]
    """Colour of a strategy, those that lead at the end and that the plan takes first."""
    pixels: Pixels
    """Red, green and blue from 0 to 1, shape `(L, S, 3)`; pale is undecided."""
    plan: Pixels
    """Colours of the plan, `(L, 1, 3)`."""
    hardened: int | None
    """Step from which on stage boundaries are whole layers in the seconds."""

    own: bool
    """Whether the restart has the plan's pipeline configuration."""

    @property
    def end(self) -> int:
        """Return the step at which the last recorded one ends."""
        steps = self.winner.steps
        return steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)

    def legend(self) -> list[tuple[str, str]]:
        """Return names and colours; strategies without a colour of their own in one entry."""
        own = [(name, colour) for name, colour in self.colours.items() if colour != OTHERS]
        others = len(self.colours) - len(own)
        return own + ([(f"{others} more", OTHERS)] if others else [])


def hardened_at(history: Sequence[StepRecord]) -> int | None:
    """Return the first recorded step with whole layers in every stage; None: one stage, or from the start."""
    hard = [r.step for r in history if r.schedules.hard_stages and r.pp > 1]
    return hard[0] if hard and hard[0] > history[0].step else None


def journey(result: SearchResult | None, plan: Plan) -> Journey | None:
    """Return the picture of a search; None without a history of layers."""
    winner = None if result is None else result.winner
    if result is None or winner is None:
        return None
    if winner.probabilities.shape[1] != len(plan.layers):
        return None
    best = winner.probabilities.max(-1)
    probability = best.values.numpy()
    leader = best.indices.numpy()
    labels = [layer.label() for layer in plan.layers]
    colours = _colours(winner.choices, leader, labels)
    shades = np.array([rgb(colours.get(name, OTHERS)) for name in winner.choices])
    weight = probability[..., None]
    shown = (weight * shades[leader] + (1.0 - weight)).transpose(1, 0, 2)
    final = np.array([[rgb(colours[label])] for label in labels])
    hardened = hardened_at(result.history)
    own = _is_configuration(winner.name, plan)
    return Journey(winner, colours, shown.clip(0.0, 1.0), final, hardened, own)


def _is_configuration(name: str, plan: Plan) -> bool:
    """Return whether a name as `pp4 v2 cp2 1f1b m128` is the pipeline configuration of a plan."""
    counts = {"v": plan.virtual_stages, "cp": plan.cp}
    words = {f"{key}{count}" for key, count in counts.items() if count > 1}
    words |= {f"pp{plan.pp}", f"m{plan.num_micro_batches}"}
    return set(re.sub(r" \(.*\)", "", name).split()) - {plan.schedule_name} == words


def _colours(
    choices: Sequence[str], leader: NDArray[np.int64], labels: Sequence[str]
) -> dict[str, str]:
    """Give a colour to every strategy that leads somewhere or that the plan takes.

    Args:
        choices: Names of the strategies.
        leader: Index of the leading strategy by step and layer.
        labels: Strategies of the plan's layers; they come first, the most common one at the head.
    """
    counts = np.bincount(leader.ravel(), minlength=len(choices))
    at_end = set(leader[-1].tolist())
    leading = np.flatnonzero(counts).tolist()
    leading.sort(key=lambda choice: (choice not in at_end, -counts[choice], choice))
    names = sorted(labels, key=lambda label: -labels.count(label))
    names += [choices[choice] for choice in leading]
    colours = {}
    for place, name in enumerate(dict.fromkeys(names)):
        colours[name] = COLOURS[place] if place < len(COLOURS) else OTHERS
    return colours


def rgb(colour: str) -> tuple[float, ...]:
    """Return red, green and blue of `#rrggbb`, from 0 to 1."""
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def thinned(count: int, limit: int) -> range:
    """Thin the places of axis labels to at most `limit`."""
    return range(0, count, -(-count // limit))


def short_names(names: Sequence[str]) -> list[str]:
    """Return numbers of the blocks; whole names of all other layers (`mtp.0`)."""
    return [name.removeprefix("layers.") for name in names]
