"""Residual spreads: what the posterior of the parameters does not explain, by how near the measured runs are.

A prediction's logarithm has the variance of its parameters (Laplace) plus that of what no parameter holds:
release, tuning, disturbance, structure. The second is read off runs that were held out, in three steps of
nearness: a software family without any run, a source without any run, a device and software with runs of
their own. It is the smallest spread whose 80 % interval holds 80 % of those runs, a fold counted as the root
of its runs: what is asked for next is one more source, not one more run of the source with the most, and yet
the runs of one source are not all alike.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from experiments.calibration.errors import SMALLEST_GROUP, strategy_group

if TYPE_CHECKING:
    from experiments.calibration.crossvalidation import HeldOut

SHARE = 0.8
"""Of runs that the interval holds."""
NORMAL = 1.2815515655446004
"""Standard deviations of half of an 80 % interval."""
ENOUGH = 8
"""Runs of a device and software from which on their own spread counts more than the wider one."""
FLOOR = 0.015
"""No spread is below the spread of repeats: 1.0 % median, 4.6 % for nine of ten (README of the rows)."""


@dataclass(frozen=True)
class Held:
    """A figure that was predicted without its fold."""

    fold: str
    device: str
    stack: str
    error: float
    """log(predicted / measured)."""
    variance: float
    """Of the logarithm, by the posterior without the fold."""


def spread(held: Sequence[Held]) -> float:
    """The smallest standard deviation, beside those of the parameters, whose interval holds `SHARE`.

    A fold weighs as much as the root of the number of its runs.
    """
    if not held:
        return FLOOR
    runs = Counter(h.fold for h in held)
    needed = sorted((max((h.error / NORMAL) ** 2 - h.variance, FLOOR**2), runs[h.fold] ** -0.5) for h in held)
    inside = np.cumsum([weight for _, weight in needed])
    return float(np.sqrt(needed[int(np.searchsorted(inside, SHARE * (1.0 - 1e-12) * inside[-1]))][0]))


def by_place(near: Sequence[Held], wide: float) -> dict[str, float]:
    """Spreads of every device and software with runs, drawn to that of all where there are few.

    Args:
        near: Runs predicted with other runs of their own software.
        wide: Spread of all of them.
    """
    groups: dict[str, list[Held]] = defaultdict(list)
    for h in near:
        groups[f"{h.device}+{h.stack}"].append(h)
    result = {}
    for name, members in sorted(groups.items()):
        weight = len(members) / (len(members) + ENOUGH)
        result[name] = float(np.exp(weight * np.log(spread(members)) + (1 - weight) * np.log(wide)))
    return result


def covered(held: Sequence[Held], spreads: Sequence[float]) -> NDArray[np.bool_]:
    """Whether each 80 % interval holds its measurement, `(N,)`."""
    half = [NORMAL * (h.variance + s**2) ** 0.5 for h, s in zip(held, spreads, strict=True)]
    return np.array([abs(h.error) <= width for h, width in zip(held, half, strict=True)])


def cross_coverage(held: Sequence[Held]) -> float:
    """Share of held-out runs inside intervals whose spread was read off the other folds alone."""
    spreads = {fold: spread([h for h in held if h.fold != fold]) for fold in {h.fold for h in held}}
    return float(covered(held, [spreads[h.fold] for h in held]).mean())


def pair_spread(results: "Sequence[HeldOut]") -> float:
    """Standard deviation of the error of the difference of two plans of one measured job.

    From the errors of jobs around their own mean: what all plans of a job share does not tell them apart. Of
    every job the width whose 80 % interval holds 80 % of its pairs; of the jobs the median: a sweep of
    fifty plans is one job too.
    """
    jobs: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for result in results:
        held = result.held("seconds")
        if held is not None:
            jobs[strategy_group(result.case.run)].append(held.error)
    widths = [
        float(np.quantile([abs(a - b) for i, a in enumerate(errors) for b in errors[:i]], SHARE))
        for errors in jobs.values()
        if len(errors) >= SMALLEST_GROUP
    ]
    return float(np.median(widths)) / NORMAL if widths else FLOOR
