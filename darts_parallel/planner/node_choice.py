"""Nodes that were chosen out of an offer, and what the report says of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from darts_parallel.config import Config
from darts_parallel.cost import build_placed, evaluate
from darts_parallel.errors import ConfigError, InfeasibleError, UnsupportedError
from darts_parallel.exact import best_uniform_plans, find_uniform_plan
from darts_parallel.gradient import SearchResult
from darts_parallel.plan import OuterSpace, Plan, outer_spaces
from darts_parallel.problem import Bill, Problem, bill, choose, price_per_hour


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
        nodes = " + ".join(f"{g.count} × {g.gpus} {g.device.name}" for g in self.problem.cluster.groups)
        return f"{nodes}, {self.plan.describe(self.problem.training.global_batch_size)}"

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
        return replace(
            result,
            plan=self.plan,
            iteration_time_s=self.iteration_time_s,
            method="uniform plan that chose the nodes",
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
    """Return the problem on some nodes of its cluster; node groups without nodes drop out.

    Args:
        problem: On the whole offer.
        counts: Nodes of every node group.
    """
    config = problem.config
    nodes = [replace(g, count=n) for g, n in zip(config.cluster.nodes, counts, strict=True) if n]
    smaller: Config = replace(config, cluster=replace(config.cluster, nodes=nodes))
    return Problem.from_config(smaller)


def rentals(problem: Problem) -> list[Rental]:
    """Return the best uniform plan and the bill of every choice of nodes that some plan fits.

    Errors:
        ConfigError: a price is missing that the objective needs, or the offer has too many choices.
        InfeasibleError: no choice admits a plan.
    """
    if problem.config.objective.name != "time":
        price_per_hour(problem)
    counts = node_choices(problem)
    found = []
    for nodes, plan in zip(counts, _best_uniform(problem, counts), strict=True):
        if plan is not None:
            smaller = rented(problem, nodes)
            seconds = evaluate(plan, smaller).iteration_time_s
            amount = bill(smaller, seconds) or Bill(0.0, 0.0, 0.0)
            found.append(Rental(nodes, smaller, plan, seconds, amount, len(counts)))
    if not found:
        raise InfeasibleError(
            f"memory: model={problem.config.model.name} fits in no uniform plan that was found on any choice "
            f"of nodes of cluster={problem.cluster.name}; try an offer with more nodes or larger GPUs."
        )
    return found


def _best_uniform(problem: Problem, counts: Sequence[tuple[int, ...]]) -> list[Plan | None]:
    """Find the best uniform plan of every choice of nodes, given by its counts."""
    config = problem.config
    if not config.cost.knows_stages or config.cost.pipeline != "closed_form":
        raise UnsupportedError(
            f"cost={config.cost.name} with cost.pipeline={config.cost.pipeline} must be priced stage by "
            "stage to compare clusters; try cost=analytic cost.pipeline=closed_form."
        )
    placed: list[tuple[int, Problem, OuterSpace]] = []
    interleaved: dict[int, Plan | None] = {}
    for number, nodes in enumerate(counts):
        groups = zip(problem.cluster.groups, nodes, strict=True)
        cluster = replace(problem.cluster, groups=tuple(replace(g, count=n) for g, n in groups))
        what_if = replace(problem, cluster=cluster)
        try:
            spaces = outer_spaces(what_if)
        except ConfigError:
            continue  # the batch or the pins admit no plan on this one
        plain = [space for space in spaces if space.virtual_stages == 1]
        placed += [(number, what_if, space) for space in plain]
        if not plain:
            own = build_placed([(what_if, space) for space in spaces])
            best = find_uniform_plan(own).best
            interleaved[number] = None if best is None else best.to_plan(own)
    tables = build_placed([(what_if, space) for _, what_if, space in placed])
    answers = best_uniform_plans([number for number, _, _ in placed], tables, len(counts))
    found = [None if answer is None else answer[0] for answer in answers]
    return [interleaved.get(number, plan) for number, plan in enumerate(found)]


def rent(problem: Problem) -> Rental:
    """Return the nodes that the objective wants, by the best uniform plans; of equally fast ones the fewest.

    Errors:
        InfeasibleError: no plan is within the budget or the deadline.
    """
    found = rentals(problem)
    objective = problem.config.objective
    if objective.name == "time":
        return min(found, key=lambda rental: (rental.iteration_time_s, sum(rental.counts)))
    return found[choose(objective, [rental.bill for rental in found], [rental.name for rental in found])]
