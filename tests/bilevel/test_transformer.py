import pytest
import torch

from darts_parallel.bilevel._quantize import lossy_sum
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.space import Candidate
from darts_parallel.bilevel.transformer import Toy, Weights, mixed_reduce
from darts_parallel.problem.problem import load_problem
from tests.support.bilevel_tiny import OVERRIDES, corpus, tiny_problem, tiny_settings

PROBLEM = tiny_problem(width=32, context=16)
PAIRS = ((1, 16), (4, 16), (2, 8), (4, 4), (4, 2))
SETTINGS = BilevelSettings.of(PROBLEM)
TOY = Toy(SETTINGS.model)


def model(seed: int) -> tuple[Weights, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: w.double() for name, w in TOY.initial_weights(generator).items()}
    return weights, sample(corpus().train, 3, 16, generator)


@pytest.mark.parametrize("seed", range(2))
def test_at_16_bits_all_degrees_agree_to_float_error_in_loss_and_gradient(seed: int) -> None:
    weights, tokens = model(seed)
    results = []
    for tp in (1, 2, 4):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        loss = TOY.plan_loss(leaves, tokens, [Candidate(tp, 8 // tp)] * 2)
        results.append((loss, *torch.autograd.grad(loss, tuple(leaves.values()))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_one_hot_mixture_is_its_candidate() -> None:
    weights, tokens = model(0)
    for index, (tp, bits) in enumerate(PAIRS):
        one_hot = torch.nn.functional.one_hot(torch.tensor([index] * 2), len(PAIRS)).double()
        mixed = TOY.mixed_loss(weights, tokens, one_hot, PAIRS)
        alone = TOY.plan_loss(weights, tokens, [Candidate(tp, 8 // tp, bits)] * 2)
        torch.testing.assert_close(mixed, alone)


def test_a_mixture_weights_gradient_is_the_inner_product_with_what_its_candidate_delivers() -> None:
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(
        4, 2, 3, 32, generator=generator, dtype=torch.float64, requires_grad=True
    )
    upstream = torch.randn(2, 3, 32, generator=generator, dtype=torch.float64)
    count = len(PAIRS)
    weights = torch.full((count,), 1.0 / count, dtype=torch.float64, requires_grad=True)
    mixed = mixed_reduce(partials, PAIRS, weights)
    by_weight, by_partial = torch.autograd.grad((mixed * upstream).sum(), (weights, partials))
    for index, (tp, bits) in enumerate(PAIRS):
        ranks = torch.unflatten(partials.detach(), 0, (tp, -1)).sum(1)
        expected = (lossy_sum(ranks, bits) * upstream).sum()
        torch.testing.assert_close(by_weight[index], expected)
    torch.testing.assert_close(by_partial, upstream.expand_as(partials))


def test_blocks_of_other_models_train_with_sums_at_few_bits() -> None:
    llama = ["gated_mlp=true", "ffn_hidden_size=24", "norm_bias=false", "learned_positions=false"]
    changes = [f"model.{change}" for change in [*llama, "linear_bias=true"]]
    settings = BilevelSettings.of(load_problem([*OVERRIDES, *changes]))
    trainer = WeightTrainer(settings, 0, measure_noise=False)
    before = {name: weight.clone() for name, weight in trainer.weights.items()}
    assert "embedding.positions.weight" not in before
    for _ in range(3):
        trainer.learn_plan(trainer.next_batch(corpus().train), (Candidate(2, 4, 8, 8),) * 2)
    for name in ("blocks.0.mlp.gate.weight", "blocks.1.attention.out.bias", "head.norm.weight"):
        assert not torch.equal(before[name], trainer.weights[name])


def test_a_short_training_beats_the_unigram_entropy() -> None:
    settings = tiny_settings(
        width=32, context=16, global_batch_size=8, learning_rate=2e-2, learning_rate_warmup=5
    )
    trainer = WeightTrainer(settings, 0, measure_noise=False)
    plan = (Candidate(2, 4, 8, 8),) * 2
    losses = [trainer.learn_plan(trainer.next_batch(corpus().train), plan).loss for _ in range(80)]
    shares = torch.bincount(corpus().train.long()).double() / len(corpus().train)
    entropy = float(torch.special.entr(shares).sum())
    assert sum(losses[-20:]) / 20 < entropy - 0.1
