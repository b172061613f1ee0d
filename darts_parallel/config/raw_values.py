"""Values of the command that a schema would take without a word, though they say something else."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

from darts_parallel.config.schema import Config
from darts_parallel.errors import ConfigError

_NUMBER = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?", re.IGNORECASE)


def refuse_silent_overrides(overrides: Sequence[str]) -> None:
    """Refuse an empty mapping, which a merge ignores, and a number other than 0 and 1 for a switch.

    Args:
        overrides: `key=value` as the command was given.

    Errors:
        ConfigError: names the key, the value and the nearest legal one.
    """
    for override in overrides:
        key, given, value = override.partition("=")
        value = value.strip()
        if not given or key.startswith(("~", "hydra")):
            continue
        key = key.lstrip("+")
        if re.fullmatch(r"\{\s*\}", value):
            raise ConfigError(
                f"{key}={value} would change nothing, since mappings are merged; nearest legal: leave {key} "
                f"out of the command, or name an entry of it."
            )
        if _NUMBER.fullmatch(value) and value not in ("0", "1") and _kind_of(key) is bool:
            raise ConfigError(f"{key}={value} must be true or false; nearest legal: true.")


def _kind_of(key: str) -> Any:
    """Type of the schema's field at a dotted key; None where there is no such field."""
    kind: Any = Config
    for part in key.split("."):
        if is_dataclass(kind):
            kind = next((entry.type for entry in fields(kind) if entry.name == part), None)
            if get_origin(kind) not in (list, dict):  # a group that may be null
                kind = next((inner for inner in get_args(kind) if is_dataclass(inner)), kind)
        elif get_origin(kind) in (list, dict):
            kind = get_args(kind)[-1]
        else:
            return None
    return kind
