"""Check configured values; each check refuses with one sentence that names the closest valid value.

A name is a user's (or a downloaded file's) text. It may hold anything that can be seen, and nothing
that can end a line, move a cursor or hide: whatever a name holds stays inside its comment, its
string and its cell.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import field, fields, is_dataclass
from math import isfinite, isqrt
from typing import Any

from omegaconf import MISSING

from darts_parallel.errors import ConfigError, Entries, closest, require_listed

_BARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
LONGEST = 4096
"""Characters of any text of the configuration, as long as the longest path of a Linux system."""
MAX_SIZE = 2**24
"""Largest width, vocabulary, sequence or batch: beyond, a slip of the pen is likelier than a
model."""
USUAL = {"training.global_batch_size": 512, "training.seq_len": 4096}
"""Values to try in place of one that is too small, where the least one helps nobody."""
PEFT = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
"""Products with adapters by the names of PEFT's `target_modules`."""
MAX_PROCESSES = 256
"""More on one machine are a slip of the keyboard."""


def ranged(default: Any, least: float = 1, most: float = MAX_SIZE) -> Any:
    """Return a field with numbers in `[least, most]`; see `check_fields`."""
    return _field(default, {"range": (least, most)})


def one_of(default: Any, members: tuple[Any, ...]) -> Any:
    """Return a field with values out of `members`; see `check_fields`."""
    return _field(default, {"members": members})


def _field(default: Any, rules: Entries) -> Any:
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=rules)
    return field(default=default, metadata=rules)


def check_fields(key: str, config: Any) -> None:
    """Check each field of a dataclass and of nested ones by the rule in its definition.

    Args:
        key: Where `config` stands in the configuration, e.g. `search`; empty for the root.
        config: Instance of a dataclass; null and missing values are left out.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    for entry in fields(config):
        for place, value in _entries(
            f"{key}.{entry.name}".lstrip("."), getattr(config, entry.name)
        ):
            if is_dataclass(value):
                check_fields(place, value)
            if "range" in entry.metadata:
                require_within(place, value, *entry.metadata["range"])
            if "members" in entry.metadata:
                if isinstance(getattr(config, entry.name), dict):
                    place, _, value = place.rpartition(".")
                require_member(place, value, entry.metadata["members"])


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{key}.{name}", inner) for name, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from (
            (f"{key}[{i}]" if is_dataclass(inner) else key, inner) for i, inner in enumerate(value)
        )
    elif value is not None and value != MISSING:
        yield key, value


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def as_yaml(value: Any) -> str:
    """Write a value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def require(valid: bool, setting: str, rule: str, near: Any) -> None:
    """Refuse a setting (`key=value`) that is not `valid`: rule and closest valid value."""
    if not valid:
        raise ConfigError(f"{setting} must {rule}; try {near}.")


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, rising."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    large = [number // d for d in reversed(small) if d * d != number]
    return small + large


def require_divisor(key: str, value: int, whole_key: str, whole: int) -> None:
    """Refuse `value` of `key` where it does not divide `whole`, the value of `whole_key`."""
    rule = f"{key}={value} must divide {whole_key}={whole}"
    require_listed(value, divisors(whole), rule, ConfigError)


def require_at_least(key: str, value: float, minimum: float) -> None:
    """Refuse a value below `minimum`, or not finite."""
    finite = isinstance(value, int) or isfinite(value)
    least = _shown(minimum)
    rule = f"be {'' if finite else 'a finite number '}at least {least}"
    valid = finite and value >= minimum
    require(valid, f"{key}={_shown(value)}", rule, USUAL.get(key, least))


def require_at_most(key: str, value: float, maximum: float) -> None:
    """Refuse `value` of `key` above `maximum`."""
    limit = _shown(maximum)
    require(value <= maximum, f"{key}={_shown(value)}", f"be at most {limit}", limit)


def require_within(key: str, value: float, least: float, most: float) -> None:
    """Refuse an implausible number: seconds and bytes would overflow or vanish."""
    require_at_least(key, value, least)
    require_at_most(key, value, most)


def require_member(key: str, value: Any, members: tuple[Any, ...]) -> None:
    """Refuse `value` of `key` that is none of `members` (at least one), naming the closest one."""
    if value not in members:
        raise ConfigError(member_sentence(key, value, members))


def member_sentence(key: str, value: Any, members: tuple[Any, ...]) -> str:
    """Return the sentence that names the members, and the one closest to a value of `key`."""
    names = ", ".join(map(as_yaml, members))
    near = (
        members[-value]
        if isinstance(value, bool)
        else closest(PEFT.get(str(value), value), members)
    )
    near = "null" if near == "None" else near
    return f"{key}={as_yaml(value)} must be one of {names}; try {near}."


def require_members(key: str, values: Iterable[Any], members: tuple[Any, ...]) -> None:
    """Refuse `values` of `key` one of which is none of `members`."""
    for value in values:
        require_member(key, value, members)


def quoted(name: str) -> str:
    """Write a name for a comment: bare if it is one plain word, else as a JSON string.

    Errors:
        ConfigError: the name holds what cannot be printed.
    """
    require_printable("name", name)
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def require_printable(key: str, text: str) -> None:
    """Refuse characters that are not printable: control, direction, surrogates."""
    if len(text) > LONGEST:
        raise ConfigError(
            f"{key} has {len(text)} characters and must have {LONGEST} at most; try its start."
        )
    if text.isprintable():
        return
    near = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[:60]
    shown = ascii(text) if len(text) < 60 else f"{text[:60]!a}..."
    raise ConfigError(
        f"{key}={shown} must hold printable characters only, without line breaks; try {near!a}."
    )


def require_printable_texts(key: str, value: Any) -> None:
    """Check every text inside a configuration: values, list entries and keys of mappings.

    Args:
        key: Where `value` stands, e.g. `model`; empty for the root.
        value: A dataclass, mapping, list or plain value.

    Errors:
        ConfigError: names the key of a text that cannot be printed.
    """
    if isinstance(value, str):
        require_printable(key, value)
    elif isinstance(value, dict):
        for name in value:
            require_printable(f"a key of {key}", str(name))
    inner = vars(value) if is_dataclass(value) else value
    if isinstance(inner, (dict, list, tuple)):
        for place, own in _entries(key, inner):
            require_printable_texts(place.lstrip("."), own)
