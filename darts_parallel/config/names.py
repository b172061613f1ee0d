"""Names of the configuration on their way out: into reports, scripts and programs that others run.

A name is a user's (or a downloaded file's) text. It may hold anything that can be seen, and nothing that can
end a line, move a cursor or hide: whatever a name holds stays inside its comment, its string and its cell.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from darts_parallel.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
LONGEST = 4096
"""Characters of any text of the configuration, as long as the longest path of a Linux system."""


def quoted(name: str) -> str:
    """Write a name for the comment of a file: bare where it is one plain word, else as a JSON string.

    Errors:
        ConfigError: the name holds what cannot be printed.
    """
    require_printable("name", name)
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def require_printable(key: str, text: str) -> None:
    """Refuse control, separating, direction and surrogate characters (all but printable ones and spaces)."""
    if len(text) > LONGEST:
        raise ConfigError(
            f"{key} has {len(text)} characters and must have at most {LONGEST}; try its beginning."
        )
    if text.isprintable():
        return
    near = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    shown = ascii(text) if len(text) < 60 else f"{text[:60]!a}..."
    raise ConfigError(
        f"{key}={shown} must hold printable characters only, without line breaks; try {near[:60]!a}."
    )


def require_printable_texts(key: str, value: Any) -> None:
    """Check every text inside a configuration: values, list entries and keys of mappings.

    Args:
        key: Where `value` stands, e.g. `model`; empty for the root.
        value: A dataclass, mapping, list or plain value.

    Errors:
        ConfigError: names the key of a text that cannot be printed.
    """
    for place, text in _texts(key, value):
        require_printable(place, text)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield f"a key of {key}", str(name)
            yield from _texts(f"{key}.{name}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _texts(f"{key}[{index}]", inner)
    elif is_dataclass(value):
        for entry in fields(value):
            yield from _texts(f"{key}.{entry.name}".lstrip("."), getattr(value, entry.name))
