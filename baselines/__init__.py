"""Rivals of the literature, one paper a module."""

from baselines.planner import Planner as Planner

PLANNERS = {
    planner.name: planner
    for planner in (
        Planner("random_search", seeded=True, layerwise=True),
        Planner("annealing", seeded=True, layerwise=True),
        Planner("flexflow", seeded=True, layerwise=True),
        Planner("evolution", seeded=True, layerwise=True),
        Planner("megatron_rule"),
        Planner("fasop"),
        Planner("amp"),
        Planner("pipedream"),
        Planner("dapple"),
        Planner("hetpipe"),
        Planner("piper", layerwise=True),
        Planner("galvatron", layerwise=True),
        Planner("alpa", layerwise=True),
    )
}
"""Every rival by the name of its module."""

SCHEDULE_PLANNERS = {
    planner.name: planner
    for planner in (
        Planner("even_split"),
        Planner("min_max_chunks"),
        Planner("bottleneck_moves", layerwise=True),
        *(PLANNERS[name] for name in ("random_search", "annealing", "flexflow", "evolution")),
    )
}
"""Rivals where the schedule is a choice and a device holds chunks: those that read no closed form."""
