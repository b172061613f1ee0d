"""The plan as a Python file, operator by operator: it needs torch alone.

Weights and inputs are DTensors; every rank calls torch's own operators on its parts, and DTensor's
`redistribute` moves a tensor between them, one collective for each that the plan lists.
"""

import inspect
import re
from collections.abc import Collection, Iterator
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from darts_parallel.graph import _layouts, _parts
from darts_parallel.graph._layouts import State, local_shape
from darts_parallel.graph._prices import ATTENTION, GROUPED
from darts_parallel.graph._rules import PARTIAL, SLICED
from darts_parallel.graph._space import OperatorChoice
from darts_parallel.graph.operators import (
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    SOURCES,
    GraphOperator,
)
from darts_parallel.graph.plan import GraphPlan

FILE = '''\
"""A plan on a mesh of {ranks}, operator by operator; written by darts-parallel.

    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", {shape}, mesh_dim_names={names})
    weights = distribute(tensors_of(module.eval()), WEIGHTS, mesh)
    outputs = forward(mesh, weights, distribute(inputs, INPUTS, mesh))

Weights, inputs and outputs are DTensors by name, between them are a rank's parts. States on every axis of the
mesh: "S0", "S1", ... split in a dimension; "R" whole; "R*" whole, its gradient is still a sum ("R*S":
backward keeps a slice and gathers it again); "P" a sum.
"""

{imports}

REPLICATED, VARYING, SLICED, PARTIAL = "R", "R*", "R*S", "P"
State = tuple[str, ...]
WEIGHTS: dict[str, State] = {{
{weights}}}
INPUTS: dict[str, State] = {{
{inputs}}}


{functions}


def forward(mesh, weights, inputs):
    """Run one step on this rank's parts."""
{lines}
    return {{{outputs}}}
'''
RESHAPES = ("view", "_unsafe_view", "reshape", "expand")
"""Operators that are told the shape of their output."""
RUNTIME = (
    *(_layouts.forward_state, _layouts.gradient_state, _layouts.axis_moves, _parts.placement),
    *(
        _parts.distribute,
        _parts.tensors_of,
        _parts.move_axis,
        _parts.move,
        _parts.Edges,
        _parts.edges,
    ),
)
"""Functions of every file."""
SPECIAL = (
    _parts.Products,
    _parts.summed,
    _parts.own_rows,
    _parts.split_cross_entropy,
    _parts.own_head,
    _parts.own_experts,
)
"""Functions of the files that call them."""


def operators_script(plan: GraphPlan) -> str:
    """Return the text of a Python file that runs a plan."""
    writer = _Writer(plan)
    operators, ranks = plan.space.graph.operators, plan.space.mesh.ranks
    body = "\n".join(f"    {line}" for op in operators for line in writer.lines(op))
    special = [one for one in SPECIAL if re.search(rf"\b{one.__name__}[.(]", body)]
    special += [_parts.summed] * (_parts.split_cross_entropy in special)
    head = (
        inspect.getsource(_parts).split('"""\n', 1)[1].split("\n\nfrom darts_parallel")[0].strip()
    )

    def states(kinds: Collection[str]) -> str:
        own = [op for op in operators if op.op in kinds and not op.arguments]
        found = {op.target: plan.choice(op).outputs[0] for op in own}
        return "".join(f'    "{name}": {state},\n' for name, state in found.items())

    ends = {op.target: writer.output(op) for op in operators if op.op == OUTPUT}
    return FILE.format(
        ranks=" x ".join(map(str, ranks)),
        shape=ranks,
        names=tuple(f"axis{k}" for k in range(len(ranks))),
        imports=head,
        weights=states({PARAMETER, CONSTANT}),
        inputs=states({INPUT}),
        lines=body,
        functions="\n\n\n".join(inspect.getsource(one).strip() for one in (*RUNTIME, *special)),
        outputs=", ".join(f'"{name}": {text}' for name, text in ends.items()),
    )


