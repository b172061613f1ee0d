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

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from darts_parallel.config import OFFLOADS
from darts_parallel.cost import Array, BatchCost, CostTable, HardPlans, PricedPlan, evaluate_batch
from darts_parallel.plans import Plan

MAX_STEPS = 200
"""Steps of the solver; with 16 devices about 20 are taken."""
PRECISION = 1e-10
"""Relative change of the seconds at which the solver stops."""
LEAST_GAIN = 1e-9
"""Relative gain below which the shares stay as they are."""
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
    closed = simple and not table.pipeline.simulated
    given_shares = table.host is not None and table.host.fractions is not None
    if not plan.offload or not closed or given_shares:
        return plan, entry.time
    given = torch.tensor(plan.offload, dtype=torch.float64)
    programme = _Programme(table, entry.plan)
    shares = programme.solve(given)
    cost = _priced(table, entry.plan, shares)
    seconds = float(cost.iteration_time[0])
    better = seconds < entry.time * (1.0 - LEAST_GAIN)
    if not better or not bool(cost.feasible[0]):
        return plan, entry.time
    pairs = tuple((activation, optimizer) for activation, optimizer in shares.tolist())
    return replace(plan, offload=pairs), seconds


def _priced(table: CostTable, plan: HardPlans, shares: torch.Tensor) -> BatchCost:
    """Price a plan at given shares `(pp, 2)`."""
    assert table.host is not None
    host = replace(table.host, fractions=shares)
    return evaluate_batch(replace(table, host=host), plan)


class _Programme:
    """The programme of one plan; x holds the shares, then the slowest stage and synchronisation."""

    def __init__(self, table: CostTable, plan: HardPlans) -> None:
        self.table = table
        self.plan = plan
        self.size = 2 * table.pp
        self.rest = float(table.num_micro_batches[plan.outer[0]]) - 1.0
        self.scale = 1.0
        """Seconds at the start, which make all values relative."""
        self._known: dict[bytes, tuple[Array, Array]] = {}

    def solve(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the shares at which the solver ends."""
        from scipy.optimize import Bounds, minimize  # a third of a second to import

        table = self.table
        assert table.host is not None
        flat = shares.numpy().ravel()
        values, _ = self._costs(flat)
        stages, syncs, _ = np.split(values, 3)
        slowest = stages.max()
        longest = syncs.max()
        start = np.append(flat, [slowest, longest])
        total = stages.sum() + self.rest * slowest + longest
        self.scale = float(total)
        most = [float(kind in table.host.kinds) for kind in OFFLOADS]
        high = most * table.pp
        high += [np.inf, np.inf]
        settings: dict[str, Any] = {}
        settings["method"] = "SLSQP"
        settings["jac"] = True
        settings["bounds"] = Bounds(0.0, np.array(high))
        limits: dict[str, Any] = {"type": "ineq"}
        limits["fun"] = self._slack
        limits["jac"] = self._slack_slopes
        settings["constraints"] = [limits]
        options = {"maxiter": MAX_STEPS, "ftol": PRECISION}
        settings["options"] = options
        found = minimize(self._seconds, start, **settings)
        ended = found.x[: self.size].reshape(-1, 2)
        ended = ended.clip(0.0, 1.0)
        return torch.from_numpy(ended)

    def _costs(self, x: Array) -> tuple[Array, Array]:
        """Return stage seconds, synchronisation and filled shares `(3 pp,)`, and slopes `(3 pp, 2 pp)`."""
        own = x[: self.size]
        key = own.tobytes()
        if key not in self._known:
            shares = torch.tensor(own.reshape(-1, 2), requires_grad=True)
            cost = _priced(self.table, self.plan, shares)
            filled = cost.memory[0] / self.table.capacity
            parts = (cost.stage_seconds[0], cost.sync_seconds[0], filled)
            slopes = []
            for part in parts:
                # the costs of a device depend on its own shares alone
                total = part.sum()
                (slope,) = torch.autograd.grad(total, shares, retain_graph=True)
                slopes.append(_block_diagonal(slope.numpy()))
            values = torch.cat(parts)
            self._known = {key: (values.detach().numpy(), np.concatenate(slopes))}
        return self._known[key]

    def _seconds(self, x: Array) -> tuple[float, Array]:
        """Return seconds relative to those at the start, and their slopes."""
        values, slopes = self._costs(x)
        pp = self.table.pp
        stages = values[:pp]
        total = stages.sum() + self.rest * x[-2] + x[-1]
        slope = slopes[:pp].sum(axis=0)
        slope = np.append(slope, [self.rest, 1.0])
        return float(total) / self.scale, slope / self.scale

    def _slack(self, x: Array) -> Array:
        """Return what is left below all limits, `(3 pp,)`."""
        values, _ = self._costs(x)
        stages, syncs, filled = np.split(values, 3)
        stages = (x[-2] - stages) / self.scale
        syncs = (x[-1] - syncs) / self.scale
        return np.concatenate([stages, syncs, ROOM - filled])

    def _slack_slopes(self, x: Array) -> Array:
        """Return the slopes of `_slack`, `(3 pp, 2 pp + 2)`."""
        _, slopes = self._costs(x)
        pp = self.table.pp
        limits = np.zeros((3 * pp, 2))
        limits[:pp, 0] = 1.0
        limits[pp : 2 * pp, 1] = 1.0
        result = np.concatenate([-slopes, limits], axis=1)
        result[: 2 * pp] /= self.scale
        return result


def _block_diagonal(slopes: Array) -> Array:
    """Return the slopes of every device's cost, `(pp, 2 pp)`, from those by its own shares `(pp, 2)`."""
    count = len(slopes)
    result = np.zeros((count, count, 2))
    devices = np.arange(count)
    result[devices, devices] = slopes
    return result.reshape(count, -1)
