"""Lower bounds on simulated pipelines from paths: for all plans of an outer choice, whatever its schedule.

For any fixed path through the schedule the seconds are a sum over layers, weighted by how often the path
takes the stage; the cheapest plan of that sum is found by dynamic programming, and no plan is faster by the
true schedule, whose longest path is longer. So it is for any mixture of paths. The mixture is made by
fictitious play (Brown 1951, Iterative solution of games by fictitious play): the cheapest plan against the
mixture, its critical path into the mixture, and so on. `bounds.py` has the bounds from the devices' work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch

from darts_parallel.cost.critical_paths import Criticalities
from darts_parallel.cost.evaluation import evaluate_batch, pass_seconds
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.bounds import ROUNDING, outer_lower_bounds
from darts_parallel.exact.pareto import price_grid
from darts_parallel.exact.segments import Array, StageSegments

ROUNDS = 24
"""Paths of a mixture."""


@dataclass(frozen=True)
class _Chain:
    """One outer choice with the layers' costs by stage; S stages, L layers, C strategies."""

    table: CostTable
    outer: int
    rows: Array
    """Seconds of forward, backward, weights' gradient and synchronisation, infinite where illegal,
    `(4, Q, L, C)`."""
    segments: StageSegments
    """Layers that a stage can hold by the memory that they need at least, N."""
    message: Array
    """Least seconds of a message one way, `(S - 1, L - 1)`."""
    per_iteration: float
    need: Array
    """Bytes of a layer that add up over a device, `(S, L, C)`."""
    capacity: float
    """Bytes of all devices."""

    @staticmethod
    def read(table: CostTable, outer: int) -> "_Chain":
        legal = table.allowed[outer].expand(table.forward.shape[1], -1)
        legal = legal if table.kind_allowed is None else legal & table.kind_allowed
        rows = torch.stack(
            [values[outer].detach() for values in (table.forward, table.backward, table.weight_gradient,
                                                   table.sync)]
        ).masked_fill(~legal[:, None, :], torch.inf)  # fmt: skip
        per_iteration = (
            table.per_iteration[outer].detach().masked_fill(~table.allowed[outer], torch.inf).amin(-1).sum()
        )
        across = table.p2p[outer].detach().amin((-1, -2))[table.boundary_kind] / 2
        need = table.static[outer] + table.in_flight[outer].view(-1, 1, 1) * table.activation[outer]
        return _Chain(
            table, outer, rows.numpy(), _room(table, outer), across.numpy(), float(per_iteration),
            need.detach().numpy(), float(table.capacity.sum()),
        )  # fmt: skip

    def best_price(self, weights: tuple[Array, Array]) -> float:
        """The price of memory, in seconds per byte, that gives the best bound."""
        legal = np.isfinite(self.rows[0]).any(0).all(0)
        seconds = np.where(np.isfinite(self.rows), self.rows, 0.0).sum(0).min(0)[:, legal]
        prices = price_grid(seconds * weights[0][0].mean(), self.need.mean(0)[:, legal])
        return float(max(prices, key=lambda price: self.cheapest(weights, float(price))[0]))

    def cheapest(self, weights: tuple[Array, Array], price: float = 0.0) -> tuple[float, HardPlans]:
        """The least weighted sum of any plan, and the plan.

        Args:
            weights: Of the passes and the synchronisation `(4, S)`, and of the messages `(S - 1,)`.
            price: Seconds per byte above the memory of all devices together (a Lagrange multiplier).
        """
        passes, messages = weights
        kinds = self.table.stage_kind.numpy()
        # a weight of 0 does not make an illegal strategy legal
        priced = np.where(np.isinf(self.rows[0]), np.inf, 0.0)[kinds]
        finite = np.where(np.isinf(self.rows), 0.0, self.rows)
        priced = priced + np.einsum("rs,rslc->slc", passes, finite[:, kinds])
        priced = priced + price * self.need
        choice = priced.argmin(-1)
        seconds = self.segments.sums(priced.min(-1), np.arange(len(priced)))
        seconds = seconds + self.segments.entering(messages[:, None] * self.message, np.arange(len(messages)))
        value, starts = self.segments.split_below(seconds, np.inf)
        if not np.isfinite(value):
            return np.inf, HardPlans(*(torch.zeros(0, 1, dtype=torch.long) for _ in range(3)))
        first = torch.tensor([starts])
        layers = np.arange(priced.shape[1])
        stage = np.searchsorted(starts, layers, side="right") - 1
        chosen = torch.as_tensor(choice[stage, layers]).unsqueeze(0)
        return value + self.per_iteration - price * self.capacity, HardPlans(
            torch.tensor([self.outer]), chosen, first
        )

    def path(self, plans: HardPlans) -> tuple[Array, Array]:
        """How often a critical path of one plan takes every stage's passes, and the messages."""
        cost, model = evaluate_batch(self.table, plans), self.table.pipeline
        count = self.table.num_micro_batches[plans.outer]
        passes = pass_seconds(self.table, plans)
        found = Criticalities.of(passes, cost.sync_seconds, count, self.table.pp, model, whole=True)
        sync = found.sync[:, self.table.stage_device]
        rows = torch.stack([found.forward, found.backward, found.weight_gradient, sync])[:, 0]
        return rows.numpy(), found.message[0].numpy()


