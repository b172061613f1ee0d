"""Capture of a module by `torch.export`: forward to loss or output, operators whole, nothing computed."""

import importlib
import logging
import operator
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg
from torch.fx.operator_schemas import normalize_function

from darts_parallel.config import require
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.graph.operators import (
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    FirstTensor,
    GraphOperator,
    GraphValue,
    ModuleGraph,
    kinds,
)

Keywords = dict[str, Any]
"""Arguments of a call by name."""
DTYPES = {"float": torch.float32, "long": torch.long, "int": torch.int32, "bool": torch.bool}
"""Element types that an input can name behind its shape."""
CUTTING = kinds(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full detach argmax argmin sign floor "
    "ceil round"
)
"""Operators whose outputs have no gradient, besides those with integers."""
SOURCE_KINDS = {InputKind.PARAMETER: PARAMETER, InputKind.USER_INPUT: INPUT}
"""Kinds of sources; further ones are constants."""


def load_module(path: str, key: str = "module") -> nn.Module:
    """Import `package.file:make_block` and call it on the meta device; this runs the user's code.

    Errors:
        ConfigError: no such file or function, or it makes no module.
    """
    setting = f"{key}={path}"
    name, _, function = path.partition(":")
    example = f"{key}=package.file:make_block"
    require(bool(name and function), setting, "name a file and a function", example)
    make = _function_of(setting, _imported(key, path), function)
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        reason = f"{setting}: {function}() fails ({type(error).__name__}: {error})"
        raise ConfigError(
            f"{reason}; try a function without arguments that the meta device runs."
        ) from error
    is_module = isinstance(made, nn.Module)
    require(is_module, setting, "return a torch.nn.Module", "a function that makes one")
    return made  # type: ignore[no-any-return]


def _imported(key: str, path: str) -> ModuleType:
    """Import the user's file, from the current folder too."""
    name, _, function = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's file runs here
        parts = name.removesuffix(".py").split("/")
        dotted = ".".join(part for part in parts if part.strip("."))
        better = f"a file that python -c 'import {name}' runs"
        if dotted != name:
            better = f"{key}={dotted}:{function}"
        reason = f"{key}={path}: {name} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(f"{reason}; try {better}.") from error


def _function_of(setting: str, imported: ModuleType, name: str) -> Callable[[], Any]:
    """Return a function of the user's file."""
    make = getattr(imported, name, None)
    if callable(make):
        return make  # type: ignore[no-any-return]
    known = []
    for key, value in vars(imported).items():
        if callable(value) and not key.startswith("_"):
            known.append(key)
    raise ConfigError(
        f"{setting}: {imported.__name__} has no function {name}; "
        f"try one of {', '.join(known) or 'its own'}."
    )


def make_inputs(shapes: Sequence[Any]) -> list[Tensor]:
    """Return tensors on the meta device: `[2, 2048, 2048]` floats, `[2, 2048, long]` whole numbers.

    Errors:
        ConfigError: a size is no positive whole number, or a type is unknown.
    """
    made = []
    setting = f"inputs={shapes}"
    for shape in shapes:
        listed = isinstance(shape, (list, tuple))
        require(listed, setting, "list a shape for each input", [list(shapes)])
        sizes = list(shape)
        kind = "float"
        if sizes and isinstance(sizes[-1], str):
            kind = sizes.pop()
        known = f"be one of {', '.join(DTYPES)}"
        require(kind in DTYPES, f"{setting}: the type {kind}", known, "long")
        for size in sizes:
            whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
            require(whole, f"{setting}: the size {size}", "be a whole number from 1 on", 1)
        made.append(torch.empty(sizes, dtype=DTYPES[kind], device="meta"))
    return made


def export(module: nn.Module, inputs: Sequence[Tensor], kwargs: Keywords) -> ExportedProgram:
    """Export a module in its functional form, every operator whole, in evaluation: dropout is left out.

    Errors:
        UnsupportedError: the module does not export; names the user's line.
    """
    module.eval()
    try:
        with _quiet():
            exported = torch.export.export(module, tuple(inputs), kwargs, strict=False)
            return exported.run_decompositions({})  # type: ignore[no-any-return]
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
    sentence, _, _ = str(error).partition(". ")
    text = shorten(sentence.rstrip(" ."), 160, placeholder=" ...")
    rule = "torch.export cannot capture it"
    better = "inputs of the shapes that its forward takes"
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        rule = "its control flow depends on data"
        better = "torch.where for an if that depends on data"
    elif "numpy" in text.lower():
        rule = "it leaves torch for NumPy"
        better = "torch's own operators in the place of NumPy's"
    elif "scalar types: Long" in text:
        better = "whole numbers, e.g. inputs=[[2,128,long]]"
    reason = f"{rule}{_failed_at(module, error)} ({type(error).__name__}: {text})"
    return f"module {type(module).__name__}: {reason}; try {better}."


