from math import log

import pytest
import torch

from darts_parallel.bilevel._measurements import (
    NoiseScale,
    log_delay,
    nats_per_efold,
    squared_norms,
    unbiased,
)


def test_noise_estimates_solve_their_two_equations_exactly() -> None:
    square, trace = unbiased(4.0 + 30.0 / 2, 4.0 + 30.0 / 16, 2, 16)
    assert (square, trace) == (pytest.approx(4.0), pytest.approx(30.0))


def test_the_noise_scale_of_synthetic_gradients_is_found_without_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.ones(50) * 0.2  # |G|^2 = 2
    noise = NoiseScale(decay=0.995)
    for _ in range(3000):
        single = truth + torch.randn(8, 2, 50, generator=generator)  # trace 50
        small, large = squared_norms({"w": single.mean(1)})
        noise.update(small, large, 2, 16)
    assert noise.sequences == pytest.approx(25.0, rel=0.15)


def test_the_noise_scale_is_unknown_before_the_first_step() -> None:
    assert NoiseScale(decay=0.9).sequences is None


def test_the_exchange_rate_of_a_power_law_in_steps_is_its_slope() -> None:
    exchange = nats_per_efold([(step, 5.0 - 0.35 * log(step)) for step in range(1, 401)])
    assert exchange == pytest.approx(0.35)


def test_the_exchange_rate_is_that_of_the_last_half() -> None:
    curve = [
        (step, 5.0 - (2.0 * log(step) if step < 50 else 0.3 * log(step))) for step in range(1, 101)
    ]
    assert nats_per_efold(curve) == pytest.approx(0.3)


def test_no_exchange_rate_without_points_or_without_progress() -> None:
    assert nats_per_efold([]) is None
    assert nats_per_efold([(1, 3.0), (2, 2.0)]) is None
    for rise in (0.01, 0.0):
        assert nats_per_efold([(step, 2.0 + rise * step) for step in range(1, 50)]) is None


def test_a_training_that_takes_twice_the_steps_is_log_two_behind() -> None:
    """On a curve that is a parabola in the logarithm of steps the delay is exact, small or large."""

    def loss(step: float) -> float:
        return 4.0 - 0.9 * log(step) + 0.06 * log(step) ** 2

    curve = [loss(step) for step in range(1, 101)]
    for factor in (1.1, 2.0, 3.0):
        assert log_delay(curve, loss(90 / factor) - loss(90), 90) == pytest.approx(
            log(factor), rel=1e-6
        )
    # the slope at the end alone would say more: the curve is steeper where the slower training stands
    slope = 0.9 - 2 * 0.06 * log(90)
    assert (loss(45) - loss(90)) / slope > 1.1 * log(2.0)


def test_a_delay_is_never_negative_and_a_curve_that_rises_still_has_one() -> None:
    falling = [5.0 - 0.35 * log(step) for step in range(1, 101)]
    assert log_delay(falling, -0.1, 90) == 0.0
    assert log_delay(falling, 0.07, 90) == pytest.approx(0.2, rel=1e-3)
    assert log_delay([2.0 + 0.01 * step for step in range(1, 50)], 0.1, 40) > 0.0
    with pytest.raises(ValueError, match="3 steps"):
        log_delay([3.0, 2.0, 1.0], 0.1, 3)
