"""Plans of least memory: each layer has its lightest strategy on its own stage."""

from dataclasses import replace

import torch

from darts_parallel.cost.lightest import _fill, _lightest
from darts_parallel.cost.table import build_tables
from darts_parallel.problem.problem import load_problem

TWO_STAGES = ["model=toy", "training=toy", "cluster=toy", "space.pp=2", "space.num_micro_batches=4"]


def test_a_layer_has_the_strategy_that_is_lightest_with_the_micro_batches_of_its_stage() -> None:
    (table,) = build_tables(load_problem([*TWO_STAGES, "space.recompute=[none,full]"]))
    first, last = table.in_flight[0].tolist()
    assert first > last
    # choice 0 keeps a part of the activations that the others keep, and more whatever is in flight
    static = torch.zeros_like(table.static)
    activation = torch.full_like(table.activation, 2.0)
    activation[..., 0] = 1.0
    static[..., 0] = (first + last) / 2
    table = replace(table, static=static, activation=activation, working=torch.zeros_like(static))
    plan = _lightest(table, "layerwise")
    chosen = (plan.choices[0] == 0).tolist()
    assert chosen == (plan.stages()[0] == 0).tolist()


def test_stages_are_plain_where_a_device_has_one_and_keeps_all_in_its_own_memory() -> None:
    plain = {
        "space.schedules=[1f1b]": True,
        "space.virtual_stages=2": False,
        "space.offload=[activation]": False,
    }
    for words, expected in plain.items():
        for table in build_tables(load_problem([*TWO_STAGES, words])):
            assert table.has_plain_stages == expected


def test_stages_fill_the_same_share_of_their_memory() -> None:
    size = torch.tensor([[2.0] * 6, [1.0] * 6])
    assert _fill(size, torch.tensor([100.0, 100.0])).tolist() == [0, 2]
    assert _fill(size, torch.tensor([100.0, 25.0])).tolist() == [0, 4]
