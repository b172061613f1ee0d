"""DeepSpeed's ZeRO-3 has buffers of fixed size, and gathers each matrix of an expert by itself."""

from dataclasses import replace
from typing import Any

import pytest

from darts_parallel.cost import evaluate
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem, load_problem


def job(model: str) -> tuple[Problem, Plan]:
    problem = load_problem([f"model={model}", "cluster=toy", f"training={model}"])
    ranks = problem.cluster.num_devices
    layers = (LayerStrategy(1, ranks, 3, "none", False),) * problem.num_layers
    return problem, Plan(1, (0, problem.num_layers), layers)


def with_fact(problem: Problem, **fact: Any) -> Problem:
    return replace(problem, software=replace(problem.software, **fact))


def test_buffers_hold_whole_parameters_up_to_their_size() -> None:
    problem, plan = job("toy")
    factor = float(problem.cluster.groups[0].device.state_factor)
    bare = evaluate(plan, problem).memory_bytes[0]
    whole = problem.model.num_parameters
    for size, held in ((1e12, whole), (whole / 4, whole / 4)):
        found = evaluate(plan, with_fact(problem, buffered_parameters=size)).memory_bytes[0]
        assert found - bare == pytest.approx(2.0 * held * factor, rel=1e-6)


def test_each_matrix_of_an_expert_is_gathered_by_itself() -> None:
    problem, plan = job("toy_moe")
    bare = evaluate(plan, problem).iteration_time_s
    slow = evaluate(plan, with_fact(problem, module_gather=1.0)).iteration_time_s
    experts = [layer.experts for layer in problem.model.layers if layer.experts]
    matrices = sum(own.count * (1 + own.inputs / own.width) for own in experts)
    # gathered in forward and in backward, and a second hides nothing that counts
    assert slow - bare == pytest.approx(2.0 * matrices, rel=0.01)
