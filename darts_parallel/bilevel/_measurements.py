"""The gradient noise scale: the batch size beyond which more sequences hardly save steps.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1. The expected squared norm of a gradient of
B sequences is `|G|^2 + trace / B`; two batch sizes give two equations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from statistics import linear_regression

from torch import Tensor


@dataclass
class NoiseScale:
    """Moving averages of `|G|^2` and of the trace of the covariance of one sequence's gradient.

    Each is unbiased but noisy (one may even be negative), so both are averaged before the ratio.
    """

    decay: float
    square: float = 0.0
    trace: float = 0.0

    def update(
        self,
        small_square: float,
        large_square: float,
        small: int,
        large: int,
    ) -> None:
        """Take in one step.

        Args:
            small_square: Mean squared gradient norm of groups of `small` sequences.
            large_square: Squared norm of the gradient of all `large` sequences.
            small: Sequences of one group.
            large: Sequences of the batch, more than `small`.
        """
        # in units of the step's own gradient: gradients shrink fast, and old large ones would count most
        square, trace = unbiased(small_square / large_square, 1.0, small, large)
        keep = self.decay
        self.square = keep * self.square + (1.0 - keep) * square
        self.trace = keep * self.trace + (1.0 - keep) * trace

    @property
    def sequences(self) -> float | None:
        """B_noise in sequences; None before the averages are both positive."""
        if self.square <= 0.0 or self.trace <= 0.0:
            return None
        return self.trace / self.square


def unbiased(
    small_square: float,
    large_square: float,
    small: int,
    large: int,
) -> tuple[float, float]:
    """Return unbiased estimates of `|G|^2` and of the trace (equations A.2 and A.3)."""
    square = (large * large_square - small * small_square) / (large - small)
    trace = (small_square - large_square) / (1.0 / small - 1.0 / large)
    return square, trace


def squared_norms(gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the mean squared norm over groups, and the squared norm of the mean gradient.

    Args:
        gradients: By weight, each of shape `(G, ...)`.
    """
    small = sum(float(g.flatten(1).square().sum(1).mean()) for g in gradients.values())
    large = sum(float(g.mean(0).square().sum()) for g in gradients.values())
    return small, large


MIN_POINTS = 4


def nats_per_efold(curve: Sequence[tuple[int, float]]) -> float | None:
    """Fit a line through the last half of a run (steps from t/2 to t) against the logarithm of the step.

    Args:
        curve: Step (from 1) and loss in nats, steps rising.

    Returns:
        Nats by which the loss falls while the steps grow by e; None before there are enough points, or where
        the loss does not fall.
    """
    recent = [(log(step), loss) for step, loss in curve if 2 * step >= curve[-1][0]]
    if len(recent) < MIN_POINTS:
        return None
    slope = linear_regression(*zip(*recent, strict=True)).slope
    return -slope if slope < 0.0 else None


QUARTER = log(4.0)
"""Logarithm of steps before the end of a curve over which `log_delay` reads it."""


def log_delay(
    curve: Sequence[float],
    behind: float,
    end: float,
) -> float:
    """Return the log slowdown of a training that is some nats behind a known one.

    The known curve is read as a parabola in the logarithm of the step over its last three quarters, and asked
    when it had the loss of the other. A straight rate of exchange would not do: the curve is several times as
    steep where the other training stands as where it is itself.

    Args:
        curve: Losses of the known training, nats, from step 1 on.
        end: Step at which the other training is behind by so much.

    Returns:
        0 where it is ahead: luck is no gain.

    Errors:
        ValueError: the curve has fewer than `MIN_POINTS` steps.
    """
    if len(curve) < MIN_POINTS:
        raise ValueError(f"a curve of {len(curve)} steps has no slope")
    if behind <= 0.0:
        return 0.0
    first = max(int(len(curve) / exp(QUARTER)), 1)
    place = [log(step) - log(end) for step in range(first, len(curve) + 1)]
    line, slope, bend = _least_squares(place, curve[first - 1 :])
    # bend x^2 + slope x = behind, at the root left of the vertex
    inside = slope * slope + 4.0 * bend * behind
    if slope < 0.0 <= inside and bend > 0.0:
        return float(2.0 * behind / (inside**0.5 - slope))
    # a loss that does not fall says nothing of steps; its whole height stands for one e-fold then
    return behind / -line if line < 0.0 else behind / curve[-1]


def _least_squares(place: Sequence[float], loss: Sequence[float]) -> tuple[float, float, float]:
    """Fit a line and a parabola: the slope of the line, and slope (at 0) and bend of the parabola.

    Lines and exact sums serve, since LAPACK's solution of equal numbers differs in the last bit with the
    place of its arrays in memory, and equal seeds must give equal plans.

    Args:
        place: At least three different numbers.
    """
    line = linear_regression(place, loss).slope
    chord = linear_regression(place, [x * x for x in place])
    # what squares have beyond a line
    rest = [x * x - chord.slope * x - chord.intercept for x in place]
    bend = fsum(x * y for x, y in zip(rest, loss, strict=True)) / fsum(x * x for x in rest)
    return line, line - bend * chord.slope, bend
