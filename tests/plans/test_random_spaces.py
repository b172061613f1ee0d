"""Spaces of random pins against the check of plans, and advice on experts that is followed."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import yaml

from darts_parallel.errors import ConfigError, PlanError, UnsupportedError
from darts_parallel.plans.legality import check_plan, refuse_model
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import Problem, load_problem

DEGREES = (1, 2, 3, 4, 8)
VALUES: dict[str, tuple[object, ...]] = {
    "pp": DEGREES,
    "tp": DEGREES,
    "cp": DEGREES,
    "dp": DEGREES,
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": ("false", "true"),
    "num_micro_batches": (1, 2, 4, 5, 16),
    "micro_batch_size": (1, 2, 3, 8),
}
EXPERTS: dict[str, tuple[object, ...]] = {"ep": DEGREES, "etp": DEGREES}
JOBS = (
    ["cluster=toy"],
    ["cluster=toy", "cluster.nodes.0.gpus=2", "cluster.nodes.0.count=4"],
    ["cluster=toy_mixed"],
)
Entry = tuple[int, int, int, LayerStrategy]


def candidates(problem: Problem) -> Iterator[Entry]:
    """Yield pp, cp, micro-batches and a strategy that is no other name of another one."""
    experts = problem.model.has_experts
    sizes = (1, 2, 4, 8) if experts else (1,)
    for pp, tp, cp, dp in product(DEGREES, repeat=4):
        if pp * tp * cp * dp != 8:
            continue
        ranks = dp * cp
        zero = range(4) if ranks > 1 or (experts and tp > 1) else (0,)
        sequence = (False, True) if tp > 1 else (False,)
        for stage, own, ep, etp in product(zero, sequence, sizes, sizes):
            shards = [0]
            if stage and not experts:
                shards += [size for size in range(2, ranks) if ranks % size == 0]
            for shard in shards:
                strategy = LayerStrategy(
                    tp, dp, stage, "none", own, shard_size=shard, ep=ep, etp=etp
                )
                for count in (1, 2, 4, 8, 16):
                    yield pp, cp, count, strategy


def legal(problem: Problem, entry: Entry) -> bool:
    pp, cp, count, strategy = entry
    layers = problem.num_layers
    if pp > layers - 1 or any(  # the loss stays with the head
        devices % (8 // pp) for devices in problem.cluster.type_devices.values()
    ):
        return False
    boundaries = (*range(pp), layers)
    plan = Plan(count, boundaries, (strategy,) * layers, cp)
    try:
        check_plan(plan, problem.model, problem.cluster, problem.training, problem.measured)
    except PlanError:
        return False
    return True


def pinned(entry: Entry, problem: Problem, pins: dict[str, list[object]]) -> bool:
    """Return whether an entry has pinned values, those aside that mean nothing on its degrees."""
    pp, cp, count, strategy = entry
    own: dict[str, object] = {"pp": pp, "cp": cp, "num_micro_batches": count}
    own["micro_batch_size"] = problem.training.global_batch_size // (strategy.dp * count)
    for key in ("tp", "dp", "ep", "etp"):
        own[key] = getattr(strategy, key)
    if strategy.dp * cp > 1 or (problem.model.has_experts and strategy.tp > 1):
        own["zero_stage"] = strategy.zero_stage
    if strategy.tp > 1:
        own["sequence_parallel"] = str(strategy.sequence_parallel).lower()
    return all(value in pins[key] for key, value in own.items() if key in pins)


@pytest.mark.parametrize("model", ["toy", "toy_moe"])
@pytest.mark.parametrize("job", JOBS)
def test_the_space_of_random_pins_is_all_that_the_check_of_plans_accepts(
    model: str, job: list[str]
) -> None:
    given = [
        f"model={model}",
        "training=toy",
        *job,
        "space.recompute=none",
        "space.shard_size=null",
    ]
    whole = load_problem(given)
    every = [entry for entry in candidates(whole) if legal(whole, entry)]
    keys = VALUES | (EXPERTS if model == "toy_moe" else {})
    batch = whole.training.global_batch_size
    rng = Random(0)
    empty = 0
    for _ in range(8):
        pins = {}
        for key, values in keys.items():
            if rng.random() < 0.3:
                pins[key] = rng.sample(values, rng.randint(1, len(values)))
        words = [f"space.{key}={pins.get(key, 'null')}".replace("'", "") for key in keys]
        problem = load_problem([*given, *words])
        expected = {entry for entry in every if pinned(entry, whole, pins)}
        if not expected:
            empty += 1
            with pytest.raises(ConfigError, match="; try "):
                outer_spaces(problem)
            continue
        spaces = outer_spaces(problem)
        found = []
        for space in spaces:
            for count in () if space.node_order else space.num_micro_batches:
                entries = [(space.pp, space.cp, count, choice) for choice in space.choices]
                # the table of costs masks sizes of micro-batches that are not whole, or not pinned
                whole_sizes = [
                    entry
                    for entry in entries
                    if batch % (count * entry[3].dp) == 0 and pinned(entry, whole, pins)
                ]
                assert whole_sizes
                found += whole_sizes
        assert len(set(found)) == len(found)
        assert set(found) == expected, pins
    assert empty < 8


def test_a_degree_that_the_batch_alone_forbids_names_the_batch() -> None:
    """`pp=1` of 8 GPUs was refused as no divisor of the GPUs, where 3 sequences were the reason."""
    sentence = (
        r"space\.pp=1 must leave a dp that divides training\.global_batch_size=3 .*; try 2 or "
        r"training\.global_batch_size=4\."
    )
    toy = ["model=toy", "training=toy", "cluster=toy"]
    with pytest.raises(ConfigError, match=sentence):
        outer_spaces(load_problem([*toy, "gbs=3", "space.pp=1"]))
    outer_spaces(load_problem([*toy, "gbs=3", "space.pp=2"]))


MIXTURE = ["model=toy_moe", "training=toy", "cluster=toy"]


@pytest.mark.parametrize(("key", "value", "near"), [("ep", 3, 2), ("ep", 16, 8), ("etp", 5, 4)])
def test_a_pinned_degree_of_experts_that_no_stage_admits_gets_the_closest_one(
    key: str, value: int, near: int
) -> None:
    with pytest.raises(ConfigError, match=rf"^space\.{key}={value} must divide .*; try {near}\.$"):
        outer_spaces(load_problem([*MIXTURE, f"space.{key}={value}"]))
    spaces = outer_spaces(load_problem([*MIXTURE, f"space.{key}={near}"]))
    assert {getattr(choice, key) for space in spaces for choice in space.choices} == {near}


def test_degrees_of_experts_that_a_stage_lacks_get_the_closest_ones() -> None:
    problem = load_problem(MIXTURE)
    legal_ones = [own for own in product((1, 2, 4, 8), repeat=2) if 8 % (own[0] * own[1]) == 0]
    legal_ones = [own for own in legal_ones if own[1] <= 4]  # GPUs of a node
    for ep, etp in product((1, 2, 3, 6, 8, 16), (1, 2, 3, 4, 7)):
        strategy = LayerStrategy(1, 8, ep=ep, etp=etp)
        plan = Plan(1, (0, problem.num_layers), (strategy,) * problem.num_layers)
        parts = (problem.model, problem.cluster, problem.training, problem.measured)
        if (ep, etp) in legal_ones:
            check_plan(plan, *parts)
            continue
        with pytest.raises(PlanError, match=rf"ep={ep} and etp={etp}, which must") as error:
            check_plan(plan, *parts)
        advice = re.search(r"try ep=(\d+) and etp=(\d+)\.$", str(error.value))
        assert advice
        near = int(advice[1]), int(advice[2])
        assert near in legal_ones
        steps = [abs(own[0] - ep) + abs(own[1] - etp) for own in legal_ones]
        assert abs(near[0] - ep) + abs(near[1] - etp) == min(steps)


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("moe_router_num_groups", 4),
        ("moe_router_enable_expert_bias", True),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_pre_softmax", True),
        ("moe_router_topk_scaling_factor", 2.5),
    ],
)
def test_routing_that_cannot_run_here_is_refused_and_the_advice_runs(key: str, other: Any) -> None:
    built = replace(load_problem(MIXTURE).model.config, moe_shared_expert_intermediate_size=None)
    training = load_problem(MIXTURE).training
    refuse_model(Model(built, fused_attention=True), training)
    with pytest.raises(UnsupportedError, match=f"model.{key}={other}, .*; try ") as error:
        refuse_model(Model(replace(built, **{key: other}), fused_attention=True), training)
    near = yaml.safe_load(str(error.value).partition("; try ")[2].removesuffix("."))
    refuse_model(Model(replace(built, **{key: near}), fused_attention=True), training)
