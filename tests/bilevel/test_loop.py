from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

from darts_parallel.bilevel._trainer import WeightStep, WeightTrainer
from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.loop import BilevelLoop
from darts_parallel.bilevel.optimum import verify
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.problem.problem import load_problem
from tests.support.bilevel_tiny import BILEVEL, corpus, records, tiny_loop


def weights(loop: BilevelLoop) -> list[torch.Tensor]:
    return [weight.clone() for weight in loop.trainer.weights.values()]


def logits(loop: BilevelLoop) -> list[torch.Tensor]:
    return [group.logits.detach().clone() for group in loop.upper.groups]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_logits_stay_where_they_are_during_warm_up() -> None:
    loop = tiny_loop()
    start = logits(loop)
    for _ in range(BILEVEL["warmup_steps"]):
        assert loop.step().upper is None
    assert equal(start, logits(loop))
    assert loop.step().upper is not None
    assert not equal(start, logits(loop))


def test_logits_step_once_for_several_weight_steps() -> None:
    found = records(tiny_loop(logit_every=3, num_steps=13))
    assert [record.step for record in found if record.upper is not None] == [7, 10, 13]


def test_equal_seeds_search_alike_to_the_last_bit_and_others_do_not() -> None:
    ends = []
    for seed in (0, 0, 1):
        loop = tiny_loop(seed=seed, num_steps=9)
        loop.run()
        prices = [loop.prices.forward, loop.prices.gradient]
        ends.append([*weights(loop), *logits(loop), *prices])
    assert equal(ends[0], ends[1])
    assert not torch.equal(ends[0][0], ends[2][0])
    assert not torch.equal(ends[0][-3], ends[2][-3])


def test_frozen_weights_and_random_logits_stay_while_the_rest_moves() -> None:
    for control in ("frozen_weights", "no_weight_step", "random_logits"):
        loop = tiny_loop(control=control, batch_candidates=(8, 16))
        first = logits(loop)
        for _ in range(BILEVEL["warmup_steps"]):
            loop.step()
        before = weights(loop)
        noise = loop.trainer.noise.trace
        for _ in range(3):
            loop.step()
        frozen = control != "random_logits"
        assert equal(before, weights(loop)) == frozen
        assert equal(first, logits(loop)) != frozen
        assert (loop.trainer.noise.trace == noise) == (control == "no_weight_step")
        assert loop.trainer.step == BILEVEL["warmup_steps"] + 3


def test_the_end_of_a_loop_is_a_plan_that_the_exact_methods_check_at_the_learned_prices() -> None:
    loop = tiny_loop()
    loop.run()
    (phase,) = loop.phases()
    found = phase.plan
    assert (phase.from_step, found.batch, found.proven) == (0, BATCH, True)
    assert evaluate(found.plan, loop.problem).iteration_time_s == pytest.approx(found.seconds)
    steps = loop.prices.of_plan(found.blocks, BATCH)
    assert steps == pytest.approx(found.log_slowdown, abs=1e-12)
    entries = verify(loop.space, loop.prices, found, 30.0)
    assert [entry.name for entry in entries] == ["exhaustive", "dynamic_programming"]
    assert all(entry.proven for entry in entries)
    assert entries[1].gap == pytest.approx(0.0, abs=1e-9)
    assert entries[0].gap <= 1e-9


BATCH = 8
LARGE = 64
EXACT_BITS = {"tp_bits": (16,), "grad_bits": (16,)}


def test_a_look_ahead_decides_the_batch_and_the_batch_the_plan_phase_by_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"batch_candidates": (8, 64), "look_ahead_every": 1, "look_ahead_steps": 4}
    loop = tiny_loop(num_steps=20, warmup_steps=2, **given, **EXACT_BITS)
    loop.tried = loop.space.free
    lost = {8: 1.0, 64: 2.0}

    def loss(_: BilevelLoop, trainer: WeightTrainer, __: torch.Tensor) -> float:
        return 3.0 if trainer is loop.trainer else lost[trainer.batch]

    monkeypatch.setattr(BilevelLoop, "_validate", loss)
    for _ in range(4):
        loop.step()
    assert loop.trainer.batch == 8
    pace = loop.best_plan(LARGE).seconds / loop.best_plan(BATCH).seconds
    # half of the gain in equal seconds is twice the seconds, in first order a log slowdown of a half
    assert loop.prices.by_batch == pytest.approx({BATCH: 0.0, LARGE: 0.5 - log(pace)})
    lost[64] = -20.0
    for _ in range(3):
        loop.step()
    assert loop.trainer.batch == 64
    first, last = loop.phases()
    assert first.from_step == 0
    assert last.from_step == 5
    assert [phase.plan.batch for phase in (first, last)] == [8, 64]
    for phase in (first, last):
        here = phase.plan.problem(loop.problem)
        assert here.training.global_batch_size == phase.plan.batch
        seconds = evaluate(phase.plan.plan, here).iteration_time_s
        assert seconds == pytest.approx(phase.plan.seconds)


