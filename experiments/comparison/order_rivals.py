"""Rivals of the search of orders of passes, each in its place and for as many seconds (`search_tables`)."""

import numpy as np

from darts_parallel.cost import HardPlans
from darts_parallel.gradient import GradientSearch, Order, OrderProblem, OrderSearch

SAMPLES = 8
"""Pairs of a perturbed gradient."""
DECODED = 30
"""Orders that annealing times while keys are decoded once."""


class HeuristicOrder(OrderSearch):
    """Take the heuristic of Qi et al. 2023 (arXiv 2401.10241, section 3.1) at the memory of each device."""

    def starts(self, problem: OrderProblem, plan: HardPlans) -> list[Order]:
        """Return its orders, the best first."""
        if not problem.free:
            return problem.starts(plan)
        first = np.append(plan.first_layers[0].numpy(), problem.table.num_layers)
        return sorted(
            problem.heuristic(first, plan.choices[0].numpy()), key=lambda order: order.seconds
        )

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
        """Return the best order that the decoded keys give."""
        if not problem.free:
            return order
        random = np.random.default_rng(int(self.state[0]))
        self.state += np.uint64(1)
        _, ended = problem.run(order)
        keys, best, width = ended / ended.max(), order, 0.02
        mean, square = np.zeros_like(keys), np.zeros_like(keys)
        for step in range(1, 1 + moves // DECODED // (2 * SAMPLES)):
            gradient = np.zeros_like(keys)
            for _ in range(SAMPLES):
                noise = random.standard_normal(keys.shape)
                pair = [
                    problem.dispatched(order.first, order.choices, keys + s * width * noise)
                    for s in (1, -1)
                ]
                best = min([best, *pair], key=lambda found: found.seconds)
                up, down = (min(found.seconds / order.seconds, 2.0) for found in pair)
                gradient += (up - down) * noise
            mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
            slope = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.99**step)) + 1e-12)
            keys -= 0.3 * width * slope
            width *= 0.98
        return best


HEURISTIC = "heuristic_order"
RIVALS: dict[str, type[OrderSearch]] = {
    HEURISTIC: HeuristicOrder,
    "blind_moves": BlindMoves,
    "perturbed_gradient": PerturbedGradient,
}
ORDER_LOOPS: dict[str, type[GradientSearch]] = {
    name: type(own.__name__, (GradientSearch,), {"orders": own}) for name, own in RIVALS.items()
}
"""Loops by the names of the rivals whose orders they take."""
