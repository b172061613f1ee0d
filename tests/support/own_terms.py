"""Cost terms as a user writes them: two good ones, and one for each rule that they may break."""

import torch
from torch import Tensor

from darts_parallel import PlanView


def links(view: PlanView) -> Tensor:
    """Seconds of each micro-batch: stages of one node wait for each other's messages."""
    together = view.stage_node.unsqueeze(0) == view.stage_node.unsqueeze(1)
    return 0.5 * view.stage_communication_s @ together.double()


links.non_negative = True  # type: ignore[attr-defined]


def heat(view: PlanView) -> Tensor:
    """Seconds of the iteration: the square of the compute of all stages."""
    busy = view.stage_compute_s.square().sum(1)
    return 0.1 * busy * view.num_micro_batches + 1e-12 * view.device_memory_bytes.sum(1)


heat.non_negative = True  # type: ignore[attr-defined]


def discount(view: PlanView) -> Tensor:
    """Seconds below 0, by the weights of one strategy."""
    return -1e-3 * view.layer_weights[..., 0].sum(1)


def flat(view: PlanView) -> Tensor:
    """No gradient."""
    return torch.ones_like(view.num_micro_batches)


def list_of_seconds(view: PlanView) -> list[float]:
    """No tensor."""
    return view.num_micro_batches.tolist()  # type: ignore[no-any-return]


def by_device(view: PlanView) -> Tensor:
    """One column too many."""
    return torch.cat([view.stage_compute_s, view.sync_s[:, :1]], 1)


def single(view: PlanView) -> Tensor:
    """In single precision."""
    return view.stage_compute_s.float()


def endless(view: PlanView) -> Tensor:
    """Not finite."""
    return view.stage_compute_s / 0.0


def below_zero(view: PlanView) -> Tensor:
    """Negative, and declared not to be."""
    return -view.stage_compute_s


below_zero.non_negative = True  # type: ignore[attr-defined]


def counting(view: PlanView) -> Tensor:
    """Another answer at each call."""
    CALLS.append(1)
    return view.stage_compute_s * len(CALLS)


CALLS: list[int] = []


def of_all(view: PlanView) -> Tensor:
    """The mean over all plans."""
    return view.stage_compute_s.mean().expand_as(view.num_micro_batches)


def wrong_slope(view: PlanView) -> Tensor:
    """A value whose gradient is cut."""
    return view.stage_compute_s * view.stage_compute_s.detach()


def failing(view: PlanView) -> Tensor:
    """A fault of the user's."""
    raise RuntimeError("no such sensor")
