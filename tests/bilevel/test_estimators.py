from functools import partial

import pytest
import torch

from darts_parallel.bilevel import transformer
from darts_parallel.bilevel._quantize import BLOCK
from darts_parallel.bilevel._trainer import WeightTrainer, differentiate, gradient_shortfall, slopes
from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.space import EXACT, Candidate, JointSpace
from darts_parallel.bilevel.transformer import Toy, Weights
from darts_parallel.bilevel.trials import Trials, log_slowdown
from tests.support.bilevel_tiny import corpus, tiny_problem, tiny_settings

SETTINGS = tiny_settings()
PAIRS = ((1, 16), (4, 4), (4, 2))


def batch(seed: int, part: str = "train") -> torch.Tensor:
    return sample(getattr(corpus(), part), 8, 8, torch.Generator().manual_seed(seed))


def test_trials_charge_exact_pairs_nothing_and_fewer_bits_at_the_widest_group() -> None:
    space = JointSpace.build(tiny_problem(), [8])
    trials = Trials(SETTINGS, corpus().train)
    found = trials.price_bits(space.free)
    for candidate, prices in (
        (Candidate(2, 1, 4), found.forward[:, found.forward_pairs.index((2, 4))]),
        (Candidate(1, 8, 16, 4), found.gradient[:, found.gradient_pairs.index((4, 4))]),
    ):
        slowdown = log_slowdown(trials._train(candidate), trials.exact)
        assert prices.tolist() == [slowdown / 2] * 2
    for pairs, prices in (
        (found.forward_pairs, found.forward),
        (found.gradient_pairs, found.gradient),
    ):
        for column, (_, bits) in enumerate(pairs):
            assert prices[:, column].min() >= 0.0
            assert bits < 16 or not prices[:, column].any()
            assert len(prices[:, column].unique()) == 1
    # equal seeds see equal batches
    assert trials._train(EXACT) == trials.exact


def test_only_the_end_of_a_trial_counts() -> None:
    exact = [5.0 - 0.01 * step for step in range(10)]
    late = [loss + (0.2 if step >= 8 else 9.0) for step, loss in enumerate(exact)]
    only = [loss + (0.2 if step >= 8 else 0.0) for step, loss in enumerate(exact)]
    assert log_slowdown([late], [exact]) == log_slowdown([only], [exact]) > 0.0
    assert log_slowdown([exact], [late]) == 0.0  # luck is no gain


def test_groups_of_one_rank_send_nothing_and_those_of_two_send_few_bits() -> None:
    alone, two = Candidate(1, 1, 4, 4), Candidate(2, 2, 4, 2)
    assert (alone.forward_pair, alone.gradient_pair) == ((1, 16), (1, 16))
    assert (two.forward_pair, two.gradient_pair) == ((2, 4), (2, 2))


def test_the_learning_rate_rises_linearly_and_then_stays() -> None:
    trainer = WeightTrainer(tiny_settings(learning_rate_warmup=4, learning_rate=0.01), 0)
    for trainer.step, share in ((0, 0.25), (1, 0.5), (3, 1.0), (9, 1.0)):
        assert trainer.learning_rate == pytest.approx(share * 0.01)


def test_the_progress_that_a_pair_lacks_is_a_share() -> None:
    trainer, plan = WeightTrainer(SETTINGS, 0), (Candidate(1, 1),) * 2
    outcome = trainer.learn_plan(batch(1), plan)
    loss = partial(trainer.toy.plan_loss, plan=plan)
    by_weight, _ = differentiate(loss, trainer.weights, batch(1))
    small = {name: 1e-6 * gradient for name, gradient in by_weight.items()}
    found = [gradient_shortfall(trainer, own, outcome.mean, PAIRS) for own in (by_weight, small)]
    assert not found[0][:, 0].any()
    assert found[0][:, 1:].all()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("pairs", [((1, 16), (2, 16)), PAIRS], ids=["exact", "lossy"])
def test_double_backward_is_the_unrolled_derivative(
    pairs: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against central differences of the unrolled loss, with an error for each number of bits held fixed.

    Straight-through treats what rounding took as a constant; held fixed, the unrolled loss is smooth, and its
    derivative is what double backward must give, with lossy candidates, too.
    """
    drawn = torch.Generator().manual_seed(0)
    toy = Toy(SETTINGS.model)
    model = {n: w.double() for n, w in toy.initial_weights(drawn).items()}
    weights = torch.softmax(torch.randn(2, len(pairs), generator=drawn, dtype=torch.float64), -1)
    step = {name: torch.full_like(weight, 0.1) for name, weight in model.items()}
    errors = (
        torch.randn(17, 8, 8, SETTINGS.model.hidden_size, generator=drawn, dtype=torch.float64) / 10
    )

    def held(partials: torch.Tensor, bits: int, block_size: int = BLOCK) -> torch.Tensor:
        return partials.sum(0) + (errors[bits] if bits < 16 else 0.0)

    monkeypatch.setattr(transformer, "lossy_sum", held)

    def loss(weights_: Weights, tokens: torch.Tensor, by_pair: torch.Tensor) -> torch.Tensor:
        return toy.mixed_loss(weights_, tokens, by_pair, pairs)

    train, validation = batch(1), batch(2, "validation")
    found = slopes(loss, model, weights, validation, train, step).by_pair
    first = slopes(loss, model, weights, validation, train).by_pair

    def unrolled(by_pair: torch.Tensor) -> float:
        leaves = {name: w.clone().requires_grad_() for name, w in model.items()}
        inner = torch.autograd.grad(loss(leaves, train, by_pair), tuple(leaves.values()))
        moved = zip(leaves.items(), inner, strict=True)
        return float(
            loss({name: w.detach() - step[name] * g for (name, w), g in moved}, validation, by_pair)
        )

    size = 1e-5
    for block in range(2):
        # along directions that keep the sum of the weights: off the simplex exact sums are scaled, too
        for column in range(1, len(pairs)):
            direction = torch.zeros_like(weights)
            direction[block, column], direction[block, 0] = 1.0, -1.0
            exact = (
                unrolled(weights + size * direction) - unrolled(weights - size * direction)
            ) / (2 * size)
            assert float((found * direction).sum()) == pytest.approx(exact, rel=1e-4, abs=1e-9)
    if pairs is PAIRS:
        assert not torch.allclose(found, first, rtol=1e-3)
