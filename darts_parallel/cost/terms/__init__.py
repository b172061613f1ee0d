"""Terms that layers can have besides dense products and attention. One term is one file.

A file contributes seconds and bytes to the layers that have its term, or to the plans that use it,
and ends with `TERM`, by which the registry finds it. The table, the evaluation and the explanation
add up whatever is registered.
"""

from collections.abc import Iterator

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.terms._term import Contribution as Contribution
from darts_parallel.cost.terms._term import CostTerm as CostTerm
from darts_parallel.cost.terms._term import PlanContribution as PlanContribution
from darts_parallel.errors import registered
from darts_parallel.problem import LayerSpec

TERMS: tuple[CostTerm, ...] = tuple(registered(__name__, "TERM"))
FORMULAS = {name: formula for term in TERMS for name, formula in term.formulas.items()}
"""Formula in words and its source, by the name of what a term contributes."""


def terms_of(layer: LayerSpec) -> list[CostTerm]:
    """Return the terms that a layer has."""
    return [term for term in TERMS if term.present(layer)]


def plan_contributions(table: CostTable, plans: HardPlans) -> Iterator[PlanContribution]:
    """Return what the terms add to hard plans of a table."""
    found = (term.plan_cost(table, plans) for term in TERMS)
    return (own for own in found if own is not None)
