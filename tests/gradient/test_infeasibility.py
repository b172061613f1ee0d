import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.lightest import lightest_plans
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import InfeasibleError
from darts_parallel.gradient import infeasibility
from darts_parallel.gradient.descent import search
from darts_parallel.gradient.infeasibility import NoPlanFitsError, _Lightest, _Remedies, any_fits
from darts_parallel.gradient.step_record import SearchResult
from darts_parallel.problem.cluster import Cluster
from darts_parallel.problem.problem import load_problem

SHORT = ["search.num_steps=2", "search.num_restarts=1", "search.polish=false"]
TIGHT = [
    ["model=toy", "cluster=toy", "training=toy", "cluster.devices.toy.memory_GiB=0.01"],
    [
        "model=llama2_70b",
        "training=llama2_70b",
        "model.num_layers=56",
        "cluster=h100_1x8",
        "space=uniform",
    ],
    [
        "model=llama2_7b",
        "training=llama2_7b",
        "cluster=a10_4x4",
        "space.pp=1",
        "space.zero_stage=0",
        "space.tp=[1,2,4]",
    ],
    [
        "space.pp=1",
        "space.tp=1",
        "space.zero_stage=0",
        "space.recompute=none",
        "space=stagewise",
        "cluster.devices.a10.memory_GiB=10",
    ],
]


GATHERED = [
    *("model=llama3_8b", "training=llama3_8b", "model.num_layers=4", "seq=512", "gbs=16"),
    *("training.lora_rank=64", "training.frozen_bits=4", "tp=1", "pp=1"),
    *("cluster=h100_1x8", "gpus=2", "cluster.devices.h100.memory_GiB=5"),
]
"""Adapters of which the layers that ZeRO-3 gathers have more bytes than it saves in a layer."""


def found(overrides: list[str]) -> SearchResult:
    return search(load_problem([*overrides, *SHORT]))


def followed(overrides: list[str], way: str) -> list[str]:
    """The overrides with one advice of the sentence taken."""
    if way.startswith("freeing "):
        return [
            o for o in overrides if o.split("=")[0] not in way.removeprefix("freeing ").split(", ")
        ]
    nodes = re.match(r"(\d+) nodes instead of \d+", way)
    return [*overrides, f"cluster.nodes.0.count={nodes.group(1)}" if nodes else way]


@pytest.mark.parametrize("overrides", TIGHT, ids=[" ".join(row[:2]) for row in TIGHT])
def test_a_model_that_fits_nowhere_is_refused_and_every_advice_works(overrides: list[str]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        found(overrides)
    sentence = str(caught.value)
    assert re.match(
        r"memory: model=\S+ fits in no .* needs \S+ [GM]iB of the \S+ [GM]iB of ", sentence
    )
    assert "\n" not in sentence
    ways = sentence.rstrip(".").split("smallest changes that help: ")[1].split(" or ")
    assert ways
    for way in ways:
        assert found(followed(overrides, way)).iteration_time_s > 0, way


def test_a_hundredth_of_a_gibibyte_less_than_advised_is_too_little() -> None:
    with pytest.raises(InfeasibleError) as caught:
        found(TIGHT[0])
    advised = re.search(r"memory_GiB=(\d+\.\d+)", str(caught.value))
    less = float(advised.group(1)) - 0.011
    with pytest.raises(InfeasibleError):
        found([*TIGHT[0], f"cluster.devices.toy.memory_GiB={less:.3f}"])


def test_the_fewest_doublings_of_the_nodes_that_fit_are_advised() -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    count = problem.cluster.groups[0].count

    def lightest(excess: int) -> _Lightest:
        return _Lightest(None, torch.tensor([excess]), "", None)

    for factor in (2, 4, 8, 16, 32):

        class Remedies(_Remedies):
            least = factor * count

            def changed(self, cluster: Cluster) -> _Lightest:
                return lightest(self.least - cluster.groups[0].count)

        found = Remedies(problem, lightest(1)).nodes()
        assert found == [f"{factor * count} nodes instead of {count}"]


def test_more_nodes_are_advised_where_no_pins_are_in_the_way() -> None:
    """With the pins of a user it took 16 times the nodes, where another recomputation was enough."""
    for overrides in TIGHT:
        with pytest.raises(InfeasibleError) as caught:
            found(overrides)
        assert not ("freeing" in str(caught.value) and "nodes instead" in str(caught.value))


def test_pins_are_in_the_way_only_where_a_plan_fits_without_them() -> None:
    pinned = [*TIGHT[0], "space.recompute=none"]
    with pytest.raises(InfeasibleError) as caught:
        found(pinned)
    assert "freeing" not in str(caught.value)


def test_the_sentence_is_made_once_and_only_if_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search at several headrooms met five such errors, and read one; to make each took a second."""
    made: list[Any] = []
    monkeypatch.setattr(
        infeasibility, "_sentence", lambda *given: f"sentence {made.append(given)}."
    )
    error = NoPlanFitsError("problem", "tables")
    assert not made
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is InfeasibleError
    assert str(error) == str(again) == "sentence None."
    assert made == [("problem", "tables")]


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_some_plan_fits_where_that_of_one_number_of_micro_batches_does(share: float) -> None:
    job = ["model=toy", "cluster=toy", "training=toy", "space=uniform", "space.pp=2", "space.tp=1"]
    (table,) = build_tables(load_problem([*job, "space.axis_order=tp-dp-pp"]))
    (plans,) = lightest_plans([table], "uniform")
    needed = evaluate_batch(table, plans).memory.amax(1)
    assert 1.01 * needed.min() < needed.max()
    tight = replace(table, capacity=torch.full_like(table.capacity, share * float(needed.min())))
    assert any_fits([tight], "uniform") == (share > 1)


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize(
    "overrides", [TIGHT[0], TIGHT[3], [*GATHERED, "space=uniform"], [*GATHERED, "space=layerwise"]]
)
def test_the_lightest_plan_exceeds_the_memory_least(overrides: list[str], proven: bool) -> None:
    problem = load_problem(overrides)
    tables = build_tables(problem)
    plan = NoPlanFitsError(problem, tables, proven).lightest
    cost = evaluate(plan, problem)
    pairs = zip(cost.memory_bytes, cost.capacity_bytes, strict=True)
    excess = max(used - most for used, most in pairs)
    assert excess > 0
    others = lightest_plans(tables, problem.config.space.kind)
    for table, plans in zip(tables, others, strict=True):
        for some in (plans, even_uniform_plans(table)):
            over = (evaluate_batch(table, some).memory - table.capacity).amax(1)
            assert float(over.min()) >= excess * (1 - 1e-9)
