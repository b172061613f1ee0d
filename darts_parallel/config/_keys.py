"""Dotted keys of a schema of dataclasses: list them, type of one, closest one."""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from darts_parallel.errors import closest

HELP = "--help, which lists the words and groups"
"""Proposal where no key is spelled alike."""
ENTRIES: dict[Any, str] = {list: "[]", dict: ".*"}
"""How a key names an entry of a list and of a mapping."""
TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
}


def all_fields(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield every dotted key with its dataclass and field, a dataclass before what it holds.

    In a key `[]` is an entry of a list, `*` of a mapping.
    """
    for entry in fields(schema):
        key = f"{prefix}{entry.name}"
        yield key, schema, entry
        inner = nested(entry.type)
        if inner is not None:
            yield from all_fields(inner, f"{key}{ENTRIES.get(get_origin(entry.type), '')}.")


def nested(kind: Any) -> Any:
    """Return the dataclass inside a field's type; None where it holds plain values."""
    kind = plain_type(kind)
    parts = (kind, *get_args(kind)[-1:])
    return next((part for part in parts if is_dataclass(part)), None)


def all_keys(schema: Any) -> list[str]:
    """List every dotted key of a dataclass, those with fewer parts first."""
    return sorted((key for key, *_ in all_fields(schema)), key=lambda key: key.count("."))


def plain_type(kind: Any) -> Any:
    """Return a field's type without the `None` that may take its place."""
    if get_origin(kind) in (list, dict) or not get_args(kind):
        return kind
    return next(inner for inner in get_args(kind) if inner is not type(None))


def walk(key: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each part of a dotted key with its type, as far as the schema has them."""
    kind = schema
    for part in key.split("."):
        if is_dataclass(kind):
            found = {entry.name: entry.type for entry in fields(kind)}
            if part not in found:
                return
            kind = found[part]
        elif get_origin(plain_type(kind)) in (list, dict):
            kind = get_args(plain_type(kind))[-1]
        else:
            return
        yield part, kind
        kind = plain_type(kind)


def type_at(key: str, schema: Any) -> Any:
    """Return the type of the field at a dotted key; None where the schema has none."""
    kinds = [kind for _, kind in walk(key, schema)]
    return plain_type(kinds[-1]) if len(kinds) == len(key.split(".")) else None


def closest_key(key: str, schema: Any) -> str:
    """Return the existing key that an unknown one most likely means.

    A key of the same last name elsewhere (`pp`), perhaps after `num_`, or with these initials
    (`search.lr`), comes before one of similar spelling at the same place. Without any it is `HELP`.
    """
    parts = key.split(".")
    known = list(walk(key, schema))[: len(parts) - 1]
    place = ".".join(parts[: len(known)])
    every = all_keys(schema)
    meant = [
        k for k in every if parts[-1] in (_name(k), _name(k).removeprefix("num_"), _initials(k))
    ]
    if meant:
        return min(meant, key=lambda k: k.partition(".")[0] != parts[0])
    kind = plain_type(known[-1][1]) if known else schema
    candidates = every
    if known:
        if not is_dataclass(kind):
            return place
        candidates = [f"{place}.{entry.name}" for entry in fields(kind)]
    names = [_name(candidate) for candidate in candidates]
    if not known and not get_close_matches(parts[0], names):
        return HELP
    return candidates[names.index(closest(parts[len(known)], names))]


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _initials(key: str) -> str:
    words = _name(key).split("_")
    return "".join(word[0] for word in words) if len(words) > 1 else ""
