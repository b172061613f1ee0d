"""Simulated annealing over strategies, stage edges and outer choices (Kirkpatrick et al., Science 1983).

Many chains anneal side by side as one batch. A round begins at a temperature that accepts half of the
problem's own small uphill moves, and cools geometrically; the next round, twice as long, reheats the better
half of the chains and restarts the others at random. Rounds follow each other until the time is over, so a
seed gives one trajectory, whatever the speed of the machine, of which the budget sees a part.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baselines.chains import Chains, PlanSpace
from baselines.incumbent import Incumbent, time_limit
from baselines.moves import MoveWeights, RandomMoves
from baselines.planner import on_problems
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.result import TableResult

CHAINS = 64
"""Plans that anneal side by side."""
FIRST_ROUND = 100
"""Steps of the first round; every further one has twice as many."""
COOLING = 1e-4
"""Last temperature of a round over its first."""
WEIGHTS = MoveWeights(layer=0.2, run=0.2, stage=0.15, whole=0.05, edge=0.3, outer=0.05, jump=0.05)


def solve(
    tables: Sequence[CostTable],
    space_kind: str,
    *,
    deadline: float | None = None,
    seed: int = 0,
    max_steps: int | None = None,
) -> TableResult:
    """Search cost tables; arguments as `random_search.solve`, a step changes every chain once."""
    incumbent = Incumbent(tables, time_limit(deadline))
    space = PlanSpace(incumbent, space_kind)
    generator = torch.Generator().manual_seed(seed)
    moves = RandomMoves(space, WEIGHTS, generator)
    chains, energy = best_starts(space, CHAINS)
    length, step, left = FIRST_ROUND, 0, math.inf if max_steps is None else max_steps
    hottest = uphill(space, moves, chains, energy) / math.log(2.0)
    while not incumbent.over() and left > 0:
        temperature = hottest * COOLING ** (step / length)
        chains, energy = metropolis(space, moves, chains, energy, temperature)
        step, left = step + 1, left - 1
        if step == length:
            chains, energy = _restart(space, moves, chains, energy)
            step, length = 0, 2 * length
    return incumbent.result()


find_plan = on_problems(solve)


def _restart(space: PlanSpace, moves: RandomMoves, chains: Chains, energy: Tensor) -> tuple[Chains, Tensor]:
    """The better half of the chains, and random plans."""
    kept = energy.argsort(stable=True)[: len(chains) // 2]
    fresh = moves.random_plans(len(chains) - len(kept))
    return Chains.concatenate([chains[kept], fresh]), torch.cat([energy[kept], space.price(fresh)])


def best_starts(space: PlanSpace, count: int) -> tuple[Chains, Tensor]:
    """The best `count` of the plans that the gradient search starts from, repeated where they are fewer."""
    starts = space.starting_plans()
    energy = space.price(starts)
    order = energy.argsort(stable=True)[torch.arange(count) % len(starts)]
    return starts[order], energy[order]


def uphill(space: PlanSpace, moves: RandomMoves, chains: Chains, energy: Tensor) -> float:
    """The scale of temperatures: a rise that a fifth of the rising moves stay below.

    The median would be set by moves that break the memory, which no temperature should accept.
    """
    rises = space.price(moves.propose(chains)) - energy
    rises = rises[(rises > 0) & rises.isfinite()]
    return float(rises.quantile(0.2)) if len(rises) else 1.0


def metropolis(
    space: PlanSpace, moves: RandomMoves, chains: Chains, energy: Tensor, temperature: float
) -> tuple[Chains, Tensor]:
    """One change of every chain, accepted with probability `exp(-rise / temperature)` (Metropolis 1953)."""
    proposed = moves.propose(chains)
    reached = space.price(proposed)
    threshold = torch.rand(len(chains), generator=moves.generator, dtype=torch.float64)
    accepted = torch.exp((energy - reached) / temperature) > threshold
    return proposed.where(accepted, chains), torch.where(accepted, reached, energy)
