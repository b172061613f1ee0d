"""Cost terms whose names others have, and terms that leave less than no seconds."""

from torch import Tensor

from darts_parallel import PlanView


def links(view: PlanView) -> Tensor:
    """Seconds of the iteration: a tenth of the synchronisation."""
    return 0.1 * view.sync_s.sum(1)


def compute(view: PlanView) -> Tensor:
    """Seconds of the iteration: a tenth of the compute of all stages."""
    return 0.1 * view.stage_compute_s.sum(1) * view.num_micro_batches


def huge_discount(view: PlanView) -> Tensor:
    """More seconds than an iteration has."""
    return -100.0 * view.stage_compute_s.sum(1) * view.num_micro_batches


def stage_below_zero(view: PlanView) -> Tensor:
    """More seconds than the first stage has, and less than those of all."""
    return -2.0 * view.stage_compute_s * (view.stage_device == 0)
