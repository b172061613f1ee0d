"""Checks of configured values; each refuses with one sentence that names the closest valid value."""

from collections.abc import Iterable
from difflib import get_close_matches
from math import isfinite
from typing import Any

from darts_parallel.errors import ConfigError

MAX_PROCESSES = 256
"""More on one machine are a slip of the keyboard."""


def require_at_least(key: str, value: float, minimum: float, *, strict: bool = False) -> None:
    """Refuse `value` of `key` below `minimum` (or equal to it, when `strict`), and what is not finite."""
    if isfinite(value) and (value > minimum or (value == minimum and not strict)):
        return
    rule = f"{'above' if strict else 'at least'} {minimum:g}"
    if not isfinite(value):
        rule = f"a finite number {rule}"
    near = f"a value above {minimum:g}" if strict else f"{minimum:g}"
    raise ConfigError(f"{key}={value:g} must be {rule}; try {near}.")


def require_at_most(key: str, value: float, maximum: float) -> None:
    """Refuse `value` of `key` above `maximum`."""
    if not value <= maximum:
        limit = str(maximum) if isinstance(maximum, int) else f"{maximum:g}"
        raise ConfigError(f"{key}={value} must be at most {limit}; try {limit}.")


def require_within(key: str, value: float, least: float, most: float) -> None:
    """Refuse a number outside what a real thing can have: beyond, seconds and bytes overflow or vanish.

    Args:
        key: Of the configuration.
        value: A number.
        least: Smallest plausible value.
        most: Largest plausible value.

    Errors:
        ConfigError: names the range and its nearer end.
    """
    if isfinite(value) and least <= value <= most:
        return
    near = least if not value > most else most
    raise ConfigError(f"{key}={value:g} must be between {least:g} and {most:g}; try {near:g}.")


def require_size(key: str, value: int, maximum: int) -> None:
    """Refuse a number of things that is not in `[1, maximum]`."""
    require_at_least(key, value, 1)
    require_at_most(key, value, maximum)


def require_member(key: str, value: Any, members: tuple[Any, ...]) -> None:
    """Refuse `value` of `key` that is none of `members` (at least one), naming the nearest one."""
    if value in members:
        return
    if isinstance(value, (int, float)):
        near = min(members, key=lambda member: abs(member - value))
    else:
        near = get_close_matches(str(value), [str(member) for member in members], n=1, cutoff=0.0)[0]
    names = ", ".join(str(member) for member in members)
    raise ConfigError(f"{key}={value} must be one of {names}; try {near}.")


def require_members(key: str, values: Iterable[Any], members: tuple[Any, ...]) -> None:
    """Refuse `values` of `key` one of which is none of `members`."""
    for value in values:
        require_member(key, value, members)


def nearest_divisor(number: int, value: int) -> int:
    """The divisor of `number` that is closest to `value`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - value), d))
