"""The graph of an exported module: its operators, its values, and what torch says of their gradients."""

import operator
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg
from torch.fx.operator_schemas import normalize_function

from darts_parallel.cost import Tensors
from darts_parallel.errors import UnsupportedError
from darts_parallel.graph.operators import (
    ATTENTION,
    BUFFER,
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    GraphOperator,
    GraphValue,
    ModuleGraph,
)

SOURCE_KINDS = {InputKind.PARAMETER: PARAMETER, InputKind.USER_INPUT: INPUT}
"""Kinds of sources; further ones are constants."""
NO_GRADIENT = torch.ops.higher_order.wrap_with_set_grad_enabled
"""Region of a graph without gradients, where its first argument is False."""


def detach_regions(exported: ExportedProgram) -> None:
    """Detach the results of regions without gradients: decompositions would give them one."""
    graph = exported.graph
    trained = _trained_sources(exported)
    """Names of values that depend on a parameter or an input with a gradient."""
    for node in list(graph.nodes):
        if trained.isdisjoint(one.name for one in node.all_input_nodes):
            continue
        if node.target is not NO_GRADIENT or node.args[0] is not False:
            trained.add(node.name)
            continue
        for user in list(node.users):
            with graph.inserting_after(user):
                detached = graph.call_function(torch.ops.aten.detach.default, (user,))
            detached.meta.update(user.meta)
            user.replace_all_uses_with(detached, lambda one, own=detached: one is not own)


def _trained_sources(exported: ExportedProgram) -> set[str]:
    """Return the parameters that are trained, and the inputs that have a gradient."""
    found = set()
    specs = exported.graph_signature.input_specs
    for node, spec in zip(exported.graph.nodes, specs, strict=False):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        trained = spec.kind == InputKind.PARAMETER and value.requires_grad
        given = spec.kind == InputKind.USER_INPUT
        if trained or (given and (value.is_floating_point() or value.is_complex())):
            found.add(node.name)
    return found


class _Gradients(Interpreter):
    """Runs a graph without numbers, and notes which values require a gradient."""

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__(exported.graph_module)
        self.names: set[str] = set()
        self.underivable = 0
        sources = _trained_sources(exported)
        given = []
        modes: list[Any] = [nullcontext()]
        """Last the mode in which tensors have no numbers."""
        for node in exported.graph.find_nodes(op="placeholder"):
            value: Any = node.meta.get("val")
            if isinstance(value, Tensor):
                modes.append(getattr(value, "fake_mode", modes[0]))
                value = value.detach().requires_grad_(node.name in sources)
            given.append(value)
        with modes[-1], torch.enable_grad():
            self.run(*given)

    def run_node(self, node: Node) -> Any:
        """Run one operator."""
        if node.target is torch.ops.aten.view.default:  # strides may differ from the export's
            (given, sizes), _ = self.fetch_args_kwargs_from_env(node)
            made = given.reshape(sizes)
        else:
            made = super().run_node(node)
        if node.op != "output":
            for name, tensor in numbered(node, made).items():
                if tensor.requires_grad:
                    self.names.add(name)
                if tensor.grad_fn is not None:
                    self.underivable += tensor.grad_fn.name() == "NotImplemented"
        return made


