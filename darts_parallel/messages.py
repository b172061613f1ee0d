"""Hydra's and OmegaConf's errors as one sentence that names the key, the value and a way out."""

import re
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from darts_parallel.config import Config, config_dir


def config_sentence(error: BaseException, overrides: list[str] | None = None) -> str:
    """One sentence for an error of the configuration layer.

    Args:
        error: A HydraException or OmegaConfBaseException.
        overrides: The overrides of the command, to name the value that was given.
    """
    text = " ".join(str(error).split())
    cause = error.__cause__
    while cause is not None and type(cause).__module__.startswith(("omegaconf", "hydra")):
        text = f"{text} {' '.join(str(cause).split())}"
        cause = cause.__cause__
    given = dict(o.lstrip("+~").split("=", 1) for o in overrides or [] if "=" in o)
    for pattern, render in _RULES:
        match = re.search(pattern, text)
        if match:
            return render(match, given)
    text = re.sub(r" See https?://\S+ for details\.?", "", text)
    return text if text.endswith(".") else f"{text}."


def _unknown_option(match: re.Match[str], given: dict[str, str]) -> str:
    group, name = match.group(1).rsplit("/", 1) if "/" in match.group(1) else ("", match.group(1))
    folder = Path(config_dir()) / group
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    close = get_close_matches(name, names, n=1, cutoff=0.0)
    near = f"; nearest legal: {close[0]}" if close else ""
    return f"{group}={name} must name a file of the group {group}: {', '.join(names)}{near}."


def _unknown_key(match: re.Match[str], given: dict[str, str]) -> str:
    key = match.group("key")
    full = next((name for name in given if name == key or name.endswith(f".{key}")), key)
    close = get_close_matches(full, all_keys(Config), n=1, cutoff=0.0)
    value = f"={given[full]}" if full in given else ""
    return f"{full}{value} is not a key of the configuration; nearest legal: {close[0]}."


def _wrong_type(match: re.Match[str], given: dict[str, str]) -> str:
    value, kind = match.group("value"), match.group("kind")
    key = match.groupdict().get("key") or next((k for k, v in given.items() if v == value), "value")
    words = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    return f"{key}={value} must be {words.get(kind, kind)}."


def _missing(match: re.Match[str], given: dict[str, str]) -> str:
    return f"{match.group('key')} is missing: the configuration must give it."


_RULES: list[tuple[str, Any]] = [
    (r"Could not find '([\w/.\-]+)'", _unknown_option),
    (r"Could not override '(?P<key>[\w.\[\]]+)'\..*Key '\w+' (?:is )?not in", _unknown_key),
    (r"Key '(?P<key>\w+)' (?:is )?not in '\w+'.*full_key: (?P<full>[\w.\[\]]+)", _unknown_key),
    (r"Value '(?P<value>[^']*)'.*could not be converted to (?P<kind>\w+).*full_key: (?P<key>[\w.\[\]]+)", _wrong_type),
    (r"Value '(?P<value>[^']*)'.*is not a valid (?P<kind>\w+).*full_key: (?P<key>[\w.\[\]]+)", _wrong_type),
    (r"Missing mandatory value: (?P<key>[\w.\[\]]+)", _missing),
    (r"Structured config of type `\w+` has missing mandatory value: (?P<key>\w+)", _missing),
]


def all_keys(kind: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a schema dataclass."""
    keys = []
    for entry in fields(kind):
        name = f"{prefix}{entry.name}"
        keys.append(name)
        nested = [t for t in (entry.type, *get_args(entry.type)) if is_dataclass(t)]
        for inner in nested:
            keys.extend(all_keys(inner, f"{name}."))
    return keys
