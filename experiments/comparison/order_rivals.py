"""Rivals of the search of orders of passes, each in its place and for as many seconds (`search_tables`)."""

import numpy as np

from darts_parallel.cost import HardPlans
from darts_parallel.gradient import GradientSearch, Order, OrderProblem, OrderSearch


class HeuristicOrder(OrderSearch):
    """Take the heuristic of Qi et al. 2023 (arXiv 2401.10241, section 3.1) at the memory of each device."""

    def starts(self, problem: OrderProblem, plan: HardPlans) -> list[Order]:
        """Return its orders, the best first."""
        if not problem.free:
            return problem.starts(plan)
        first = np.append(plan.first_layers[0].numpy(), problem.table.num_layers)
        return problem.heuristic(first, plan.choices[0].numpy())

    def improved(self, problem: OrderProblem, order: Order, moves: int) -> Order:
        """Return the order as it is."""
        return order


class BlindMoves(OrderSearch):
    """Move any pass and the layers of any stage: iterated local search without slopes."""

    def improved(self, problem: OrderProblem, order: Order, moves: int) -> Order:
        """Return the best order that blind moves lead to."""
        return problem.annealed(order, moves, self.state, blind=True)


HEURISTIC = "heuristic_order"
RIVALS: dict[str, type[OrderSearch]] = {
    HEURISTIC: HeuristicOrder,
    "blind_moves": BlindMoves,
}


def _loop_of(rival: type[OrderSearch]) -> type[GradientSearch]:
    return type(rival.__name__, (GradientSearch,), {"orders": rival})


ORDER_LOOPS = {name: _loop_of(rival) for name, rival in RIVALS.items()}
"""Loops of the gradient search that take their orders from a rival, by its name."""
