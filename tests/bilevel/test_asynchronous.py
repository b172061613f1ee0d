"""Pipelines that do not wait: their price, their memory, and training with older weights."""

import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.loop import BilevelLoop, TrainingPhase
from darts_parallel.bilevel.optimum import BatchPlan, find_optimum, verify
from darts_parallel.bilevel.retrain import Retraining
from darts_parallel.bilevel.space import ASYNCHRONOUS, EXACT, JointSpace, TrainingMode
from darts_parallel.cost.asynchronous import ENDLESS, with_versions
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import PlanError
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report.text import claim
from tests.support.bilevel_tiny import corpus, tiny_problem, tiny_settings

GIVEN: dict[str, Any] = {"tp_bits": (16, 4), "grad_bits": (16, 4), "space_pp": (1, 2, 4)}
GIVEN["space_num_micro_batches"] = (1, 2, 4)
PROBLEM = tiny_problem(num_blocks=2, **GIVEN)
SPACE = JointSpace.build(PROBLEM, [8], asynchronous=True)
MODES = [mode for mode in SPACE.free.by_mode if mode.pp]


def steady_period(forward: list[float], backward: list[float]) -> float:
    """Seconds of a micro-batch far inside an endless 1F1B pipeline, by its events."""
    pp, count = len(forward), 400
    free = [0.0] * pp
    done: dict[tuple[str, int, int], float] = {}
    orders = []
    for stage in range(pp):
        ahead = pp - 1 - stage
        order = [("F", batch) for batch in range(ahead)]
        for batch in range(count):
            order += [("F", ahead + batch), ("B", batch)]
        orders.append(deque(order))
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while order:
                kind, batch = order[0]
                before = ("F", stage - 1, batch) if kind == "F" else ("B", stage + 1, batch)
                outside = before[1] in (-1, pp)
                if not outside and before not in done:
                    break
                seconds = forward[stage] if kind == "F" else backward[stage]
                start = max(free[stage], 0.0 if outside else done[before])
                free[stage] = done[kind, stage, batch] = start + seconds
                order.popleft()
                moved = True
    ends = [done["B", 0, batch] for batch in range(count - pp)]
    return (ends[-1] - ends[len(ends) // 2]) / (len(ends) - 1 - len(ends) // 2)


@pytest.mark.parametrize("seed", range(8))
def test_a_pipeline_that_does_not_wait_moves_at_the_pace_of_its_slowest_stage(seed: int) -> None:
    drawn = random.Random(seed)
    pp = drawn.choice([2, 3, 4, 8])
    forward = [drawn.uniform(0.5, 2.0) for _ in range(pp)]
    backward = [2.0 * own for own in forward]
    slowest = max(map(sum, zip(forward, backward, strict=True)))
    assert steady_period(forward, backward) == pytest.approx(slowest, rel=1e-9)


def random_plans(table: int, count: int) -> HardPlans:
    own, generator = SPACE.tables[table], torch.Generator().manual_seed(table)
    outer = torch.randint(own.num_outer, (count,), generator=generator)
    weights = own.allowed[outer].double().unsqueeze(1).expand(-1, own.num_layers, -1)
    choices = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(count, -1)
    return HardPlans(outer, choices, torch.arange(own.pp).expand(count, -1))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_its_price_is_that_of_its_micro_batches_and_synchronisation(mode: TrainingMode) -> None:
    (number,) = SPACE.of_mode(mode)
    table = SPACE.tables[number]
    plans = random_plans(number, 20)
    cost = evaluate_batch(table, plans)
    counts = table.num_micro_batches[plans.outer] / ENDLESS
    slowest = ENDLESS * cost.stage_seconds.amax(1)
    per_iteration = cost.iteration_time - cost.pipeline_end[:, 0] - cost.sync_seconds.amax(1)
    wanted = counts * slowest + cost.sync_seconds.amax(1) + per_iteration
    torch.testing.assert_close(cost.iteration_time, wanted, rtol=1e-9, atol=0.0)
    assert int(counts.min()) >= mode.pp
    for index in range(4):
        priced = SPACE.price(number, plans[index : index + 1], SPACE.free)
        if priced is None:
            continue
        found = BatchPlan.of(SPACE, priced, SPACE.free)
        here = found.problem(PROBLEM)
        shown = evaluate(found.plan, here)
        assert shown.iteration_time_s == pytest.approx(priced.seconds, rel=1e-9)
        assert sum(shown.breakdown_s.values()) == pytest.approx(shown.iteration_time_s)
        assert shown.breakdown_s["pipeline_bubble"] == 0.0
        waiting = evaluate(found.plan, PROBLEM)
        assert shown.stage_times_s == pytest.approx(waiting.stage_times_s)
        assert waiting.breakdown_s["pipeline_bubble"] > 0.0
        assert sum(shown.memory_bytes) > sum(waiting.memory_bytes)


def test_stages_hold_their_versions_of_the_weights() -> None:
    pins = {"space_num_micro_batches": (4,), "space_tp": 1, "space_zero_stage": 0}
    problem = tiny_problem(space_pp=4, tp_bits=(16,), grad_bits=(16,), **pins)
    (table,) = build_tables(problem)
    outer = torch.zeros(1, dtype=torch.long)
    starts = torch.tensor([[0, 1, 2, 3]])
    plan = HardPlans(outer, torch.zeros(1, 5, dtype=torch.long), starts)
    waits = evaluate_batch(table, plan).memory[0]
    # bf16 weights
    numbers = [2.0 * layer.parameters(256) for layer in problem.model.layers]
    weights = torch.tensor([*numbers[:3], sum(numbers[3:])], dtype=torch.float64)
    own = with_versions(table, problem.model, problem.training)
    found = evaluate_batch(own, plan).memory[0]
    torch.testing.assert_close(found - waits, weights)
    few = table.select([0])
    fewer = replace(few, num_micro_batches=few.num_micro_batches - 1)
    assert with_versions(fewer, problem.model, problem.training).num_outer == 0


def test_no_version_of_the_weights_is_sharded() -> None:
    pins = {"space_num_micro_batches": (4,), "space_zero_stage": (0, 1, 2, 3)}
    problem = tiny_problem(space_pp=2, tp_bits=(16,), grad_bits=(16,), **pins)
    (table,) = build_tables(problem)
    own = with_versions(table, problem.model, problem.training)
    before, after = (
        {choice.zero_stage for choice, legal in zip(t.choices, t.allowed[0], strict=True) if legal}
        for t in (table, own)
    )
    assert before == {0, 1, 2, 3}
    assert after == {0, 1}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_dynamic_programming_finds_what_brute_force_does(mode: TrainingMode) -> None:
    (number,) = SPACE.of_mode(mode)
    table = SPACE.tables[number]
    prices = SPACE.free.at_bits(16, 16)
    exact = [
        index
        for index, choice in enumerate(table.choices)
        if choice.tp_comm_bits == 16 and choice.grad_comm_bits == 16
    ]
    rows = torch.cartesian_prod(*[torch.tensor(exact)] * 4)
    rows = torch.cat([rows, rows[:, -1:]], 1)
    best = float("inf")
    for outer in range(table.num_outer):
        cuts = torch.combinations(torch.arange(1, 4), mode.pp - 1)
        for cut in cuts.tolist():
            starts = torch.tensor([[0, *cut]]).expand(len(rows), -1)
            hard = HardPlans(torch.full((len(rows),), outer), rows, starts)
            priced = SPACE.price(number, hard, prices)
            best = best if priced is None else min(best, priced.value)
    found = find_optimum(SPACE, prices, mode, 60.0)
    assert found is not None
    assert found.proven
    assert found.value == pytest.approx(best, abs=1e-9)
    answers = verify(SPACE, prices, found, 30.0)
    assert all(entry.gap <= 1e-9 for entry in answers if entry.plan)
    here = found.problem(PROBLEM)
    words = claim(here, evaluate(found.plan, here), answers)
    assert words.startswith("optimal in the model (layerwise, pp=")


def trained(stale: bool, steps: int) -> WeightTrainer:
    trainer = WeightTrainer(tiny_settings(), 8, 0, measure_noise=False, stale=stale)
    for _ in range(steps):
        trainer.learn_plan(trainer.next_batch(corpus().train), (EXACT,) * 2)
    return trainer


def test_the_first_batch_sees_the_newest_weights_and_later_ones_older_ones() -> None:
    plain, own = trained(False, 1).weights, trained(True, 1).weights
    assert all(torch.equal(plain[name], own[name]) for name in plain)
    late = trained(True, 3).weights["head.norm.weight"]
    assert not torch.equal(trained(False, 3).weights["head.norm.weight"], late)


def test_the_trainings_that_judge_have_old_weights_from_the_phase_on_that_does_not_wait() -> None:
    plan = find_optimum(SPACE, SPACE.free.at_bits(16, 16), MODES[0], 30.0)
    assert plan is not None
    waits = replace(plan, mode=TrainingMode(8))
    retraining = Retraining(tiny_settings(), corpus(), 3, plan.seconds)
    schedules = [[TrainingPhase(0, waits)], [TrainingPhase(0, waits), TrainingPhase(3, plan)]]
    known, own = (retraining.train(phases, 7.5 * plan.seconds).curve for phases in schedules)
    # the first batch of the phase has no older weights
    assert own[:4] == known[:4]
    assert own[4:] != known[4:]


def seen(trainer: WeightTrainer, value: float) -> float:
    trainer.weights = {"w": torch.full((1,), value)}
    return float(trainer.seen()["w"])


def test_weights_are_those_before_the_last_update_moved_ahead_by_the_update_that_made_them() -> (
    None
):
    trainer = trained(True, 0)
    # 1 + (1 - 0), 4 + (4 - 1), 9 + (9 - 4), 16 + (16 - 9)
    assert [seen(trainer, step**2) for step in range(6)] == [0.0, 0.0, 2.0, 7.0, 14.0, 23.0]
    # weights that move evenly are predicted exactly
    assert [seen(trainer, 25.0 + 3 * step) for step in range(4)][-1] == 34.0
    # versions from before a synchronous part are forgotten
    trainer.stale = False
    assert seen(trainer, 50.0) == 50.0
    trainer.stale = True
    assert [seen(trainer, own) for own in (60.0, 61.0, 62.0)] == [60.0, 60.0, 62.0]


def test_without_delay_training_is_synchronous_to_the_last_bit() -> None:
    """Weights that do not change are their own prediction: frozen steps measure the same losses."""
    losses = []
    for stale in (False, True):
        trainer = trained(stale, 2)
        trainer.versions.clear()
        trainer.weights = trained(False, 2).weights
        trainer.frozen = True
        batches = [trainer.next_batch(corpus().train) for _ in range(3)]
        losses.append([trainer.learn_plan(own, (EXACT,) * 2).loss for own in batches])
    assert losses[0] == losses[1]


def loop_of(problem: Problem) -> BilevelLoop:
    settings = replace(tiny_settings(), asynchronous=True, look_ahead_every=1)
    return BilevelLoop(settings, problem, corpus())


def test_old_weights_give_the_pipeline_degree_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(tiny_problem(tp_bits=(16,), grad_bits=(16,)))
    loop.tried = loop.space.free
    lost = {mode: 2.0 for mode in loop.space.free.by_mode}

    def loss(_: BilevelLoop, trainer: WeightTrainer, __: torch.Tensor) -> float:
        return 3.0 if trainer is loop.trainer else lost[ASYNCHRONOUS if trainer.stale else ""]

    monkeypatch.setattr(BilevelLoop, "_validate", loss)
    weights = []
    for gain in (1.9, 2.9):
        lost.update({ASYNCHRONOUS: gain, "": 2.0})
        own = loop_of(tiny_problem(tp_bits=(16,), grad_bits=(16,)))
        own.tried = own.space.free
        loop = own
        for _ in range(12):
            record = own.step()
        assert record.upper is not None
        weights.append(record.upper.outer_weights)
        stale = own.leader is not None and bool(own.leader.mode.pp)
        assert own.trainer.stale == stale
    assert weights[0].get(ASYNCHRONOUS, 0.0) > weights[1].get(ASYNCHRONOUS, 0.0)
    assert weights[0]["pp 2"] > weights[1]["pp 2"]


def test_no_other_part_reads_such_a_plan(tmp_path: Path) -> None:
    found = find_optimum(SPACE, SPACE.free.at_bits(16, 16), MODES[0], 30.0)
    assert found is not None
    names = [layer.name for layer in PROBLEM.model.layers]
    data = found.plan.to_dict(names, range(8))
    assert Plan.from_dict(data | {"asynchronous": None}) == found.plan
    with pytest.raises(PlanError, match=r"asynchronous=PipeDream-2BW must be null.*try"):
        Plan.from_dict(data | {"asynchronous": ASYNCHRONOUS})
