"""Which nodes of an offer to rent: all choices of counts, searched in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from baselines.what_ifs import solve_clusters
from darts_parallel.config import Config
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.objectives import Bill, bill, choose, price_per_hour
from darts_parallel.problem import Problem
from darts_parallel.strategy import Plan

MOST_CHOICES = 4096


@dataclass(frozen=True)
class Rental:
    """Nodes to rent, and the best uniform plan on them."""

    counts: tuple[int, ...]
    """Nodes of every node group of the offer."""
    problem: Problem
    plan: Plan
    iteration_time_s: float
    bill: Bill


def node_choices(problem: Problem) -> list[tuple[int, ...]]:
    """All counts of nodes that the offer allows, without the empty one.

    Errors:
        ConfigError: there are more than `MOST_CHOICES`.
    """
    most = [group.count for group in problem.cluster.groups]
    number = prod(count + 1 for count in most) - 1
    if number > MOST_CHOICES:
        index = max(range(len(most)), key=most.__getitem__)
        others = prod(count + 1 for i, count in enumerate(most) if i != index)
        near = max((MOST_CHOICES + 1) // others - 1, 1)
        raise ConfigError(
            f"cluster.nodes of {problem.cluster.name} offers {number} choices of nodes, which must be at "
            f"most {MOST_CHOICES}; nearest legal: cluster.nodes[{index}].count={near}."
        )
    return [counts for counts in product(*(range(count + 1) for count in most)) if any(counts)]


def rented(problem: Problem, counts: Sequence[int]) -> Problem:
    """The problem on some nodes of its cluster; node groups without nodes drop out.

    Args:
        problem: On the whole offer.
        counts: Nodes of every node group.
    """
    config = problem.config
    nodes = [replace(g, count=n) for g, n in zip(config.cluster.nodes, counts, strict=True) if n]
    smaller: Config = replace(config, cluster=replace(config.cluster, nodes=nodes))
    return Problem.from_config(smaller)


def rentals(problem: Problem) -> list[Rental]:
    """The best uniform plan and the bill of every choice of nodes that some plan fits.

    Errors:
        ConfigError: a price is missing, or the offer has too many choices.
        InfeasibleError: no choice admits a plan.
    """
    price_per_hour(problem)
    groups = problem.cluster.groups
    counts = node_choices(problem)
    clusters = [
        replace(problem.cluster, groups=tuple(replace(g, count=n) for g, n in zip(groups, own, strict=True)))
        for own in counts
    ]
    found = []
    for own, answer in zip(counts, solve_clusters(problem, clusters), strict=True):
        amount = bill(answer.problem, answer.iteration_time_s)
        if answer.plan is not None and amount is not None:
            found.append(Rental(own, rented(problem, own), answer.plan, answer.iteration_time_s, amount))
    if not found:
        raise InfeasibleError(
            f"memory: model={problem.config.model.name} fits on no choice of nodes of "
            f"cluster={problem.cluster.name}; nearest legal: an offer with more nodes or larger GPUs."
        )
    return found


def rent(problem: Problem) -> Problem:
    """The problem on the nodes that its objective wants, by the best uniform plans.

    Errors:
        InfeasibleError: no plan is within the budget or the deadline.
    """
    found = rentals(problem)
    return found[choose(problem.config.objective, [rental.bill for rental in found])].problem
