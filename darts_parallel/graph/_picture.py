"""The picture of a plan, as Graphviz reads it: operators and the edges between them."""

import json
from collections import defaultdict

from darts_parallel.graph._prices import VIEWS
from darts_parallel.graph.operators import INPUT, OUTPUT, PARAMETER, RELAY, GraphOperator
from darts_parallel.graph.plan import PlannedGraph

WHOLE = "#c8c8c8"
COLOURS = ("#66c2a5", "#fc8d62", "#8da0cb", "#e78ac3", "#a6d854", "#ffd92f", "#e5c494", "#80b1d3")
"""Colours of boxes that split nothing, and of different splits in turn."""
LARGEST = 160
"""Boxes that are drawn at most: the first of repeated blocks come first."""
FILE = """\
digraph plan {{
node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=10]
edge [fontname="sans-serif", fontsize=9]
{lines}
}}
"""
BOX = '{name} [label={text}, fillcolor="{colour}"]'
EDGE = "{start} -> {end} [label={text}, color={colour}]"
Edges = dict[tuple[str, str], dict[str, None]]


def picture(planned: PlannedGraph) -> str:
    """Return the text of a Graphviz file: boxes by the dimension that they split, collectives on edges.

    Views, relays, parameters and values without a gradient are left out; edges go around them.
    """
    boxes = _boxes(planned)
    lines = []
    colours: dict[str, str] = {}
    for op in boxes:
        splits = " · ".join(planned.plan.choice(op).labels)
        colour = WHOLE
        if splits.replace("none", "").strip(" ·*"):
            colour = colours.setdefault(splits, COLOURS[len(colours) % len(COLOURS)])
        name = op.target if op.op in (INPUT, OUTPUT) else op.op
        module = op.module.rpartition(".")[2] or op.name
        text = json.dumps(f"{name}\n{module}: {splits}", ensure_ascii=False)
        lines.append(BOX.format(name=json.dumps(op.name), text=text, colour=colour))
    for (start, end), moves in _edges(planned, {op.name for op in boxes}).items():
        names = {"start": json.dumps(start), "end": json.dumps(end)}
        colour = "red" if moves else "gray"
        text = json.dumps(", ".join(moves))
        lines.append(EDGE.format(**names, text=text, colour=colour))
    return FILE.format(lines="\n".join(lines))


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
