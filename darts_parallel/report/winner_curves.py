"""The winning restart as TensorBoard curves: strategies over all layers, memory, multipliers."""

from collections.abc import Callable
from typing import Any

from darts_parallel.gradient.winner import WinnerHistory

MOST_POINTS = 60
"""Points of a curve."""
NOTABLE = 0.01
"""A strategy whose mean probability never reaches this gets no curve."""
MOST_STAGES = 32

Scalars = Callable[[dict[str, float], int], None]
"""Writes values by tag at a step."""


def write_winner(winner: WinnerHistory, write: Scalars) -> dict[str, list[Any]]:
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
