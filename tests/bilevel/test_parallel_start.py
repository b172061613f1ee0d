import torch

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.parallel_start import ParallelStarts
from darts_parallel.bilevel.transformer import plan_loss
from experiments.parallel_start import ARMS, StartOptions, final_loss
from tests.support.bilevel_tiny import corpus, tiny_settings

PLAN = (Candidate(2, 4),) * 2


def starts(count: int, **changes: float) -> ParallelStarts:
    return ParallelStarts.initial(tiny_settings(**changes), PLAN, count, seed=0)


def test_a_batch_of_starts_trains_each_as_if_it_were_alone() -> None:
    both = starts(2)
    tokens = sample(corpus().train, 16, 8, torch.Generator().manual_seed(1))
    both.advance(corpus().train)
    assert not torch.equal(both.weights["head"][0], both.weights["head"][1])
    alone = starts(1)
    alone.weights = {name: w[:1].clone() for name, w in starts(2).weights.items()}
    weights = {name: w[0].clone().requires_grad_() for name, w in starts(2).weights.items()}
    gradient = torch.autograd.grad(plan_loss(weights, tokens[:8], PLAN), tuple(weights.values()))
    moments = [mean[0] for mean, _ in both.optimizer.moments]
    for mean, exact in zip(moments, gradient, strict=True):
        torch.testing.assert_close(mean, 0.1 * exact, rtol=1e-4, atol=1e-7)


def test_the_filter_waits_for_the_first_steep_drop() -> None:
    batch = starts(4)
    batch.advance(corpus().train)
    assert not batch.filter(corpus().train, 2)
    assert batch.filtered_at is None


def test_the_filter_keeps_the_best_and_resamples_around_them() -> None:
    batch = starts(4)
    batch.advance(corpus().train)
    batch.losses = torch.tensor([2.0, 1.0, 1.5, 2.5])
    batch.gradient_norms = torch.tensor([1.0, 4.0, 3.0, 2.0])
    before = {name: w.clone() for name, w in batch.weights.items()}
    assert batch.filter(corpus().train, 2)
    for name in ("0.up", "head"):
        assert torch.equal(batch.weights[name][:2], before[name][[1, 2]])
        distance = (batch.weights[name][2] - before[name][1]).std() / before[name][1].std()
        assert 0.01 < float(distance) < 0.03
    assert not batch.filter(corpus().train, 2)


def test_the_best_start_goes_on_alone_with_its_moments() -> None:
    batch = starts(3)
    batch.advance(corpus().train)
    batch.losses = torch.tensor([2.0, 1.0, 3.0])
    weights, moments = batch.weights["head"][1].clone(), batch.optimizer.moments[0][0][1].clone()
    batch.keep_best()
    assert torch.equal(batch.weights["head"][0], weights)
    assert torch.equal(batch.optimizer.moments[0][0][0], moments)
    batch.advance(corpus().train)
    assert batch.evaluate(sample(corpus().validation, 4, 8, batch.generator)).shape == (1,)


def test_every_arm_of_the_experiment_spends_its_evaluations_and_chooses_after_the_drop() -> None:
    options = StartOptions(starts=2, evaluations=24)
    settings = tiny_settings(width=16, learning_rate=2e-2, global_batch_size=16, context=8)
    for arm in ARMS:
        loss, chosen = final_loss(arm, settings, corpus(), options)
        assert loss < 5.6  # of 256 equally likely bytes
        assert (chosen == 0) == (arm == "single") or arm != "best_at_once"
    assert final_loss("best_at_once", settings, corpus(), options)[1] == 1
