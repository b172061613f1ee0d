"""Two cost terms of your own, for `cost.term=FILE:FUNCTION`.

PYTHONPATH=examples darts-parallel model=llama2_7b pp=16 cost.term=own_cost_term:shared_links
PYTHONPATH=examples darts-parallel "cost.term=[own_cost_term:shared_links,own_cost_term:power_cap]"
"""

import torch
from torch import Tensor

from darts_parallel import PlanView

LINK_SHARE = 0.5
"""Share of a stage's communication that goes over the links of its node."""
CAP = 0.85
"""Load of a GPU above which its clock falls."""
SLOPE = 0.6
"""Relative loss of clock for each unit of load above the cap."""
SHARPNESS = 50.0
"""Sharpness of the bend at the cap: a smooth function has a gradient everywhere."""


def shared_links(view: PlanView) -> Tensor:
    """Stages of one node share its links: each waits for the messages of the others, `(B, K)`."""
    together = view.stage_node.unsqueeze(0) == view.stage_node.unsqueeze(1)
    others = together.double() - torch.eye(len(together), dtype=torch.float64)
    return LINK_SHARE * view.stage_communication_s @ others


def power_cap(view: PlanView) -> Tensor:
    """The clock of a GPU falls if it computes nearly all the time, `(B, K)`."""
    seconds = view.stage_compute_s + view.stage_communication_s
    slowest = seconds.amax(1, keepdim=True)
    load = view.stage_compute_s / slowest.clamp(min=1e-30)
    above = torch.nn.functional.softplus(SHARPNESS * (load - CAP)) / SHARPNESS
    return view.stage_compute_s * SLOPE * above


shared_links.non_negative = True  # type: ignore[attr-defined]
power_cap.non_negative = True  # type: ignore[attr-defined]
