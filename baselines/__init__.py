"""Rivals of the literature, one paper a module, and the doors to the exact planners under their old names."""

from baselines.planner import Planner as Planner

PLANNERS = {
    planner.name: planner
    for planner in (
        Planner("random_search", seeded=True, layerwise=True),
        Planner("annealing", seeded=True, layerwise=True),
        Planner("flexflow", seeded=True, layerwise=True),
        Planner("evolution", seeded=True, extra="rivals", layerwise=True),
        Planner("megatron_rule"),
        Planner("fasop"),
        Planner("amp"),
        Planner("pipedream"),
        Planner("dapple"),
        Planner("hetpipe"),
        Planner("piper", layerwise=True),
        Planner("galvatron", layerwise=True),
        Planner("alpa", extra="rivals", layerwise=True),
    )
}
"""Every rival by the name of its module."""
