from typing import Any

import pytest
import torch
from darts_parallel.bilevel.logits import Progress
from darts_parallel.bilevel.rollout import gradient_costs, sum_costs

from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.errors import ConfigError
from darts_parallel.problem.problem import load_problem
from tests.support.bilevel_tiny import BILEVEL, corpus, records, same, tiny_search


def upper_of(search: BilevelSearch) -> Any:
    found = [record.upper for record in records(search) if record.upper is not None]
    assert found
    return found


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("mix", ["collective", "block"])
def test_lossless_candidates_get_no_loss_gradient_beyond_float_error(order: str, mix: str) -> None:
    """Exact parallelism does not change the loss, so the loss cannot choose between its degrees."""
    common: dict[str, Any] = {"order": order, "mix": mix, "grad_bits": (16,), "tp": (1, 2, 4), "num_steps": 9}
    exact = upper_of(tiny_search(tp_bits=(16,), **common))
    lossy = upper_of(tiny_search(tp_bits=(16, 2), **common))
    largest = max(float(upper.loss_part.abs().max()) for upper in exact)
    assert largest < 1e-5
    assert max(float(upper.loss_part.abs().max()) for upper in lossy) > 20 * largest
    assert min(float(upper.time_part.abs().max()) for upper in exact) > 1e-3


def test_lossless_candidates_of_a_lossy_space_share_one_loss_gradient_per_unit_of_weight() -> None:
    search = tiny_search()
    upper = upper_of(search)[0]
    lossless = torch.tensor([c.lossless for c in search.choices.candidates])
    rows = upper.loss_part[:, lossless]
    # at nearly equal weights a softmax passes each candidate its own merit
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=0.02, atol=1e-6)
    assert float(upper.loss_part[:, ~lossless].std()) > 10 * float((rows - rows.mean(1, keepdim=True)).std())


def test_the_finite_difference_is_the_unrolled_derivative() -> None:
    """Against autograd through the weight step, in float64 and at lossless, smooth candidates."""
    search = tiny_search(order="second", mix="block")
    for _ in range(9):
        search.step()
    trainer, upper = search.trainer, search.upper
    trainer.weights = {name: w.double() for name, w in trainer.weights.items()}
    trainer.optimizer.moments = [(m.double(), s.double()) for m, s in trainer.optimizer.moments]
    generator = torch.Generator().manual_seed(0)
    train, validation = (sample(corpus().train, 8, 8, generator) for _ in range(2))
    # at 16 bits nothing is rounded; weights that do not sum to 1 scale outputs, so the loss has a gradient
    lossless = [i for i, c in enumerate(search.choices.candidates) if c.tp_comm_bits == 16]
    weights = torch.zeros(2, len(search.choices.candidates), dtype=torch.float64)
    weights[:, lossless] = 0.9 / len(lossless)
    _, found, _ = upper._validation(weights, trainer, (train, validation))

    leaf = weights.clone().requires_grad_()
    leaves = {name: w.clone().requires_grad_() for name, w in trainer.weights.items()}
    inner = torch.autograd.grad(upper.loss(leaf)(leaves, train), tuple(leaves.values()), create_graph=True)
    scale = trainer.preconditioner()
    steps = zip(leaves.items(), inner, strict=True)
    ahead = {name: w - trainer.learning_rate * scale[name] * g for (name, w), g in steps}
    (exact,) = torch.autograd.grad(upper.loss(leaf)(ahead, validation), leaf)
    torch.testing.assert_close(found[:, lossless], exact[:, lossless], rtol=1e-3, atol=1e-6)


def test_logits_stay_where_they_are_during_warm_up() -> None:
    search = tiny_search()
    start = search.logits.choices.detach().clone()
    for _ in range(BILEVEL["warmup_steps"]):
        assert search.step().upper is None
    assert torch.equal(search.logits.choices.detach(), start)
    for _ in range(4):
        search.step()
    assert not torch.equal(search.logits.choices.detach(), start)


def test_equal_seeds_search_alike_to_the_last_bit_and_others_do_not() -> None:
    states = []
    for seed in (0, 0, 1):
        search = tiny_search(seed=seed)
        search.run()
        states.append(search.state())
    assert same(states[0], states[1])
    assert not torch.equal(states[0]["logits"][0], states[2]["logits"][0])


def test_progress_of_a_gradient_that_is_half_as_good_doubles_the_steps() -> None:
    progress = Progress(0.9)
    progress.update(torch.tensor([[1.0, 0.5]]), 0.0)
    whole, half = (progress.log_steps(torch.tensor([w])) for w in ([1.0, 0.0], [0.0, 1.0]))
    assert float((half - whole).exp()) == pytest.approx(2.0)


def test_unmeasured_or_negative_progress_pulls_nowhere() -> None:
    weights = torch.tensor([[0.5, 0.5]], requires_grad=True)
    progress = Progress(0.9)
    assert not torch.autograd.grad(progress.log_steps(weights), weights)[0].any()
    progress.update(torch.tensor([[-1.0, -0.5]]), 0.0)
    assert not torch.autograd.grad(progress.log_steps(weights), weights)[0].any()


