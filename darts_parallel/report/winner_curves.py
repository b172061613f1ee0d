"""The winning restart as TensorBoard curves: probabilities and entropy by layer, memory, multipliers."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from darts_parallel.gradient.winner import WinnerHistory
from darts_parallel.plan.strategy import Plan

MOST_CHARTS = 32
"""Layers with a chart of their own; in deeper models runs of equal layers share one."""
MOST_POINTS = 60
"""Points of a curve."""
NOTABLE = 0.02
"""A strategy that never has this probability in a run of layers gets no curve there."""
MOST_STAGES = 32

Scalars = Callable[[dict[str, float], int], None]
"""Writes values by tag at a step."""


def layer_runs(plan: Plan, layer_names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Name, first layer and end of every chart.

    Layers stand alone in models of at most `MOST_CHARTS` layers. In deeper ones neighbours of one kind
    that end in one stage with one strategy stand together.
    """
    if len(layer_names) <= MOST_CHARTS:
        return [(name, index, index + 1) for index, name in enumerate(layer_names)]

    def kind(layer: int) -> tuple[Any, ...]:
        stem = layer_names[layer].rpartition(".")[0] or layer_names[layer]
        return stem, plan.stage_of_layer[layer], plan.layers[layer]

    runs = []
    for _, members in groupby(range(len(layer_names)), key=kind):
        own = list(members)
        first, last = layer_names[own[0]], layer_names[own[-1]].rpartition(".")[2]
        runs.append((first if len(own) == 1 else f"{first}-{last}", own[0], own[-1] + 1))
    return runs


def write_winner(
    winner: WinnerHistory, plan: Plan, layer_names: Sequence[str], write: Scalars
) -> dict[str, dict[str, list[Any]]]:
    """Write all curves of the winning restart.

    Args:
        winner: Its history.
        plan: The final plan.
        layer_names: Of the model.
        write: Writes the values of a step.

    Returns:
        The layout of their charts, for `add_custom_scalars`.
    """
    every = -(-len(winner.steps) // MOST_POINTS)
    rows = sorted({*range(0, len(winner.steps), every), len(winner.steps) - 1})
    steps = [winner.steps[row] for row in rows]

    curves: dict[str, list[float]] = {}
    charts: dict[str, list[Any]] = {}
    entropy = winner.entropy[rows]
    for name, first, end in layer_runs(plan, layer_names):
        mean = winner.probabilities[rows, first:end].mean(1)
        for choice in (mean.amax(0) >= NOTABLE).nonzero().flatten().tolist():
            curves[f"layers/{name}/{winner.choices[choice]}"] = mean[:, choice].tolist()
        charts[name] = ["Multiline", [f"layers/{_tag(name)}/.*"]]
        curves[f"entropy/{name}"] = entropy[:, first:end].mean(1).tolist()
    overall = winner.probabilities[rows].mean(1)
    for choice in (overall.amax(0) >= NOTABLE / 2).nonzero().flatten().tolist():
        curves[f"strategy/{winner.choices[choice]}"] = overall[:, choice].tolist()
    for group, values in (("memory", winner.memory), ("multiplier", winner.multipliers)):
        for stage in range(min(values.shape[1], MOST_STAGES)):
            curves[f"{group}/stage_{stage:02d}"] = values[rows, stage].tolist()
    for place, step in enumerate(steps):
        write({tag: values[place] for tag, values in curves.items()}, step)
    return {
        "winner": {
            "strategies, mean over layers": ["Multiline", ["strategy/.*"]],
            "entropy by layer": ["Multiline", ["entropy/.*"]],
            "memory over capacity": ["Multiline", ["memory/.*"]],
            "memory multipliers": ["Multiline", ["multiplier/.*"]],
        },
        "layers": charts,
    }


def _tag(name: str) -> str:
    """Return a regular expression of the tag of a name."""
    return "".join(c if c.isalnum() or c in "-/_" else "." for c in name)
