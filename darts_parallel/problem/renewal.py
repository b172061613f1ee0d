"""Goodput: the share of its time in which a job on nodes that fail trains.

The model is a Markov renewal process.
- Every running node fails at a constant rate. Idle nodes do not fail.
- A repair takes an exponential time, whatever else is repaired. The node is a spare again.
- The job trains `interval` seconds, then stands still for `write` seconds, and so on.
- A failure loses what follows the last finished write. It may come during a write or a restart, too.
- The job restarts in `restart` seconds on the nodes that are left.
- With fewer nodes than the plan needs, the job waits for a repair, or goes on with a smaller plan.
- A job on a smaller plan restarts from its last write as soon as all nodes of the plan are back.

Nodes in repair are a birth-death chain, whose stationary shares are products of rates. The time from
a restart to the next is of phase type: with the generator Q within such a period, `a exp(Q t) 1` of
the periods that start in a second last t. Summed over the ends of cycles,
`t = restart + k (interval + write)`, these are the finished cycles of a second:
`a exp(Q restart) E (1 - E)^-1 1` with `E = exp(Q (interval + write))`.

For a job that only waits, Q is minus the rate of failures. This is Daly's complete formula (Future
Generation Computer Systems 22, 2006, doi 10.1016/j.future.2004.11.016) times one minus Erlang's loss.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

MOST_LOST = 128
"""Nodes below the plan's number at which a job on fewer nodes waits, too."""


@dataclass(frozen=True)
class SmallerPlan:
    """A plan on fewer nodes."""

    nodes: int
    slowdown: float
    """Its seconds per iteration, relative to the plan's."""


@dataclass(frozen=True)
class FailingJob:
    """A job on nodes that fail; times in seconds."""

    nodes: int
    """Nodes of the plan."""
    node_rate: float
    """Failures of a running node a second."""
    write: float
    """Seconds of a checkpoint."""
    restart: float
    repair: float
    spares: int = 0
    smaller: tuple[SmallerPlan, ...] = ()
    """Plans to go on with where nodes are missing; waiting is always possible."""

    @property
    def best_interval(self) -> float:
        """Return the seconds of training between two writes that leave most time to training.

        That is the maximum of x / (exp(x + d) - 1), x and d being interval and write times the rate of
        failures: `exp(-x - d) = 1 - x`, solved by Lambert's W. Young's formula, sqrt(2 d), is its limit
        for small d.
        """
        from scipy.special import lambertw  # slow to import

        rate = self.nodes * self.node_rate
        d = self.write * rate
        x = sqrt(2.0 * d)
        if d > 1e-8:  # below, the argument of W rounds to -1 / e
            x = 1.0 + float(lambertw(-exp(-1.0 - d)).real)
        return x / rate


@dataclass(frozen=True)
class Goodput:
    """Shares of a job's time, which add up to one, and what they are worth."""

    checkpoint_interval_s: float
    """Training between two checkpoints."""
    training: float
    training_on_fewer_nodes: float
    checkpoints: float
    lost_work: float
    restarts: float
    waiting: float
    useful: float
    """Useful tokens relative to a job that never fails."""
    smaller: SmallerPlan | None = None
    """The plan on fewer nodes; None: the job waits for a repair."""


@dataclass(frozen=True)
class _Periods:
    """Periods between restarts that run one plan."""

    starts: NDArray[np.float64]
    """Periods that start in a second, by level."""
    generator: NDArray[np.float64]
    """Rates between levels within a period, less those of its end."""
    share: float
    """Share of all time."""

    def cycles_and_restarts(self, restart: float, cycle: float) -> tuple[float, float]:
        """Return finished cycles a second, and the share of all time that is restarts."""
        from scipy.linalg import expm  # slow to import

        one = np.ones(len(self.starts))
        survive = expm(self.generator * restart) @ one
        # matrices of one generator commute
        end = expm(self.generator * cycle)
        ends = end @ np.linalg.solve(np.eye(len(one)) - end, survive)
        restarts = np.linalg.solve(self.generator, survive - one)
        return float(self.starts @ ends), float(self.starts @ restarts)


def _shares(job: FailingJob, smaller: SmallerPlan | None, interval: float) -> Goodput:
    """Return the shares of a job that goes on with a smaller plan, or waits where that is None."""
    full = job.spares + 1
    fewer = 0 if smaller is None else min(job.nodes - smaller.nodes, MOST_LOST)
    small_rate = 0.0 if smaller is None else smaller.nodes * job.node_rate
    rate = job.nodes * job.node_rate
    rates = np.array([rate] * full + [small_rate] * fewer)
    repairs = np.arange(1, full + fewer + 1) / job.repair
    odds = np.cumsum(np.concatenate(([0.0], np.log(rates / repairs))))
    levels = np.exp(odds - odds.max())
    levels /= levels.sum()
    flows = levels[:-1] * rates
    running = float(levels[:full].sum())
    plans = [_Periods(np.array([rate * running]), np.array([[-rate]]), running)]
    if fewer:
        back = repairs[full - 1 : -1]
        starts = flows[full - 1 : -1].copy()
        starts[-1] += flows[-1]  # those that had to wait
        generator = np.diag(back[1:], -1) - np.diag(back + small_rate)
        plans.append(_Periods(starts, generator, float(levels[full:-1].sum())))
    cycle = interval + job.write
    found = [each.cycles_and_restarts(job.restart, cycle) for each in plans]
    training, *others = [cycles * interval for cycles, _ in found]
    on_fewer = sum(others)
    writes = sum(cycles for cycles, _ in found) * job.write
    restarts = sum(restarts for _, restarts in found)
    waiting = float(levels[-1])
    lost = sum(each.share for each in plans) - training - on_fewer - writes - restarts
    useful = training if smaller is None else training + on_fewer / smaller.slowdown
    return Goodput(interval, training, on_fewer, writes, lost, restarts, waiting, useful, smaller)


def goodput(job: FailingJob, interval: float | None = None) -> Goodput:
    """Return what failures leave of a job that waits or goes on with fewer nodes, whichever is better.

    Args:
        interval: Seconds of training between two writes; None: `best_interval`, which is exact for a
            job that waits. On smaller plans it lost at most 0.4 % in 80 random jobs.
    """
    interval = job.best_interval if interval is None else interval
    options = [_shares(job, smaller, interval) for smaller in (None, *job.smaller)]
    return max(options, key=lambda option: option.useful)


def best_spares(job: FailingJob) -> int:
    """Return the number of spares with most useful tokens a node, running or spare."""

    def worth(spares: int) -> float:
        return goodput(replace(job, spares=spares)).useful / (job.nodes + spares)

    def enough(spares: int) -> bool:
        return worth(spares + 1) <= worth(spares)

    found = bisect_left(range(2 * job.nodes), True, key=enough)
    # plans on fewer nodes may make a second peak, without spares
    return max((0, found), key=worth)
