"""Rivals of the literature, one paper a module: every module without an underscore ends with its `solve`."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from baselines._planner import Planner as Planner


def _discovered() -> dict[str, Planner]:
    """Return the planners, those of many seeds first."""
    folder = str(Path(__file__).parent)
    found: list[Planner] = []
    for module in iter_modules([folder]):
        if not module.name.startswith("_"):
            found.append(import_module(f"{__package__}.{module.name}").solve)
    found.sort(key=lambda rival: not rival.seeded)
    return {rival.name: rival for rival in found}


PLANNERS = _discovered()
"""Every rival by the name of its module."""
