"""Nodes that were chosen out of an offer, and what the report says of them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import Any

from darts_parallel.config import Config, ObjectiveConfig
from darts_parallel.cost import CostTable, build_tables, evaluate
from darts_parallel.errors import ConfigError, InfeasibleError, UnsupportedError
from darts_parallel.exact import find_uniform_plan, outer_lower_bounds
from darts_parallel.gradient import SearchResult
from darts_parallel.plans import OuterSpace, Plan, outer_spaces
from darts_parallel.problem import Bill, Cluster, Problem, bill, choose, worth


@dataclass(frozen=True)
class Rental:
    """Nodes to rent, and the best uniform plan on them."""

    counts: tuple[int, ...]
    """Nodes of every node group of the offer."""
    problem: Problem
    plan: Plan
    iteration_time_s: float
    bill: Bill
    """Bill of the job; an empty one where the objective is time alone."""
    choices: int = 1
    """Choices of nodes that the offer allows."""

    @property
    def name(self) -> str:
        """Describe nodes and plan in a few words."""
        nodes = " + ".join(
            f"{g.count} × {g.gpus} {g.device.name}" for g in self.problem.cluster.groups
        )
        return f"{nodes}, {self.plan.describe(self.problem.training.global_batch_size)}"

    def label(self) -> str:
        """Return one line for the report."""
        return f"nodes: the best of {self.choices} choices of the offer, compared by their best uniform plans"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in `plan.json`."""
        chosen = {
            "counts": list(self.counts),
            "choices": self.choices,
            "compared_by": "best uniform plan",
        }
        return chosen | {"iteration_time_s": self.iteration_time_s}

    def instead_of(self, result: SearchResult) -> SearchResult:
        """Return the search's result with this plan, which is faster."""
        method = "uniform plan that chose the nodes"
        return replace(
            result, plan=self.plan, iteration_time_s=self.iteration_time_s, method=method
        )


MOST_CHOICES = 4096


def node_choices(problem: Problem) -> list[tuple[int, ...]]:
    """Return all counts of nodes that the offer allows, without the empty one.

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
            f"most {MOST_CHOICES}; try cluster.nodes[{index}].count={near}."
        )
    return [counts for counts in product(*(range(count + 1) for count in most)) if any(counts)]


def rented(problem: Problem, counts: Sequence[int]) -> Problem:
    """Return the problem on some nodes of its cluster; node groups without nodes drop out."""
    config = problem.config
    nodes = [replace(g, count=n) for g, n in zip(config.cluster.nodes, counts, strict=True) if n]
    smaller: Config = replace(config, cluster=replace(config.cluster, nodes=nodes))
    return Problem.from_config(smaller)


@dataclass(frozen=True)
class _Offer:
    """A choice of nodes that some plan of the space may run on."""

    counts: tuple[int, ...]
    cluster: Cluster
    """As many nodes of every node group, none of some."""
    objective: ObjectiveConfig
    tables: list[CostTable]

    @cached_property
    def floor(self) -> tuple[bool, float]:
        """Whether its fastest conceivable plan breaks the objective's limit, and that plan's figure."""
        seconds = min(
            float(outer_lower_bounds(table, "uniform", 0.0).min()) for table in self.tables
        )
        figure, kept = worth(self.objective, self.cluster, seconds)
        return not kept, figure


def _offers(problem: Problem, choices: Sequence[tuple[int, ...]]) -> list[_Offer]:
    """Price the spaces of all choices of nodes together: equal stages are priced once."""
    config, placed = problem.config, dict[tuple[int, ...], tuple[Cluster, list[OuterSpace]]]()
    if not config.cost.knows_stages or config.cost.pipeline != "closed_form":
        raise UnsupportedError(
            f"cost={config.cost.name} with cost.pipeline={config.cost.pipeline} must be priced stage by "
            "stage to compare clusters; try cost=analytic cost.pipeline=closed_form."
        )
    for counts in choices:
        groups = zip(problem.cluster.groups, counts, strict=True)
        cluster = replace(problem.cluster, groups=tuple(replace(g, count=n) for g, n in groups))
        with suppress(ConfigError):  # the batch or the pins admit no plan on this one
            spaces = outer_spaces(replace(problem, cluster=cluster))
            plain = [space for space in spaces if space.virtual_stages == 1]
            placed[counts] = cluster, plain or spaces
    every = [(cluster, space) for cluster, spaces in placed.values() for space in spaces]
    tables = iter(
        build_tables(problem, [space for _, space in every], [cluster for cluster, _ in every])
    )
    return [
        _Offer(counts, cluster, config.objective, [next(tables) for _ in spaces])
        for counts, (cluster, spaces) in placed.items()
    ]


def rent(problem: Problem) -> Rental:
    """Return the nodes that the objective wants, by the best uniform plans; of equally fast ones the fewest.

    Choices of nodes are solved in the order of their lower bounds, until no other one can be better.

    Errors:
        ConfigError: a price is missing that the objective needs, or the offer has too many choices.
        InfeasibleError: no choice admits a plan, or none is within the budget or the deadline.
    """
    objective = problem.config.objective
    choices, found, best = node_choices(problem), list[Rental](), inf
    for offer in sorted(_offers(problem, choices), key=lambda offer: offer.floor):
        if best < inf and offer.floor > (False, best):
            break
        # figures grow with the seconds: those beyond which this one cannot be better
        answer = find_uniform_plan(
            offer.tables, best / worth(objective, offer.cluster, 1.0)[0]
        ).best
        if answer is not None:
            plan, smaller = answer.to_plan(offer.tables), rented(problem, offer.counts)
            seconds = evaluate(plan, smaller).iteration_time_s
            amount = bill(objective, smaller.cluster, seconds) or Bill(0.0, 0.0, 0.0)
            found.append(Rental(offer.counts, smaller, plan, seconds, amount, len(choices)))
            figure, kept = worth(objective, smaller.cluster, seconds)
            best = min(best, figure) if kept else best
    if not found:
        raise InfeasibleError(
            f"memory: model={problem.config.model.name} fits in no uniform plan on any choice of nodes of "
            f"cluster={problem.cluster.name}; try an offer with more nodes or larger GPUs."
        )
    if objective.name == "time":
        return min(found, key=lambda rental: (rental.iteration_time_s, sum(rental.counts)))
    return found[
        choose(objective, [rental.bill for rental in found], [rental.name for rental in found])
    ]