class _Writer:
    """Writes the lines of a step, operator by operator."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan, self.graph, self.ranks = plan, plan.space.graph, plan.space.mesh.ranks
        self.known: dict[tuple[str, State], str] = {}
        """How the lines call a value in a state."""

    def lines(self, op: GraphOperator) -> Iterator[str]:
        """Yield the lines that make an operator's outputs and bring them to their consumers' states."""
        if op.op == OUTPUT:
            return
        choice, given, together = self.plan.choice(op), self._inputs(op), self.plan.merged(op)
        if choice.chained and op == together[0]:
            self.known[op.outputs[0], choice.outputs[0]] = given[0]
            return
        if choice.chained:
            given[1] = f"{given[1]} @ {self._inputs(together[0])[1]}"
        if op.op == CONSTANT and op.arguments:
            whole, state = ("R",) * len(self.ranks), choice.outputs[0]
            text = f"move(mesh, torch.tensor({_literal(op)}, device=mesh.device_type), {whole}, {state})"
        elif op.op in SOURCES:
            text = f'{"inputs" if op.op == INPUT else "weights"}["{op.target}"].to_local()'
        else:
            text = given[0] if op.op == RELAY else self._call(op, choice, given)
        if together and not choice.chained:
            every = list(zip(*map(self._inputs, together), strict=True))
            joined = ", ".join(f"torch.cat([{', '.join(own)}])" for own in every[1:])
            sizes, text = map("len({})".format, every[1]), f"{_variable(together[0].name)}__parts"
            if op == together[0]:
                yield f"{text} = functional.linear({given[0]}, {joined}).split([{', '.join(sizes)}], -1)"
            text += f"[{together.index(op)}]"
        elif readers := self.plan.readers(op):
            pairs = ", ".join(part for one in readers for part in [*self._inputs(one), "None"][1:3])
            text = f"{_variable(readers[0].name)}__parts"
            if op == readers[0]:
                axes = tuple(axis for axis, one in enumerate(choice.inputs[0]) if one == SLICED)
                yield f"{text} = Products.apply(mesh, {axes}, {given[0]}, {pairs})"
            text += f"[{readers.index(op)}]"
        if len(op.outputs) > 1 or op.outputs[0] != op.name:
            yield f"{_variable(op.name)} = {text}"
        for name in op.outputs:
            if name not in self.graph.consumers:
                continue
            value, part = _variable(name), name.removeprefix(op.name)
            made = f"{_variable(op.name)}[{part[1:]}]" if part else text
            wanted, own = self.plan.demands(name), self.plan.produced(name)
            made += ".detach()" * self._ends_gradient(op, name)
            if wanted == [own]:
                yield from [f"{value} = {made}"] * (value != made)
                self.known[name, own] = value
                continue
            parts = [f"{value}_as_{k}" if k else value for k in range(len(wanted))]
            self.known |= {(name, state): one for state, one in zip(wanted, parts, strict=True)}
            yield f"{', '.join(parts)}, = edges(mesh, {made}, {own}, {', '.join(map(str, wanted))})"

    def output(self, op: GraphOperator) -> str:
        """Spell an output of the module."""
        placements = f"list(map(placement, {self.plan.choice(op).inputs[0]}))"
        return f"DTensor.from_local({self._inputs(op)[0]}, mesh, {placements}, run_check=False)"

    def _ends_gradient(self, op: GraphOperator, name: str) -> bool:
        """Return whether the inputs of an operator have gradients, and none comes through its output."""
        values, value = self.graph.values, self.graph.values[name]
        return (
            value.floating
            and not value.needs_grad
            and any(values[one].needs_grad for one in op.inputs)
        )

    def _inputs(self, op: GraphOperator) -> list[str]:
        return [
            self.known[pair] for pair in zip(op.inputs, self.plan.choice(op).inputs, strict=False)
        ]

    def _call(self, op: GraphOperator, choice: OperatorChoice, given: list[str]) -> str:
        """Spell an operator's call on local tensors; what its splits change of it is changed."""
        labels, changed = choice.labels, dict[str, Any]()
        axes = {label: axis for axis, label in enumerate(labels)}
        if op.op in RESHAPES:
            shape = local_shape(
                self.graph.values[op.outputs[0]].shape, choice.outputs[0], self.ranks
            )
            return f"{given[0]}.{'expand' if op.op == 'expand' else 'reshape'}({shape})"
        if op.op == "embedding" and "vocabulary" in axes:
            padding = int(op.argument("padding_idx", -1))
            return f"own_rows(mesh, {axes['vocabulary']}, {', '.join(given)}, {padding})"
        if op.op == "cross_entropy_loss" and {"vocabulary", "rows"} & axes.keys():
            told = op.argument("ignore_index", -100), op.argument("reduction", 1)
            return (
                f"split_cross_entropy(mesh, {labels}, {', '.join(given[:2])}, {told[0]}, {told[1]})"
            )
        if op.op in GROUPED and "experts" in axes:
            names = ["rows", "weights", "ends"]
            product = f"lambda {', '.join(names)}: {self._spelled(op, names, changed)}"
            return f"own_experts(mesh, {axes['experts']}, {product}, {', '.join(given)})"
        if op.op == ATTENTION:
            for axis, label in enumerate(labels):
                if label == "heads" and not choice.inputs[1][axis].startswith("S"):
                    given[1:3] = [f"own_head(mesh, {axis}, {one})" for one in given[1:3]]
        share = prod(n for label, n in zip(labels, self.ranks, strict=True) if label == "groups")
        for name in ("num_groups", "groups"):
            if share > 1 and name in op.arguments:
                changed[name] = int(op.argument(name)) // share
        text = self._spelled(op, given, changed)
        ends = zip(choice.inputs[0], choice.outputs[0], self.ranks, strict=True) if given else ()
        parts = prod(n for old, new, n in ends if old.startswith("S") and new == PARTIAL)
        return f"{text} / {parts}" if op.op == "mean" and parts > 1 else text

    def _spelled(self, op: GraphOperator, given: list[str], changed: dict[str, Any]) -> str:
        """Spell torch's call with other tensors, and other values of some arguments."""
        tensors = iter(given)

        def spell(value: Any) -> str:
            if isinstance(value, Node):
                return next(tensors) if isinstance(value.meta.get("val"), Tensor) else "None"
            if isinstance(value, (list, tuple)):
                return f"[{', '.join(map(spell, value))}]"
            if isinstance(value, torch.device):
                return "mesh.device_type"
            return (
                f'float("{value}")'
                if isinstance(value, float) and not isfinite(value)
                else repr(value)
            )

        names = [*op.arguments, *[""] * len(op.node.args)]
        args = [
            spell(changed.get(name, value))
            for name, value in zip(names, op.node.args, strict=False)
        ]
        args += [f"{name}={spell(value)}" for name, value in op.node.kwargs.items()]
        return f"torch.ops.{op.node.target}({', '.join(args)})"


def _literal(op: GraphOperator) -> str:
    """Spell a tensor that the module's code holds."""
    value: Tensor = op.arguments["value"]
    return f"{value.tolist()}, dtype={value.dtype}".replace("inf", 'float("inf")').replace(
        "nan", "torch.nan"
    )


def _variable(name: str) -> str:
    """Return a value's name as a variable."""
    return re.sub(r"\W", "__", name)
