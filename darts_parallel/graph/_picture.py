"""The picture of a plan: operators coloured by the dimension that they split, collectives on edges."""

from collections import defaultdict
from io import StringIO

from darts_parallel.graph._prices import VIEWS
from darts_parallel.graph.operators import INPUT, OUTPUT, PARAMETER, RELAY, GraphOperator
from darts_parallel.graph.plan import PlannedGraph

NONE = "#c8c8c8"
WIDTH, HEIGHT = 2.7, 0.8
"""Inches between neighbours of a row, and between rows."""
BEND = 0.8
"""Inches by which an edge leaves its line where boxes stand between its ends."""
LARGEST = 160
"""Boxes that are drawn at most: the first of repeated blocks come first."""


def picture(planned: PlannedGraph) -> str:
    """Return the drawing of a plan as the text of an SVG file.

    Views, relays, parameters and what needs no gradient are left out; edges go around them. A box stands one
    row below the lowest of its producers.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    boxes, level, rows = _boxes(planned), dict[str, int](), defaultdict[int, list[str]](list)
    edges = _edges(planned, {op.name for op in boxes})
    for op in boxes:
        level[op.name] = 1 + max((level[a] for a, b in edges if b == op.name), default=-1)
        rows[level[op.name]].append(op.name)
    place = {
        name: ((x - (len(row) - 1) / 2) * WIDTH, -y * HEIGHT)
        for y, row in rows.items()
        for x, name in enumerate(row)
    }
    label = {op.name: " · ".join(planned.plan.choice(op).labels) for op in boxes}
    split = dict.fromkeys(one for one in label.values() if one.replace("none", "").strip(" ·*"))
    colours = {one: colormaps["Set2"](k % 8) for k, one in enumerate(split)}
    widest = max(2, *map(len, rows.values()))  # the legend needs two
    figure = Figure(figsize=(WIDTH * widest + 0.5, HEIGHT * (len(rows) + 1)))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-WIDTH * widest / 2, WIDTH * widest / 2), ylim=(-HEIGHT * len(rows), HEIGHT))
    axes.axis("off")
    for (start, end), moves in edges.items():
        (x1, y1), (x2, y2), colour = place[start], place[end], "#d62728" if moves else "#888"
        bend = (level[end] - level[start] > 1) * BEND  # around the boxes between
        style = {
            "arrowstyle": "-|>",
            "color": colour,
            "connectionstyle": f"arc3,rad={2 * bend / (y1 - y2)}",
        }
        axes.annotate("", (x2, y2), (x1, y1), arrowprops=style)
        side = "right" if bend else "left"
        axes.text(
            (x1 + x2) / 2 - bend, (y1 + y2) / 2, "\n".join(moves), color=colour, fontsize=6, ha=side
        )
    for op in boxes:
        name = op.target if op.op in (INPUT, OUTPUT) else op.op
        text = f"{name[:30]}\n{(op.module.rpartition('.')[2] or op.name)[:18]}: {label[op.name]}"
        box = {"boxstyle": "round", "facecolor": colours.get(label[op.name], NONE)}
        axes.text(*place[op.name], text, ha="center", va="center", fontsize=7, bbox=box)
    legend = [Patch(color=colour, label=f"splits {one}") for one, colour in colours.items()]
    axes.legend(handles=legend, loc="upper center", ncols=4, fontsize=7)
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def _boxes(planned: PlannedGraph) -> list[GraphOperator]:
    """Return what is drawn: the first of equal operators, inputs and outputs."""
    graph, firsts = planned.graph, {g.operators[0].name for g in planned.plan.space.groups}

    def drawn(op: GraphOperator) -> bool:
        trained = any(graph.values[name].needs_grad for name in op.outputs or op.inputs)
        return op.name in firsts and (
            op.op == INPUT or (trained and op.op not in (PARAMETER, RELAY, *VIEWS))
        )

    return [op for op in graph.operators if drawn(op)][:LARGEST]


def _edges(planned: PlannedGraph, boxes: set[str]) -> dict[tuple[str, str], list[str]]:
    """Return the edges between boxes with the collectives on them; edges go through what is not drawn."""
    graph = planned.graph
    moved: dict[str, list[str]] = defaultdict(list)
    for one in planned.plan.collectives:
        moved[one.name].append(f"{one.step.kind} ({one.when})")
    edges: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    origin: dict[str, dict[tuple[str, tuple[str, ...]], None]] = {}
    """Boxes that every value comes from, with the collectives since."""
    for op in graph.operators:
        arriving = [
            (src, (*seen, *moved[name])) for name in op.inputs for src, seen in origin.get(name, ())
        ]
        if op.name in boxes:
            for src, seen in arriving:
                edges[src, op.name] |= dict.fromkeys(seen)
            arriving = [(op.name, ())]
        origin |= dict.fromkeys(op.outputs, dict.fromkeys(arriving))
    return {ends: list(moves) for ends, moves in edges.items()}
