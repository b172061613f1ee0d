"""Simulated annealing over strategies, stage edges and outer choices (Kirkpatrick et al., Science 1983).

Many chains anneal side by side as one batch. A round begins at a temperature that accepts half of the
problem's own small uphill moves, and cools geometrically; the next round, twice as long, reheats the better
half of the chains and restarts the others at random. Rounds follow each other until the time is over, so a
seed gives one trajectory, whatever the speed of the machine, of which the budget sees a part.
"""

import math

import torch
from torch import Tensor

from baselines._moves import Chains, MoveWeights, PlanSpace, RandomMoves
from baselines._planner import Incumbent, on_tables

CHAINS = 64
"""Plans that anneal side by side."""
FIRST_ROUND = 100
"""Steps of the first round; every further one has twice as many."""
COOLING = 1e-4
"""Last temperature of a round over its first."""
WEIGHTS = MoveWeights(
    layer=0.2,
    run=0.2,
    stage=0.15,
    whole=0.05,
    edge=0.3,
    outer=0.05,
    jump=0.05,
)


def offer_plans(incumbent: Incumbent) -> None:
    """Anneal until the time is over; a step changes every chain once."""
    space = PlanSpace(incumbent)
    moves = RandomMoves(space, WEIGHTS)
    chains, energy = best_starts(space, CHAINS)
    length = FIRST_ROUND
    step = 0
    hottest = uphill(moves, chains, energy) / math.log(2.0)
    while not incumbent.over():
        temperature = hottest * COOLING ** (step / length)
        chains, energy = metropolis(moves, chains, energy, temperature)
        step += 1
        if step == length:
            chains, energy = _restart(moves, chains, energy)
            step = 0
            length = 2 * length


solve = on_tables(offer_plans, seeded=True)


def _restart(
    moves: RandomMoves,
    chains: Chains,
    energy: Tensor,
) -> tuple[Chains, Tensor]:
    """Return the better half of the chains, and random plans."""
    kept = energy.argsort(stable=True)[: len(chains) // 2]
    fresh = moves.random_plans(len(chains) - len(kept))
    together = Chains.concatenate([chains[kept], fresh])
    priced = moves.space.price(fresh)
    return together, torch.cat([energy[kept], priced])


def best_starts(space: PlanSpace, count: int) -> tuple[Chains, Tensor]:
    """Return the best `count` plans that the gradient search starts from, repeated if fewer."""
    starts = space.starting_plans()
    energy = space.price(starts)
    order = energy.argsort(stable=True)[torch.arange(count) % len(starts)]
    return starts[order], energy[order]


def uphill(
    moves: RandomMoves,
    chains: Chains,
    energy: Tensor,
) -> float:
    """Return the scale of temperatures: a rise that a fifth of the rising moves stay below.

    The median would be set by moves that break the memory, which no temperature should accept.
    """
    proposed = moves.propose(chains)
    rises = moves.space.price(proposed) - energy
    rises = rises[(rises > 0) & rises.isfinite()]
    return float(rises.quantile(0.2)) if len(rises) else 1.0


def metropolis(
    moves: RandomMoves,
    chains: Chains,
    energy: Tensor,
    temperature: float,
) -> tuple[Chains, Tensor]:
    """Change every chain once, accepted with probability `exp(-rise / temperature)` (Metropolis 1953)."""
    proposed = moves.propose(chains)
    reached = moves.space.price(proposed)
    threshold = torch.rand(len(chains), generator=moves.generator, dtype=torch.float64)
    accepted = torch.exp((energy - reached) / temperature) > threshold
    return proposed.where(accepted, chains), torch.where(accepted, reached, energy)
