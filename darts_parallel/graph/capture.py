"""Capture of a module by `torch.export`: forward to loss or output, operators whole, nothing computed."""

import importlib
import logging
import operator
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
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
    GraphOperator,
    GraphValue,
    ModuleGraph,
    kinds,
)

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
    require(
        bool(name and function),
        setting,
        "name a file and a function",
        f"{key}=package.file:make_block",
    )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        imported = importlib.import_module(name)
    except Exception as error:  # the user's file runs here
        dotted = ".".join(part for part in name.removesuffix(".py").split("/") if part.strip("."))
        runs = f"a file that python -c 'import {name}' runs"
        better = f"{key}={dotted}:{function}" if dotted != name else runs
        said = f"{setting}: {name} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(f"{said}; try {better}.") from error
    make = getattr(imported, function, None)
    if not callable(make):
        known = [
            key
            for key, value in vars(imported).items()
            if callable(value) and not key.startswith("_")
        ]
        own = ", ".join(known) or "its own"
        raise ConfigError(f"{setting}: {name} has no function {function}; try one of {own}.")
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        said = f"{setting}: {function}() fails ({type(error).__name__}: {error})"
        raise ConfigError(
            f"{said}; try a function without arguments that the meta device runs."
        ) from error
    require(
        isinstance(made, nn.Module),
        setting,
        "return a torch.nn.Module",
        "a function that makes one",
    )
    return made  # type: ignore[no-any-return]


def make_inputs(shapes: Sequence[Any]) -> list[Tensor]:
    """Return tensors on the meta device: `[2, 2048, 2048]` floats, `[2, 2048, long]` whole numbers.

    Errors:
        ConfigError: a size is no positive whole number, or a type is unknown.
    """
    made = []
    for shape in shapes:
        listed = isinstance(shape, (list, tuple))
        require(listed, f"inputs={shapes}", "list a shape for each input", [list(shapes)])
        entries = list(shape)
        kind = entries.pop() if entries and isinstance(entries[-1], str) else "float"
        require(
            kind in DTYPES,
            f"inputs={shapes}: the type {kind}",
            f"be one of {', '.join(DTYPES)}",
            "long",
        )
        for size in entries:
            whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
            require(whole, f"inputs={shapes}: the size {size}", "be a whole number from 1 on", 1)
        made.append(torch.empty(entries, dtype=DTYPES[kind], device="meta"))
    return made


def export(module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any]) -> ExportedProgram:
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
    """Say in one sentence why and where an export failed: the user's line, and the part that ran there."""
    place = part = ""
    paths = {
        id(one): f", in {path} ({type(one).__name__})"
        for path, one in module.named_modules()
        if path
    }
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        part = paths.get(id(frame.f_locals.get("self")), part)
        library = "/torch/" in file or Path(file).parent == Path(importlib.__file__).parent.parent
        if not (library or "darts_parallel" in file or file.startswith("<")):
            place = f" at {file}:{line} in {frame.f_code.co_name}"
    text = shorten(str(error).partition(". ")[0].rstrip(" ."), 160, placeholder=" ...")
    rule, better = "torch.export cannot capture it", "inputs of the shapes that its forward takes"
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        rule, better = (
            "its control flow depends on data",
            "torch.where for an if that depends on data",
        )
    elif "numpy" in text.lower():
        rule, better = "it leaves torch for NumPy", "torch's own operators in the place of NumPy's"
    elif "scalar types: Long" in text:
        better = "whole numbers, e.g. inputs=[[2,128,long]]"
    said = f"{rule}{place}{part} ({type(error).__name__}: {text})"
    return f"module {type(module).__name__}: {said}; try {better}."


def capture_module(
    module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any] | None = None
) -> ModuleGraph:
    """Capture a module's operators with example inputs; on the meta device nothing is computed.

    Errors:
        UnsupportedError: it does not export.
    """
    began = time.perf_counter()
    with _noted_calls(module, inputs, kwargs or {}) as calls:
        exported = export(module, inputs, kwargs or {})
    first = {id(one): name for name, one in module.named_parameters()}
    tied = {name: first[id(one)] for name, one in module.named_parameters(remove_duplicate=False)}
    graph = _GraphBuilder(exported, tied).build()
    return replace(graph, calls=calls, seconds=time.perf_counter() - began)


