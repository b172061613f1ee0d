"""Worth of better figures of a cluster to a plan, without prices: 10 % more, and the next product."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from darts_parallel.config import config_dir
from darts_parallel.cost import evaluate
from darts_parallel.design.figures import FIGURES, figure_of, places, reference, scaled
from darts_parallel.design.pricing import Pricing
from darts_parallel.errors import ConfigError
from darts_parallel.plan import Plan
from darts_parallel.problem import Cluster, Problem

NETWORK = 2.0
"""Factor from one generation of a network to the next: 100, 200, 400, 800 Gbit/s."""
INVENTED = ("toy", "cpu", "small", "fast_network", "slow_network")
"""Presets of no product, by how their names begin."""


@dataclass(frozen=True)
class Upgrade:
    """One figure, better."""

    figure: str
    to: str
    """`10 % better`, or the product that has it."""
    before: float
    """SI units."""
    after: float
    saved: float
    """Share of the seconds that the same plan saves."""
    replanned: float
    """Share that the best even uniform plan saves, once it is planned anew."""


def upgrades(plan: Plan, problem: Problem) -> list[Upgrade]:
    """Return what the plan gains from 10 % more of each figure, and from the next product of each.

    Errors:
        InfeasibleError: no even uniform plan fits.
    """
    space = replace(problem.config.space, kind="uniform", offload=None)
    uniform = Problem.from_config(replace(problem.config, space=space))

    def seconds(factors: dict[str, float]) -> tuple[float, float]:
        every, _ = Pricing(scaled(uniform, factors), (), ()).at_start
        return evaluate(plan, scaled(problem, factors)).iteration_time_s, float(every.min().exp())

    (own, best), found = seconds({}), []
    for name in _names(problem.cluster):
        present = reference(name, problem.cluster)
        for to, better in ("10 % better", 1.1), *_next_product(name, problem):
            factor = better ** FIGURES[figure_of(name)][0]
            then, planned = seconds({name: factor})
            found.append(Upgrade(name, to, present, present * factor, 1.0 - then / own, 1.0 - planned / best))
    return found


def _names(cluster: Cluster) -> Iterator[str]:
    """Yield figures, and those of single node groups where there are several."""
    yield from FIGURES
    for group, figure in product(range(len(cluster.groups) if len(cluster.groups) > 1 else 0), FIGURES):
        with suppress(ConfigError):  # it is not the group's alone
            places(name := f"nodes.{group}.{figure}", cluster)
            yield name


def _next_product(name: str, problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield the product with the least better value of a figure, and its factor over the present one."""
    (sense, key), place = FIGURES[figure_of(name)], places(name, problem.cluster)[0]
    if figure_of(name) == "inter_node.bandwidth":
        yield "next generation", NETWORK
    elif sense > 0:
        group, known = problem.config.cluster.nodes[place or 0], dict[float, str]()
        part = figure_of(name).split(".")[0]
        for path in sorted((Path(config_dir()) / part.replace("intra_node", "cluster")).glob("*.yaml")):
            raw = OmegaConf.load(path)
            for holder in [raw] if part == "device" else [node[part] for node in raw.nodes]:
                if not path.stem.startswith(INVENTED):
                    known.setdefault(_value(holder, key, problem), path.stem)
        owner = problem.config.cluster.devices[group.device] if part == "device" else group.intra_node
        present = _value(owner, key, problem)
        if better := [value for value in known if value > present * 1.001]:
            yield known[min(better)], min(better) / present


def _value(owner: Any, key: str, problem: Problem) -> float:
    """Return a figure of a configuration; the peak is that of the job's precision, 0 where there is none."""
    value = getattr(owner, key)
    return float(value if isinstance(value, (int, float)) else value.get(problem.training.precision, 0.0))
