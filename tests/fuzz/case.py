"""Define the outcome of a case of the fuzz test."""

from collections.abc import Callable
from typing import NamedTuple

GOOD = ("agreed", "refused", "accepted", "interrupted", "sound")
"""Outcomes that are correct; any other outcome says in words what is wrong."""


class FuzzOutcome(NamedTuple):
    """Hold what a case led to: one of `GOOD`, or what is wrong."""

    subject: str
    outcome: str
    plans: int = 0


FuzzCase = tuple[str, Callable[[], FuzzOutcome]]
"""Row of the table that counts a case, and what runs it."""
