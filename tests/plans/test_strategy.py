import copy
import json
import re
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import pytest

from darts_parallel.config import SearchConfig
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import PlanError
from darts_parallel.gradient.descent import search
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.plan_json import plan_dict

LAYERS = 7  # embedding, 4 blocks, head, loss


def plan_of(pp: int = 2, tp: int = 2) -> Plan:
    strategy = LayerStrategy(tp, 8 // pp // tp, 1)
    return Plan(4, (0, 3, LAYERS) if pp == 2 else (0, LAYERS), (strategy,) * LAYERS)


def names(problem: Problem) -> tuple[str, ...]:
    return tuple(layer.name for layer in problem.model.layers)


def test_a_plan_survives_its_dictionary(toy_problem: Problem) -> None:
    plan = plan_of()
    data = plan.to_dict(names(toy_problem), range(8))
    assert Plan.from_dict(data) == plan
    assert data["stages"][1] == {"layers": [3, 7], "ranks": [4, 5, 6, 7]}


def test_the_one_line_description() -> None:
    assert plan_of().describe(16) == "dp 2 · tp 2 · pp 2 · micro-batch 2 × 4 · ZeRO-1"


@pytest.mark.parametrize(
    ("strategy", "label"),
    [
        (LayerStrategy(2, 4), "tp2 z0"),
        (LayerStrategy(2, 16, 1, "full", True, 8, 4, 8), "tp2+sp z1/8 full b8 g4"),
        (LayerStrategy(1, 8, 3, "none", False, 16, 8, ep=4, etp=2), "tp1 z3 ep4 etp2 g8"),
    ],
)
def test_the_short_text_of_a_strategy(strategy: LayerStrategy, label: str) -> None:
    assert strategy.label() == label


@pytest.mark.parametrize(
    "boundaries", [(0,), (1, LAYERS), (0, 3, 3, LAYERS), (0, 5), (0, 4, 2, LAYERS)]
)
def test_stages_must_be_contiguous_and_whole(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="; try "):
        Plan(1, boundaries, plan_of().layers)


MISSING = object()
LAYER = {
    "tp": ["x", None, 0, 2.0, 10**30, True, MISSING],
    "dp": [[], -2, None, False, MISSING],
    "zero_stage": [4, -1, "1", None, MISSING],
    "recompute": ["all", None, 3, MISSING],
    "sequence_parallel": [1, "true", None, MISSING],
    "tp_comm_bits": [5],
    "grad_comm_bits": [True],
    "shard_size": [-1],
}
WRONG: dict[tuple[str | int, ...], list[Any]] = {
    ("pp",): ["x", None, 2.0, True, 0, -1, 3, 10**30, []],
    ("num_micro_batches",): ["x", None, 4.0, False, 0, -1, 10**30, [4]],
    ("stages",): ["x", None, 3, [], {}, [1], [{}], [None]],
    ("layers",): ["x", None, 3, [], {}, [1], [{}]],
    ("schema",): [None, 1, "darts-parallel/plan/2", []],
    ("cp",): [0, "x"],
    ("virtual_stages",): [0, 3],
    # plain plans have one chunk a device, as 1F1B alone among these has
    ("schedule",): ["x", "zero_bubble_v", "searched:loop", "searched:loop;0F0"],
    # the ranks of a stage are its consecutive ones
    ("stages", 0, "ranks"): [
        [0, 1, 2, 3, 4],
        [],
        [3, 2, 1, 0],
        [4, 5, 6, 7],
        None,
        "0-3",
        [0, 1, 2, True],
    ],
    **{("layers", 3, key): values for key, values in LAYER.items()},
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path in WRONG for value in WRONG[path]]
)
def test_a_wrong_field_is_named(
    toy_problem: Problem, path: tuple[str | int, ...], value: Any
) -> None:
    data = plan_of().to_dict(names(toy_problem), range(8))
    place = reduce(getitem, path[:-1], data)
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(data)
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert path[0] not in ("cp", "virtual_stages") or said.startswith(f"plan: {path[0]}=")
    if path[0] == "layers" and len(path) > 1:
        assert re.search(rf"layers\[3\].*{path[-1]}", said)
        assert (f"the field layers[3].{path[-1]} is missing" in said) == (value is MISSING)
    if path[0] == "stages" and len(path) > 1:
        assert re.search(r"stages\[0\]\.ranks.*try 0 to 3", said)


