"""Small panels of one figure, one a problem, under a legend that all share."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def small_panels(count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure with at least `count` panels, four a row; `height` of a row in inches."""
    columns = max(min(count, 4), 1)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.4 * columns, height * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels


def finish_panel(panel: Axes, name: str) -> None:
    """Name a panel and make its writing small."""
    panel.set_title(name, fontsize=7, loc="left")
    panel.tick_params(labelsize=6)
    panel.grid(color="#eeeeee", linewidth=0.5)


def finish_figure(figure: Figure, panels: Sequence[Axes], gap_to: str, columns: int) -> None:
    """Name the axes of all panels and write one legend of everything that is drawn in any."""
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel(f"gap to {gap_to}, %", fontsize=8)
    found: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    if found:
        figure.legend(
            list(found.values()), list(found), loc="outside upper center", ncols=columns, fontsize=7
        )
