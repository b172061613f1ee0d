"""Polishing one outer choice by the exact solver's segment programs, for a counted amount of work.

The descent chooses pipeline degree and number of micro-batches, and how the layers differ; inside an outer
choice the label-setting programs of the exact planner often end in a fraction of a second, where moves of
single layers and stages take many rounds. Where they would not end, they stop after a number of labels,
never after a time, so that equal seeds keep giving equal plans.
"""

from darts_parallel.cost.hard_plans import PricedPlan
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.bounds import lower_bound
from darts_parallel.exact.layerwise import FIRST_MARGIN, growth
from darts_parallel.exact.outer_choice import AGREEMENT, OuterChoiceSolver
from darts_parallel.exact.result import DeadlineError


class Work:
    """Labels that may still be made; asked like a deadline.

    Attributes:
        left: Labels left; below 0 the work is over.
    """

    def __init__(self, labels: int) -> None:
        self.left = labels

    def __call__(self, labels: int = 0) -> None:
        """Count labels.

        Errors:
            DeadlineError: there were more than allowed.
        """
        self.left -= labels
        if self.left < 0:
            raise DeadlineError


def solve_outer(
    table: CostTable,
    number: int,
    outer: int,
    kind: str,
    incumbent: float,
    work: Work,
    bound: float | None = None,
) -> tuple[PricedPlan | None, bool]:
    """The best plan of one outer choice, if it costs at most `incumbent`.

    Args:
        table: Priced by the closed form, not interleaved.
        number: Of the table, for the answer.
        outer: Outer choice.
        kind: `stagewise` or `layerwise`.
        incumbent: Seconds per iteration of a known plan.
        work: Counts the labels that are made.
        bound: Known lower bound of the outer choice; None has it worked out.

    Returns:
        The plan, or None; and whether that is proven within the work.
    """
    case = OuterChoiceSolver(table, number, outer, 0.0 if bound is None else bound)
    if bound is None:
        case.bound = lower_bound(case.costs, kind)
    lowest, margin, limit = case.bound, FIRST_MARGIN, incumbent * (1 + AGREEMENT)
    try:
        while case.bound <= limit:
            before = case.labels
            found = case.attempt(kind, min(lowest * (1 + margin), limit), work)
            if found is not None:
                return found, True
            margin *= growth(case.labels - before)
    except DeadlineError:
        return None, False
    return None, True