@pytest.mark.parametrize(("cp", "product"), [(1, "tp(2) * dp(2)"), (2, "tp(2) * cp(2) * dp(2)")])
def test_the_message_about_wrong_ranks_names_their_product(
    toy_problem: Problem, cp: int, product: str
) -> None:
    data = replace(plan_of(), cp=cp).to_dict(names(toy_problem), range(8 * cp))
    data["stages"][1]["ranks"] = [0]
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(data)
    assert f"must be the {product} devices of the stage" in str(caught.value)
    assert str(caught.value).endswith(f"try {4 * cp} to {8 * cp - 1}.")


def test_a_plan_of_an_asynchronous_pipeline_is_refused(toy_problem: Problem) -> None:
    data = plan_of().to_dict(names(toy_problem), range(8))
    assert Plan.from_dict(data | {"asynchronous": None}) == plan_of()
    with pytest.raises(PlanError, match=r"asynchronous=PipeDream-2BW must be null.*try"):
        Plan.from_dict(data | {"asynchronous": "PipeDream-2BW"})


@pytest.mark.parametrize("foreign", [None, 3, "x", [], {}])
def test_what_is_no_plan_is_refused(foreign: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_dict(foreign)


def changed(**fields: Any) -> Plan:
    data = copy.deepcopy(plan_of().to_dict(tuple("abcdefg"), range(8)))
    for stage in data["stages"]:
        del stage["ranks"]
    data.update({key: value for key, value in fields.items() if key in data})
    for layer in data["layers"]:
        layer.update({key: value for key, value in fields.items() if key in layer})
    return Plan.from_dict(data)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (changed(tp=3), r"tp\(3\) \* dp\(2\) = 6, but a stage has 4 GPUs; try tp=2 and dp=2"),
        (changed(dp=4), r"tp\(2\) \* dp\(4\) = 8, but a stage has 4 GPUs; try tp=2 and dp=2"),
        (changed(num_micro_batches=3), "=16; try num_micro_batches=2"),
        (Plan(3, (0, LAYERS), (LayerStrategy(1, 8, 1),) * LAYERS), "=16; try num_micro_batches=2"),
        (Plan(1, (0, 5), plan_of().layers[:5]), "has 5 layers but model=toy has 7"),
        (Plan(1, (0, 6, LAYERS), plan_of().layers), "must stay with"),
        (Plan(1, (0, 2, 4, LAYERS), plan_of().layers), "pp=3 must divide the 8 GPUs; try 2"),
        (
            Plan(1, (0, 3, LAYERS), (LayerStrategy(1, 8, 1),) * LAYERS, virtual_stages=2),
            "virtual_stages=2 must be 1 where pp is 1; try 1",
        ),
    ],
)
def test_a_plan_of_another_problem_is_refused(toy_problem: Problem, plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        evaluate(plan, toy_problem)


def test_a_batch_that_the_replicas_do_not_divide_is_changed_itself(toy_problem: Problem) -> None:
    training = replace(toy_problem.config.training, global_batch_size=12)
    odd = toy_problem.with_config(training=training)
    with pytest.raises(PlanError, match=r"=12; try training\.global_batch_size=16\."):
        evaluate(Plan(1, (0, LAYERS), (LayerStrategy(1, 8, 1),) * LAYERS), odd)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero_stage": 7}, r"embedding\.zero_stage=7 must be one of 0, 1, 2, 3; try 3"),
        ({"tp_comm_bits": 7}, r"embedding\.tp_comm_bits=7 must be one of .* try 8"),
        ({"shard_size": -1}, r"embedding\.shard_size=-1 must be at least 0"),
        ({"recompute": "some"}, r"embedding\.recompute=some must be one of none"),
        ({"tp": 0}, r"embedding\.tp=0 must be at least 1; try 1"),
        ({"tp": "2"}, r"embedding\.tp='2' must be a whole number"),
    ],
)
def test_a_strategy_made_in_python_is_checked_as_one_of_a_file(
    toy_problem: Problem, fields: dict[str, Any], words: str
) -> None:
    layers = tuple(replace(layer, **fields) for layer in plan_of().layers)
    with pytest.raises(PlanError, match=words):
        evaluate(replace(plan_of(), layers=layers), toy_problem)