def test_trials_price_the_bits_and_single_steps_share_the_price_among_blocks() -> None:
    progress = Progress(0.9)
    progress.update(torch.tensor([[1.0, 0.5], [1.0, 0.9]]), 0.0)
    for cost in (0.2, 0.4):
        progress.add_trial(torch.tensor([0.0, cost]))
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert float(progress.log_steps(weights)) == pytest.approx(0.3 / 6)
    assert float(progress.log_steps(torch.tensor([[0.0, 1.0]] * 2))) == pytest.approx(0.3)
    assert float(progress.log_steps(torch.tensor([[1.0, 0.0]] * 2))) == 0.0


def test_a_trial_leaves_the_training_as_it_was_and_charges_nothing_for_exact_gradients() -> None:
    search = tiny_search()
    for _ in range(4):
        search.step()
    before = search.trainer.state()
    plan, pairs = search.plan().blocks, [(8, 16), (8, 2), (1, 16)]
    costs = gradient_costs(search.trainer, plan, corpus().train, pairs, 3, 0.3)
    assert same(before, search.trainer.state())
    assert costs[8, 16] == costs[1, 16] == 0.0
    assert costs[8, 2] != 0.0
    assert costs == gradient_costs(search.trainer, plan, corpus().train, pairs, 3, 0.3)


def test_a_trial_of_sums_leaves_the_training_as_it_was_and_charges_more_for_fewer_bits() -> None:
    search = tiny_search()
    for _ in range(4):
        search.step()
    before, pairs = search.trainer.state(), [(2, 16), (2, 4), (2, 2)]
    costs = sum_costs(search.trainer, 2, corpus().train, pairs, 6, 0.3)
    assert same(before, search.trainer.state())
    assert costs[2, 16] == 0.0
    assert costs[2, 2] > costs[2, 4]
    # a cost is a distance in nats over the exchange rate
    twice = sum_costs(search.trainer, 2, corpus().train, pairs, 6, 0.15)
    assert twice[2, 2] == pytest.approx(2.0 * costs[2, 2])


def test_without_trials_the_mixture_prices_the_sums_and_with_them_the_trials_do() -> None:
    def sums_part(trial_steps: int) -> torch.Tensor:
        search = tiny_search(trial_steps=trial_steps)
        record = search.step()
        while record.upper is None:
            record = search.step()
        assert (record.sum_costs is None) == (trial_steps == 0)
        return record.upper.loss_part

    mixture, tried = sums_part(0), sums_part(2)
    assert mixture.any()
    assert tried.any()
    assert not torch.equal(mixture, tried)


def test_a_larger_noise_scale_pulls_to_larger_batches() -> None:
    search = tiny_search(batch_candidates=(8, 16, 64))
    for _ in range(9):
        search.step()
    batches = tuple(sample(text, 8, 8, search.generator) for text in (corpus().train, corpus().validation))
    trainer, pairs = search.trainer, len(search.choices.gradient_pairs)
    sizes = [sum(trainer.weights[name].numel() for name in trainer.block_names(i)) for i in range(2)]
    delivered = [torch.zeros(pairs, size) for size in sizes]
    pulls = []
    for trace in (1e-6, 1e6):
        search.trainer.noise.square, search.trainer.noise.trace = 1.0, trace
        upper = search.upper.gradients(search.logits, 1.0, search.trainer, batches, delivered, 0.3)
        pulls.append(upper.batch)
    assert pulls[0][2] > pulls[0][0]
    assert pulls[1][2] < pulls[1][0]


def test_the_plan_has_a_candidate_for_each_block_and_a_batch() -> None:
    search = tiny_search(batch_candidates=(8, 16))
    plan = search.run()
    assert len(plan.blocks) == 2
    assert set(plan.blocks) <= set(search.choices.candidates)
    assert plan.global_batch_size in (8, 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bilevel.num_step=3"], "bilevel.num_step.*nearest legal: bilevel.num_steps"),
        (["bilevel.num_steps=x"], "bilevel.num_steps=x must be"),
        (["bilevel.order=third"], "bilevel.order=third must be one of first, second"),
        (["bilevel.arms=[best]"], "bilevel.arms=best must be one of bilevel"),
        (["bilevel.seeds=[]"], "bilevel.seeds and bilevel.arms must each list at least one"),
        (["space.tp=3"], "space.tp=3 must divide the heads"),
        (["space.grad_comm_bits=8"], "space.grad_comm_bits=.8. must hold 16"),
        (["space.tp_comm_bits=[16,5]"], "space.tp_comm_bits=5 must be one of"),
        (["training.global_batch_size=12"], "must be a multiple of the 8 GPUs.*nearest legal: 16"),
        (["bilevel.temperature=[1.0]"], "bilevel.temperature"),
        (["model.vocab_size=300"], "model.vocab_size=300 must be 256"),
        (["model.gated_mlp=true"], "model.gated_mlp=True must be False"),
    ],
)
def test_illegal_settings_are_refused_with_a_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        searched(arguments)


def searched(arguments: list[str]) -> BilevelSearch:
    problem = load_problem(["experiment=bilevel", *arguments])
    return BilevelSearch(BilevelSettings.of(problem, 0), problem, corpus())
