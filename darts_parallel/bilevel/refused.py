"""Settings that the bilevel loop does not search, refused before anything is computed."""

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.collectives import LOSSLESS
from darts_parallel.errors import ConfigError
from darts_parallel.problem.problem import Problem

FIXED_SEARCH = ("relaxation",)
"""Settings of the main search that have no counterpart in the loop."""
UNUSED_SEARCH = ("num_steps", "num_restarts", "thin_at", "max_seconds")
"""Settings of the main search for which the loop has its own; a change of them is told, not refused."""


def refuse_unsearched(problem: Problem) -> None:
    """Refuse a problem that asks for what the loop does not search.

    Errors:
        ConfigError: names the key, its value and what the loop does instead.
    """
    config = problem.config
    space, cost = config.space, config.cost
    wanted = {
        "space.kind": (space.kind, "layerwise", "every block has bits of its own"),
        "space.cp": (space.cp, 1, "the loop trains without context parallelism"),
        "space.virtual_stages": (space.virtual_stages, 1, "the loop's pipelines have one stage a device"),
        "space.shard_size": (space.shard_size, 0, "the loop shards over all data-parallel ranks"),
        "space.offload": (space.offload, None, "the exact check knows no host memory"),
        "space.executable": (space.executable, False, "nothing that runs here sends few bits"),
        "cost.pipeline": (cost.pipeline, "closed_form", "the exact check rests on the closed form"),
        "cost.name": (cost.name, "analytic", "the bits of collectives are priced by that model alone"),
        "objective.name": (config.objective.name, "time", "the loop's objective is time to target"),
        "export": (config.export, None, "no trainer sends tensor-parallel sums at few bits"),
    }
    for key, (value, legal, reason) in wanted.items():
        # a pin of one value may be a list of it
        if value not in (legal, [legal], (legal,)):
            shown, near = ("null" if v is None else v for v in (value, legal))
            raise ConfigError(f"{key}={shown} is not searched by the bilevel loop: {reason}; try {near}.")
    usual = SearchConfig()
    for name in FIXED_SEARCH:
        mine, legal = getattr(config.search, name), getattr(usual, name)
        if mine != legal:
            raise ConfigError(
                f"search.{name}={mine} is not searched by the bilevel loop, which moves plain softmax "
                f"weights; try {legal}."
            )
    for key in ("tp_comm_bits", "grad_comm_bits"):
        pinned = space.pinned(key)
        if pinned is not None and LOSSLESS not in pinned:
            raise ConfigError(
                f"space.{key}={list(pinned)} must hold {LOSSLESS}: layers around the blocks are lossless; "
                f"try {[LOSSLESS, *pinned]}."
            )


def unused_settings(problem: Problem) -> list[str]:
    """One sentence for each changed setting of the main search that the loop does not read."""
    usual, own = SearchConfig(), problem.config.search
    return [
        f"search.{name}={getattr(own, name)} is not used: the bilevel loop has its own, "
        "bilevel.num_steps and bilevel.num_restarts"
        for name in UNUSED_SEARCH
        if getattr(own, name) != getattr(usual, name)
    ]
