from dataclasses import replace
from typing import Any

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import PlanError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plan.legality import refuse_unexecutable
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.plan_json import plan_dict

PROBLEM = load_problem(["model=toy", "cluster=toy", "training=toy"])
LAYERS = len(PROBLEM.model.layers)


def plan(every: int = 1, pp: int = 2, micro_batches: int = 4, **changes: Any) -> Plan:
    boundaries = (0, LAYERS) if pp == 1 else (0, 3, LAYERS)
    layer = replace(LayerStrategy(1, PROBLEM.cluster.num_devices // pp), **changes)
    return Plan(micro_batches, boundaries, (layer,) * LAYERS, sync_every=every)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_pays_its_share_of_an_average_and_nothing_else_changes(pp: int) -> None:
    summed, averaged = (evaluate(plan(every, pp, 2), PROBLEM) for every in (1, 4))
    assert summed.breakdown_s["gradient_sync"] > 0.0
    for term, seconds in summed.breakdown_s.items():
        share = 0.25 if term == "gradient_sync" else 1.0
        assert averaged.breakdown_s[term] == pytest.approx(share * seconds, rel=1e-12), term
    assert sum(averaged.breakdown_s.values()) == pytest.approx(averaged.iteration_time_s, rel=1e-12)
    assert averaged.iteration_time_s < summed.iteration_time_s
    assert averaged.memory_bytes == summed.memory_bytes


def test_a_plan_of_local_steps_survives_its_file_and_others_do_not_name_it() -> None:
    own, names = plan(8), tuple(layer.name for layer in PROBLEM.model.layers)
    assert Plan.from_dict(own.to_dict(names, PROBLEM.cluster.num_devices)) == own
    assert "averaged every 8 steps" in own.describe(PROBLEM.training.global_batch_size)
    assert "sync_every" not in plan().to_dict(names, PROBLEM.cluster.num_devices)


@pytest.mark.parametrize("schedule", ["async_1f1b", "async_1f1b_predicted"])
def test_the_plan_file_names_the_schedule_that_prices_it(schedule: str) -> None:
    own = replace(plan(), schedule=schedule)
    cost = evaluate(own, PROBLEM)
    data = plan_dict(PROBLEM, own, cost, None, [], {})
    assert data["schedule"] == schedule
    assert evaluate(Plan.from_dict(data), PROBLEM).iteration_time_s == cost.iteration_time_s


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (plan(4, zero_stage=1), "zero_stage=1 must be 0"),
        (plan(4, grad_comm_bits=4), "grad_comm_bits=4 must be 16"),
        (replace(plan(4), schedule="async_1f1b"), "schedule=async_1f1b must be 1f1b"),
        (plan(4, tp=4, dp=1, micro_batches=4), "dp=1 must be 2"),
    ],
)
def test_what_replicas_that_train_alone_cannot_have_is_refused(own: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=f"sync_every=4 .*{words}; nearest legal: sync_every=1"):
        evaluate(own, PROBLEM)


def test_a_plan_of_local_steps_is_neither_run_nor_exported() -> None:
    with pytest.raises(UnsupportedError, match="sync_every=4 cannot run here"):
        refuse_unexecutable(plan(4), PROBLEM)
    with pytest.raises(UnsupportedError, match="sync_every=4, and this trainer sums gradients in every step"):
        export_plan(PROBLEM, plan(4), "megatron")
