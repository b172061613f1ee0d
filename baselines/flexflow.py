"""FlexFlow's search: Markov chain Monte Carlo over per-layer strategies (Jia, Zaharia, Aiken, MLSys 2019).

Section 6.2 of the paper: a proposal replaces the configuration of one operation, drawn at random, by a
random one; it is accepted by the Metropolis rule at a constant temperature; chains begin at known
strategies (here those that the gradient search begins at) and at random ones, and a chain that has not
improved for half of its time begins again.

Restricted to our plans: an operation is a layer, its devices are its stage, so that besides strategies a
layer may move to the neighbouring stage, and the outer choices change too. The simulator is our `evaluate`.
"""

import math

import torch

from baselines._moves import Chains, MoveWeights, PlanSpace, RandomMoves
from baselines._planner import Incumbent, on_tables
from baselines.annealing import best_starts, metropolis, uphill
from darts_parallel.cost import flatnonzero

CHAINS = 64
"""Plans that walk side by side."""
ACCEPTED = 0.01
"""Share of small uphill moves that the temperature accepts: the paper's constant beta, free of units."""
PATIENCE = 200
"""Steps without improvement after which a chain may begin again, if they are half of its age."""
LEAST_GAIN = 1e-12
"""Log-seconds that count as an improvement, above rounding."""
WEIGHTS = MoveWeights(
    layer=0.7,
    edge=0.2,
    outer=0.05,
    jump=0.05,
)


def offer_plans(incumbent: Incumbent) -> None:
    """Walk until the time is over; a step changes every chain once."""
    space = PlanSpace(incumbent)
    moves = RandomMoves(space, WEIGHTS)
    known, known_energy = best_starts(space, CHAINS // 2)
    fresh = moves.random_plans(CHAINS - len(known))
    chains = Chains.concatenate([known, fresh])
    energy = torch.cat([known_energy, space.price(fresh)])
    temperature = uphill(moves, chains, energy) / math.log(1.0 / ACCEPTED)
    lowest = energy.clone()
    age = torch.zeros(CHAINS)
    since = torch.zeros(CHAINS)
    while not incumbent.over():
        chains, energy = metropolis(moves, chains, energy, temperature)
        better = energy < lowest - LEAST_GAIN
        lowest = torch.minimum(lowest, energy)
        age = age + 1
        since = torch.where(better, 0.0, since + 1)
        patient = (since <= PATIENCE) | (since <= age / 2)
        stale = flatnonzero(~patient)
        if len(stale):
            fresh = moves.random_plans(len(stale))
            chains = chains.put(stale, fresh)
            energy = energy.index_copy(0, stale, space.price(fresh))
            lowest[stale] = energy[stale]
            age[stale] = 0.0
            since[stale] = 0.0


solve = on_tables(offer_plans, seeded=True)