class GraphBuilder:
    """Turns torch's graph into a `ModuleGraph`: first back from the outputs, then node by node."""

    def __init__(self, exported: ExportedProgram, module: nn.Module) -> None:
        self.module = module
        self.constants = exported.constants
        self.nodes = list(exported.graph.nodes)
        signature = exported.graph_signature
        self.specs = dict(zip(self.nodes, signature.input_specs, strict=False))
        self.renamed = self._tied_values()
        """Values that later operators read in the place of others: parameters that are tied, relays."""
        self.operators: list[GraphOperator] = []
        self.values: dict[str, GraphValue] = {}
        try:
            found = _Gradients(exported)
        except Exception as error:  # an answer about the module, whatever torch raises
            words = " ".join(str(error).split())[:160]
            raise self._refusal(f"torch has no gradient for it ({words})", "detach()") from error
        self.requiring = found.names
        self.underivable = found.underivable
        self.outputs: dict[Node, str] = {}
        """Nodes that are returned, with the buffer that they become; it is empty for outputs."""
        returned: Any = self.nodes[-1].args[0]
        for node, spec in zip(returned, signature.output_specs, strict=False):
            if isinstance(node, Node) and tensors_of_node(node):
                if spec.kind == OutputKind.USER_OUTPUT:
                    self.outputs[node] = ""
                elif spec.kind == OutputKind.BUFFER_MUTATION:
                    self.outputs.setdefault(node, str(spec.target))
                elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                    reason = f"it changes its input {spec.target} in place"
                    raise self._refusal(reason, "a copy of the input")
        if "" not in self.outputs.values():
            raise self._refusal("it returns no tensor", "a forward that does")
        self.uses = Counter[str]()
        self.trained = self._reach()

    def _refusal(self, reason: str, better: str) -> UnsupportedError:
        return UnsupportedError(f"module {type(self.module).__name__}: {reason}; try {better}.")

    def _tied_values(self) -> dict[str, str]:
        """Return the values that are the same parameter as another one, with that one."""
        first = {id(one): name for name, one in self.module.named_parameters()}
        values = {spec.target: node.name for node, spec in self.specs.items()}
        found = {}
        for name, one in self.module.named_parameters(remove_duplicate=False):
            known = first[id(one)]
            if name != known and {name, known} <= values.keys():
                found[values[name]] = values[known]
        return found

    def build(self) -> ModuleGraph:
        """Add the sources, the operators that an output needs, and the outputs."""
        for node in self.nodes:
            if node in self.specs:
                self._source(node, self.specs[node])
            elif node.target is not operator.getitem and self._used(node):
                self._call(node)
        for k, (node, buffer) in enumerate(self.outputs.items()):
            op = GraphOperator(f"output.{k}", OUTPUT, (self._name(node),), (), target=node.name)
            self._add(replace(op, arguments={BUFFER: buffer}), {})
        return ModuleGraph(tuple(self.operators), self.values, self.underivable)

    def _used(self, node: Node) -> list[str]:
        """Return the values of a node that are used on the way to outputs."""
        return [name for name in tensors_of_node(node) if self.uses[name]]

    def _name(self, node: Node) -> str:
        """Return the name of the value that a node is."""
        name = node.name
        if node.target is operator.getitem:
            name = f"{node.args[0]}.{node.args[1]}"
        return self.renamed.get(name, name)

    def _reach(self) -> set[str]:
        """Count the uses of values on the way to outputs; return those with a gradient from there."""
        self.uses.update(map(self._name, self.outputs))
        trained = {self._name(node) for node, buffer in self.outputs.items() if not buffer}
        for node in reversed(self.nodes):
            used = node.op == "call_function" and self._used(node)
            if used and node.target is not operator.getitem:
                sources = [self._name(one) for one in _sources(node)]
                self.uses.update(sources)
                if self.requiring & trained.intersection(used):
                    trained.update(sources)
        return trained

    def _source(self, node: Node, spec: Any) -> None:
        """Add a parameter, an input, or a constant that is used."""
        kind = SOURCE_KINDS.get(spec.kind, CONSTANT)
        tensors = tensors_of_node(node)
        used = kind != CONSTANT or self.uses[node.name]
        if not used or not tensors or node.name in self.renamed:
            return
        target = str(node.name if kind == INPUT else spec.target)
        given = {}
        if spec.kind == InputKind.CONSTANT_TENSOR and not self._has_tensor(target):
            value = given["value"] = self.constants[target]
            if value.is_meta:
                raise self._refusal(f"its constant {target} has no numbers", "a tensor of the CPU")
        op = GraphOperator(node.name, kind, (), tuple(tensors), target=target, arguments=given)
        self._add(op, tensors)

    def _has_tensor(self, target: str) -> bool:
        """Return whether the module has a plain tensor as an attribute: its file reads it from there."""
        path, _, name = target.rpartition(".")
        part = dict(self.module.named_modules()).get(path)
        return isinstance(getattr(part, name, None), Tensor)

    def _call(self, node: Node) -> None:
        """Add an operator of torch."""
        tensors = tensors_of_node(node)
        stack = node.meta.get("nn_module_stack") or {"": ("", None)}
        target: Any = node.target
        given: Any = normalize_function(target, node.args, node.kwargs, None, None, True)
        overload = str(target).partition(".")[2] or str(target)
        kind, *_ = overload.split(".")
        inputs = tuple(map(self._name, _sources(node)))
        op = GraphOperator(node.name, kind, inputs, tuple(tensors), node=node, overload=overload)
        op = replace(op, module=str([*stack.values()][-1][0]))
        pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
        op = replace(op, pointwise=pointwise, arguments=given.kwargs if given else {})
        self._require_writable(op)
        self._add(op, tensors)

    def _require_writable(self, op: GraphOperator) -> None:
        """Refuse operators that no plan can repeat on parts of tensors."""
        place = f"{op.op} (in {op.module or 'its forward'})"
        if not hasattr(op.node.target, "overloadpacket"):
            raise self._refusal(f"{place} chooses between functions", "torch.where")
        if _draws(op):
            reason = f"{place} draws random numbers, which would differ between ranks"
            raise self._refusal(reason, "a probability of 0, or noise as an input")

    def _add(self, op: GraphOperator, tensors: Tensors) -> None:
        """Append an operator with its values, and relays of them.

        A value with a gradient and several consumers gets a copy that may lie in another layout: so an
        all-reduce can become a reduce-scatter and all-gathers, with operators on the shards between.
        """
        self.operators.append(op)
        for name, tensor in tensors.items():
            shape = tuple(map(int, tensor.shape))
            if 0 in shape and self.uses[name]:
                reason = f"{op.op} ({op.target or op.module}) makes an empty tensor {shape}"
                raise self._refusal(reason, "sizes from 1 on")
            trained = name in self.requiring and name in self.trained
            floating = tensor.is_floating_point()
            size = tensor.element_size()
            truth = tensor.dtype == torch.bool
            value = GraphValue(name, shape, floating, size, trained, truth)
            self.values[name] = value
            if trained and self.uses[name] > 1 < value.elements and op.op != PARAMETER:
                relay = self.renamed[name] = f"{name}.relay"
                self.values[relay] = replace(value, name=relay)
                copy = GraphOperator(relay, RELAY, (name,), (relay,), op.module)
                self.operators.append(copy)


def _draws(op: GraphOperator) -> bool:
    """Return whether an operator draws random numbers with these arguments."""
    if op.op == ATTENTION:
        return bool(op.argument("dropout_p", 0.0) > 0.0)
    if torch.Tag.nondeterministic_seeded not in op.node.target.tags:
        return False
    trains = op.argument("train", op.argument("training", True))
    share = op.argument("dropout", op.argument("p", 1.0))
    return bool(trains) and share != 0.0


def tensors_of_node(node: Node) -> Tensors:
    """Return the tensors that a node makes by name."""
    return numbered(node, node.meta.get("val"))


def numbered(node: Node, made: Any) -> Tensors:
    """Return results of a node by name; those of a tuple are numbered."""
    if isinstance(made, Tensor):
        return {node.name: made}
    parts = enumerate(made if isinstance(made, (tuple, list)) else ())
    return {f"{node.name}.{k}": one for k, one in parts if isinstance(one, Tensor)}


def _sources(node: Node) -> list[Node]:
    """Return the tensors that a node reads in the order of its arguments."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [one for one in found if isinstance(one.meta.get("val"), Tensor)]
