"""The layer rule and the faces of packages: who may import what, read from the source."""

import ast
import re
from collections.abc import Iterable, Iterator, Sized
from functools import cache
from pathlib import Path

import pytest

from baselines import PLANNERS
from darts_parallel.cost.terms import TERMS
from darts_parallel.schedules import NAMES
from tests.support.sources import ROOT, nodes, nodes_of

LAYERS = [
    "errors",
    "schedules",
    "config",
    "problem",
    "plans",
    "cost",
    "exact",
    "gradient",
    "planner",
    "design",
    "report",
    "cli",
]
"""A file imports from packages to its left, or from its own."""
BRANCHES = {
    "export": "plans",
    "graph": "exact",
    "run": "cost",
    "machine": "cost",
    "bilevel": "report",
    "baselines": "gradient",
}
"""Packages beside the stack, and the last layer that each sees; `bilevel` with `graph`, without `planner`."""
LATE = (
    "matplotlib",
    "tensorboard",
    "torch.utils.tensorboard",
    "torch.distributed",
    "scipy",
    "resource",
    "PIL",
    "transformers",
    "darts_parallel.report.plots",
    "darts_parallel.report._plots",
    "darts_parallel.run.",
    "darts_parallel.bilevel.",
    "darts_parallel.config._meta_model",
    "darts_parallel.cli._task",
    "darts_parallel.cli._plan_config",
    "darts_parallel.cli._sweep_table",
    "darts_parallel.cli._design",
    "darts_parallel.bilevel.train_operators",
)
"""Name what functions may import, next to the names that a face imports late: slow, or missing on
some machines."""
FILES = sorted([*ROOT.glob("darts_parallel/**/*.py"), *ROOT.glob("baselines/**/*.py")])
READERS = {
    "outer_spaces",
    "refuse_unexecutable",
    "evaluate",
    "hard_plan",
    "build_tables",
    "StageContext.build",
    "search",
    "_sentence",
}
"""Functions below `planner` that read five parts of the problem or more, and get the whole."""
MOST_READERS = 50
"""Functions and fields of `planner` that get the whole problem; the number may only fall."""
USERS = sorted([*ROOT.glob("experiments/**/*.py"), *ROOT.glob("clients/**/*.py")])
"""Files that no layer holds, and that import from faces, too."""