def test_the_newest_look_ahead_counts_most_and_one_without_progress_changes_no_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"batch_candidates": (8, 64), "look_ahead_every": 1, "look_ahead_steps": 1}
    loop = tiny_loop(num_steps=20, warmup_steps=1, **given, **EXACT_BITS)
    loop.tried = loop.space.free
    gains = {8: 1.0, 64: 2.0}

    def loss(_: BilevelLoop, trainer: WeightTrainer, __: torch.Tensor) -> float:
        return 0.0 if trainer is loop.trainer else -gains[trainer.batch]

    monkeypatch.setattr(BilevelLoop, "_validate", loss)
    loop.step()
    loop.step()
    assert loop.gains == {BATCH: 1.0, LARGE: 2.0}
    gains.update({8: 2.0, 64: 0.0})
    loop.step()
    assert loop.gains == pytest.approx({BATCH: 1.4, LARGE: 1.2})
    before = loop.prices.by_batch
    gains.update({8: -100.0})
    loop.step()
    assert loop.prices.by_batch == before
    assert len(loop.measured) == 2


@pytest.mark.parametrize("control", ["none", "frozen_weights"])
def test_copies_train_for_equal_predicted_seconds_and_leave_the_loop_as_it_is(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"batch_candidates": (8, 64), "look_ahead_steps": 12}
    loop = tiny_loop(control=control, **given, **EXACT_BITS)
    loop.tried = loop.space.free
    steps: dict[int, int] = {}
    moved: list[bool] = []
    real = WeightTrainer.learn_plan

    def counted(trainer: WeightTrainer, *arguments: Any) -> WeightStep:
        before = trainer.weights["head.output.weight"].clone()
        done = real(trainer, *arguments)
        if trainer is not loop.trainer:
            steps[trainer.batch] = steps.get(trainer.batch, 0) + 1
            moved.append(not torch.equal(before, trainer.weights["head.output.weight"]))
        return done

    for _ in range(BILEVEL["warmup_steps"] + 1):
        loop.step()
    loop.trainer.batch = 8
    monkeypatch.setattr(WeightTrainer, "learn_plan", counted)
    held_out = sample(corpus().validation, 4, 8, loop.generator)
    before = weights(loop), loop.trainer.generator.get_state(), loop.trainer.step
    loop._look_ahead(held_out)
    assert equal(before[0], weights(loop))
    assert torch.equal(before[1], loop.trainer.generator.get_state())
    assert loop.trainer.step == before[2]
    pace = loop.best_plan(BATCH).seconds / loop.best_plan(LARGE).seconds
    assert steps == {8: 12, 64: max(round(12 * pace), 1)}
    assert all(moved)


def test_weights_train_with_the_batch_that_leads() -> None:
    loop = tiny_loop(batch_candidates=(8, 16))
    loop.tried = loop.space.free
    leads = 8
    for _ in range(BILEVEL["num_steps"]):
        assert loop.step().batch == leads
        leads = loop.leader.batch if loop.leader else leads


