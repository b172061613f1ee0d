"""Megatron's template on a captured graph, to price it next to the plan that was found.

Products split columns, then rows; attention heads; the largest embedding, the head and the loss the
vocabulary; experts lie whole on their ranks; all else is on every rank. The programme chooses the rest.
"""

from collections.abc import Iterator

from darts_parallel.errors import InfeasibleError
from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._space import GraphSpace
from darts_parallel.graph._states import PARTIAL, REPLICATED, VARYING
from darts_parallel.graph.operators import (
    ATTENTION,
    GROUPED,
    SOURCES,
    GraphOperator,
    ModuleGraph,
)
from darts_parallel.graph.plan import GraphPlan

WHOLE = ("none", "none*", "partial", REPLICATED, VARYING, PARTIAL)
"""Labels of operators that all ranks run."""
NARROW = 64
"""Products with fewer columns than inputs over this (a router) stay whole."""
Products = frozenset[str]


def template_plan(space: GraphSpace, time_limit: float = 60.0) -> GraphPlan | None:
    """Return the fastest plan with Megatron's splits; None on two axes, or where nothing has a pair."""
    fixed = dict(_Template(space.graph).labels()) if len(space.mesh.ranks) == 1 else {}
    if not fixed:
        return None
    programme = GraphProgramme(space)
    for number, group in enumerate(space.groups):
        op = group.operators[0]
        wanted = fixed.get(op.name, () if op.op in SOURCES else WHOLE)
        choices = enumerate(group.choices)
        other = [k for k, choice in choices if choice.labels[0] not in wanted]
        if len(other) < len(group.choices):
            for choice in other:
                programme.upper[programme.first[number] + choice] = 0.0
    try:
        return GraphPlan(space, programme.solve(time_limit).assignment)
    except InfeasibleError:
        return None


class _Template:
    """Which operators lie between a product that splits columns and one that splits what it sums."""

    def __init__(self, graph: ModuleGraph) -> None:
        self.graph = graph
        tables = [op.inputs[0] for op in graph.of_kind("embedding")]
        sizes = {name: graph.values[name].elements for name in tables}
        self.table = max(tables, key=lambda name: sizes[name], default="")
        """The largest embedding."""
        self.split: dict[str, Products] = {}
        """Products whose columns a value's parts come from."""
        self.found: dict[str, str] = {}
        """Labels of the operators that the template names."""
        self.inside: dict[str, Products] = {}
        """Products whose columns an operator reads or makes."""
        self.paired: set[str] = set()
        """Products whose columns another operator sums."""
        for op in graph.operators:
            self._add(op)

    def _add(self, op: GraphOperator) -> None:
        before = made = Products().union(*(self.split.get(name, ()) for name in op.inputs))
        named = ""
        if self._is_weight_product(op):
            named = "inner" if before else "columns"
            made = Products() if before or self._is_router(op) else Products({op.name})
        elif op.op == "cross_entropy_loss" or self._is_largest_table(op):
            named, made = "vocabulary", Products()
        elif op.op in GROUPED:
            named, made = "experts", Products()
        elif op.op == ATTENTION and before:
            named = "heads"
        if named:
            self.found[op.name] = named
        if named in ("inner", "vocabulary"):
            self.paired |= before
        self.inside[op.name] = before | made
        self.split |= dict.fromkeys(op.outputs, made)

    def _is_weight_product(self, op: GraphOperator) -> bool:
        place = {"linear": 1, "addmm": -1}.get(op.op)
        return place is not None and self.graph.is_parameter(op.inputs[place])

    def _is_router(self, op: GraphOperator) -> bool:
        given = op.inputs[1 if op.op == "addmm" else 0]
        return self._width(op.outputs[0]) * NARROW < self._width(given)

    def _is_largest_table(self, op: GraphOperator) -> bool:
        return op.op == "embedding" and op.inputs[0] == self.table

    def _width(self, name: str) -> int:
        return self.graph.values[name].shape[-1]

    def labels(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield what operators may split, by name: nothing where it is left to the programme."""
        if not self.paired:
            return
        for op in self.graph.operators:
            own = self.inside[op.name] & self.paired
            label = self.found.get(op.name)
            if label == "columns":
                narrow = self._width(op.outputs[0]) < self._width(op.inputs[0])
                allowed = ("columns", *WHOLE) if narrow else ("columns",)
                yield op.name, allowed if own else WHOLE
            elif label in ("vocabulary", "experts") or (label and own):
                yield op.name, (label,)
            elif own:
                yield op.name, ()
