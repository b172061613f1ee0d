"""Rivals of the search of orders of passes, each in its place and for as many seconds (`search_tables`)."""

import numpy as np

from darts_parallel.cost import HardPlans
from darts_parallel.gradient import GradientSearch, Order, OrderProblem, OrderSearch

SAMPLES = 8
"""Pairs of a perturbed gradient."""
DECODED = 30
"""Orders that annealing times while keys are decoded once."""
WIDTH = 0.02
"""Standard deviation of the first perturbations; keys are in [0, 1]."""
SHRINK = 0.98
"""Factor on the perturbations after every step."""
RATE = 0.3
"""Length of a step over the width of the perturbations."""
WORST = 2.0
"""Seconds relative to the first order, beyond which orders count alike."""


class HeuristicOrder(OrderSearch):
    """Take the heuristic of Qi et al. 2023 (arXiv 2401.10241, section 3.1) at the memory of each device."""

    def starts(self, problem: OrderProblem, plan: HardPlans) -> list[Order]:
        """Return its orders, the best first."""
        if not problem.free:
            return problem.starts(plan)
        first = np.append(plan.first_layers[0].numpy(), problem.table.num_layers)
        orders = problem.heuristic(first, plan.choices[0].numpy())
        return sorted(orders, key=lambda order: order.seconds)

    def improved(self, problem: OrderProblem, order: Order, moves: int) -> Order:
        """Return the order as it is."""
        return order


class BlindMoves(OrderSearch):
    """Move any pass and the layers of any stage: iterated local search without slopes."""

    def improved(self, problem: OrderProblem, order: Order, moves: int) -> Order:
        """Return the best order that blind moves lead to."""
        return problem.annealed(order, moves, self.state, blind=True)


class PerturbedGradient(OrderSearch):
    """Descend in keys of passes by slopes of smoothed seconds (Berthet et al. 2020, arXiv 2002.08676)."""

    def improved(self, problem: OrderProblem, order: Order, moves: int) -> Order:
        """Return the best order that the decoded keys give; keys move by Adam."""
        if not problem.free:
            return order
        random = np.random.default_rng(int(self.state[0]))
        self.state += np.uint64(1)
        _, ended = problem.run(order)
        keys = ended / ended.max()
        best = order
        width = WIDTH
        mean = np.zeros_like(keys)
        square = np.zeros_like(keys)
        for step in range(1, 1 + moves // DECODED // (2 * SAMPLES)):
            gradient = np.zeros_like(keys)
            for _ in range(SAMPLES):
                noise = random.standard_normal(keys.shape)
                above = problem.dispatched(order.first, order.choices, keys + width * noise)
                below = problem.dispatched(order.first, order.choices, keys - width * noise)
                best = min(best, above, below, key=lambda found: found.seconds)
                rise = min(above.seconds / order.seconds, WORST)
                gradient += (rise - min(below.seconds / order.seconds, WORST)) * noise
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.99 * square + 0.01 * gradient**2
            scale = np.sqrt(square / (1 - 0.99**step)) + 1e-12
            keys -= RATE * width * mean / (1 - 0.9**step) / scale
            width *= SHRINK
        return best


HEURISTIC = "heuristic_order"
RIVALS: dict[str, type[OrderSearch]] = {
    HEURISTIC: HeuristicOrder,
    "blind_moves": BlindMoves,
    "perturbed_gradient": PerturbedGradient,
}


def _loop_of(rival: type[OrderSearch]) -> type[GradientSearch]:
    return type(rival.__name__, (GradientSearch,), {"orders": rival})


ORDER_LOOPS = {name: _loop_of(rival) for name, rival in RIVALS.items()}
"""Loops of the gradient search that take their orders from a rival, by its name."""