def _failed_at(module: nn.Module, error: BaseException) -> str:
    """Name the user's line, and the part of the module that ran there."""
    paths = {}
    for path, one in module.named_modules():
        if path:
            paths[id(one)] = f", in {path} ({type(one).__name__})"
    place = part = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        part = paths.get(id(frame.f_locals.get("self")), part)
        if _is_users(code.co_filename):
            place = f" at {code.co_filename}:{line} in {code.co_name}"
    return place + part


def _is_users(file: str) -> bool:
    """Return whether a file is neither torch's nor Python's nor ours."""
    python = Path(importlib.__file__).parent.parent
    known = "/torch/" in file or "darts_parallel" in file or file.startswith("<")
    return not known and Path(file).parent != python


def capture_module(
    module: nn.Module, inputs: Sequence[Tensor], kwargs: Keywords | None = None
) -> ModuleGraph:
    """Capture a module's operators with example inputs; on the meta device nothing is computed.

    Errors:
        UnsupportedError: it does not export.
    """
    began = time.perf_counter()
    named = kwargs or {}
    with _noted_calls(module, inputs, named) as calls:
        exported = export(module, inputs, named)
    first = {id(one): name for name, one in module.named_parameters()}
    tied = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        tied[name] = first[id(one)]
    graph = _GraphBuilder(exported, tied).build()
    return replace(graph, calls=calls, seconds=time.perf_counter() - began)


