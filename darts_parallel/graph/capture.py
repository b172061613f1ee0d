"""Capture of a module by `torch.export`: forward to loss or output, operators whole, nothing computed."""

import importlib
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from darts_parallel.config import load_function, require
from darts_parallel.errors import ConfigError, Entries, UnsupportedError
from darts_parallel.graph._builder import GraphBuilder, detach_regions
from darts_parallel.graph._rules import unknown_operators
from darts_parallel.graph.operators import ModuleGraph

DTYPES = {"float": torch.float32, "long": torch.long, "int": torch.int32, "bool": torch.bool}
"""Element types that an input can name behind its shape."""

COPIES = {
    torch.ops.aten.copy.default: lambda old, new, *_: new.to(old.dtype).expand(old.shape),
}
"""How an assignment to a slice takes its new values: torch has no gradient of a copy."""


def load_module(path: str, key: str = "module", device: str = "meta") -> nn.Module:
    """Import `package.file:make_block` and call it on a device; this runs the user's code.

    Errors:
        ConfigError: no such file or function, or it makes no module.
    """
    setting = f"{key}={path}"
    make = load_function(key, path)
    function = path.partition(":")[2]
    try:
        with torch.device(device):
            made = make()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting}: {function}() fails ({type(error).__name__}: {error}); "
            "try a function without arguments that the meta device runs."
        ) from error
    is_module = isinstance(made, nn.Module)
    require(is_module, setting, "return a torch.nn.Module", "a function that makes one")
    return made


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
        require(len(shape) > 0, setting, "have a size for each dimension", [[2, 128]])
        kind = shape[-1] if isinstance(shape[-1], str) else "float"
        known = f"be one of {', '.join(DTYPES)}"
        require(kind in DTYPES, f"{setting}: the type {kind}", known, "long")
        sizes = shape[:-1] if kind is shape[-1] else shape
        for size in sizes:
            whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
            require(whole, f"{setting}: the size {size}", "be a whole number from 1 on", 1)
        made.append(torch.empty(list(sizes), dtype=DTYPES[kind], device="meta"))
    return made


INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class _KeptNumbers(TorchFunctionMode):
    """Makes constants of the module's code on the CPU, before they go where they are wanted.

    The meta device would lose their numbers. Lists of indices are such constants.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Entries | None = None
    ) -> Any:
        """Call a function of torch."""
        named = dict(kwargs or {})
        if func in INDEXING:
            tensor, index, *values = args
            args = (tensor, _kept_index(index), *values)
        if func is nn.functional.embedding and args[0].is_floating_point():
            raise TypeError("indices must be of the scalar types: Long")  # PyTorch 2.12 says so
        device = named.pop("device", None) if func is torch.tensor else None
        made = func(*args, **named)
        return made if device is None else made.to(device)


def _kept_index(index: Any) -> Any:
    """Return an index with its lists of whole numbers as tensors of the CPU."""
    if isinstance(index, tuple):
        return tuple(map(_kept_index, index))
    listed = isinstance(index, list) and all(isinstance(one, int) for one in index)
    return torch.tensor(index) if listed else index


def export(
    module: nn.Module,
    inputs: Sequence[Tensor],
) -> ExportedProgram:
    """Export a module in its functional form, every operator whole, in evaluation: dropout is left out.

    Errors:
        UnsupportedError: the module does not export; names the user's line.
    """
    module.eval()
    try:
        with _quiet(), _KeptNumbers():
            exported = torch.export.export(module, tuple(inputs), strict=False)
            detach_regions(exported)
            return exported.run_decompositions(COPIES)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's forward raises is an answer about the module
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
    named = [(path, one) for path, one in module.named_modules() if path]
    paths = {id(one): f", in {path} ({type(one).__name__})" for path, one in named}
    python = Path(importlib.__file__).parent.parent
    place = part = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        part = paths.get(id(frame.f_locals.get("self")), part)
        file = code.co_filename
        # neither torch's nor Python's nor ours
        known = "/torch/" in file or "darts_parallel" in file or file.startswith("<")
        if not known and Path(file).parent != python:
            place = f" at {code.co_filename}:{line} in {code.co_name}"
    return place + part


def capture_module(
    module: nn.Module,
    inputs: Sequence[Tensor],
) -> ModuleGraph:
    """Capture a module's operators with example inputs; on the meta device nothing is computed.

    Errors:
        UnsupportedError: it does not export.
    """
    began = time.perf_counter()
    exported = export(module, inputs)
    graph = _decomposed(exported, module)
    return replace(graph, seconds=time.perf_counter() - began)


def _decomposed(exported: ExportedProgram, module: nn.Module) -> ModuleGraph:
    """Return the graph of a module; operators without a rule become others where these have more rules."""
    graph = other = GraphBuilder(exported, module).build()
    with suppress(Exception), _quiet():  # whatever torch raises, there is a graph
        known = dict(torch.export.default_decompositions()) if unknown_operators(graph) else {}
        while wanted := {op.node.target for op in unknown_operators(other)} & known.keys():
            table = {op: known.pop(op) for op in wanted}
            exported = exported.run_decompositions(table | COPIES)
            other = GraphBuilder(exported, module).build()
    return min(graph, other, key=lambda one: (one.underivable, len(unknown_operators(one))))
