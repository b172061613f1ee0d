"""Rivals of the literature, one paper a module: every module without an underscore ends with its `solve`."""

from baselines._planner import Planner as Planner
from darts_parallel.errors import registered

_SEEDED_FIRST = sorted(registered(__name__, "solve"), key=lambda rival: not rival.seeded)
PLANNERS: dict[str, Planner] = {rival.name: rival for rival in _SEEDED_FIRST}
"""Every rival by the name of its module, those of many seeds first."""
