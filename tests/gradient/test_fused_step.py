"""The fused step is the surrogate and its slope: autograd is its referee."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.gradient.kernels.step_parts import StepFigures
from darts_parallel.gradient.relaxation import Schedules
from darts_parallel.gradient.relaxed_cost import surrogate
from darts_parallel.gradient.restarts import RestartBatch
from tests.support.random_tables import random_table

SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 3), (4, 2)]


@pytest.mark.parametrize(("hard_stages", "step"), [(False, "adam"), (True, "adam"), (True, "natural")])
@pytest.mark.parametrize(("pp", "layouts"), SHAPES)
def test_the_fused_step_gives_the_costs_and_slopes_of_autograd(
    pp: int, layouts: int, hard_stages: bool, step: str
) -> None:
    schedules = Schedules(0.7, 0.6, 30.0, hard_stages=hard_stages)
    config = SearchConfig(num_restarts=3, step=step)
    for seed in range(4):
        table = random_table(seed, pp=pp, num_layers=6, num_choices=4, num_layouts=layouts)
        table = replace(table, pipeline=PipelineModel(blocking=seed != 3))
        rng = torch.Generator().manual_seed(seed)
        batch = RestartBatch.initial(table, "layerwise", config, rng, 0, torch.arange(table.num_outer))
        batch.multipliers = torch.rand(batch.multipliers.shape, generator=rng, dtype=torch.float64)
        before = batch.multipliers
        relaxed = batch.relax(schedules, None, natural=step == "natural")
        cost = surrogate(relaxed, table, schedules.sharpness)
        loss = batch.loss(cost, config).sum()
        slopes = torch.autograd.grad(loss, (batch.logits, batch.widths))
        after, batch.multipliers = batch.multipliers, before

        assert batch.figures is not None
        weights, found = batch.fused_step(batch.figures, schedules, config)
        for mine, theirs in [
            (weights.choices, relaxed.choices),
            (weights.stages, relaxed.stages),
            (found.iteration_time, cost.iteration_time),
            (found.stage_seconds, cost.stage_seconds),
            (found.memory, cost.memory),
            (found.sync, cost.sync),
            (batch.multipliers, after),
            (batch.logits.grad, slopes[0]),
            (batch.widths.grad, slopes[1]),
        ]:
            assert mine is not None
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_a_step_of_other_spaces_is_left_to_autograd() -> None:
    table, config = random_table(0), SearchConfig(num_restarts=2)
    rng, outer = torch.Generator().manual_seed(0), torch.arange(table.num_outer)
    assert RestartBatch.initial(table, "stagewise", config, rng, 0, outer).figures is None
    simulated = replace(table, pipeline=PipelineModel(simulated=True))
    assert RestartBatch.initial(simulated, "layerwise", config, rng, 0, outer).figures is None


def test_illegal_strategies_have_no_weight() -> None:
    table = replace(random_table(1), allowed=torch.tensor([[True, False, True], [False, True, False]]))
    figures = StepFigures.build(table)
    assert figures.barred is not None
    config, rng = SearchConfig(num_restarts=2), torch.Generator().manual_seed(0)
    batch = RestartBatch.initial(table, "layerwise", config, rng, 0, torch.arange(2))
    weights, _ = batch.fused_step(figures, Schedules(1.0, 1.0, 20.0), config)
    assert (
        float(weights.choices.detach()[~table.allowed[:, None, None].expand_as(weights.choices)].sum()) == 0
    )
    torch.testing.assert_close(weights.choices.sum(-1), torch.ones(weights.choices.shape[:3]).double())
