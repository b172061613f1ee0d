"""Chain weights: marginals against enumeration, slopes against differences, and what the surrogate reads."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.errors import ConfigError
from darts_parallel.gradient.chain.rounding import best_paths, stage_prices
from darts_parallel.gradient.chain.weights import ChainPrices, chain_marginals, priced_terms
from darts_parallel.gradient.descent import search_tables
from darts_parallel.gradient.relaxation import Schedules
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, surrogate
from darts_parallel.gradient.restarts import RestartBatch
from tests.support.random_tables import random_table


def _terms(seed: int, layers: int = 4, choices: int = 3, layouts: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    unary = 2.0 * torch.randn(2, 3, layers, choices, generator=rng, dtype=torch.float64)
    pair = 2.0 * torch.randn(2, 3, layers - 1, layouts, layouts, generator=rng, dtype=torch.float64)
    return unary, pair, torch.arange(choices) % layouts


@pytest.mark.parametrize(("layers", "choices", "layouts"), [(1, 3, 2), (2, 2, 1), (4, 3, 2), (5, 4, 3)])
def test_marginals_are_those_of_all_paths(layers: int, choices: int, layouts: int) -> None:
    for seed in range(3):
        unary, pair, layout = _terms(seed, layers, choices, layouts)
        held, pairs = chain_marginals(unary, pair, layout)
        expected, expected_pairs = torch.zeros_like(held), torch.zeros_like(pairs)
        paths = torch.tensor(list(product(range(choices), repeat=layers)))
        every = torch.arange(layers)
        score = unary[..., every, paths].sum(-1)
        of_path = layout[paths]
        score = score + pair[..., every[:-1], of_path[:, :-1], of_path[:, 1:]].sum(-1)
        weight = torch.softmax(score, dim=-1)
        for number, path in enumerate(paths.tolist()):
            for layer, choice in enumerate(path):
                expected[..., layer, choice] += weight[..., number]
            for layer in range(layers - 1):
                before, after = layout[path[layer]], layout[path[layer + 1]]
                expected_pairs[..., layer, before, after] += weight[..., number]
        torch.testing.assert_close(held, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pairs, expected_pairs, rtol=1e-10, atol=1e-12)


def test_slopes_of_the_marginals_are_those_of_differences() -> None:
    unary, pair, layout = _terms(7)
    inputs = (unary[:1, :1].clone().requires_grad_(), pair[:1, :1].clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda u, p: chain_marginals(u, p, layout), inputs, eps=1e-6, atol=1e-7)


def test_a_chain_without_pairs_is_a_softmax_of_every_layer() -> None:
    unary, pair, layout = _terms(3)
    held, pairs = chain_marginals(unary, torch.zeros_like(pair), layout)
    torch.testing.assert_close(held, torch.softmax(unary, -1), rtol=1e-12, atol=1e-14)
    layouts = held @ torch.nn.functional.one_hot(layout).double()
    independent = layouts[..., :-1, :].unsqueeze(-1) * layouts[..., 1:, :].unsqueeze(-2)
    torch.testing.assert_close(pairs, independent, rtol=1e-12, atol=1e-14)


def _batch(table: CostTable, seed: int = 0) -> RestartBatch:
    rng = torch.Generator().manual_seed(seed)
    config = SearchConfig(num_restarts=3)
    return RestartBatch.initial(table, "layerwise", config, rng, 0, torch.arange(table.num_outer))


@pytest.mark.parametrize(("pp", "layouts"), [(1, 3), (2, 2), (3, 1)])
def test_a_cold_priced_chain_is_the_best_path_under_the_prices(pp: int, layouts: int) -> None:
    schedules, config = Schedules(1.0, 0.05, 40.0, hard_stages=True), SearchConfig()
    for seed in range(4):
        table = random_table(seed, pp=pp, num_layers=6, num_choices=4, num_layouts=layouts)
        table = replace(table, kind_allowed=None)  # relaxed plans know no kinds of stages
        batch = _batch(table, seed)
        relaxed = batch.relax(schedules, None, chain=True)
        cost = surrogate(relaxed, table, schedules.sharpness)
        prices = stage_prices(cost, table, batch.multipliers, config.penalty, schedules.sharpness)
        own, pair = priced_terms(
            relaxed.stages.detach(), table, ChainPrices(*prices, cost.iteration_time.detach())
        )
        own = own.masked_fill(~table.allowed[:, None, None, :], -1e30)
        held, _ = chain_marginals(1e4 * own, 1e4 * pair, table.layout)
        argmax = HardPlans(
            torch.arange(table.num_outer).repeat_interleave(3),
            held.argmax(-1).flatten(0, 1),
            relaxed.stages.detach().flatten(0, 1).round().argmax(1),
        )
        path = best_paths(argmax, table, *(values.flatten(0, 1) for values in prices))
        assert torch.equal(argmax.choices, path.choices)


def test_independent_pairs_cost_what_independent_weights_do() -> None:
    table = random_table(2, pp=2, num_layers=6, num_choices=4, num_layouts=3)
    relaxed = _batch(table).relax(Schedules(1.0, 0.5, 20.0), None)
    layouts = relaxed.choices @ torch.nn.functional.one_hot(table.layout).double()
    pairs = layouts[..., :-1, :].unsqueeze(-1) * layouts[..., 1:, :].unsqueeze(-2)
    plain, paired = surrogate(relaxed, table), surrogate(replace(relaxed, pairs=pairs), table)
    torch.testing.assert_close(paired.iteration_time, plain.iteration_time, rtol=1e-12, atol=0)


def test_neighbours_that_agree_cost_no_resharding() -> None:
    table = random_table(5, pp=1, num_layers=5, num_choices=2, num_layouts=2)
    unary = torch.zeros(table.num_outer, 1, 5, 2, dtype=torch.float64)
    pair = -1e6 * (1.0 - torch.eye(2, dtype=torch.float64)).expand(table.num_outer, 1, 4, 2, 2)
    choices, pairs = chain_marginals(unary, pair, table.layout)
    stages = torch.ones(table.num_outer, 1, 5, 1, dtype=torch.float64)
    together = surrogate(RelaxedPlans(choices, stages, pairs=pairs), table).iteration_time
    same = torch.diagonal(table.reshard[:, table.stage_kind[0]], dim1=-2, dim2=-1).mean(-1).sum(-1)
    alone = replace(table, reshard=torch.zeros_like(table.reshard))
    bare = surrogate(RelaxedPlans(choices, stages), alone).iteration_time
    expected = bare[:, 0] + table.num_micro_batches * same
    torch.testing.assert_close(together[:, 0], expected, rtol=1e-9, atol=0)


def test_a_search_with_chain_weights_finds_plans_and_repeats_itself() -> None:
    tables = [random_table(3, pp=pp, num_layers=6, num_choices=3) for pp in (1, 2)]
    config = SearchConfig(num_steps=20, num_restarts=4, weights="chain", polish=False)
    first, second = (search_tables(tables, "layerwise", config, seed=1) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.plan == second.plan
    assert first.raw_iteration_time_s == second.raw_iteration_time_s


@pytest.mark.parametrize(("key", "value"), [("relaxation", "gumbel"), ("step", "natural")])
def test_chain_weights_refuse_what_softmax_weights_alone_know(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"search.{key}={value} is not for search.weights=chain; nearest"):
        SearchConfig(weights="chain", **{key: value})  # type: ignore[arg-type]
