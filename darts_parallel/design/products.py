"""Worth of better figures of a cluster to a plan, without prices: 10 % more, and the next product."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from darts_parallel.config import group_files
from darts_parallel.cost import evaluate
from darts_parallel.design.bound import Knobs
from darts_parallel.design.figures import (
    FIGURES,
    MEMORY,
    Factor,
    figure_of,
    places,
    reference,
    scaled,
    sense,
)
from darts_parallel.design.pricing import Pricing
from darts_parallel.errors import ConfigError, Entries
from darts_parallel.planner import sensitivity
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

BETTER = 1.1
"""Goodness whose worth is told without a product."""
NETWORK = 2.0
"""Factor from one generation of a network to the next: 100, 200, 400, 800 Gbit/s."""
SAME = 1.001
"""Factor up to which the figures of two products are equal but for rounding."""
INVENTED = ("toy", "cpu", "small", "fast_network", "slow_network", "box")
"""Beginnings of presets of no product."""
NO_KNOBS = Knobs((), *np.zeros((5, 0)))


def upgrades(plan: Plan, problem: Problem) -> list[Entries]:
    """Return what the plan gains from 10 % more of each figure, and from the next product of each.

    Returns:
        Rows of `figure`, `to` (`10 % better`, or the product that has it), `before` and `after` in
        SI units, and the shares of the seconds that the same plan saves (`saved`), and the best
        even uniform one, planned again (`replanned`), of which one must fit. More memory saves at
        least what local moves gain with 10 % more.
    """
    space = replace(problem.config.space, kind="uniform", offload=None)
    uniform = problem.with_config(space=space)
    cluster = problem.cluster
    names = list(FIGURES)
    if len(cluster.groups) > 1:
        numbers = range(len(cluster.groups))
        names += [f"nodes.{group}.{figure}" for group in numbers for figure in FIGURES]
    own, own_best = _seconds(plan, problem, uniform, MEMORY, 1.0)
    # local moves of the plan, as the report has it: even uniform plans may leave the memory unused
    of_memory = 1.0 - BETTER ** sensitivity(plan, problem).get("memory", 0.0)
    rows: list[Entries] = []
    for name in names:
        try:
            before = reference(name, cluster)
        except ConfigError:  # it is not the group's alone
            continue
        better = [("10 % better", BETTER), *_next_product(name, problem)]
        for product, goodness in better:
            factor = goodness ** sense(name)
            seconds, best = _seconds(plan, problem, uniform, name, factor)
            row: Entries = {"figure": name, "to": product}
            row |= {"before": before, "after": before * factor}
            row["saved"] = 1.0 - seconds / own
            row["replanned"] = max(1.0 - best / own_best, of_memory * (name == MEMORY))
            rows.append(row)
    return rows


def _seconds(
    plan: Plan,
    problem: Problem,
    uniform: Problem,
    name: str,
    factor: float,
) -> tuple[float, float]:
    """Return the seconds of a plan, and of the best even uniform one, where a figure is better."""
    better = [Factor(name, place, factor) for place in places(name, problem.cluster)]
    pricing = Pricing(scaled(uniform, better), NO_KNOBS, NO_KNOBS)
    best = pricing.at_start.heights.min()
    cost = evaluate(plan, scaled(problem, better))
    return cost.iteration_time_s, float(np.exp(best))


def _next_product(name: str, problem: Problem) -> Iterator[tuple[str, float]]:
    """Yield the product with the least better value of a figure, and its factor over the present one."""
    figure = figure_of(name)
    key = FIGURES[figure]
    part = figure.split(".")[0]
    if figure == "inter_node.bandwidth":
        yield "next generation", NETWORK
    if sense(name) < 0 or part == "inter_node":
        return
    precision = problem.training.precision
    config = problem.config.cluster
    first = places(name, problem.cluster)[0] or 0
    group = config.nodes[first]
    owner = config.devices[group.device] if part == "device" else group.intra_node
    present = _value(owner, key, precision)
    better = []
    for path in group_files(part.replace("intra_node", "cluster")):
        if path.stem.startswith(INVENTED):
            continue
        raw = OmegaConf.load(path)
        owners = [raw] if part == "device" else [node[part] for node in raw.nodes]
        for one in owners:
            value = _value(one, key, precision)
            if value > present * SAME:
                better.append((value, path.stem))
    if better:
        value, product = min(better)
        yield product, value / present


def _value(
    owner: Any,
    key: str,
    precision: str,
) -> float:
    """Return a figure; of peaks the one for a precision, 0 where there is none."""
    found = getattr(owner, key)
    if not isinstance(found, (int, float)):
        found = found.get(precision, 0.0)
    return float(found)
