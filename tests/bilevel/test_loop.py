import pytest
import torch

from darts_parallel.bilevel.conclusion import (
    conclude,
    find_learned_optimum,
    fixed_bits_optimum,
    verify,
)
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.problem.problem import load_problem
from tests.support.bilevel_tiny import BILEVEL, corpus, records, tiny_search


def test_logits_stay_where_they_are_during_warm_up() -> None:
    search = tiny_search()
    start = [group.logits.detach().clone() for group in search.upper.groups]
    for _ in range(BILEVEL["warmup_steps"]):
        assert search.step().upper is None
    assert all(
        torch.equal(a, b.logits.detach()) for a, b in zip(start, search.upper.groups, strict=True)
    )
    for _ in range(2):
        search.step()
    assert not any(
        torch.equal(a, b.logits.detach()) for a, b in zip(start, search.upper.groups, strict=True)
    )


def test_equal_seeds_search_alike_to_the_last_bit_and_others_do_not() -> None:
    ends = []
    for seed in (0, 0, 1):
        search = tiny_search(seed=seed, num_steps=9)
        search.run()
        logits = [group.logits.detach() for group in search.upper.groups]
        prices = [search.log_slowdown.forward, search.log_slowdown.gradient]
        ends.append([*search.trainer.weights.values(), *logits, *prices])
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[1], strict=True))
    assert not any(torch.equal(ends[0][i], ends[2][i]) for i in (0, len(search.trainer.weights)))


def test_weights_train_as_the_leading_plan_says_after_the_warm_up() -> None:
    found = records(tiny_search())
    trained = [record.trained for record in found]
    assert all(plan is not None for plan in trained)
    warm = BILEVEL["warmup_steps"]
    assert all(candidate.lossless for plan in trained[:warm] for candidate in plan or ())
    assert any(not candidate.lossless for plan in trained[warm:] for candidate in plan or ())


def test_the_end_of_a_search_is_proven_and_verified_at_its_bits() -> None:
    search = tiny_search()
    search.run()
    found = conclude(search)
    assert found.raw_gap is not None
    assert found.raw_gap >= -1e-12
    assert found.proven
    here = search.problem
    assert evaluate(found.chosen.plan, here).iteration_time_s == pytest.approx(
        found.chosen.seconds, rel=1e-9
    )
    assert evaluate(found.raw.plan, here).iteration_time_s == pytest.approx(
        found.raw.seconds, rel=1e-9
    )
    steps = search.log_slowdown.of_plan(found.chosen.blocks, found.chosen.global_batch_size)
    assert steps == pytest.approx(found.chosen.log_slowdown, abs=1e-12)
    entries = verify(search.space, found.chosen, 30.0)
    assert [entry.name for entry in entries] == ["exhaustive", "dynamic_programming"]
    for entry in entries:
        assert entry.proven
        assert evaluate(entry.plan, here).iteration_time_s == pytest.approx(entry.iteration_time_s)
    # at the bits of the learned optimum no other degrees are faster
    assert entries[1].gap == pytest.approx(0.0, abs=1e-9)
    best = fixed_bits_optimum(
        search.space, found.chosen.blocks, found.chosen.global_batch_size, 30.0
    )
    assert best.seconds == pytest.approx(entries[1].iteration_time_s, rel=1e-9)


def test_a_larger_noise_scale_charges_small_batches_more_steps() -> None:
    search = tiny_search(batch_candidates=(8, 16), num_steps=8)
    search.run()
    search.trainer.noise.square, search.trainer.noise.trace = 1.0, 100.0
    search.step()
    by_batch = search.log_slowdown.by_batch
    assert by_batch[8] > by_batch[16] > 0.0
    assert set(search.space.batch_of) == {8, 16}


@pytest.mark.parametrize("order", ["first", "second"])
def test_a_mixture_prices_lossy_pairs_and_ends_with_a_plan(order: str) -> None:
    search = tiny_search(num_steps=10, estimator="mixture", order=order)
    found = records(search)
    assert found[-1].validation_loss is not None
    lossy = [i for i, (_, bits) in enumerate(search.space.forward_pairs) if bits < 16]
    exact = [i for i, (_, bits) in enumerate(search.space.forward_pairs) if bits == 16]
    assert search.log_slowdown.forward[:, lossy].any()
    # exact parallelism does not change the loss: its degrees cannot be told apart by it
    assert search.log_slowdown.forward[:, exact].abs().max() < 1e-4
    assert conclude(search).chosen.seconds > 0.0
    assert search.trials is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bilevel.num_step=3"], "bilevel.num_step.*try bilevel.num_steps"),
        (["bilevel.num_steps=x"], "bilevel.num_steps=x must be"),
        (["bilevel.order=third"], "bilevel.order=third must be one of first, second"),
        (["bilevel.order=second"], "bilevel.order=second .*try bilevel.estimator=mixture"),
        (["bilevel.variants=[best]"], "bilevel.variants=best must be one of bilevel"),
        (["bilevel.seeds=[]"], "bilevel.seeds and bilevel.variants must each list at least one"),
        (["space.grad_comm_bits=8"], "space.grad_comm_bits=.8. must hold 16"),
        (["space.tp_comm_bits=[16,5]"], "space.tp_comm_bits=5 must be one of"),
        (["training.global_batch_size=12"], "must be a multiple of the 8 GPUs.*try 16"),
        (["model.vocab_size=300"], "model.vocab_size=300 must be 256"),
        (["model.gated_mlp=true"], "model.gated_mlp=True must be False"),
        (["space=uniform"], "space.kind=uniform is not searched.*try layerwise"),
        (["space.cp=null"], "space.cp=null is not searched.*try 1"),
        (["space.cp=[1,2]"], r"space.cp=\[1, 2\] is not searched"),
        (["space.virtual_stages=[1,2]"], "space.virtual_stages=.* is not searched"),
        (["space.shard_size=null"], "space.shard_size=null is not searched"),
        (["cost.pipeline=simulated"], "cost.pipeline=simulated is not searched.*try closed_form"),
        (["search.relaxation=gumbel"], "search.relaxation=gumbel is not searched.*try softmax"),
        (["export=megatron"], "export=megatron is not searched"),
    ],
)
def test_illegal_settings_and_what_is_not_searched_are_refused(
    arguments: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        begin(arguments)


def test_a_device_without_memory_is_refused_before_anything_trains() -> None:
    with pytest.raises(InfeasibleError, match="memory"):
        begin(
            ["cluster.devices.small.memory_GiB=0.0001", "space.pp=1", "space.num_micro_batches=1"]
        )


def test_pins_of_the_space_hold_in_the_plan() -> None:
    search = tiny_search(
        space_pp=2,
        space_zero_stage=1,
        space_recompute="full",
        space_num_micro_batches=2,
        space_tp=2,
    )
    best = find_learned_optimum(search.space, search.log_slowdown, 30.0).plan
    plan = search.space.to_plan(best.table, best.plans)
    assert (plan.pp, plan.num_micro_batches, plan.layers[1].tp) == (2, 2, 2)
    assert {(layer.zero_stage, layer.recompute) for layer in plan.layers} == {(1, "full")}


def begin(arguments: list[str]) -> BilevelSearch:
    problem = load_problem(["experiment=bilevel", *arguments])
    return BilevelSearch(BilevelSettings.of(problem, 0), problem, corpus())
