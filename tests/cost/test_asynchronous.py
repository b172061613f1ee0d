from dataclasses import replace

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.pipeline import FLUSH_EVERY
from darts_parallel.errors import PlanError, UnsupportedError
from darts_parallel.plan.legality import refuse_unexecutable
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import load_problem

PROBLEM = load_problem(["model=toy", "cluster=toy", "training=toy"])


def plan(schedule: str | None, micro_batches: int = 4) -> Plan:
    devices, layers = PROBLEM.cluster.num_devices, len(PROBLEM.model.layers)
    return Plan(
        micro_batches, (0, 3, layers), (LayerStrategy(1, devices // 2),) * layers, schedule=schedule
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["async_1f1b", "async_1f1b_predicted"])
def test_an_asynchronous_pipeline_has_no_bubble_and_a_second_version_of_the_weights(schedule: str) -> None:
    waits, goes_on = (evaluate(plan(name), PROBLEM) for name in (None, schedule))
    assert goes_on.stage_times_s == pytest.approx(waits.stage_times_s, rel=1e-12)
    bubble = sum(waits.stage_times_s) - max(waits.stage_times_s)
    saved = bubble * (1.0 - 1.0 / FLUSH_EVERY)
    assert goes_on.iteration_time_s == pytest.approx(waits.iteration_time_s - saved, rel=1e-12)
    assert sum(goes_on.breakdown_s.values()) == pytest.approx(goes_on.iteration_time_s, rel=1e-12)
    assert goes_on.breakdown_s["pipeline_bubble"] == pytest.approx(bubble / FLUSH_EVERY)
    more = [b - a for a, b in zip(waits.memory_bytes, goes_on.memory_bytes, strict=True)]
    parameters = sum(layer.parameters(PROBLEM.model.config.vocab_size) for layer in PROBLEM.model.layers[:3])
    assert min(more) > 0.0
    assert more[0] == pytest.approx(2.0 * parameters, rel=0.02)  # bf16; tables are padded


def test_an_asynchronous_plan_survives_its_file_and_says_its_schedule() -> None:
    own, names = plan("async_1f1b"), tuple(layer.name for layer in PROBLEM.model.layers)
    assert Plan.from_dict(own.to_dict(names, PROBLEM.cluster.num_devices)) == own
    assert "async_1f1b" in own.describe(PROBLEM.training.global_batch_size)


def test_what_an_asynchronous_plan_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match="at least pp=2"):
        evaluate(plan("async_1f1b", 1), PROBLEM)
    with pytest.raises(PlanError, match="nearest legal: async_1f1b"):
        plan("async_1f1")
    with pytest.raises(UnsupportedError, match="schedule=async_1f1b cannot run here"):
        refuse_unexecutable(replace(plan("async_1f1b")), PROBLEM)