def test_lists_of_a_plan_made_in_python_are_as_good_as_tuples(toy_problem: Problem) -> None:
    known = plan_of()
    given = Plan(4, list(known.boundaries), list(known.layers))  # type: ignore[arg-type]
    assert hash(given) == hash(known)
    assert evaluate(given, toy_problem).iteration_time_s > 0.0


def test_a_plan_without_micro_batches_is_refused(toy_problem: Problem) -> None:
    with pytest.raises(PlanError, match=r"num_micro_batches=0 must be at least 1; try 1"):
        evaluate(replace(plan_of(), num_micro_batches=0), toy_problem)


def test_an_interleaved_plan_survives_its_dictionary_and_names_its_chunks() -> None:
    strategy = LayerStrategy(1, 2, 1, tp_comm_bits=16, grad_comm_bits=4, shard_size=2)
    plan = Plan(4, (0, 2, 3, 5, LAYERS), (strategy,) * LAYERS, cp=2, virtual_stages=2)
    assert (plan.pp, plan.num_chunks) == (2, 4)
    assert plan.stage_of_layer == (0, 0, 1, 0, 0, 1, 1)
    data = plan.to_dict(tuple("abcdefg"), range(8))
    assert Plan.from_dict(data) == plan
    assert data["stages"][2] == {"layers": [3, 5], "ranks": [0, 1, 2, 3], "chunk": 1}
    assert data["layers"][0]["grad_comm_bits"] == 4
    assert plan.describe(16) == (
        "dp 2 · tp 1 · cp 2 · pp 2 × 2 chunks · micro-batch 2 × 4 · ZeRO-1 · sharded over 2 · "
        "gradients at 4 bits"
    )


def test_a_file_without_the_newer_fields_reads_as_it_did(toy_problem: Problem) -> None:
    data = plan_of().to_dict(names(toy_problem), range(8))
    for key in ("cp", "virtual_stages"):
        del data[key]
    for layer in data["layers"]:
        for key in ("tp_comm_bits", "grad_comm_bits", "shard_size"):
            del layer[key]
    assert Plan.from_dict(data) == plan_of()


def test_integers_of_other_libraries_are_integers_of_a_plan(toy_problem: Problem) -> None:
    """A number of micro-batches that numpy counted was refused, and JSON does not take it."""
    one, two, four = (np.int64(number) for number in (1, 2, 4))
    layers = (LayerStrategy(two, two, one),) * 7
    plan = Plan(four, tuple(np.array([0, 3, 7])), layers, cp=one, virtual_stages=one)
    assert plan == Plan(4, (0, 3, 7), (LayerStrategy(2, 2, 1),) * 7)
    cost = evaluate(plan, toy_problem)
    assert json.loads(json.dumps(plan_dict(Outcome(toy_problem, plan, cost))))["pp"] == 2
    assert LayerStrategy(1, 1, 0, "none", True).sequence_parallel is True
    few = SearchConfig(num_steps=2, num_restarts=1)
    assert search(toy_problem, np.int64(3), config=few).seed == 3
