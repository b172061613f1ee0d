import pytest
import torch

from darts_parallel.bilevel.quantize import (
    GradientReducer,
    Rounding,
    flatten_layer,
    hadamard_matrix,
    lossy_sum,
    round_blocks,
    round_e4m3,
    straight_through_sum,
    unflatten_layer,
)
from darts_parallel.cost.collectives import transmitted_bits


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_errs_by_at_most_half_a_level_of_its_block(bits: int, seed: int) -> None:
    values = numbers(seed, 3, 200)
    blocks = torch.nn.functional.pad(values, (0, 56)).view(3, 4, 64)
    half = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1) / 2
    error = torch.nn.functional.pad(round_blocks(values, bits) - values, (0, 56)).view(3, 4, 64).abs()
    assert (error <= half * (1 + 1e-5)).all()


def test_rounding_twice_is_rounding_once_and_zeros_stay_zero() -> None:
    per_iteration = round_blocks(numbers(0, 2, 128), 4)
    torch.testing.assert_close(round_blocks(per_iteration, 4), per_iteration)
    assert not round_blocks(torch.zeros(2, 70), 2).any()


def test_sixteen_bits_and_single_ranks_are_exact() -> None:
    partials = numbers(0, 4, 100)
    assert torch.equal(lossy_sum(partials, 16), partials.sum(0))
    assert torch.equal(lossy_sum(partials[:1], 2), partials[0])
    assert transmitted_bits(16) == 16
    assert transmitted_bits(4) == 4.25


def test_backward_of_a_lossy_sum_is_that_of_the_exact_sum() -> None:
    partials = numbers(0, 4, 100).requires_grad_()
    weight = numbers(1, 100)
    (gradient,) = torch.autograd.grad((straight_through_sum(partials, 2) * weight).sum(), partials)
    assert torch.equal(gradient, weight.expand(4, 100))


def test_without_rounding_the_reduced_gradient_is_the_mean() -> None:
    gradients = numbers(0, 8, 50)
    reduced = GradientReducer().reduce(gradients, [(8, 16), (4, 16), (1, 2)])
    torch.testing.assert_close(reduced, gradients.mean(0).expand(3, 50))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_feedback_delivers_in_the_long_run_what_was_sent(bits: int) -> None:
    reducer = GradientReducer()
    sent, delivered = torch.zeros(90), torch.zeros(90)
    for step in range(60):
        gradients = numbers(step, 8, 90)
        sent += gradients.mean(0)
        delivered += reducer.reduce(gradients, [(4, bits)])[0]
    # all that is missing lies in the residuals, the ranks' averaged and the owner's
    residual = reducer.residuals[4, bits]
    torch.testing.assert_close(delivered + residual[:-1].mean(0) + residual[-1], sent, rtol=1e-4, atol=1e-4)


def test_without_feedback_small_gradients_would_never_arrive() -> None:
    gradients = torch.full((2, 64), 0.1)
    gradients[:, 0] = 1.0
    reducer = GradientReducer()
    total = sum((reducer.reduce(gradients, [(2, 2)])[0] for _ in range(40)), torch.zeros(64))
    assert not round_blocks(gradients, 2)[:, 1:].any()
    assert (total[1:] > 2.0).all()


def test_flattening_a_layer_loses_nothing() -> None:
    gradients = {"0.a": numbers(0, 8, 3, 4), "0.b": numbers(1, 8, 5)}
    flat = flatten_layer(gradients, ["0.a", "0.b"])
    back = unflatten_layer(flat[2], {name: g[0] for name, g in gradients.items()}, ["0.a", "0.b"])
    assert all(torch.equal(back[name], gradients[name][2]) for name in gradients)


def test_a_rotation_is_its_own_inverse_and_spreads_an_outlier() -> None:
    matrix = hadamard_matrix(32).double()
    torch.testing.assert_close(matrix @ matrix, torch.eye(32, dtype=torch.float64))
    values = numbers(0, 1, 256)
    values[0, ::32] = 30.0
    errors = [
        float((round_blocks(values, 4, Rounding(block=32, hadamard=rotated)) - values)[0, 1:32].norm())
        for rotated in (False, True)
    ]
    assert errors[1] < errors[0]


def test_stochastic_rounding_is_unbiased_and_nearest_is_not() -> None:
    values = torch.full((1, 64), 0.2)
    values[0, 0] = 1.0
    rounding = Rounding(stochastic=True).seeded(0)
    mean = sum(round_blocks(values, 2, rounding) for _ in range(400)) / 400
    assert float((mean - values)[0, 1:].mean().abs()) < 0.01
    assert not round_blocks(values, 2)[0, 1:].any()


def test_smaller_blocks_err_less_and_send_more_scales() -> None:
    values = numbers(0, 4, 512) * torch.linspace(0.1, 3.0, 512)
    small, large = Rounding(block=32), Rounding(block=256)
    assert (round_blocks(values, 4, small) - values).norm() < (round_blocks(values, 4, large) - values).norm()
    assert transmitted_bits(4, small.block) == 4.5 > transmitted_bits(4, large.block)


def test_fp8_is_the_format_that_hardware_has_and_scales_with_its_block() -> None:
    values = torch.cat([numbers(0, 4000) * 40.0, 2.0 ** torch.arange(-12.0, 9.0), torch.tensor([448.0, 0.0])])
    assert torch.equal(round_e4m3(values), values.to(torch.float8_e4m3fn).float())
    small, fp8 = numbers(0, 2, 128) * 1e-3, Rounding(fp8=True)
    sent = round_blocks(small, 8, fp8)
    assert 0.0 < float(((sent - small) / small).abs().max()) < 2.0**-3
    assert float(((sent - small) / small).abs().median()) < 2.0**-4
    torch.testing.assert_close(round_blocks(small * 1e5, 8, fp8), sent * 1e5)
    assert torch.equal(round_blocks(small, 4, fp8), round_blocks(small, 4))
