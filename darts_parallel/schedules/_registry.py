"""The schedules of this package by name: every module without an underscore holds one."""

from operator import attrgetter

from darts_parallel.errors import registered
from darts_parallel.schedules._schedule import SEARCHED, Schedule
from darts_parallel.schedules._searched import searched

_BY_NAME = sorted(registered(__package__, "SCHEDULE"), key=attrgetter("name"))
_SCHEDULES: dict[str, Schedule] = {own.name: own for own in _BY_NAME}
_ALIASES: dict[str, str] = {}
for _schedule in _SCHEDULES.values():
    _ALIASES.update(dict.fromkeys(_schedule.aliases, _schedule.name))
NAMES = tuple(_SCHEDULES)
CLOSED_FORM = "1f1b"
"""The schedule whose seconds have a closed form; the others are simulated."""
USUAL = (CLOSED_FORM, "interleaved")
"""Schedules that need no name: the number of chunks says which."""


def find(name: str) -> Schedule:
    """Return the schedule of a name of `NAMES`, of an alias, or of the code of a searched order."""
    if name.startswith(f"{SEARCHED}:"):
        return searched(name)
    return _SCHEDULES[full_name(name)]


def search_start(placement: str) -> Schedule:
    """Return the schedule of a placement at which a search of orders begins."""
    schedules = _SCHEDULES.values()
    return next(s for s in schedules if s.starts_search and s.placement == placement)


def full_name(name: str) -> str:
    """Return the one spelling of a schedule; a name that is not known stays as it is."""
    return _ALIASES.get(name, name)


def usual_schedule(chunks: int) -> str:
    """Return the schedule of a plan that names none."""
    return USUAL[chunks > 1]


def names_with_chunks(chunks: int) -> tuple[str, ...]:
    """Return the names and aliases of the schedules of `chunks` stages a device."""
    known = sorted([*NAMES, *_ALIASES])
    return tuple(name for name in known if find(name).chunks == chunks)
