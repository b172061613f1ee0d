"""The plan as a Python file, operator by operator: it needs torch alone.

Weights and inputs are DTensors; every rank calls torch's own operators on its parts, and DTensor's
`redistribute` moves a tensor between them, one collective for each that the plan lists.
"""

import inspect
import json
import re
from collections.abc import Collection, Iterator, Sequence
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from darts_parallel.graph import _parts, _states
from darts_parallel.graph._states import PARTIAL, REPLICATED, SLICED, State, is_split, local_shape
from darts_parallel.graph.operators import (
    ATTENTION,
    CONSTANT,
    GROUPED,
    INPUT,
    OPERATORS,
    OUTPUT,
    PARAMETER,
    RELAY,
    SOURCES,
    GraphOperator,
)
from darts_parallel.graph.plan import GraphPlan

HEAD = '''\
"""A plan on a mesh of {ranks}, operator by operator; written by darts-parallel.

    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", {shape}, mesh_dim_names={names})
    module = parallelize(module, mesh)

Its parameters become DTensors. A call with inputs of the planned shapes runs the plan, without dropout.

States on every axis of the mesh: "S0", "S1", ... split in a dimension; "R" whole; "R*" whole, its gradient is
still a sum ("R*S": backward keeps a slice and gathers it again); "P" a sum.
"""

'''
TABLES = '''

REPLICATED, VARYING, SLICED, PARTIAL = "R", "R*", "R*S", "P"
State = tuple[str, ...]
WEIGHTS: dict[str, State] = {{
{weights}}}
INPUTS: dict[str, State] = {{
{inputs}}}
CHANGED = {changed}
"""Buffers that a step changes."""


'''
STEP = '''


def forward(mesh, weights, inputs):
    """Run one step on this rank's parts."""
{lines}
    return [{outputs}]


def parallelize(module, mesh):
    """Split a module's tensors over the mesh, in place; called with its inputs, it runs the plan.

    Inputs are whole tensors or DTensors. It returns its tensors in order: those that all ranks have whole
    as tensors, others as DTensors.
    """
    weights = split_tensors(module, WEIGHTS, mesh)

    def run(*inputs):
        pairs = zip(INPUTS.items(), inputs, strict=True)
        given = {{name: enter(mesh, tensor, state) for (name, state), tensor in pairs}}
        outputs = forward(mesh, weights, given)
        for name in CHANGED:
            put(module, name, weights[name])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    module.forward = run
    return module
'''
TOLD = {*OPERATORS["rules"]["reshaped"].split(), "expand.default"}
"""Operators that are told the shape of their output."""


def plan_script(plan: GraphPlan) -> str:
    """Return the text of a Python file that runs a plan."""
    writer = _Writer(plan)
    operators = plan.space.graph.operators
    ranks = plan.space.mesh.ranks
    body = "\n".join(f"    {line}" for op in operators for line in writer.lines(op))
    outputs = []
    changed = []
    for op in plan.space.graph.of_kind(OUTPUT):
        if op.buffer:
            changed.append(op.buffer)
            body += f"\n    weights[{json.dumps(op.buffer)}] = {writer.distributed(op)}"
        else:
            outputs.append(writer.output(op))
    names = tuple(f"axis{axis}" for axis in range(len(ranks)))
    weights = _source_states(plan, (PARAMETER, CONSTANT))
    inputs = _source_states(plan, (INPUT,))
    text = HEAD.format(ranks=" x ".join(map(str, ranks)), shape=ranks, names=names)
    text += _imports() + TABLES.format(weights=weights, inputs=inputs, changed=json.dumps(changed))
    return text + _functions(body) + STEP.format(lines=body, outputs=", ".join(outputs))


def _imports() -> str:
    """Return the imports of `_parts` from outside the project."""
    code = inspect.getsource(_parts).split('"""\n', 1)[1]
    return code.split("\n\nfrom darts_parallel")[0].strip()


def _functions(body: str) -> str:
    """Return the source of the functions that a file calls, and of those that they call."""
    sources = {}
    for module in (_states, _parts):
        for name, part in vars(module).items():
            if getattr(part, "__module__", "") == module.__name__:
                sources[name] = inspect.getsource(part).strip()
    text = f"{STEP}{body} edges()"
    chosen: set[str] = set()
    while more := {name for name in sources if re.search(rf"\b{name}[.(]", text)} - chosen:
        chosen |= more
        text += "".join(map(sources.__getitem__, more))
    return "\n\n\n".join(source for name, source in sources.items() if name in chosen)


