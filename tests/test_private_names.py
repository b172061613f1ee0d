"""No private name of another package is used, but those listed here, each with the reason."""

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.support.sources import FOLDERS, ROOT, SOURCES, nodes

ALLOWED = {
    # the wrapper that FSDP2 and pipelines recompute whole layers by; torch exports it from nowhere else
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("run/_chunks",),
    # torchtitan's way, too, to run an order of passes that no class of torch writes
    "_PipelineScheduleRuntime": ("run/engine",),
    "_load_csv": ("run/engine",),
    # torchtitan makes the schedule of a list of passes nowhere else
    "_build_pipeline_schedule": ("clients/test_searched_orders",),
    # documented by the library reference, in spite of its name: ends a process without its exit handlers
    "_exit": ("",),
    # documented by the library reference, in spite of its name: makes a named tuple of an iterable
    "_make": ("exact/",),
    # documented by the library reference, in spite of its name: the fields of a named tuple by name
    "_asdict": ("cli/_lengths", "planner/figure_posterior"),
    # DeepSpeed has no other hook for uneven stages
    "_partition_layers": ("deepspeed", "export/test_targets"),
    "_set_bounds": ("deepspeed", "export/test_targets"),
    "_topo": ("deepspeed", "export/test_targets"),
    # the group of ranks that do not exist; torch has it nowhere else
    "torch.testing._internal.distributed.fake_pg": ("clients/",),
    # every export of a module looks all operators of torch up again
    "torch._export": ("graph/conftest",),
    "_materialize_cpp_cia_ops": ("graph/conftest",),
    "_ops": ("graph/conftest",),
    # operators of ATen that torch.export writes for public functions
    "_softmax": ("graph/operator_calls",),
    "_log_softmax": ("graph/operator_calls",),
    "_unsafe_view": ("graph/operator_calls",),
}
"""Private names of dependencies, and the parts of paths of the files that may use each."""


def private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(every: Iterable[ast.AST]) -> set[str]:
    """List what the project itself defines: functions, classes, variables, fields."""
    names: set[str] = set()
    for node in every:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
            ):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def used(every: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a source imports, or reads of an object."""
    for node in every:
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] not in FOLDERS:
                yield from (module if private(module) else a.name for a in node.names)
            case ast.Import():
                yield from (a.name for a in node.names if a.name.split(".")[0] not in FOLDERS)
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                yield name


def violations(own: set[str], file: str, every: Iterable[ast.AST]) -> list[str]:
    """List what a file uses without being allowed to."""
    names = {name for name in used(every) if private(name) and name not in own}
    return [
        f"{file}: {n}"
        for n in sorted(names)
        if not any(part in file for part in ALLOWED.get(n, ()))
    ]


def test_private_names_of_dependencies_are_those_of_the_list() -> None:
    own = own_names(n for file in SOURCES if "golden" not in file.parts for n in nodes(file)) - set(
        ALLOWED
    )
    files = {file: str(file.relative_to(ROOT)) for file in SOURCES}
    assert [one for file, name in files.items() for one in violations(own, name, nodes(file))] == []


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("from hydra._internal.utils import run", True),
        ("import torch._C", True),
        ("from omegaconf.base import _get_value", True),
        ("x = getattr(config, '_metadata')", True),
        ("config._set_flag('struct', False)", True),
        ("self._mine = other._mine", False),
        (
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
            True,
        ),
    ],
)
def test_the_rule_sees_private_names(source: str, broken: bool) -> None:
    assert (
        bool(violations({"_mine"}, "darts_parallel/config/_keys.py", ast.walk(ast.parse(source))))
        == broken
    )
