import pytest
import torch

from darts_parallel.bilevel._quantize import (
    GradientReducer,
    flatten_layer,
    lossy_sum,
    round_blocks,
    straight_through_sum,
    unflatten_layer,
)
from darts_parallel.cost.collectives import wire_bytes


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_errs_by_at_most_half_a_level_of_its_block(bits: int, seed: int) -> None:
    values = numbers(seed, 3, 200)
    blocks = torch.nn.functional.pad(values, (0, 56)).view(3, 4, 64)
    half = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1) / 2
    error = (
        torch.nn.functional.pad(round_blocks(values, bits) - values, (0, 56)).view(3, 4, 64).abs()
    )
    assert (error <= half * (1 + 1e-5)).all()


def test_rounding_twice_is_rounding_once_and_zeros_stay_zero() -> None:
    per_iteration = round_blocks(numbers(0, 2, 128), 4)
    torch.testing.assert_close(round_blocks(per_iteration, 4), per_iteration)
    assert not round_blocks(torch.zeros(2, 70), 2).any()


def test_sixteen_bits_and_single_ranks_are_exact() -> None:
    partials = numbers(0, 4, 100)
    assert torch.equal(lossy_sum(partials, 16), partials.sum(0))
    assert torch.equal(lossy_sum(partials[:1], 2), partials[0])
    assert wire_bytes(4.0, torch.tensor([16, 4])).tolist() == [4.0, 4.25 / 8]


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
    torch.testing.assert_close(
        delivered + residual[:-1].mean(0) + residual[-1], sent, rtol=1e-4, atol=1e-4
    )


def test_flattening_a_layer_loses_nothing() -> None:
    gradients = {"0.a": numbers(0, 8, 3, 4), "0.b": numbers(1, 8, 5)}
    flat = flatten_layer(gradients, ["0.a", "0.b"])
    back = unflatten_layer(flat[2], {name: g[0] for name, g in gradients.items()}, ["0.a", "0.b"])
    assert all(torch.equal(back[name], gradients[name][2]) for name in gradients)


def test_smaller_blocks_err_less_and_send_more_scales() -> None:
    values = numbers(0, 4, 512) * torch.linspace(0.1, 3.0, 512)
    assert (round_blocks(values, 4, 32) - values).norm() < (
        round_blocks(values, 4, 256) - values
    ).norm()
    assert wire_bytes(2.0, torch.tensor(4), 32) == 4.5 / 8 > wire_bytes(2.0, torch.tensor(4), 256)