def _room(table: CostTable, outer: int) -> StageSegments:
    """Segments that may fit on their stage."""
    held = table.in_flight[outer].view(-1, 1, 1)
    need = (table.static[outer] + held * table.activation[outer]).detach()
    least = need.masked_fill(~table.allowed[outer], torch.inf).amin(-1).numpy()
    limit = table.capacity.detach().numpy()[table.stage_device.numpy()] * (1 + ROUNDING)
    segments = StageSegments.legal(table.num_stages, table.fused_to_previous.numpy())
    return segments.keep(segments.sums(least, np.arange(len(least))) <= limit[segments.stage])


def chain_bound(
    table: CostTable, outer: int, *, enough: float = np.inf, rounds: int = ROUNDS, deadline: float = np.inf
) -> float:
    """Bound from mixtures of paths, for one outer choice.

    Args:
        table: Costs of one pipeline degree.
        outer: Its outer choice.
        enough: Seconds beyond which a better bound is of no use.
        rounds: Paths of the mixture.
        deadline: `time.monotonic()` after which no further path is added.

    Returns:
        Seconds; infinite where no plan fits the memory.
    """
    chain = _Chain.read(table, outer)
    count = float(table.num_micro_batches[outer])
    # before any path is known: a device's share of all passes
    passes = np.full((4, table.num_stages), count / table.pp)
    passes[2:] = 0.0
    weights, best = (passes, np.zeros(table.num_stages - 1)), 0.0
    price = chain.best_price(weights)
    for turn in range(rounds):
        value, plans = chain.cheapest(weights, price)
        best = max(best, value)
        if best >= enough or monotonic() > deadline:
            break
        share = 1.0 / (turn + 1.0)
        new = chain.path(plans)
        weights = (weights[0] + share * (new[0] - weights[0]), weights[1] + share * (new[1] - weights[1]))
    return best * (1 - ROUNDING)


def simulated_lower_bound(
    tables: Sequence[CostTable],
    space_kind: str,
    *,
    known: float = np.inf,
    seconds: float = 4.0,
    deadline: float = np.inf,
) -> float:
    """No feasible plan of any table is faster by its schedule.

    Args:
        tables: One for each pipeline degree, number of chunks and schedule; simulated.
        space_kind: `uniform`, `stagewise` or `layerwise`.
        known: Seconds of a plan: bounds of outer choices need not exceed it.
        seconds: Time for the bounds from paths; the outer choice of the least bound comes first.
        deadline: `time.monotonic()` at which they end in any case.
    """
    deadline, tables = min(monotonic() + seconds, deadline), [table.unburdened() for table in tables]
    bounds = [
        (float(b), n, o)
        for n, t in enumerate(tables)
        for o, b in enumerate(outer_lower_bounds(t, space_kind))
    ]
    done: list[float] = []
    while bounds:
        bounds.sort()
        least, number, outer = bounds[0]
        if least >= min([known, *done]) or monotonic() > deadline:
            break
        better = chain_bound(tables[number], outer, enough=known, deadline=deadline)
        done.append(max(least, better))
        del bounds[0]
    return min([known, *done, *(bound for bound, _, _ in bounds)])
