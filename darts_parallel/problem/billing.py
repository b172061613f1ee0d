"""The bill of a job, and which of several plans an objective wants."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_parallel.config import ObjectiveConfig
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.problem.cluster import HOUR, Cluster

LIMITS = {
    "time_under_budget": ("budget_usd", "must pay for a plan", "cheapest", "costs"),
    "cost_under_deadline": ("deadline_hours", "must be met by a plan", "fastest", "takes"),
}
"""The limit's key of an objective, its rule, and which plan comes closest, in words."""


@dataclass(frozen=True)
class Bill:
    """Dollars and hours of a whole job."""

    price_per_hour_usd: float
    """Dollars an hour of all nodes."""
    hours: float
    dollars: float

    def label(self) -> str:
        """Return short text, e.g. `$1,234 for 12.3 hours at $98.32 an hour`."""
        return f"${self.dollars:,.2f} for {self.hours:,.2f} hours at ${self.price_per_hour_usd:,.2f} an hour"


def price_per_hour(objective: ObjectiveConfig, cluster: Cluster) -> float:
    """Return the dollars of an hour of all nodes.

    Errors:
        ConfigError: a node group has no price.
    """
    total = 0.0
    for index, group in enumerate(cluster.groups):
        if group.price_per_hour is None and group.count:
            raise ConfigError(
                f"objective={objective.name} must know the price of every node, and "
                f"cluster.nodes[{index}].price_per_hour_usd of {group.device.name} is missing; "
                "try a price, e.g. 1.0."
            )
        total += group.count * (group.price_per_hour or 0.0)
    return total


def bill(objective: ObjectiveConfig, cluster: Cluster, iteration_time_s: float) -> Bill | None:
    """Return the bill of the job at this pace; None where the objective knows no dollars.

    Errors:
        ConfigError: a node group has no price.
    """
    if not objective.in_dollars or objective.num_iterations is None:
        return None
    price = price_per_hour(objective, cluster)
    hours = objective.num_iterations * iteration_time_s / HOUR
    return Bill(price, hours, price * hours)


def worth(
    objective: ObjectiveConfig, cluster: Cluster, iteration_time_s: float
) -> tuple[float, bool]:
    """Return the figure that the objective minimises, and whether the pace keeps its limit."""
    amount = bill(objective, cluster, iteration_time_s)
    if amount is None:
        return iteration_time_s, True
    (figure, _), limited, limit = _figures(objective, amount)
    return figure, limited <= limit


def _figures(objective: ObjectiveConfig, amount: Bill) -> tuple[tuple[float, float], float, float]:
    """Return what decides between bills, first and then, what is limited, and its limit."""
    dollars = amount.dollars
    hours = amount.hours
    decides = (dollars, hours) if objective.name.startswith("cost") else (hours, dollars)
    if objective.name == "time_under_budget":
        return decides, dollars, objective.budget_usd or 0.0
    if objective.name == "cost_under_deadline":
        return decides, hours, objective.deadline_hours or 0.0
    return decides, 0.0, 0.0


def choose(objective: ObjectiveConfig, bills: Sequence[Bill], names: Sequence[str]) -> int:
    """Return the index of the bill that the objective wants; its other figure breaks ties.

    Args:
        names: Of those plans, for errors.

    Errors:
        InfeasibleError: none is within the budget (the cheapest is named) or the deadline (the
        fastest is).
    """
    figures = [_figures(objective, amount) for amount in bills]
    order = sorted(range(len(bills)), key=lambda i: figures[i][0])
    within = [i for i in order if figures[i][1] <= figures[i][2]]
    if within:
        return within[0]
    key, rule, word, verb = LIMITS[objective.name]
    best = min(order, key=lambda i: figures[i][1])
    _, closest, limit = figures[best]
    raise InfeasibleError(
        f"objective.{key}={limit:g} {rule}, and the {word} ({names[best]}) {verb} {bills[best].label()}; "
        f"try objective.{key}={_above(closest)}."
    )


def _above(value: float) -> str:
    """Return the value in a few digits, rounded up so that it is still valid."""
    return f"{value * (1 + 1e-5) + 5e-3:.2f}"
