"""Two controls of the gradient search: noise for gradients, and no descent at all.

Each is a loop that `search_tables` runs in place of its own, on problems of closed forms and of schedules:
`search_tables(tables, space_kind, config, seed, loop=CONTROLS["no_gradient"])`.
"""

from collections.abc import Callable
from functools import cached_property
from math import inf

import torch

from baselines._moves import PlanSpace, RandomMoves
from baselines._planner import Incumbent
from baselines.annealing import WEIGHTS
from darts_parallel.cost import HardPlans, PricedPlan
from darts_parallel.gradient import (
    GradientSearch,
    MoveEvaluator,
    StepRecord,
    polish,
    polish_pool,
    repair,
)

KICKS = 3
"""Random changes of a plan before it is descended from again."""


class NoGradient(GradientSearch):
    """Replace the gradient of every restart's parameters by noise of the same norm."""

    @cached_property
    def noise(self) -> torch.Generator:
        """Return a generator of its own, so that the search draws the numbers that it always draws."""
        return torch.Generator().manual_seed(self.generator.initial_seed() + 1)

    def move(self) -> None:
        """Move all parameters against noise."""
        for parameter, _ in self.optimizer.parameters:
            gradient = parameter.grad
            if gradient is not None:
                noise = torch.randn(gradient.shape, generator=self.noise, dtype=gradient.dtype)
                # outer choice and restart stay apart; logits of outer choices are one vector
                own = tuple(range(2, gradient.dim())) or (0,)
                size = gradient.square().sum(own, keepdim=True).sqrt()
                gradient.copy_(noise * size / noise.square().sum(own, keepdim=True).sqrt())
        super().move()


class NoDescent(GradientSearch):
    """Polish the starts, then improve them by iterated local search until the search's time is over.

    Lourenco, Martin and Stuetzle 2003, Iterated Local Search: kick a good plan by random changes, repair it,
    descend from it by polishing's moves, and keep the best.
    """

    def run(
        self, on_record: Callable[[StepRecord], None] = lambda record: None
    ) -> list[StepRecord]:
        """Search until `max_seconds`; there are no steps to record."""
        pool = self.pool
        if any(table.simulated for table in pool.tables):
            return []  # local search follows anyway: of orders of passes and layers
        self.stopped_by = polish_pool(
            pool, self.space_kind, self.config, hurry=False, bounds=self.bounds
        )
        space = PlanSpace(Incumbent(pool.tables, keep_all=True))
        moves = RandomMoves(space, WEIGHTS, self.generator)
        try:
            while self.stopped_by is None and pool.best is not None:
                self._descend_from(self._kicked(moves))
                self.stopped_by = "time_limit" if self.over() else None
        except KeyboardInterrupt:
            self.stopped_by = "user"
        return []

    def over(self) -> bool:
        """Return whether the time is over."""
        return self.clock.seconds >= self.config.max_seconds

    def _kicked(self, moves: RandomMoves) -> PricedPlan:
        """Change one of the best outer choices' plans at random, good ones more often."""
        entries = self.pool.by_outer()
        place = int(torch.empty(1).geometric_(0.5, generator=self.generator)) - 1
        entry = entries[min(place, len(entries) - 1)]
        chains = moves.space.of_table(entry.table, entry.plan)
        for _ in range(KICKS):
            chains = moves.propose(chains)
        number = int(chains.table[0])
        table = self.pool.tables[number]
        first_layers = chains.first_layers[:, : table.num_stages]
        plan = HardPlans(chains.outer, chains.choices, first_layers)
        plan, cost = repair(table, plan, inf)
        seconds = cost.fitting_seconds
        return PricedPlan(number, plan, float(seconds))

    def _descend_from(self, entry: PricedPlan) -> None:
        """Descend by cheap moves from a plan that fits."""
        if entry.time < torch.inf:
            table = self.pool.tables[entry.table]
            evaluator = MoveEvaluator(table, self.over)
            plan, _, evaluated = polish(table, entry.plan, self.space_kind, evaluator=evaluator)
            self.pool.evaluated += evaluated
            self.pool.add(entry.table, plan)


CONTROLS: dict[str, type[GradientSearch]] = {"no_gradient": NoGradient, "no_descent": NoDescent}
"""Loops by the names of their variants."""