@cache
def face_of(package: str) -> dict[str, bool]:
    """Return names that `darts_parallel.<package>` exports, and whether their modules are imported late."""
    every = nodes(ROOT / "darts_parallel" / package / "__init__.py")
    late = {id(n) for test in every[0].body if isinstance(test, ast.If) for n in ast.walk(test)}
    return {
        alias.asname or alias.name: id(node) in late
        for node in every
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def past_the_face(file: Path, text: str) -> Iterator[str]:
    """Yield imports from another package of darts_parallel that its face does not export."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    mine = package_of(module.removesuffix(".__init__"))
    for _, source, name in imports(text):
        package = package_of(f"{source}.{name}" if source == "darts_parallel" else source)
        if not source.startswith("darts_parallel") or package == mine:
            continue
        if (
            not (ROOT / "darts_parallel" / package / "__init__.py").exists()
            or source == "darts_parallel"
        ):
            continue
        if source != f"darts_parallel.{package}" or name not in face_of(package):
            yield f"{module} imports {source}.{name}: not of the package's face"


def package_of(module: str) -> str:
    """`cost` for `darts_parallel.cost.table`, `baselines` for `baselines.amp`, `` for the root."""
    first, *rest = module.split(".")
    return (rest[0] if rest else "") if first == "darts_parallel" else first


def allowed(importer: str, imported: str) -> bool:
    """Return whether a file of one package may import another package."""
    if importer in ("", "api", "__main__") or importer == imported:
        return True
    if importer == "cli":
        return imported != "baselines"
    last = BRANCHES.get(importer, importer)
    # its blocks are timed and trained, and its workers run the files of plans
    if imported == "run" and importer in ("machine", "bilevel", "graph"):
        return True
    if imported not in LAYERS or (importer, imported) == ("bilevel", "planner"):
        return (importer, imported) == ("bilevel", "graph")
    return LAYERS.index(imported) <= LAYERS.index(last)


def imports(text: str) -> Iterator[tuple[ast.AST, str, str]]:
    """Every import as statement, module and name; a module that is imported whole has an empty name."""
    for node in nodes_of(text):
        if isinstance(node, ast.ImportFrom):
            yield from ((node, node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name, "") for alias in node.names)


def theirs_late(source: str, name: str) -> bool:
    """Return whether a face imports a name late."""
    first, _, package = source.partition(".")
    if (
        first != "darts_parallel"
        or not (ROOT / "darts_parallel" / package / "__init__.py").exists()
    ):
        return False
    return face_of(package).get(name, False)


def violations(file: Path, text: str) -> Iterator[str]:
    """Yield what a source breaks."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    mine = package_of(module.removesuffix(".__init__"))
    inside = {id(n) for f in nodes_of(text) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node, source, name in imports(text):
        where = f"{module} imports {source}{'.' if name else ''}{name}"
        if source.split(".")[0] == "experiments":
            yield f"{where}: experiments are nobody's ground"
        if source.split(".")[0] in ("darts_parallel", "baselines"):
            theirs = package_of(source)
            whole = package_of(f"{source}.{name}") if source == "darts_parallel" else theirs
            if not allowed(
                mine, whole if source == "darts_parallel" and whole in LAYERS else theirs
            ):
                yield f"{where}: against the layers"
            if theirs != mine and any(part.startswith("_") for part in (*source.split("."), name)):
                yield f"{where}: private to another package"
        late = f"{source}.{name}".startswith(LATE) or theirs_late(source, name)
        if id(node) in inside and not late:
            yield f"{where} inside a function"


def test_a_file_imports_only_from_below() -> None:
    assert [broken for file in FILES for broken in violations(file, file.read_text())] == []


def test_other_packages_import_from_the_face_alone() -> None:
    files = [*FILES, *USERS]
    assert [broken for file in files for broken in past_the_face(file, file.read_text())] == []


def modules() -> dict[str, Path]:
    """Return every module of darts_parallel and its file; a face is named like its package."""
    found = {}
    for file in ROOT.glob("darts_parallel/**/*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported_modules(text: str, known: Iterable[str]) -> set[str]:
    """Return the modules that a source imports anywhere: at the top, for types, inside functions."""
    found = set()
    for _, source, name in imports(text):
        module = f"{source}.{name}"
        found.add(module if module in known else source)
    return found.intersection(known)


def import_cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the largest groups of modules that all import each other, over any number of steps."""
    reached = {module: _reachable(graph, module) for module in graph}
    cycles: list[set[str]] = []
    for module in graph:
        group = {other for other in reached[module] if module in reached[other]}
        if group and group not in cycles:
            cycles.append(group)
    return cycles


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - found:
            found.add(module)
            waiting.append(module)
    return found


def test_no_modules_import_each_other() -> None:
    files = modules()
    graph = {name: imported_modules(file.read_text(), files) for name, file in files.items()}
    assert sorted(map(sorted, import_cycles(graph))) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from p.b import y",
        "from p import b",
        "import p.b",
        "if TYPE_CHECKING:\n    from p.b import y",
        "def f():\n    from p.b import y",
    ],
)
def test_an_import_of_any_form_closes_a_cycle(statement: str) -> None:
    texts = {"p": "", "p.a": statement, "p.b": "from p.c import z", "p.c": "from p.a import x"}
    graph = {name: imported_modules(text, texts) for name, text in texts.items()}
    assert import_cycles(graph) == [{"p.a", "p.b", "p.c"}]


def test_below_the_planner_few_functions_get_the_whole_problem() -> None:
    found, below = set(), LAYERS[LAYERS.index("problem") : LAYERS.index("planner")]
    for file in (file for name in below for file in ROOT.glob(f"darts_parallel/{name}/**/*.py")):
        scopes = {
            id(n): f"{c.name}." for c in nodes(file) if isinstance(c, ast.ClassDef) for n in c.body
        }
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef) and re.search(
                r"\bProblem\b", ast.unparse(node.args)
            ):
                found.add(scopes.get(id(node), "") + node.name)
    assert found == READERS


def test_few_functions_and_fields_of_the_planner_get_the_whole_problem() -> None:
    found = []
    for node in (n for file in ROOT.glob("darts_parallel/planner/*.py") for n in nodes(file)):
        if isinstance(node, ast.FunctionDef):
            found.append(ast.unparse(node.args))
        elif isinstance(node, ast.ClassDef):
            found += [ast.unparse(n.annotation) for n in node.body if isinstance(n, ast.AnnAssign)]
    assert sum(bool(re.search(r"\bProblem\b", text)) for text in found) <= MOST_READERS


def test_a_package_has_at_most_30_modules() -> None:
    for folder in ROOT.glob("darts_parallel/*/"):
        modules = [
            path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")
        ]
        assert len(modules) <= 30, folder


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("darts_parallel/schedules", NAMES),
        ("darts_parallel/cost/terms", TERMS),
        ("baselines", PLANNERS),
    ],
)
def test_every_module_without_an_underscore_is_registered(folder: str, found: Sized) -> None:
    assert len(found) == len(list((ROOT / folder).glob("[!_]*.py")))


def test_no_package_is_called_like_a_public_name_of_the_root() -> None:
    root = ROOT / "darts_parallel"
    every = nodes(root / "__init__.py")
    public = {n.name for n in every if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    public |= {name for _, _, name in imports((root / "__init__.py").read_text())}
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    modules = {path.stem for path in root.glob("*.py")}
    assert {"plan", "search", "Problem"} <= public
    assert {"plans", "problem"} <= packages
    # `import darts_parallel.plan.space as s` fails where a function has the name of the package
    assert not public & (packages | modules)


def test_no_package_exports_the_name_of_one_of_its_modules() -> None:
    for face in ROOT.glob("darts_parallel/*/__init__.py"):
        exported = {name for _, _, name in imports(face.read_text())}
        assert not exported & {path.stem for path in face.parent.glob("*.py")}, face


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("from darts_parallel.gradient.pool import PlanPool", True),
        ("from darts_parallel.plans.strategy import Plan", False),
        ("import baselines.amp", True),
        ("from darts_parallel.plans.strategy import _layer", True),
        ("def f():\n    import json", True),
        ("def f():\n    import scipy", False),
        ("from experiments import compare", True),
    ],
)
def test_the_rule_sees_what_breaks_it(source: str, broken: bool) -> None:
    file = ROOT / "darts_parallel/cost/table.py"
    assert bool(list(violations(file, source))) == broken
