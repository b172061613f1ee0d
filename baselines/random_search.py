"""Random search: independent random plans, the best feasible one is kept (Bergstra and Bengio, JMLR 2012)."""

from baselines._moves import MoveWeights, PlanSpace, RandomMoves
from baselines._planner import Incumbent, on_tables

BATCH = 256
"""Plans priced at once."""


def offer_plans(incumbent: Incumbent) -> None:
    """Offer random plans until the time is over; a step is a batch of them."""
    space = PlanSpace(incumbent)
    moves = RandomMoves(space, MoveWeights())
    space.price(space.starting_plans())
    while not incumbent.over():
        space.price(moves.random_plans(BATCH))


solve = on_tables(offer_plans, seeded=True)
