"""Nodes that were chosen out of an offer, and what the report says of them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, isfinite, prod

from darts_parallel.config import Config, ObjectiveConfig
from darts_parallel.cost import CostTable, build_tables, evaluate
from darts_parallel.errors import ConfigError, Entries, InfeasibleError, UnsupportedError
from darts_parallel.exact import find_uniform_plan, least_bound
from darts_parallel.gradient import SearchResult
from darts_parallel.planner.failing_job import failing_job
from darts_parallel.plans import OuterSpace, Plan, outer_spaces
from darts_parallel.problem import (
    Bill,
    Cluster,
    Problem,
    SmallerPlan,
    bill,
    choose,
    goodput,
    worth,
)

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
    useful: float = 1.0
    """Share of the seconds that the objective counts: what failures leave, or all."""
    front: tuple["Rental", ...] = ()
    """Choices that no other one beats in seconds and in dollars, fastest first; empty without dollars."""

    @property
    def name(self) -> str:
        """Describe nodes and plan in a few words."""
        nodes = " + ".join(f"{g.count} × {g.gpus} {g.device}" for g in self.config.cluster.nodes)
        return f"{nodes}, {self.plan.describe(self.config.training.global_batch_size)}"

    def label(self) -> str:
        """Return one line for the report."""
        choices = f"the best of {self.choices} choices of the offer"
        front = ""
        if self.front:
            front = (
                f"; {len(self.front)} on the front of seconds and dollars (plan.json: rental.front)"
            )
        return f"nodes: {choices}, compared by their best uniform plans{front}"

    def to_dict(self) -> Entries:
        """Return the entry in `plan.json`."""
        front = [other.on_front() for other in self.front]
        return {
            "front": front,
            "counts": list(self.counts),
            "choices": self.choices,
            "compared_by": "best uniform plan",
            "iteration_time_s": self.iteration_time_s,
        }

    def on_front(self) -> Entries:
        """Return the entry of a choice on the front."""
        return {
            "counts": list(self.counts),
            "iteration_time_s": self.iteration_time_s,
            "dollars": self.bill.dollars,
            "plan": self.name,
        }

    def instead_of(self, result: SearchResult) -> SearchResult:
        """Return the search's result with this plan, which is faster."""
        method = "uniform plan that chose the nodes"
        return replace(
            result, plan=self.plan, iteration_time_s=self.iteration_time_s, method=method
        )


FEWER = (1.0, 7 / 8, 3 / 4, 1 / 2)
"""Shares of the nodes, less one of all, at which a job that fails is planned again."""
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
    """Return the job on some nodes of its cluster; node groups without nodes drop out.

    With `objective=goodput` the other nodes are spares.
    """
    offered = config.cluster
    groups = zip(offered.nodes, counts, strict=True)
    nodes = [replace(group, count=count) for group, count in groups if count]
    spares = offered.spare_nodes
    if config.objective.name == "goodput":
        spares += sum(group.count for group in offered.nodes) - sum(counts)
    return replace(config, cluster=replace(offered, nodes=nodes, spare_nodes=spares))


