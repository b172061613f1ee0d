"""The picture of a plan (SVG): operators coloured by the dimension that they split, collectives on edges."""

from collections import defaultdict
from html import escape

from darts_parallel.graph._prices import VIEWS
from darts_parallel.graph.operators import INPUT, OUTPUT, RELAY, SOURCES, GraphOperator
from darts_parallel.graph.plan import PlannedGraph

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#ff9da7", "#9c755f")
NONE = "#c8c8c8"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 190, 34, 26, 30, 20
"""Pixels of a box, of the gaps between boxes, and around them."""
LARGEST = 160
"""Boxes that are drawn at most: the first of repeated blocks come first."""


def picture(planned: PlannedGraph) -> str:
    """Return the drawing of a plan as the text of an SVG file.

    Views, relays, parameters and what needs no gradient are left out; edges go around them. A box stands one
    row below the lowest of its producers.
    """
    boxes = _boxes(planned)
    edges = _edges(planned, {op.name for op in boxes})
    rows: dict[int, list[str]] = defaultdict(list)
    level: dict[str, int] = {}
    for op in boxes:
        level[op.name] = 1 + max((level[a] for a, b in edges if b == op.name), default=-1)
        rows[level[op.name]].append(op.name)
    widest = max((len(row) for row in rows.values()), default=1)
    place = {
        name: (MARGIN + (x + (widest - len(row)) / 2.0) * (WIDTH + GAP_X), MARGIN + y * (HEIGHT + GAP_Y))
        for y, row in rows.items() for x, name in enumerate(row)
    }  # fmt: skip
    label = {op.name: " · ".join(planned.plan.choice(op).labels) for op in boxes}
    split = dict.fromkeys(one for one in label.values() if one.replace("none", "").strip(" ·*"))
    colours = {one: COLOURS[k % len(COLOURS)] for k, one in enumerate(split)}
    drawn = [_edge(place[a], place[b], text) for (a, b), text in edges.items()]
    drawn += [_box(place[op.name], op, label[op.name], colours) for op in boxes]
    width = 2 * MARGIN + widest * (WIDTH + GAP_X)
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP_Y) + 24 * (len(colours) // 4 + 1)
    drawn += [_legend(k, one, colour, height) for k, (one, colour) in enumerate(colours.items())]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>", "",
    ])  # fmt: skip


def _boxes(planned: PlannedGraph) -> list[GraphOperator]:
    """Return what is drawn: the first of equal operators, inputs and outputs."""
    graph, firsts = planned.graph, {g.operators[0].name for g in planned.plan.space.groups}
    found = []
    for op in graph.operators:
        drawn = op.op in (INPUT, OUTPUT) or (op.op not in (*SOURCES, RELAY) and op.op not in VIEWS)
        values = [graph.values[name] for name in op.outputs or op.inputs]
        if drawn and op.name in firsts and any(value.needs_grad or op.op == INPUT for value in values):
            found.append(op)
    return found[:LARGEST]


def _edges(planned: PlannedGraph, boxes: set[str]) -> dict[tuple[str, str], list[str]]:
    """Return the edges between boxes with the collectives on them; edges go through what is not drawn."""
    graph = planned.graph
    moved: dict[str, list[str]] = defaultdict(list)
    for one in planned.plan.collectives:
        moved[one.name].append(f"{one.step.kind} ({one.when})")
    edges: dict[tuple[str, str], list[str]] = {}
    origin: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for op in graph.operators:
        arriving = {(src, (*seen, *moved[name])) for name in op.inputs for src, seen in origin.get(name, ())}
        if op.name in boxes:
            for src, seen in arriving:
                edges[src, op.name] = list(dict.fromkeys([*edges.get((src, op.name), []), *seen]))
            arriving = {(op.name, ())}
        for name in op.outputs:
            origin[name] = arriving
    return edges


def _box(place: tuple[float, float], op: GraphOperator, label: str, colours: dict[str, str]) -> str:
    x, y = place
    name = op.target if op.op in (INPUT, OUTPUT) else op.op
    where = op.module.rpartition(".")[2] or op.name
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{colours.get(label, NONE)}" fill-opacity="0.75" stroke="#555"/>'
        f'<text x="{x + 8:.0f}" y="{y + 14:.0f}">{escape(name[:30])}</text>'
        f'<text x="{x + 8:.0f}" y="{y + 28:.0f}" fill="#333">{escape(where[:18])}: {escape(label)}</text>'
    )


def _edge(start: tuple[float, float], end: tuple[float, float], moves: list[str]) -> str:
    x1, y1, x2, y2 = start[0] + WIDTH / 2, start[1] + HEIGHT, end[0] + WIDTH / 2, end[1]
    colour, width = ("#d62728", 2.0) if moves else ("#888", 1.0)
    ends = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
    line = f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'
    x, y = (x1 + x2) / 2 + 5, (y1 + y2) / 2
    texts = [
        f'<text x="{x:.0f}" y="{y + 12 * k:.0f}" fill="#d62728">{escape(text)}</text>'
        for k, text in enumerate(moves)
    ]
    return line + "".join(texts)


def _legend(k: int, label: str, colour: str, height: float) -> str:
    x, y = MARGIN + (k % 4) * (WIDTH + GAP_X), height - 24 * (k // 4 + 1)
    return (
        f'<rect x="{x}" y="{y:.0f}" width="14" height="14" fill="{colour}" fill-opacity="0.75"/>'
        f'<text x="{x + 20}" y="{y + 11:.0f}">splits {escape(label)}</text>'
    )
