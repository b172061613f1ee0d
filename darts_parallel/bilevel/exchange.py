"""The measured exchange rate between loss and steps: nats per e-fold of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

MIN_POINTS = 4


@dataclass(frozen=True)
class Exchange:
    """A straight line through the recent losses against the logarithm of the step."""

    nats_per_efold: float
    """How much the loss falls while the steps grow by e."""
    loss: float
    """Of the line at the last step: the final loss with less noise than the last measurement."""

    def steps_to(self, target: float, steps: int) -> float:
        """Steps after which the line reaches `target`, if it is at `loss` after `steps`."""
        return steps * exp((self.loss - target) / self.nats_per_efold)


def measure(curve: Sequence[tuple[int, float]]) -> Exchange | None:
    """Least squares over the last half of the run (steps from t/2 to t).

    Args:
        curve: Step (from 1) and loss in nats, steps rising.

    Returns:
        None before there are enough points, or where the loss does not fall.
    """
    if not curve:
        return None
    recent = [(log(step), loss) for step, loss in curve if 2 * step >= curve[-1][0]]
    if len(recent) < MIN_POINTS:
        return None
    mean_x = sum(x for x, _ in recent) / len(recent)
    mean_y = sum(y for _, y in recent) / len(recent)
    spread = sum((x - mean_x) ** 2 for x, _ in recent)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in recent) / spread
    if slope >= 0.0:
        return None
    return Exchange(-slope, mean_y + slope * (recent[-1][0] - mean_x))
