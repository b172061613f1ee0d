"""The picture of a plan: operators coloured by the dimension that they split, collectives on edges."""

from collections import defaultdict
from xml.sax.saxutils import escape

from darts_parallel.graph._prices import VIEWS
from darts_parallel.graph.operators import INPUT, OUTPUT, PARAMETER, RELAY, GraphOperator
from darts_parallel.graph.plan import PlannedGraph

WHOLE = "#c8c8c8"
COLOURS = ("#66c2a5", "#fc8d62", "#8da0cb", "#e78ac3", "#a6d854", "#ffd92f", "#e5c494", "#80b1d3")
"""Colours of boxes that split nothing, and of different splits in turn."""
ROW, COLUMN = 64, 210
"""Pixels between rows, and between neighbours of a row."""
BEND = 90
"""Pixels by which an edge leaves its line where boxes stand between its ends."""
LARGEST = 160
"""Boxes that are drawn at most: the first of repeated blocks come first."""
FILE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">
<g font-size="9" text-anchor="middle">
{shapes}
</g>
</svg>
"""
EDGE = """\
<path d="M{x1},{y1} Q{x},{y} {x2},{y2}" fill="none" stroke="{colour}"/>
<text x="{x}" y="{y}" fill="{colour}">{text}</text>"""
BOX = """\
<rect x="{left}" y="{top}" width="180" height="32" rx="6" fill="{colour}" stroke="black"/>
<text x="{x}" y="{above}">{name}</text>
<text x="{x}" y="{below}">{splits}</text>"""
Edges = dict[tuple[str, str], dict[str, None]]


def picture(planned: PlannedGraph) -> str:
    """Return the drawing of a plan as the text of an SVG file.

    Views, relays, parameters and values without a gradient are left out; edges go around them. A box
    stands one row below the lowest of its producers.
    """
    boxes = _boxes(planned)
    edges = _edges(planned, {op.name for op in boxes})
    rows = defaultdict[int, list[str]](list)
    row_of: dict[str, int] = {}
    for op in boxes:
        above = [row_of[start] for start, end in edges if end == op.name]
        row_of[op.name] = 1 + max(above, default=-1)
        rows[row_of[op.name]].append(op.name)
    width = COLUMN * max(map(len, rows.values()), default=1)
    places: dict[str, tuple[float, int]] = {}
    for row, names in rows.items():
        for column, name in enumerate(names):
            offset = column - (len(names) - 1) / 2
            places[name] = width / 2 + offset * COLUMN, ROW // 2 + row * ROW
    shapes = _drawn_edges(edges, places) + _drawn_boxes(planned, boxes, places)
    return FILE.format(width=width, height=ROW * len(rows), shapes="\n".join(shapes))


def _drawn_edges(edges: Edges, places: dict[str, tuple[float, int]]) -> list[str]:
    """Draw edges with the collectives on them."""
    shapes = []
    for (start, end), moves in edges.items():
        (x1, y1), (x2, y2) = places[start], places[end]
        x = (x1 + x2) / 2 - (BEND if y2 - y1 > ROW else 0)
        texts = {"text": ", ".join(moves), "colour": "#d62728" if moves else "#888888"}
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        shapes.append(EDGE.format(x=x, y=(y1 + y2) / 2, **ends, **texts))
    return shapes


def _drawn_boxes(
    planned: PlannedGraph, boxes: list[GraphOperator], places: dict[str, tuple[float, int]]
) -> list[str]:
    """Draw operators, each with its module and its splits."""
    shapes = []
    colours: dict[str, str] = {}
    for op in boxes:
        x, y = places[op.name]
        splits = " · ".join(planned.plan.choice(op).labels)
        colour = WHOLE
        if splits.replace("none", "").strip(" ·*"):
            colour = colours.setdefault(splits, COLOURS[len(colours) % len(COLOURS)])
        name = op.target if op.op in (INPUT, OUTPUT) else op.op
        module = op.module.rpartition(".")[2] or op.name
        texts = {"name": escape(name[:30]), "splits": escape(f"{module[:18]}: {splits}")}
        corner = {"left": x - 90, "top": y - 16, "above": y - 3, "below": y + 10}
        shapes.append(BOX.format(x=x, colour=colour, **corner, **texts))
    return shapes


def _boxes(planned: PlannedGraph) -> list[GraphOperator]:
    """Return the operators that are drawn: the first of equal ones, inputs and outputs."""
    graph = planned.graph
    drawn = set()
    for group in planned.plan.space.groups:
        op = group.operators[0]
        hidden = op.op in (PARAMETER, RELAY, *VIEWS)
        trained = graph.gradients(op.outputs or op.inputs) > 0
        if op.op == INPUT or (trained and not hidden):
            drawn.add(op.name)
    return [op for op in graph.operators if op.name in drawn][:LARGEST]


def _edges(planned: PlannedGraph, boxes: set[str]) -> Edges:
    """Return the edges between boxes with the collectives on them; edges go through hidden operators."""
    moved = defaultdict[str, list[str]](list)
    for one in planned.plan.collectives:
        moved[one.name].append(f"{one.step.kind} ({one.when})")
    edges: Edges = defaultdict(dict)
    origins = defaultdict[str, dict[tuple[str, ...], None]](dict)
    """Paths from boxes to every value: the box, and the collectives since."""
    for op in planned.graph.operators:
        given = [(*path, *moved[name]) for name in op.inputs for path in origins[name]]
        paths = dict.fromkeys(given)
        if op.name in boxes:
            for start, *moves in paths:
                edges[start, op.name] |= dict.fromkeys(moves)
            paths = {(op.name,): None}
        origins |= dict.fromkeys(op.outputs, paths)
    return edges