@contextmanager
def _noted_calls(
    module: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any]
) -> Iterator[dict[str, tuple[str, int]]]:
    """Note how a module and its parts get their first tensor (`ModuleGraph.calls`)."""
    calls: dict[str, tuple[str, int]] = {}

    def note(path: str, _: nn.Module, args: Sequence[Any], named: dict[str, Any]) -> None:
        given = {"": args[0]} | named if args else named
        if tensors := [name for name, value in given.items() if isinstance(value, Tensor)]:
            calls[path] = tensors[0], len(args)

    note("", module, inputs, kwargs)
    parts = [(path, part) for path, part in module.named_modules() if path]
    handles = [
        part.register_forward_pre_hook(partial(note, path), with_kwargs=True)
        for path, part in parts
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class _GraphBuilder:
    """Turns torch's graph into a `ModuleGraph`: first back from the outputs, then node by node."""

    def __init__(self, exported: ExportedProgram, tied: dict[str, str]) -> None:
        """Name the sources; `tied` has the first name of every parameter: tied ones are one."""
        signature, self.nodes = exported.graph_signature, list(exported.graph.nodes)
        self.constants = exported.constants
        self.specs = dict(zip(self.nodes, signature.input_specs, strict=False))
        self.renamed: dict[str, str] = {}
        """Values that later operators read in the place of others: parameters that are tied, relays."""
        nodes = {spec.target: node.name for node, spec in self.specs.items()}
        for name, first in tied.items():
            if name != first and {name, first} <= nodes.keys():
                self.renamed[nodes[name]] = nodes[first]
        self.operators: list[GraphOperator] = []
        self.values: dict[str, GraphValue] = {}
        returned: Any = self.nodes[-1].args[0]
        made = (one for one in returned if isinstance(one, Node) and _tensors(one))
        found = [one for one in made if one.name in signature.user_outputs]
        self.outputs = [one for one in found if self._is_loss(one)] or found
        self.uses, self.felt = self._reach(self.outputs)

    def build(self) -> ModuleGraph:
        """Add the sources, the operators that an output needs, and the outputs."""
        for node in self.nodes:
            if node in self.specs:
                self._source(node, self.specs[node])
            elif (
                any(self.uses[name] for name in _tensors(node))
                and node.target is not operator.getitem
            ):
                self._call(node)
        for k, one in enumerate(self.outputs):
            self._add(
                GraphOperator(f"output.{k}", OUTPUT, (self._name(one),), (), target=one.name), {}
            )
        return ModuleGraph(tuple(self.operators), self.values)

    def _name(self, node: Node) -> str:
        """Return the name of the value that a node is."""
        picks = node.target is operator.getitem
        name = f"{node.args[0]}.{node.args[1]}" if picks else node.name
        return self.renamed.get(name, name)

    def _reach(self, outputs: Sequence[Node]) -> tuple[Counter[str], set[str]]:
        """Return how often values are used on the way to outputs, and those with a gradient from there."""
        uses = Counter(map(self._name, outputs))
        felt = set(uses)
        for node in reversed(self.nodes):
            made = {name: tensor for name, tensor in _tensors(node).items() if uses[name]}
            if node.op == "call_function" and made and node.target is not operator.getitem:
                sources = [self._name(one) for one in _sources(node)]
                uses.update(sources)
                passes = any(
                    name in felt and one.dtype.is_floating_point for name, one in made.items()
                )
                felt.update(sources if passes and _kind(node.target) not in CUTTING else ())
        return uses, felt

    def _is_loss(self, node: Node) -> bool:
        """Return whether an output is a number with a gradient; the plan is of such ones alone."""
        (tensor,), (_, felt) = _tensors(node).values(), self._reach([node])
        trained = (_tensors(one) for one, spec in self.specs.items() if spec.kind in SOURCE_KINDS)
        trains = any(
            one.is_floating_point() and name in felt for own in trained for name, one in own.items()
        )
        return trains and tensor.is_floating_point() and not tensor.shape

    def _source(self, node: Node, spec: Any) -> None:
        kind = SOURCE_KINDS.get(spec.kind, CONSTANT)
        tensors = _tensors(node)
        if tensors and node.name not in self.renamed and (kind != CONSTANT or self.uses[node.name]):
            target = str(node.name if kind == INPUT else spec.target)
            held = self.constants.get(target) if spec.kind == InputKind.CONSTANT_TENSOR else None
            given = {} if held is None else {"value": held}
            op = GraphOperator(node.name, kind, (), tuple(tensors), target=target, arguments=given)
            self._add(op, tensors, trained=kind != CONSTANT)

    def _call(self, node: Node) -> None:
        kind, tensors = _kind(node.target), _tensors(node)
        inputs = tuple(self._name(one) for one in _sources(node))
        stack = ["", *(str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())]
        given: Any = normalize_function(node.target, node.args, node.kwargs, None, None, True)  # type: ignore
        op = GraphOperator(
            node.name,
            kind,
            inputs,
            tuple(tensors),
            stack[-1],
            pointwise=torch.Tag.pointwise in getattr(node.target, "tags", ()),
            arguments=given.kwargs if given else {},
            node=node,
        )
        trained = kind not in CUTTING and any(self.values[name].needs_grad for name in inputs)
        self._add(op, tensors, trained)

    def _add(self, op: GraphOperator, tensors: dict[str, Tensor], trained: bool = False) -> None:
        """Append an operator with its values, and relays of them.

        A value with a gradient and several consumers gets a copy that may lie in another layout: so an
        all-reduce can become a reduce-scatter and all-gathers, with operators on the shards between.
        """
        self.operators.append(op)
        for name, tensor in tensors.items():
            floating = tensor.dtype.is_floating_point
            grad, shape = trained and floating and name in self.felt, tuple(map(int, tensor.shape))
            value = self.values[name] = GraphValue(
                name, shape, floating, tensor.element_size(), grad
            )
            if self.uses[name] > 1 and grad and value.elements > 1 and op.op != PARAMETER:
                relay = self.renamed[name] = f"{name}.relay"
                self.values[relay] = replace(value, name=relay)
                self.operators.append(GraphOperator(relay, RELAY, (name,), (relay,), op.module))


def _tensors(node: Node) -> dict[str, Tensor]:
    """Return the tensors that a node makes by name; those of a tuple are numbered."""
    made = node.meta.get("val")
    if isinstance(made, Tensor):
        return {node.name: made}
    parts = made if isinstance(made, (tuple, list)) else ()
    return {f"{node.name}.{k}": one for k, one in enumerate(parts) if isinstance(one, Tensor)}


def _sources(node: Node) -> list[Node]:
    """Return the tensors that a node reads in the order of its arguments."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return [one for one in found if isinstance(one.meta.get("val"), Tensor)]


def _kind(target: Any) -> str:
    """Return torch's name of an operator without namespace and overload."""
    parts = str(target).split(".")
    return parts[1] if len(parts) > 1 else parts[0]
