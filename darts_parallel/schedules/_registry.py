"""The schedules of this package by name: every module without an underscore holds one."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from darts_parallel.schedules._schedule import SEARCHED, Schedule
from darts_parallel.schedules._searched import searched


def _discovered() -> dict[str, Schedule]:
    modules = [module.name for module in iter_modules([str(Path(__file__).parent)])]
    public = [name for name in modules if not name.startswith("_")]
    found = [import_module(f"{__package__}.{name}").SCHEDULE for name in public]
    return {schedule.name: schedule for schedule in sorted(found, key=lambda one: one.name)}


_SCHEDULES = _discovered()
_ALIASES = {alias: name for name, schedule in _SCHEDULES.items() for alias in schedule.aliases}
NAMES = tuple(_SCHEDULES)
CLOSED_FORM = "1f1b"
"""The schedule whose seconds have a closed form; the others are simulated."""
USUAL = (CLOSED_FORM, "interleaved")
"""Schedules that need no name: the number of chunks says which."""


def find(name: str) -> Schedule:
    """Return the schedule of a name of `NAMES`, of an alias, or of the code of a searched order."""
    return searched(name) if name.startswith(f"{SEARCHED}:") else _SCHEDULES[full_name(name)]


def full_name(name: str) -> str:
    """Return the one spelling of a schedule; a name that is not known stays as it is."""
    return _ALIASES.get(name, name)


def usual_schedule(chunks: int) -> str:
    """Return the schedule of a plan that names none."""
    return USUAL[chunks > 1]


def names_with_chunks(chunks: int) -> tuple[str, ...]:
    """Return the names and aliases of the schedules of `chunks` stages a device."""
    known = [*NAMES, *_ALIASES]
    return tuple(sorted(name for name in known if find(name).chunks == chunks))
