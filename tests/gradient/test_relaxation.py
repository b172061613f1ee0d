import pytest
import torch

from darts_parallel.config import SearchConfig
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.relaxation import (
    Schedules,
    geometric,
    smooth_max,
    soft_stages,
    softmax_weights,
    stage_edges,
    straight_through,
)

CENTRES = torch.arange(20) + 0.5


@pytest.mark.parametrize("seed", range(10))
def test_soft_stages_are_contiguous_and_sum_to_one(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    widths = 3 * torch.randn(4, 6, generator=rng, dtype=torch.float64)
    edges = stage_edges(widths, 20)
    assert (edges.diff(dim=-1) > 0).all()
    stages = soft_stages(edges, CENTRES, 0.5)
    torch.testing.assert_close(stages.sum(-1), torch.ones(4, 20, dtype=torch.float64))
    assert (stages > -1e-12).all()
    cold = soft_stages(edges, CENTRES, 1e-6).argmax(-1)
    assert (cold.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("seed", range(10))
def test_smooth_max_lies_above_the_maximum_by_at_most_log_n_over_sharpness(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = torch.rand(5, 7, generator=rng, dtype=torch.float64) * 10.0**seed
    smooth, exact = smooth_max(values, 50.0), values.amax(-1)
    assert (smooth >= exact).all()
    assert (smooth <= exact * (1 + torch.log(torch.tensor(7.0)) / 50 + 1e-12)).all()
    torch.testing.assert_close(smooth_max(values, None), exact)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sharpness", [5.0, 20.0, 220.0])
def test_smooth_max_has_the_slope_of_its_value(seed: int, sharpness: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = 1.0 + 0.3 * torch.rand(6, generator=rng, dtype=torch.float64)
    free = values.clone().requires_grad_()
    smooth_max(free, sharpness).backward()
    step = 1e-6
    slopes = []
    for index in range(6):
        moved = [values.clone(), values.clone()]
        moved[0][index] -= step
        moved[1][index] += step
        low, high = (float(smooth_max(one, sharpness)) for one in moved)
        slopes.append((high - low) / (2 * step))
    assert free.grad is not None
    assert free.grad.tolist() == pytest.approx(slopes, abs=1e-4)


def test_smooth_max_of_zeros_has_a_finite_gradient() -> None:
    values = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    smooth_max(values, 20.0).sum().backward()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("seed", range(5))
def test_forbidden_choices_get_no_weight_and_no_gradient(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 6, generator=rng, dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([True, False, True, True, False, True])
    weights = softmax_weights(logits, allowed, 0.7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, dtype=torch.float64))
    (weights * torch.rand(6, generator=rng, dtype=torch.float64)).sum().backward()
    assert (weights[:, ~allowed] == 0).all()
    assert (logits.grad[:, ~allowed] == 0).all()


def test_straight_through_rounds_forward_and_is_soft_backward() -> None:
    soft = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64, requires_grad=True)
    hard = straight_through(soft)
    torch.testing.assert_close(hard.detach(), torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))
    (hard * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(soft.grad, torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64))


def test_geometric_schedule_meets_both_ends() -> None:
    assert geometric(2.0, 0.05, 0, 300) == 2.0
    assert geometric(2.0, 0.05, 299, 300) == pytest.approx(0.05)
    assert geometric(2.0, 0.05, 0, 1) == 2.0


def test_adam_is_the_adam_of_torch() -> None:
    rng = torch.Generator().manual_seed(1)
    start = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    mine = Adam([(ours, 0.1)], betas=(0.5, 0.999))
    reference = torch.optim.Adam([theirs], lr=0.1, betas=(0.5, 0.999))
    for _ in range(50):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()  # type: ignore[attr-defined]
            (parameter.sin() * parameter).sum().backward()
            optimizer.step()  # type: ignore[attr-defined]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_learning_rates_fall_to_a_twentieth() -> None:
    config = SearchConfig()
    rates = [Schedules.at(config, step, 100).rate for step in range(101)]
    assert rates[:31] == [1.0] * 31
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.05)
