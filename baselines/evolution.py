"""Differential evolution (Storn and Price 1997) by scipy: an evolutionary searcher of a well-kept library.

A plan is a vector of random keys (Bean 1994): one number for the outer choice, one for the width of every
stage, one for the strategy of every layer; runs of layers share a key by a threshold on the difference, so
that a mutation can change many. `scipy.optimize.differential_evolution` evolves a population, priced in one
batch; a plan that does not fit is penalised as in annealing.
"""

import numpy as np
import torch
from scipy.optimize import OptimizeResult, differential_evolution

from baselines._moves import Chains, PlanSpace
from baselines._planner import Incumbent, on_tables
from darts_parallel.exact import Array

POPULATION = 128
"""Plans of a generation."""
KNOTS = 12
"""Places along the model where a plan may choose another strategy; all layers where they are fewer."""


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Evolve a population until the time is over; a step is a generation."""
    space = PlanSpace(incumbent, space_kind)
    space.price(space.starting_plans())
    genome = _Genome(space)
    rng = np.random.default_rng(seed)

    def price(columns: Array) -> Array:
        return space.price(genome.plans(np.atleast_2d(columns.T))).numpy()

    def stop(intermediate_result: OptimizeResult) -> bool:
        return incumbent.over()

    differential_evolution(
        price, [(0.0, 1.0)] * genome.size, strategy="rand1bin", maxiter=incumbent.max_steps, tol=0.0,
        atol=0.0, init=rng.random((POPULATION, genome.size)), rng=rng, callback=stop, polish=False,
        vectorized=True, updating="deferred", recombination=0.5,
    )  # fmt: skip


solve = on_tables(offer_plans, seeded=True, layerwise=True, chunks=True)


class _Genome:
    """Decode vectors in [0, 1] to plans: outer choice, widths of the stages, strategies at knots."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.knots = {"uniform": 1, "stagewise": space.most_stages}.get(
            space.space_kind, min(KNOTS, space.num_layers)
        )
        self.size = 1 + space.most_stages + 2 * self.knots

    def plans(self, genes: Array) -> Chains:
        """Return one legal plan for every row."""
        space, values = self.space, torch.from_numpy(np.ascontiguousarray(genes)).clamp(0.0, 1.0 - 1e-12)
        pair = space.outer_choices[(values[:, 0] * len(space.outer_choices)).long()]
        table, outer = pair.unbind(1)
        stages = values[:, 1 : 1 + space.most_stages]
        starts = space.split(space.pp[table], self._jitter(stages, space.pp[table]))
        keys, places = values[:, 1 + space.most_stages :].chunk(2, dim=1)
        allowed = space.allowed[table, outer]
        rank = (keys * allowed.sum(1, keepdim=True)).long()
        order = (~allowed).double().argsort(dim=1, stable=True)
        strategy = order.gather(1, rank)
        knot = self._knot_of_layer(places, starts)
        chains = Chains(table, outer, strategy.gather(1, knot), starts)
        return space.in_kind(chains)

    def _jitter(self, widths: torch.Tensor, pp: torch.Tensor) -> torch.Tensor:
        """Return shift of every edge against even stages, in units, `(N, K)`."""
        order = torch.arange(self.space.most_stages)
        share = torch.where(order < pp.unsqueeze(1), 0.5 + widths, 0.0)
        edges = torch.nn.functional.pad((share / share.sum(1, keepdim=True)).cumsum(1)[:, :-1], (1, 0))
        return len(self.space.units) * (edges - order / pp.unsqueeze(1))

    def _knot_of_layer(self, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return number of the knot that sets each layer's strategy, `(N, L)`."""
        layers = torch.arange(self.space.num_layers)
        if self.space.space_kind == "stagewise":
            return Chains(starts[:, 0], starts[:, 0], layers.expand(len(starts), -1), starts).stages()
        ordered = (places.sort(1).values * self.space.num_layers)[:, 1:].contiguous()
        return torch.searchsorted(ordered, (layers + 0.5).expand(len(places), -1).contiguous(), right=True)
