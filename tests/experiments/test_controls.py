"""The controls of the gradient search: noise for gradients, no descent at all."""

import pytest
import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.simulated import simulated_lower_bound
from darts_parallel.gradient.descent import search_tables
from darts_parallel.problem.problem import load_problem
from experiments.comparison.controls import CONTROLS
from experiments.comparison.problems import suite


@pytest.mark.parametrize("name", list(CONTROLS))
def test_controls_plan_problems_of_schedules_and_repeat_themselves(name: str) -> None:
    given = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.tp=1"]
    tables = build_tables(
        load_problem([*given, "space.num_micro_batches=4", "space.schedules=[1f1b,interleaved]"])
    )
    config = SearchConfig(
        num_steps=20, num_restarts=4, max_seconds=0.5 if name == "no_descent" else 60.0
    )
    found = [search_tables(tables, "layerwise", config, 1, loop=CONTROLS[name]) for _ in range(2)]
    bound = simulated_lower_bound(tables, "layerwise")
    for result in found:
        assert bound <= result.iteration_time_s <= result.raw_iteration_time_s
        assert result.iteration_time_s < float("inf")
        assert result.steps == (0 if name == "no_descent" else 20)


def test_noise_has_the_size_of_the_gradient_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = suite(["toy on toy, tight"])[0].tables()
    search = CONTROLS["no_gradient"](tables, "layerwise", SearchConfig(num_restarts=4), 0)
    parameters = [parameter for parameter, _ in search.optimizer.parameters]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    search.move()
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        size = gradient.square().mean(tuple(range(2, gradient.dim())) or (0,)).sqrt()
        torch.testing.assert_close(size, torch.full_like(size, number + 1.0))
        assert gradient.numel() == 1 or gradient.std() > 0
