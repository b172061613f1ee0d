"""Worth of better figures of a cluster to a plan, without prices: 10 % more, and the next product."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from darts_parallel.config import config_dir
from darts_parallel.cost import evaluate
from darts_parallel.design.bound import Array, Knobs
from darts_parallel.design.figures import FIGURES, MEMORY, figure_of, places, reference, scaled
from darts_parallel.design.pricing import Pricing
from darts_parallel.errors import ConfigError
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

NETWORK = 2.0  # from one generation of a network to the next: 100, 200, 400, 800 Gbit/s
INVENTED = (
    "toy",
    "cpu",
    "small",
    "fast_network",
    "slow_network",
)  # beginnings of presets of no product
NO_KNOBS = Knobs((), *np.zeros((5, 0)))


def upgrades(plan: Plan, problem: Problem) -> list[dict[str, Any]]:
    """Return what the plan gains from 10 % more of each figure, and from the next product of each.

    Returns:
        Rows of `figure`, `to` (`10 % better`, or the product that has it), `before` and `after` in SI units,
        and the shares of the seconds that the same plan saves (`saved`), and the best even uniform one,
        planned anew (`replanned`), of which one must fit.
    """
    space = replace(problem.config.space, kind="uniform", offload=None)
    uniform, cluster = Problem.from_config(replace(problem.config, space=space)), problem.cluster

    def seconds(name: str, factor: float) -> Array:
        better = [(name, place, factor) for place in places(name, cluster)]
        every = Pricing(scaled(uniform, better), NO_KNOBS, NO_KNOBS).at_start.heights
        return np.array(
            [evaluate(plan, scaled(problem, better)).iteration_time_s, np.exp(every.min())]
        )

    own, rows = seconds(MEMORY, 1.0), []
    groups = range(len(cluster.groups) if len(cluster.groups) > 1 else 0)
    for name in [*FIGURES, *(f"nodes.{group}.{figure}" for group in groups for figure in FIGURES)]:
        try:
            before = reference(name, cluster)
        except ConfigError:  # it is not the group's alone
            continue
        for to, better in ("10 % better", 1.1), *_next_product(name, problem):
            factor = better ** FIGURES[figure_of(name)][0]
            saved, replanned = (1.0 - seconds(name, factor) / own).tolist()
            values = {
                "before": before,
                "after": before * factor,
                "saved": saved,
                "replanned": replanned,
            }
            rows.append({"figure": name, "to": to, **values})
    return rows


def _next_product(name: str, problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield the product with the least better value of a figure, and its factor over the present one."""
    (sense, key), place = FIGURES[figure_of(name)], places(name, problem.cluster)[0]
    part, precision = figure_of(name).split(".")[0], problem.training.precision
    if figure_of(name) == "inter_node.bandwidth":
        yield "next generation", NETWORK
    if sense < 0 or part == "inter_node":
        return

    def value(owner: Any) -> float:
        found = getattr(owner, key)  # peaks by precision, 0 where there is none for the job's
        return float(found if isinstance(found, (int, float)) else found.get(precision, 0.0))

    group, cluster = problem.config.cluster.nodes[place or 0], problem.config.cluster
    present = value(cluster.devices[group.device] if part == "device" else group.intra_node)
    better = dict[float, str]()
    for path in sorted((Path(config_dir()) / part.replace("intra_node", "cluster")).glob("*.yaml")):
        raw = OmegaConf.load(path)
        for owner in [raw] if part == "device" else [node[part] for node in raw.nodes]:
            if not path.stem.startswith(INVENTED) and value(owner) > present * 1.001:
                better.setdefault(value(owner), path.stem)
    if better:
        yield better[min(better)], min(better) / present
