"""Megatron's template on a captured graph, to price it next to the plan that was found.

Products split columns, then rows; attention heads; the largest embedding, the head and the loss the
vocabulary; experts lie whole on their ranks; all else is on every rank. The programme chooses the rest.
"""

from collections.abc import Iterator

from darts_parallel.errors import InfeasibleError
from darts_parallel.graph._prices import ATTENTION, GROUPED
from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._rules import PARTIAL, REPLICATED, VARYING
from darts_parallel.graph._space import GraphSpace
from darts_parallel.graph.operators import PARAMETER, SOURCES, ModuleGraph
from darts_parallel.graph.plan import GraphPlan

WHOLE = ("none", "none*", "partial", REPLICATED, VARYING, PARTIAL)
"""Labels of operators that all ranks run."""
NARROW = 64
"""Products with fewer columns than inputs over this (a router) stay whole."""


def template_plan(space: GraphSpace, time_limit: float = 60.0) -> GraphPlan | None:
    """Return the fastest plan with Megatron's splits; None on two axes, or where nothing has a pair."""
    fixed = dict(_labels(space.graph)) if len(space.mesh.ranks) == 1 else {}
    if not fixed:
        return None
    programme = GraphProgramme(space)
    for number, group in enumerate(space.groups):
        op = group.operators[0]
        wanted = fixed.get(op.name, () if op.op in SOURCES else WHOLE)
        allowed = {k for k, choice in enumerate(group.choices) if choice.labels[0] in wanted}
        if allowed:
            programme.forbid(number, set(range(len(group.choices))) - allowed)
    try:
        return GraphPlan(space, programme.solve(time_limit).assignment)
    except InfeasibleError:
        return None


def _labels(graph: ModuleGraph) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what operators may split, by name: nothing where the template leaves it to the programme."""
    split: dict[str, frozenset[str]] = {}
    """Products whose columns a value's parts come from."""
    found, paired, inside = dict[str, str](), set[str](), dict[str, frozenset[str]]()
    tables = [op.inputs[0] for op in graph.operators if op.op == "embedding"]
    largest = max(tables, key=lambda name: graph.values[name].elements, default="")
    for op in graph.operators:
        made = before = frozenset[str]().union(*(split.get(name, ()) for name in op.inputs))
        weight = op.inputs[-1 if op.op == "addmm" else 1] if op.op in ("linear", "addmm") else ""
        if weight and graph.producers[weight][0].op == PARAMETER:
            rows, columns = (
                graph.values[op.inputs[op.op == "addmm"]].shape[-1],
                graph.values[op.outputs[0]].shape[-1],
            )
            found[op.name] = "inner" if before else "columns"
            made = frozenset({op.name} if not before and columns * NARROW >= rows else ())
        elif op.op == "cross_entropy_loss" or (op.op == "embedding" and op.inputs[0] == largest):
            found[op.name], made = "vocabulary", frozenset()
        elif op.op in GROUPED:
            found[op.name], made = "experts", frozenset()
        elif op.op == ATTENTION and before:
            found[op.name] = "heads"
        inside[op.name] = before | made
        paired |= before if found.get(op.name) in ("inner", "vocabulary") else set()
        split |= dict.fromkeys(op.outputs, made)
    for op in graph.operators if paired else ():
        own = inside[op.name] & paired
        label = found.get(op.name)
        if label == "columns":
            narrow = graph.values[op.outputs[0]].shape[-1] < graph.values[op.inputs[0]].shape[-1]
            yield op.name, ("columns", *WHOLE * narrow) if own else WHOLE
        elif label in ("vocabulary", "experts") or (label and own):
            yield op.name, (label,)
        elif own:
            yield op.name, ()
