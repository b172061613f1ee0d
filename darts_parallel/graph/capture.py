"""Capture of a module by `torch.export`: forward to loss or output, operators whole, nothing computed."""

import importlib
import logging
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.operator_schemas import normalize_function

from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.graph.operators import (
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    GraphOperator,
    GraphValue,
    ModuleGraph,
    TensorArgument,
)

DTYPES = {"float": torch.float32, "long": torch.long, "int": torch.int32, "bool": torch.bool}
"""Element types that an input can name behind its shape."""
SKIPPED = ("_assert_tensor_metadata", "_assert_async", "sym_constrain_range_for_size", "_assert_scalar")
CUTTING = (
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "detach",
    "argmax", "argmin", "sign", "floor", "ceil", "round",
)  # fmt: skip
"""Operators whose outputs have no gradient, besides those with integers."""
SOURCE_KINDS = {
    InputKind.PARAMETER: PARAMETER,
    InputKind.BUFFER: CONSTANT,
    InputKind.CONSTANT_TENSOR: CONSTANT,
    InputKind.USER_INPUT: INPUT,
}


def load_module(path: str, key: str = "module") -> nn.Module:
    """Import `package.file:make_block` and call it on the meta device; this runs the user's code.

    Args:
        key: Where the path stands in the configuration, for messages.

    Errors:
        ConfigError: no such file or function, or it makes no module.
    """
    name, colon, function = path.partition(":")
    if not colon or not name or not function:
        raise ConfigError(f"{key}={path} must name a file and a function; try {key}=package.file:make_block.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        imported = importlib.import_module(name)
    except Exception as error:  # the user's file runs here
        raise ConfigError(
            f"{key}={path}: {name} cannot be imported ({type(error).__name__}: {error}); try a file that "
            f"python -c 'import {name}' runs in this folder."
        ) from error
    make = getattr(imported, function, None)
    if not callable(make):
        known = [key for key, value in vars(imported).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{key}={path}: {name} has no function {function}; try one of {', '.join(known) or 'its own'}."
        )
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        raise ConfigError(
            f"{key}={path}: {function}() fails ({type(error).__name__}: {error}); try a function without "
            "arguments that also runs on the meta device."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{key}={path} must return a torch.nn.Module; try a function that makes one.")
    return made


def make_inputs(shapes: Sequence[Any]) -> list[Tensor]:
    """Return tensors on the meta device: `[2, 2048, 2048]` floats, `[2, 2048, long]` whole numbers.

    Errors:
        ConfigError: a size is no positive whole number, or a type is unknown.
    """
    made = []
    for shape in shapes:
        entries = list(shape) if isinstance(shape, (list, tuple)) else [shape]
        kind = entries.pop() if entries and isinstance(entries[-1], str) else "float"
        if kind not in DTYPES:
            raise ConfigError(
                f"inputs={shapes}: the type {kind} must be one of {', '.join(DTYPES)}; try long."
            )
        for size in entries:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"inputs={shapes}: the size {size} must be a whole number from 1 on; try 1."
                )
        made.append(torch.empty(entries, dtype=DTYPES[kind], device="meta"))
    return made


def export(module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any]) -> ExportedProgram:
    """Export a module in its functional form, every operator whole.

    Args:
        module: Set to evaluation: dropout is left out.
        inputs: Positional ones.
        kwargs: Further ones by name.

    Errors:
        UnsupportedError: the module does not export; names the user's line.
    """
    module.eval()
    try:
        with _quiet():
            exported = torch.export.export(module, tuple(inputs), kwargs, strict=False)
            functional: ExportedProgram = exported.run_decompositions({})
            return functional
    except Exception as error:  # whatever a user's forward raises is an answer about the module
        raise UnsupportedError(_export_sentence(module, error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own remarks about an export from the terminal: the error says what matters."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _export_sentence(module: nn.Module, error: BaseException) -> str:
    """Say in one sentence why and where an export failed."""
    frame, place = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        layer = "/torch/nn/modules/" in file and not file.endswith(("module.py", "container.py"))
        if layer or ("/torch/" not in file and "darts_parallel" not in file and not file.startswith("<")):
            place = f" at {file}:{frame.tb_lineno} in {frame.tb_frame.f_code.co_name}"
        frame = frame.tb_next
    text = " ".join(str(error).split())
    rule = "torch.export cannot capture it"
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        rule = "its control flow depends on data"
    return (
        f"module {type(module).__name__}: {rule}{place} ({type(error).__name__}: {text[:160].rstrip(' .')}); "
        "try inputs of the shapes that its forward takes, and torch.where for an if that depends on data."
    )


def capture(
    module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any] | None = None
) -> tuple[ModuleGraph, ExportedProgram]:
    """Capture a module's operators.

    Args:
        module: Not changed; on the meta device nothing is computed.
        inputs: Example inputs on the module's device.
        kwargs: Further inputs by name.

    Returns:
        The graph that is planned, and torch's own, which an interpreter runs.

    Errors:
        UnsupportedError: it does not export.
    """
    began = time.perf_counter()
    exported = export(module, inputs, kwargs or {})
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    tied = {name: first.setdefault(id(one), name) for name, one in named}
    graph = _GraphBuilder(exported, tied).build()
    return replace(graph, seconds=time.perf_counter() - began), exported


class _GraphBuilder:
    """Turns torch's graph into a `ModuleGraph`, node by node."""

    def __init__(self, exported: ExportedProgram, tied: dict[str, str]) -> None:
        self.exported = exported
        self.tied = tied
        """First name of every parameter: tied ones are one."""
        self.operators: list[GraphOperator] = []
        self.values: dict[str, GraphValue] = {}
        self.names: dict[Node, str] = {}
        self.tuples: dict[Node, list[str]] = {}

    def build(self) -> ModuleGraph:
        """Visit all nodes, then give every tensor of several consumers a relay."""
        specs = iter(self.exported.graph_signature.input_specs)
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self._source(node, next(specs))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._outputs(node)
        return _with_relays(_without_dead(ModuleGraph(tuple(self.operators), self.values)))

    def _value(self, name: str, tensor: Tensor, needs_grad: bool) -> str:
        floating = tensor.dtype.is_floating_point
        shape = tuple(int(size) for size in tensor.shape)
        self.values[name] = GraphValue(name, shape, floating, tensor.element_size(), needs_grad and floating)
        return name

    def _source(self, node: Node, spec: Any) -> None:
        tensor = node.meta.get("val")
        if not isinstance(tensor, Tensor):
            return
        kind = SOURCE_KINDS.get(spec.kind, CONSTANT)
        known = {op.target: op.name for op in self.operators if op.op == PARAMETER}
        if kind == PARAMETER and self.tied.get(spec.target, spec.target) in known:
            self.names[node] = known[self.tied[spec.target]]
            return
        self.names[node] = self._value(node.name, tensor, kind in (PARAMETER, INPUT))
        target = spec.target if kind != INPUT else node.name
        self.operators.append(GraphOperator(node.name, kind, (), (node.name,), target=str(target)))

    def _call(self, node: Node) -> None:
        target = node.target
        if getattr(target, "__name__", "") == "getitem":
            source, index = node.args
            self.names[node] = self.tuples[source][index]  # type: ignore[index]
            return
        kind = _kind(target)
        if kind in SKIPPED:
            return
        inputs: list[str] = []
        args = self._argument(node.args, inputs)
        given = args, {name: self._argument(value, inputs) for name, value in node.kwargs.items()}
        arguments = _named_arguments(target, *given)
        grad = kind not in CUTTING and any(self.values[name].needs_grad for name in inputs)
        made = node.meta.get("val")
        tensors = (
            [made] if isinstance(made, Tensor) else [one for one in made or () if isinstance(one, Tensor)]
        )
        if isinstance(made, Tensor):
            outputs = [self._value(node.name, made, grad)]
            self.names[node] = outputs[0]
        else:
            outputs = [self._value(f"{node.name}.{k}", one, grad) for k, one in enumerate(tensors)]
            self.tuples[node] = outputs
        pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
        names = tuple(inputs), tuple(outputs)
        path = _module_path(node)
        self.operators.append(
            GraphOperator(node.name, kind, *names, arguments, pointwise, path, target, given)
        )

    def _argument(self, value: Any, inputs: list[str]) -> Any:
        """Put places in the place of tensors, and note the tensors."""
        if isinstance(value, Node):
            if value not in self.names:
                return None
            inputs.append(self.names[value])
            return TensorArgument(len(inputs) - 1)
        if isinstance(value, (list, tuple)):
            return [self._argument(one, inputs) for one in value]
        return value

    def _outputs(self, node: Node) -> None:
        """Add an output for every tensor that the module returns; where one is a loss, for losses alone."""
        users = {spec.arg.name for spec in self.exported.graph_signature.output_specs
                 if spec.kind.name == "USER_OUTPUT" and hasattr(spec.arg, "name")}  # fmt: skip
        returned: Any = node.args[0]
        found = [one for one in returned if isinstance(one, Node) and one in self.names and one.name in users]
        losses = [one for one in found if self._is_loss(self.values[self.names[one]])]
        for one in losses or found:
            name = f"output.{sum(op.op == OUTPUT for op in self.operators)}"
            self.operators.append(GraphOperator(name, OUTPUT, (self.names[one],), (), target=one.name))

    @staticmethod
    def _is_loss(value: GraphValue) -> bool:
        return value.needs_grad and not value.shape


def _kind(target: Any) -> str:
    """Return torch's name of an operator without namespace and overload."""
    parts = str(target).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _named_arguments(target: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of torch's schema."""
    normal = normalize_function(target, tuple(args), kwargs, None, None, True)
    return {f"argument{k}": v for k, v in enumerate(args)} | kwargs if normal is None else dict(normal.kwargs)


def _module_path(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _without_dead(graph: ModuleGraph) -> ModuleGraph:
    """Leave out operators that no output needs, and gradients that do not come from one."""
    needed: set[str] = set()
    felt: set[str] = set()
    kept = []
    for op in reversed(graph.operators):
        if op.op in (OUTPUT, PARAMETER, INPUT) or needed & set(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
            if op.op == OUTPUT or any(graph.values[n].needs_grad and n in felt for n in op.outputs):
                felt.update(op.inputs)
    values = {n: replace(v, needs_grad=v.needs_grad and n in felt) for n, v in graph.values.items()}
    return replace(graph, operators=tuple(reversed(kept)), values=values)


def _with_relays(graph: ModuleGraph) -> ModuleGraph:
    """Give a tensor with a gradient and several consumers a copy that may lie in another layout.

    An all-reduce can so become a reduce-scatter and all-gathers, with operators on the shards between.
    """
    values, operators = dict(graph.values), []
    renamed: dict[str, str] = {}
    fans: dict[str, int] = defaultdict(int)
    for op in graph.operators:
        for name in op.inputs:
            fans[name] += 1
    for op in graph.operators:
        operators.append(replace(op, inputs=tuple(renamed.get(name, name) for name in op.inputs)))
        for name in op.outputs:
            value = graph.values[name]
            if fans[name] > 1 and value.needs_grad and value.elements > 1 and op.op != PARAMETER:
                relay = f"{name}.relay"
                renamed[name] = relay
                values[relay] = replace(value, name=relay)
                operators.append(GraphOperator(relay, RELAY, (name,), (relay,), module=op.module))
    return replace(graph, operators=tuple(operators), values=values)
