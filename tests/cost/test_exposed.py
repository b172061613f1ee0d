from dataclasses import replace

import pytest
import torch

from darts_parallel.cost.layer_costs import exposed
from darts_parallel.problem.problem import load_problem

DEVICE = load_problem(["model=toy", "cluster=toy", "training=toy"]).cluster.groups[0].device


@pytest.mark.parametrize("exponent", [1.0, 1.6, 8.0, 64.0])
def test_what_communication_adds_is_exact_and_never_overflows(exponent: float) -> None:
    device = replace(DEVICE, overlap_exponent=exponent)
    compute = torch.tensor([1e-9, 1e-6, 1.0, 3.0, 1e3], dtype=torch.float64)
    communication = torch.tensor([1e6, 1e-3, 1.0, 2.0, 1e-9], dtype=torch.float64)
    found = exposed(compute, communication, device.overlap_exponent)
    assert bool(found.isfinite().all())
    assert bool((found >= (communication - compute).clamp(min=0.0) * (1 - 1e-12)).all())
    assert bool((found <= communication * (1 + 1e-12)).all())
    middle = (1.0**exponent + 1.0**exponent) ** (1 / exponent) - 1.0
    assert float(found[2]) == pytest.approx(middle, rel=1e-12)
