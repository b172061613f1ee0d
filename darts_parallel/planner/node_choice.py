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

Counts = tuple[int, ...]
"""Nodes of every node group of the offer."""


@dataclass(frozen=True)
class Rental:
    """Nodes to rent, and the best uniform plan on them."""

    counts: Counts
    config: Config
    """The job on these nodes."""
    plan: Plan
    iteration_time_s: float
    bill: Bill
    """Bill of the job; an empty one where the objective is time alone."""
    choices: int = 1
    """Choices of nodes that the offer allows."""

    @property
    def name(self) -> str:
        """Describe nodes and plan in a few words."""
        nodes = " + ".join(f"{g.count} × {g.gpus} {g.device}" for g in self.config.cluster.nodes)
        return f"{nodes}, {self.plan.describe(self.config.training.global_batch_size)}"

    def label(self) -> str:
        """Return one line for the report."""
        return f"nodes: the best of {self.choices} choices of the offer, compared by their best uniform plans"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in `plan.json`."""
        return {
            "counts": list(self.counts),
            "choices": self.choices,
            "compared_by": "best uniform plan",
            "iteration_time_s": self.iteration_time_s,
        }

    def instead_of(self, result: SearchResult) -> SearchResult:
        """Return the search's result with this plan, which is faster."""
        method = "uniform plan that chose the nodes"
        return replace(
            result, plan=self.plan, iteration_time_s=self.iteration_time_s, method=method
        )


MOST_CHOICES = 4096
"""Choices of nodes that are compared at most: a minute or so."""


def node_choices(cluster: Cluster) -> list[Counts]:
    """Return all counts of nodes that an offer allows, without the empty one.

    Errors:
        ConfigError: there are more than `MOST_CHOICES`.
    """
    most = [group.count for group in cluster.groups]
    number = prod(count + 1 for count in most) - 1
    if number > MOST_CHOICES:
        index = most.index(max(most))
        others = prod(count + 1 for i, count in enumerate(most) if i != index)
        near = max((MOST_CHOICES + 1) // others - 1, 1)
        raise ConfigError(
            f"cluster.nodes of {cluster.name} offers {number} choices of nodes, which must be at "
            f"most {MOST_CHOICES}; try cluster.nodes[{index}].count={near}."
        )
    return [counts for counts in product(*(range(count + 1) for count in most)) if any(counts)]


def rented(config: Config, counts: Sequence[int]) -> Config:
    """Return the job on some nodes of its cluster; node groups without nodes drop out."""
    groups = zip(config.cluster.nodes, counts, strict=True)
    nodes = [replace(group, count=count) for group, count in groups if count]
    return replace(config, cluster=replace(config.cluster, nodes=nodes))


@dataclass(frozen=True)
class _Offer:
    """A choice of nodes that some plan of the space may run on."""

    counts: Counts
    cluster: Cluster
    """As many nodes of every node group, none of some."""
    objective: ObjectiveConfig
    tables: list[CostTable]

    @cached_property
    def floor(self) -> tuple[bool, float]:
        """Whether its fastest conceivable plan breaks the objective's limit, and that plan's figure."""
        bounds = [outer_lower_bounds(table, "uniform", 0.0) for table in self.tables]
        seconds = min(float(bound.min()) for bound in bounds)
        figure, kept = worth(self.objective, self.cluster, seconds)
        return not kept, figure


def _offers(problem: Problem, choices: Sequence[Counts]) -> list[_Offer]:
    """Price the spaces of all choices of nodes together: equal stages are priced once."""
    config = problem.config
    if not config.cost.knows_stages or config.cost.pipeline != "closed_form":
        raise UnsupportedError(
            f"cost={config.cost.name} with cost.pipeline={config.cost.pipeline} must be priced stage by "
            "stage to compare clusters; try cost=analytic cost.pipeline=closed_form."
        )
    clusters: dict[Counts, Cluster] = {}
    spaces: dict[Counts, list[OuterSpace]] = {}
    for counts in choices:
        cluster = _with_counts(problem.cluster, counts)
        with suppress(ConfigError):  # the batch or the pins admit no plan on this one
            every = outer_spaces(replace(problem, cluster=cluster))
            plain = [space for space in every if space.virtual_stages == 1]
            clusters[counts] = cluster
            spaces[counts] = plain or every
    placed = [(clusters[counts], space) for counts, own in spaces.items() for space in own]
    tables = build_tables(
        problem, [space for _, space in placed], [cluster for cluster, _ in placed]
    )
    offers = []
    for counts, cluster in clusters.items():
        number = len(spaces[counts])
        offers.append(_Offer(counts, cluster, config.objective, tables[:number]))
        tables = tables[number:]
    return offers


def _with_counts(cluster: Cluster, counts: Counts) -> Cluster:
    """Return a cluster with some nodes of every node group, none of some."""
    groups = zip(cluster.groups, counts, strict=True)
    return replace(cluster, groups=tuple(replace(group, count=count) for group, count in groups))


def rent(problem: Problem) -> Rental:
    """Return the nodes that the objective wants, by the best uniform plans; of equally fast ones the fewest.

    Choices of nodes are solved in the order of their lower bounds, until no other one can be
    better.

    Errors:
        ConfigError: a price is missing that the objective needs, or the offer has too many choices.
        InfeasibleError: no choice admits a plan, or none is within the budget or the deadline.
    """
    config = problem.config
    objective = config.objective
    choices = node_choices(problem.cluster)
    found: list[Rental] = []
    best = inf
    for offer in sorted(_offers(problem, choices), key=lambda offer: offer.floor):
        if best < inf and offer.floor > (False, best):
            break
        # figures grow with the seconds: those beyond which this one cannot be better
        limit = best / worth(objective, offer.cluster, 1.0)[0]
        answer = find_uniform_plan(offer.tables, limit).best
        if answer is None:
            continue
        plan = answer.to_plan(offer.tables)
        own = rented(config, offer.counts)
        smaller = Problem.from_config(own)
        seconds = evaluate(plan, smaller).iteration_time_s
        amount = bill(objective, smaller.cluster, seconds) or Bill(0.0, 0.0, 0.0)
        found.append(Rental(offer.counts, own, plan, seconds, amount, len(choices)))
        figure, kept = worth(objective, smaller.cluster, seconds)
        if kept:
            best = min(best, figure)
    if not found:
        raise InfeasibleError(
            f"memory: model={config.model.name} fits in no uniform plan on any choice of nodes of "
            f"cluster={problem.cluster.name}; try an offer with more nodes or larger GPUs."
        )
    if objective.name == "time":
        return min(found, key=lambda rental: (rental.iteration_time_s, sum(rental.counts)))
    bills = [rental.bill for rental in found]
    return found[choose(objective, bills, [rental.name for rental in found])]