def test_a_mixture_of_gradients_leaves_out_what_weighs_nothing_and_sums_to_one() -> None:
    loop = tiny_loop(estimator="mixture", tp=(1,), space_pp=(1,))
    leader = loop.upper.leader(loop.prices)
    lossy = torch.tensor([c.grad_comm_bits < 16 for c in leader.candidates])
    kinds = torch.tensor([1.0, 9e-4]).double()[lossy.long()]
    counts = torch.tensor([int((~lossy).sum()), int(lossy.sum())])[lossy.long()]
    weights = (kinds / counts * 0.9).expand_as(leader.weights)
    for pairs, weight in loop._gradient_mixtures(replace(leader, weights=weights)):
        assert {bits for _, bits in pairs} == {16}
        assert float(weight.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("order", ["first", "second", "one_level"])
def test_a_mixture_prices_lossy_pairs_and_ends_with_a_plan(order: str) -> None:
    loop = tiny_loop(num_steps=10, estimator="mixture", order=order)
    assert records(loop)[-1].validation_loss is not None
    bits = [bits for _, bits in loop.prices.forward_pairs]
    lossy = [column for column, own in enumerate(bits) if own < 16]
    exact = [column for column, own in enumerate(bits) if own == 16]
    assert loop.prices.forward[:, lossy].any() or loop.prices.gradient.any()
    # exact parallelism does not change the loss: its degrees cannot be told apart by it
    assert loop.prices.forward[:, exact].abs().max() < 1e-4
    assert loop.phases()[0].plan.seconds > 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bilevel.num_step=3"], "bilevel.num_step.*try bilevel.num_steps"),
        (["bilevel.num_steps=x"], "bilevel.num_steps=x must be"),
        (["bilevel.order=third"], "bilevel.order=third must be one of first, second"),
        (["bilevel.order=second"], "bilevel.order=second .*try bilevel.estimator=mixture"),
        (["bilevel.control=frozen"], "bilevel.control=frozen must be one of none"),
        (["space.grad_comm_bits=8"], "space.grad_comm_bits=.8. must hold 16"),
        (["space.tp_comm_bits=[16,5]"], "space.tp_comm_bits=5 must be one of"),
        (["training.global_batch_size=12"], "must be a multiple of the 8 GPUs.*try 16"),
        (["model.vocab_size=300"], "model.vocab_size=300 must be 256.* or experiment=bilevel"),
        (["trainer=megatron"], "trainer=megatron must not go with a bilevel.*try trainer=none"),
        (["model.num_kv_heads=2"], "model.num_kv_heads=2 must be 4"),
        (["space=uniform"], "space.kind=uniform is not searched.*try layerwise"),
        (["space.cp=null"], "space.cp=null is not searched.*try 1"),
        (["space.cp=[1,2]"], r"space.cp=\[1, 2\] is not searched"),
        (["space.virtual_stages=[1,2]"], "space.virtual_stages=.* is not searched"),
        (["space.shard_size=null"], "space.shard_size=null is not searched"),
        (["cost.pipeline=simulated"], "cost.pipeline=simulated is not searched.*try closed_form"),
        (["export=megatron"], "export=megatron is not searched"),
        (["search.num_steps=7"], "search.num_steps=7 is not searched.*bilevel.num_steps.*try 300"),
    ],
)
def test_illegal_settings_and_what_is_not_searched_are_refused(
    arguments: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        begin(arguments)


def test_a_device_without_memory_is_refused_before_anything_trains() -> None:
    few = ["cluster.devices.small.memory_GiB=0.0001", "space.pp=1", "space.num_micro_batches=1"]
    with pytest.raises(InfeasibleError, match="memory"):
        begin(few)


def test_pins_of_the_space_hold_in_the_plan_and_a_headroom_holds_at_every_batch() -> None:
    loop = tiny_loop(
        space_pp=2,
        space_zero_stage=1,
        space_recompute="full",
        space_num_micro_batches=2,
        space_tp=2,
    )
    plan = loop.best_plan(BATCH).plan
    assert (plan.pp, plan.num_micro_batches, plan.layers[1].tp) == (2, 2, 2)
    assert {(layer.zero_stage, layer.recompute) for layer in plan.layers} == {(1, "full")}
    tight = replace(loop.problem, headroom=0.25)
    tables = BilevelLoop(loop.settings, tight, corpus()).space.tables
    for own, table in zip(tables, loop.space.tables, strict=True):
        assert float(own.capacity[0]) == pytest.approx(0.75 * float(table.capacity[0]))


def begin(arguments: list[str]) -> BilevelLoop:
    problem = load_problem(["experiment=bilevel", *arguments])
    return BilevelLoop(BilevelSettings.of(problem), problem, corpus())
