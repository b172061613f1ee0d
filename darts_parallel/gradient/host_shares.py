"""Shares in host memory of one plan, chosen for all devices together.

While plans are compared, every device takes the shares that cost itself the least seconds
(`OffloadedPlans`). An iteration takes `sum s + (m - 1) max s + max y` with the seconds s of the stages
and y of synchronisation, so a device that is not the slowest one may send activations for nearly
nothing, and one whose y is not the largest optimizer state. The shares of the final plan are therefore
finished by sequential quadratic programming (SLSQP, Kraft 1988) on the gradient of the plan's cost.

Variables: shares f[d] in [0, 1]^2, the slowest stage S, the longest synchronisation Y
Objective: minimise sum s(f) + (m - 1) S + Y
Constraints: s[d](f) <= S, y[d](f) <= Y, bytes[d](f) <= capacity[d]
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.autograd.functional import jacobian

from darts_parallel.config import OFFLOADS
from darts_parallel.cost import (
    COST_TOLERANCE,
    Array,
    BatchCost,
    CostTable,
    HardPlans,
    PricedPlan,
    evaluate_batch,
    float_tensor,
)
from darts_parallel.errors import Entries, remembered
from darts_parallel.plans import Plan

MAX_STEPS = 200
"""Steps of the solver; with 16 devices about 20 are taken."""
PRECISION = 1e-10
"""Relative change of the seconds at which the solver stops."""
ROOM = 1.0 - 1e-9
"""Share of the capacity that may be filled: the solver keeps constraints up to rounding."""


def with_finished_shares(table: CostTable, entry: PricedPlan, plan: Plan) -> tuple[Plan, float]:
    """Return a plan with the best shares of all devices, and its seconds.

    Plans without offloading or with given shares, of simulated or interleaved pipelines and under own
    terms stay as they are.

    Args:
        plan: The plan that the entry holds.
    """
    simple = table.virtual_stages == 1 and table.own is None
    closed = simple and not table.simulated
    given_shares = table.host is not None and table.host.fractions is not None
    if not plan.offload or not closed or given_shares:
        return plan, entry.time
    given = float_tensor(plan.offload)
    programme = _Programme(table, entry.plan)
    shares = programme.solve(given)
    cost = _priced(table, entry.plan, shares)
    seconds = float(cost.fitting_seconds[0])
    if seconds >= entry.time * (1.0 - COST_TOLERANCE):
        return plan, entry.time
    pairs = tuple(map(tuple, shares.tolist()))
    return replace(plan, offload=pairs), seconds


def _priced(table: CostTable, plan: HardPlans, shares: torch.Tensor) -> BatchCost:
    """Price a plan at given shares `(pp, 2)`."""
    assert table.host is not None
    host = replace(table.host, fractions=shares)
    return evaluate_batch(replace(table, host=host), plan)


@dataclass
class _Programme:
    """The programme of one plan; x holds the shares, then the slowest stage and synchronisation."""

    table: CostTable
    plan: HardPlans
    scale: float = 1.0
    """Seconds at the start, which make all values relative."""

    def solve(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the shares at which the solver ends."""
        from scipy.optimize import Bounds, minimize  # a third of a second to import

        table = self.table
        assert table.host is not None
        cost = _priced(table, self.plan, shares)
        longest = [cost.stage_seconds.amax(1), cost.sync_seconds.amax(1)]
        start = torch.cat([shares.flatten(), *longest])
        self.scale = float(self._outcome(start)[0])
        most = [float(kind in table.host.kinds) for kind in OFFLOADS]
        high = most * table.pp
        high += [np.inf, np.inf]
        at = self._known_at
        limits: Entries = {"type": "ineq", "fun": lambda x: at(*x)[0][1:]}
        limits["jac"] = lambda x: at(*x)[1][1:]
        settings: Entries = {"constraints": [limits]}
        settings["jac"] = lambda x: at(*x)[1][0]
        settings["bounds"] = Bounds(0.0, np.array(high))
        settings["options"] = {"maxiter": MAX_STEPS, "ftol": PRECISION}
        found = minimize(lambda x: at(*x)[0][0], start, method="SLSQP", **settings)
        ended = found.x[:-2].reshape(-1, 2)
        ended = ended.clip(0.0, 1.0)
        return torch.from_numpy(ended)

    @remembered
    def _known_at(self, *x: float) -> tuple[Array, Array]:
        """Return the values of `_outcome` and their slopes; the solver asks for both several times."""
        given = float_tensor(x)
        slopes = jacobian(self._outcome, given, vectorize=True)  # type: ignore[no-untyped-call]
        return self._outcome(given).numpy(), slopes.numpy()

    def _outcome(self, x: torch.Tensor) -> torch.Tensor:
        """Return seconds relative to those at the start, then what is left below all limits."""
        slowest = x[-2]
        longest = x[-1]
        cost = _priced(self.table, self.plan, x[:-2].reshape(-1, 2))
        stages = cost.stage_seconds[0]
        rest = float(self.table.num_micro_batches[self.plan.outer[0]]) - 1.0
        total = stages.sum() + rest * slowest + longest
        seconds = [total.reshape(1), slowest - stages, longest - cost.sync_seconds[0]]
        room = ROOM - cost.memory[0] / self.table.capacity
        return torch.cat([torch.cat(seconds) / self.scale, room])