def _source_states(plan: GraphPlan, kinds: Collection[str]) -> str:
    """Return lines with the states of tensors that the module or its caller has, by name."""
    states: dict[str, State] = {}
    for op in plan.space.graph.operators:
        if op.op in kinds and not op.arguments:
            states[op.target] = plan.choice(op).outputs[0]
    return "".join(f"    {json.dumps(name)}: {state},\n" for name, state in states.items())


class _Writer:
    """Writes the lines of a step, operator by operator."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.graph = plan.space.graph
        self.ranks = plan.space.mesh.ranks
        self.variables: dict[tuple[str, State], str] = {}
        """Variable of a value in a state."""

    def lines(self, op: GraphOperator) -> Iterator[str]:
        """Yield the lines that make an operator's outputs and bring them to their consumers' states."""
        if op.op == OUTPUT:
            return
        readers = self.plan.readers(op)
        if op in readers[:1]:
            yield self._sliced_products(op, readers)
        text = self._made(op, readers)
        result = _variable(op.name)
        single = op.outputs == (op.name,)
        if not single:
            yield f"{result} = {text}"
        for name in op.outputs:
            if name in self.graph.consumers:
                part = f"{result}[{name.rpartition('.')[2]}]"
                yield self._moved(op, name, text if single else part)

    def output(self, op: GraphOperator) -> str:
        """Spell an output of the module; one that all ranks have whole is a plain tensor."""
        whole = set(self.plan.choice(op).inputs[0]) <= {REPLICATED}
        return self._inputs(op)[0] if whole else self.distributed(op)

    def distributed(self, op: GraphOperator) -> str:
        """Spell the input of an operator as a DTensor."""
        placements = f"list(map(placement, {self.plan.choice(op).inputs[0]}))"
        return f"DTensor.from_local({self._inputs(op)[0]}, mesh, {placements}, run_check=False)"

    def _inputs(self, op: GraphOperator) -> list[str]:
        """Return the variables of an operator's inputs."""
        pairs = zip(op.inputs, self.plan.choice(op).inputs, strict=False)
        return [self.variables[pair] for pair in pairs]

    def _moved(
        self,
        op: GraphOperator,
        name: str,
        made: str,
    ) -> str:
        """Return the line that brings a value to the states of its consumers."""
        value = self.graph.values[name]
        if value.floating and not value.needs_grad and self.graph.gradients(op.inputs):
            made = f"{made}.detach()"
        variable = _variable(name)
        own = self.plan.produced(name)
        demanded = self.plan.demands(name)
        wanted = list(dict.fromkeys(state for state, _ in demanded))
        if wanted == [own]:
            self.variables[name, own] = variable
            return f"{variable} = {made}"
        parts = [f"{variable}_as_{k}" if k else variable for k in range(len(wanted))]
        for part, state in zip(parts, wanted, strict=True):
            self.variables[name, state] = part
        states = ", ".join(map(str, wanted))
        return f"{', '.join(parts)}, = edges(mesh, {made}, {own}, {states})"

    def _made(self, op: GraphOperator, readers: list[GraphOperator]) -> str:
        """Return the expression that makes an operator's outputs; `readers` share its products."""
        if op.op in SOURCES:
            return self._source(op)
        given = self._inputs(op)
        if op.op == RELAY:
            return given[0]
        if readers:
            return f"{_variable(readers[0].name)}__parts[{readers.index(op)}]"
        return self._call(op, given)

    def _source(self, op: GraphOperator) -> str:
        """Spell an input, a weight, or a constant that the module's code holds."""
        if op.op == CONSTANT and op.arguments:
            tensor = f"torch.tensor({_literal(op)}, device=mesh.device_type)"
            whole = ("R",) * len(self.ranks)
            return f"move(mesh, {tensor}, {whole}, {self.plan.choice(op).outputs[0]})"
        group = "inputs" if op.op == INPUT else "weights"
        return f"{group}[{json.dumps(op.target)}].to_local()"

    def _sliced_products(self, op: GraphOperator, readers: Sequence[GraphOperator]) -> str:
        """Spell linear operators that keep a slice of one input and gather it again together."""
        pairs = [name for one in readers for name in [*self._inputs(one), "None"][1:3]]
        states = enumerate(self.plan.choice(op).inputs[0])
        axes = tuple(axis for axis, state in states if state == SLICED)
        given = ", ".join([self._inputs(op)[0], *pairs])
        return f"{_variable(op.name)}__parts = Products.apply(mesh, {axes}, {given})"

    def _call(self, op: GraphOperator, given: list[str]) -> str:
        """Spell an operator's call on local tensors, with the arguments that its splits change."""
        choice = self.plan.choice(op)
        labels = choice.labels
        tensors = ", ".join(given)
        if op.overload in TOLD:
            shape = self.graph.values[op.outputs[0]].shape
            method = "expand" if op.op == "expand" else "reshape"
            return f"{given[0]}.{method}({local_shape(shape, choice.outputs[0], self.ranks)})"
        if op.op == "embedding" and "vocabulary" in labels:
            padding = int(op.argument("padding_idx", -1))
            return f"own_rows(mesh, {labels.index('vocabulary')}, {tensors}, {padding})"
        if op.op == "cross_entropy_loss" and {"vocabulary", "rows"} & set(labels):
            more = op.argument("ignore_index", -100), op.argument("reduction", 1)
            return (
                f"split_cross_entropy(mesh, {labels}, {', '.join(given[:2])}, {more[0]}, {more[1]})"
            )
        if op.op in GROUPED and "experts" in labels:
            names = ["rows", "weights", "ends"]
            product = f"lambda {', '.join(names)}: {self._spelled(op, names)}"
            return f"own_experts(mesh, {labels.index('experts')}, {product}, {tensors})"
        if op.op == ATTENTION:
            given = self._with_own_heads(op, given)
        return self._share_of_mean(op, self._spelled(op, given))

    def _with_own_heads(self, op: GraphOperator, given: Sequence[str]) -> list[str]:
        """Take a rank's key-value heads out of whole ones where its query heads are split."""
        choice = self.plan.choice(op)
        q, k, v, *rest = given
        for axis, label in enumerate(choice.labels):
            if label == "heads" and not is_split(choice.inputs[1][axis]):
                k, v = (f"own_head(mesh, {axis}, {one})" for one in (k, v))
        return [q, k, v, *rest]

    def _share_of_mean(self, op: GraphOperator, text: str) -> str:
        """Divide the mean of a rank's part by the number of parts that are summed."""
        if op.op != "mean":
            return text
        choice = self.plan.choice(op)
        axes = zip(choice.inputs[0], choice.outputs[0], self.ranks, strict=True)
        parts = prod(n for given, made, n in axes if is_split(given) and made == PARTIAL)
        return f"{text} / {parts}" if parts > 1 else text

    def _spelled(self, op: GraphOperator, given: Sequence[str]) -> str:
        """Spell torch's call with other tensors, and with a rank's share of channel groups."""
        tensors = iter(given)
        labels = zip(self.plan.choice(op).labels, self.ranks, strict=True)
        share = prod(count for label, count in labels if label == "groups")
        args = []
        names = [*op.arguments, *op.node.args]  # behind the schema's names anything
        for name, value in zip(names, op.node.args, strict=False):
            if name in ("num_groups", "groups"):
                value = int(value) // share
            args.append(_spelled_value(value, tensors))
        for name, value in op.node.kwargs.items():
            args.append(f"{name}={_spelled_value(value, tensors)}")
        return f"torch.ops.{op.node.target}({', '.join(args)})"


def _spelled_value(value: Any, tensors: Iterator[str]) -> str:
    """Spell an argument; the next variable stands for a tensor."""
    if isinstance(value, Node):
        return next(tensors) if isinstance(value.meta.get("val"), Tensor) else "None"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_spelled_value(one, tensors) for one in value)}]"
    if isinstance(value, torch.device):
        return "mesh.device_type"
    if isinstance(value, float) and not isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _literal(op: GraphOperator) -> str:
    """Spell a tensor that the module's code holds."""
    value: Tensor = op.arguments["value"]
    text = f"{value.tolist()}, dtype={value.dtype}"
    return text.replace("inf", 'float("inf")').replace("nan", "torch.nan")


def _variable(name: str) -> str:
    """Return a value's name as a variable; none has the name of a function that the file calls."""
    taken = name in ("mesh", "weights", "inputs") or hasattr(_parts, name)
    return re.sub(r"\W", "__", name) + "_" * taken
