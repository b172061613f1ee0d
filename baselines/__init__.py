"""Rivals of the literature, one paper a module: every module without an underscore ends with its `solve`."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from baselines._planner import Planner as Planner


def _discovered() -> dict[str, Planner]:
    """Return the planners, those of many seeds first."""
    names = [module.name for module in iter_modules([str(Path(__file__).parent)])]
    public = [name for name in names if not name.startswith("_")]
    found = {name: import_module(f"{__package__}.{name}").solve for name in public}
    return dict(sorted(found.items(), key=lambda rival: not rival[1].seeded))


PLANNERS = _discovered()
"""Every rival by the name of its module."""
