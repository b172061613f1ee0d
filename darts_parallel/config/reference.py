"""Say what every key of the configuration means, by the docstrings and rules of the schema.

The command's help and the reference of keys say the same, because both read it here.
"""

import ast
import inspect
import sys
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_origin

from omegaconf import MISSING

from darts_parallel.config._keys import TYPE_WORDS, all_fields, nested, plain_type
from darts_parallel.config.checks import as_yaml
from darts_parallel.config.schema import Config
from darts_parallel.config.words import NAMES


@dataclass(frozen=True)
class KeyDoc:
    """One key of the configuration."""

    key: str
    """Dotted key; `[]` stands for an entry of a list, `*` for a name in a mapping."""
    meaning: str
    """Docstring of the field in one line; empty where it has none."""
    default: str
    """Default of the schema as YAML; a file of the group may set another one."""
    allowed: str
    """Type, range or values."""
    unit: str
    """Unit of the number; empty where the meaning says it."""
    may_be_null: bool

    def lines(self) -> list[str]:
        """Return key, meaning, and default with range and unit, a line each."""
        facts = [f"default {self.default}", self.allowed]
        if self.unit:
            facts.append(f"unit: {self.unit}")
        return [self.key, self.meaning, "; ".join(facts)]


@cache
def key_docs() -> tuple[KeyDoc, ...]:
    """Return every key of the configuration, in the order of the schema."""
    docs = []
    for key, schema, entry in all_fields(Config):
        if nested(entry.type) is None:
            docs.append(_doc_of(key, entry, _docstrings(schema).get(entry.name, "")))
    return tuple(docs)


def _doc_of(key: str, entry: Field[Any], meaning: str) -> KeyDoc:
    default = entry.default
    if default is NO_DEFAULT and entry.default_factory is not NO_DEFAULT:
        default = entry.default_factory()
    required = default == MISSING or default is NO_DEFAULT
    shown = "none, the group's file gives it" if required else as_yaml(default)
    may_be_null = default is None or type(None) in get_args(entry.type)
    ends = (unit for end, unit in NAMES["units"].items() if entry.name.endswith(end))
    return KeyDoc(key, meaning, shown, _allowed(entry), next(ends, ""), may_be_null)


def _allowed(entry: Field[Any]) -> str:
    """Say which values a field takes."""
    if "members" in entry.metadata:
        return f"one of {', '.join(map(as_yaml, entry.metadata['members']))}"
    kind = plain_type(entry.type)
    if get_origin(kind) is not None:
        inner = TYPE_WORDS.get(get_args(kind)[-1], "values")
        return f"a {get_origin(kind).__name__}, each entry {inner}{_range(entry)}"
    return f"{TYPE_WORDS.get(kind, 'a value or a list of values')}{_range(entry)}"


def _range(entry: Field[Any]) -> str:
    if "range" not in entry.metadata:
        return ""
    least, most = entry.metadata["range"]
    return f", {least:,} to {most:,}"


@cache
def _docstrings(schema: Any) -> dict[str, str]:
    """Return the texts below the fields of a dataclass, by field, each in one line."""
    tree = ast.parse(inspect.getsource(sys.modules[schema.__module__]))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == schema.__name__)
    found = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            text = ast.literal_eval(following.value)
            found[ast.unparse(statement.target)] = " ".join(text.split())
    return found