@contextmanager
def _noted_calls(
    module: nn.Module, inputs: Sequence[Tensor], kwargs: Keywords
) -> Iterator[dict[str, FirstTensor]]:
    """Note how a module and its parts get their first tensor."""
    calls: dict[str, FirstTensor] = {}

    def note(path: str, _: nn.Module, args: Sequence[Any], named: Keywords) -> None:
        given = {"": args[0]} | named if args else named
        tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        if tensors:
            calls[path] = FirstTensor(tensors[0], len(args))

    note("", module, inputs, kwargs)
    handles = []
    for path, part in module.named_modules():
        if path:
            hook = partial(note, path)
            handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class _GraphBuilder:
    """Turns torch's graph into a `ModuleGraph`: first back from the outputs, then node by node."""

    def __init__(self, exported: ExportedProgram, tied: dict[str, str]) -> None:
        """Name the sources; `tied` has the first name of every parameter: tied ones are one."""
        signature = exported.graph_signature
        self.nodes = list(exported.graph.nodes)
        self.constants = exported.constants
        self.specs = dict(zip(self.nodes, signature.input_specs, strict=False))
        self.renamed = self._tied_values(tied)
        """Values that later operators read in the place of others: parameters that are tied, relays."""
        self.operators: list[GraphOperator] = []
        self.values: dict[str, GraphValue] = {}
        returned: Any = self.nodes[-1].args[0]
        nodes = [one for one in returned if isinstance(one, Node)]
        tensors = [one for one in nodes if _tensors(one)]
        outputs = [one for one in tensors if one.name in signature.user_outputs]
        self.outputs = [one for one in outputs if self._is_loss(one)] or outputs
        self.uses, self.trained = self._reach(self.outputs)

    def _tied_values(self, tied: dict[str, str]) -> dict[str, str]:
        """Return the values that are the same parameter as another one, with that one."""
        values = {}
        for node, spec in self.specs.items():
            values[spec.target] = node.name
        found = {}
        for name, first in tied.items():
            if name != first and {name, first} <= values.keys():
                found[values[name]] = values[first]
        return found

    def build(self) -> ModuleGraph:
        """Add the sources, the operators that an output needs, and the outputs."""
        for node in self.nodes:
            if node in self.specs:
                self._source(node, self.specs[node])
            elif node.target is not operator.getitem and self._is_used(node):
                self._call(node)
        for k, node in enumerate(self.outputs):
            given = (self._name(node),)
            op = GraphOperator(f"output.{k}", OUTPUT, given, (), target=node.name)
            self._add(op, {})
        return ModuleGraph(tuple(self.operators), self.values)

    def _is_used(self, node: Node) -> bool:
        return any(self.uses[name] for name in _tensors(node))

    def _name(self, node: Node) -> str:
        """Return the name of the value that a node is."""
        name = node.name
        if node.target is operator.getitem:
            name = f"{node.args[0]}.{node.args[1]}"
        return self.renamed.get(name, name)

    def _reach(self, outputs: Sequence[Node]) -> tuple[Counter[str], set[str]]:
        """Return how often values are used on the way to outputs, and those with a gradient from there."""
        uses = Counter(map(self._name, outputs))
        trained = set(uses)
        for node in reversed(self.nodes):
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            made = _tensors(node)
            used = [name for name in made if uses[name]]
            if used:
                sources = [self._name(one) for one in _sources(node)]
                uses.update(sources)
                floating = [name for name in used if made[name].is_floating_point()]
                passes = _kind(node.target) not in CUTTING
                if passes and not trained.isdisjoint(floating):
                    trained.update(sources)
        return uses, trained

    def _is_loss(self, node: Node) -> bool:
        """Return whether an output is a number with a gradient; the plan is of such ones alone."""
        (tensor,) = _tensors(node).values()
        if tensor.shape or not tensor.is_floating_point():
            return False
        _, trained = self._reach([node])
        for source, spec in self.specs.items():
            if spec.kind in SOURCE_KINDS:
                for name, one in _tensors(source).items():
                    if one.is_floating_point() and name in trained:
                        return True
        return False

    def _source(self, node: Node, spec: Any) -> None:
        """Add a parameter, an input, or a constant that is used."""
        kind = SOURCE_KINDS.get(spec.kind, CONSTANT)
        tensors = _tensors(node)
        if (
            not tensors
            or node.name in self.renamed
            or (kind == CONSTANT and not self.uses[node.name])
        ):
            return
        target = str(node.name if kind == INPUT else spec.target)
        given = {}
        if spec.kind == InputKind.CONSTANT_TENSOR and target in self.constants:
            given["value"] = self.constants[target]
        op = GraphOperator(node.name, kind, (), tuple(tensors), target=target, arguments=given)
        self._add(op, tensors, trained=kind != CONSTANT)

    def _call(self, node: Node) -> None:
        """Add an operator of torch."""
        kind = _kind(node.target)
        tensors = _tensors(node)
        inputs = tuple(self._name(one) for one in _sources(node))
        stack = node.meta.get("nn_module_stack") or {}
        module = ""
        for path, _ in stack.values():
            module = str(path)
        target: Any = node.target
        given: Any = normalize_function(target, node.args, node.kwargs, None, None, True)
        op = GraphOperator(node.name, kind, inputs, tuple(tensors), module=module, node=node)
        op = replace(
            op,
            pointwise=torch.Tag.pointwise in getattr(node.target, "tags", ()),
            arguments=given.kwargs if given else {},
        )
        trained = [self.values[name].needs_grad for name in inputs]
        self._add(op, tensors, kind not in CUTTING and any(trained))

    def _add(self, op: GraphOperator, tensors: dict[str, Tensor], trained: bool = False) -> None:
        """Append an operator with its values, and relays of them.

        A value with a gradient and several consumers gets a copy that may lie in another layout: so an
        all-reduce can become a reduce-scatter and all-gathers, with operators on the shards between.
        """
        self.operators.append(op)
        for name, tensor in tensors.items():
            floating = tensor.dtype.is_floating_point
            shape = tuple(map(int, tensor.shape))
            needs_grad = trained and floating and name in self.trained
            value = GraphValue(name, shape, floating, tensor.element_size(), needs_grad)
            self.values[name] = value
            shared = self.uses[name] > 1 and value.elements > 1
            if shared and value.needs_grad and op.op != PARAMETER:
                self._add_relay(value, op.module)

    def _add_relay(self, value: GraphValue, module: str) -> None:
        """Let later operators read a copy of a value."""
        relay = f"{value.name}.relay"
        self.renamed[value.name] = relay
        self.values[relay] = replace(value, name=relay)
        copy = GraphOperator(relay, RELAY, (value.name,), (relay,), module)
        self.operators.append(copy)


def _tensors(node: Node) -> dict[str, Tensor]:
    """Return the tensors that a node makes by name; those of a tuple are numbered."""
    made = node.meta.get("val")
    if isinstance(made, Tensor):
        return {node.name: made}
    parts = made if isinstance(made, (tuple, list)) else ()
    found = {}
    for k, one in enumerate(parts):
        if isinstance(one, Tensor):
            found[f"{node.name}.{k}"] = one
    return found


def _sources(node: Node) -> list[Node]:
    """Return the tensors that a node reads in the order of its arguments."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    values = [(one, one.meta.get("val")) for one in found]
    return [one for one, value in values if isinstance(value, Tensor)]


def _kind(target: Any) -> str:
    """Return torch's name of an operator without namespace and overload."""
    parts = str(target).split(".")
    return parts[1] if len(parts) > 1 else parts[0]
