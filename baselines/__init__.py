"""Rivals of the literature, one paper a module: every module without an underscore ends with its `solve`."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from baselines._planner import Planner as Planner


def _discovered() -> dict[str, Planner]:
    names = [module.name for module in iter_modules([str(Path(__file__).parent)])]
    public = [name for name in names if not name.startswith("_")]
    found = {name: import_module(f"{__package__}.{name}").solve for name in public}
    return dict(
        sorted(found.items(), key=lambda rival: not rival[1].seeded)
    )  # those of many seeds first


PLANNERS = {name: rival for name, rival in _discovered().items() if rival.closed_form}
"""Every rival by the name of its module."""
SCHEDULE_PLANNERS = {name: rival for name, rival in _discovered().items() if rival.chunks}
"""Rivals where the schedule is a choice."""