@dataclass(frozen=True)
class NodeOffer:
    """A choice of nodes that some plan of the space may run on."""

    counts: Counts
    cluster: Cluster
    """As many nodes of every node group, none of some."""
    objective: ObjectiveConfig
    useful: float
    """As in `Rental`, of a job that waits for repairs."""
    tables: list[CostTable]

    def worth(self, seconds: float) -> tuple[float, bool]:
        """Return the figure that the objective minimises without failures, and whether it keeps its limit."""
        return worth(self.objective, self.cluster, seconds)

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of its fastest conceivable plan."""
        return least_bound(self.tables, "uniform", 0.0)

    @cached_property
    def floor(self) -> tuple[bool, float]:
        """Whether its fastest conceivable plan breaks the objective's limit, and that plan's figure."""
        figure, kept = self.worth(self.least_seconds)
        return not kept, figure

    def beaten(self, found: Sequence[Rental]) -> bool:
        """Return whether a choice was found that is faster and cheaper than any plan on this one."""
        seconds = self.least_seconds
        amount = bill(self.objective, self.cluster, seconds)
        if amount is None or not isfinite(seconds):
            return False
        return any(
            r.iteration_time_s <= seconds and r.bill.dollars <= amount.dollars for r in found
        )


def comparable(config: Config) -> bool:
    """Return whether clusters can be compared: plans are priced stage by stage, in closed form."""
    return config.cost.knows_stages and config.cost.pipeline == "closed_form"


def offers(problem: Problem, choices: Sequence[Counts]) -> list[NodeOffer]:
    """Price the spaces of all choices of nodes together: equal stages are priced once."""
    config = problem.config
    if not comparable(config):
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
    found = []
    for counts, cluster in clusters.items():
        number = len(spaces[counts])
        useful = _useful(problem, cluster)
        found.append(NodeOffer(counts, cluster, config.objective, useful, tables[:number]))
        tables = tables[number:]
    return found


def smaller_plans(
    problem: Problem,
    nodes: int,
    seconds: float,
) -> tuple[SmallerPlan, ...]:
    """Return the best uniform plans on fewer nodes, where all nodes are equal.

    Args:
        nodes: Nodes of the plan that fails, which takes `seconds`.
    """
    if len(problem.cluster.groups) > 1 or not comparable(problem.config):
        return ()
    counts = {min(int(nodes * share), nodes - 1) for share in FEWER} - {0}
    found = []
    for offer in offers(problem, [(count,) for count in sorted(counts)]):
        answer = find_uniform_plan(offer.tables)
        if answer.best is not None:
            found.append(SmallerPlan(offer.counts[0], answer.cost / seconds))
    return tuple(found)


def _useful(
    problem: Problem,
    cluster: Cluster,
    smaller: tuple[SmallerPlan, ...] = (),
) -> float:
    """Return the share of the seconds on some nodes of the offer that its objective counts."""
    job = failing_job(problem, cluster)
    if problem.config.objective.name != "goodput" or job is None:
        return 1.0
    spares = job.spares + len(problem.cluster.node_types) - job.nodes
    return goodput(replace(job, spares=spares, smaller=smaller)).useful


def _with_counts(cluster: Cluster, counts: Counts) -> Cluster:
    """Return a cluster with some nodes of every node group, none of some."""
    groups = zip(cluster.groups, counts, strict=True)
    return replace(cluster, groups=tuple(replace(group, count=count) for group, count in groups))


def rent(problem: Problem) -> Rental:
    """Return the nodes that the objective wants, by the best uniform plans; of equally fast ones the fewest.

    Choices of nodes are solved in the order of their lower bounds, until no other one can be
    better. With an objective in dollars this means: better in seconds or in dollars.

    Errors:
        ConfigError: a price is missing that the objective needs, or the offer has too many choices.
        InfeasibleError: no choice admits a plan, or none is within the budget or the deadline.
    """
    config = problem.config
    objective = config.objective
    choices = node_choices(problem.cluster)
    found: list[Rental] = []
    best = inf
    for offer in sorted(offers(problem, choices), key=lambda offer: offer.floor):
        limit = inf
        if objective.in_dollars:
            if offer.beaten(found):
                continue
        elif best < inf and offer.floor > (False, best):
            break
        else:
            # figures grow with the seconds: those beyond which this one cannot be better
            limit = best / offer.worth(1.0)[0]
        answer = find_uniform_plan(offer.tables, limit).best
        if answer is None:
            continue
        plan = answer.to_plan(offer.tables)
        own = rented(config, offer.counts)
        smaller = Problem.from_config(own)
        seconds = evaluate(plan, smaller).iteration_time_s
        amount = bill(objective, smaller.cluster, seconds) or Bill(0.0, 0.0, 0.0)
        useful = offer.useful
        found.append(Rental(offer.counts, own, plan, seconds, amount, len(choices), useful))
        figure, kept = offer.worth(seconds / useful)
        if kept:
            best = min(best, figure)
    if not found:
        raise InfeasibleError(
            f"memory: model={config.model.name} fits in no uniform plan on any choice of nodes of "
            f"cluster={problem.cluster.name}; try an offer with more nodes or larger GPUs."
        )
    if not objective.in_dollars:
        return _most_useful(problem, found)
    bills = [rental.bill for rental in found]
    chosen = found[choose(objective, bills, [rental.name for rental in found])]
    return replace(chosen, front=_front(found))


def _most_useful(problem: Problem, found: Sequence[Rental]) -> Rental:
    """Return the fastest choice; where failures count, with plans on fewer nodes."""

    def figure(own: Rental) -> tuple[float, int]:
        return own.iteration_time_s / own.useful, sum(own.counts)

    every = sorted(found, key=figure)
    best = every[0]
    for own in every:
        if own.useful < 1.0 and own.iteration_time_s < figure(best)[0]:
            smaller = smaller_plans(problem, sum(own.counts), own.iteration_time_s)
            cluster = _with_counts(problem.cluster, own.counts)
            useful = _useful(problem, cluster, smaller)
            best = min(best, replace(own, useful=useful), key=figure)
    return best


def _front(found: Sequence[Rental]) -> tuple[Rental, ...]:
    """Return the choices that no other one beats in seconds and in dollars, fastest first."""
    front: list[Rental] = []
    for rental in sorted(found, key=lambda r: (r.iteration_time_s, r.bill.dollars)):
        if not front or rental.bill.dollars < front[-1].bill.dollars:
            front.append(rental)
    return tuple(front)
