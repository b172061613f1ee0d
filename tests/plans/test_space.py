import re
from dataclasses import replace
from itertools import product

import pytest

from darts_parallel.config.schema import RECOMPUTE
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans.degrees import (
    batch_note,
    divisors,
    tensor_degrees,
    virtual_stage_counts,
)
from darts_parallel.plans.legality import check_plan
from darts_parallel.plans.space import (
    ScheduleChoice,
    left_out,
    micro_batch_legal,
    outer_spaces,
    schedule_choices,
)
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

TOY = ["model=toy", "cluster=toy", "training=toy"]


def toy(*overrides: str) -> Problem:
    return load_problem([*TOY, *overrides])


def tensor(problem: Problem) -> list[int]:
    return tensor_degrees(problem.config.space, problem.model, problem.cluster, problem.measured)[0]


def omitted(problem: Problem) -> tuple[str, ...]:
    return left_out(problem.config, problem.model, problem.cluster, problem.measured)


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1024, 16777216])
def test_divisors_are_all_divisors_in_order(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % d == 0 for d in found)
    if number < 2000:
        assert found == [d for d in range(1, number + 1) if number % d == 0]


def test_the_toy_space_holds_every_legal_product_and_no_other() -> None:
    problem = toy()
    found = {
        (space.pp, m, c)
        for space in outer_spaces(problem)
        for m in space.num_micro_batches
        for c in space.choices
    }
    assert {pp for pp, _, _ in found} == {1, 2, 4}
    for pp, m, c in found:
        assert c.tp * c.dp * pp == 8
        assert 4 % c.tp == 0
        assert 16 % m == 0
        assert c.recompute in RECOMPUTE
        assert c.dp > 1 or c.zero_stage == 0
        assert c.tp > 1 or not c.sequence_parallel
    for pp, tp in product((1, 2, 4), (1, 2, 4)):
        if 8 % (pp * tp) == 0 and 16 % (8 // (pp * tp)) == 0:
            assert any(p == pp and c.tp == tp for p, _, c in found)


@pytest.mark.parametrize(
    ("pin", "check"),
    [
        ("space.pp=2", lambda pp, m, c: pp == 2),
        ("space.tp=[1,2]", lambda pp, m, c: c.tp in (1, 2)),
        ("space.dp=4", lambda pp, m, c: c.dp == 4),
        ("space.num_micro_batches=4", lambda pp, m, c: m == 4),
        ("space.zero_stage=[1]", lambda pp, m, c: c.zero_stage == 1 or c.dp == 1),
        ("space.recompute=full", lambda pp, m, c: c.recompute == "full"),
        ("space.sequence_parallel=true", lambda pp, m, c: c.sequence_parallel or c.tp == 1),
    ],
)
def test_a_pinned_value_is_kept(pin: str, check) -> None:  # type: ignore[no-untyped-def]
    spaces = outer_spaces(toy(pin))
    assert spaces
    assert all(check(s.pp, m, c) for s in spaces for m in s.num_micro_batches for c in s.choices)


def test_sequence_parallel_ranks_have_equal_parts_of_the_sequence() -> None:
    """Megatron-LM asserts it at the first step: a script had --sequence-parallel and 8,191 tokens."""
    layers = [c for own in outer_spaces(toy("training.seq_len=62")) for c in own.choices]
    assert {c.tp for c in layers if c.sequence_parallel} == {2}
    assert 4 in {c.tp for c in layers}
    pinned = ("training.seq_len=62", "space.sequence_parallel=true")
    assert {c.tp for own in outer_spaces(toy(*pinned)) for c in own.choices} == {1, 2}
    with pytest.raises(ConfigError, match=r"tp=4 must .*training\.seq_len=62 .*; try 2\.$"):
        outer_spaces(toy(*pinned, "space.tp=4"))


def test_sequence_parallel_ranks_divide_the_part_of_their_context_parallel_rank() -> None:
    problem = toy("training.seq_len=12", "space.cp=null")
    found: dict[int, set[int]] = {}
    for own in outer_spaces(problem):
        found.setdefault(own.cp, set()).update(c.tp for c in own.choices if c.sequence_parallel)
    assert found == {1: {2, 4}, 2: {2}}
    layer = LayerStrategy(4, 1, sequence_parallel=True)
    plan = Plan(1, (0, problem.num_layers), (layer,) * problem.num_layers, cp=2)
    parts = (problem.model, problem.cluster, problem.training, problem.measured)
    with pytest.raises(PlanError, match=r"tp=4 and cp=2, which must divide training\.seq_len=12"):
        check_plan(plan, *parts)
    without = replace(layer, sequence_parallel=False)
    check_plan(replace(plan, layers=(without,) * problem.num_layers), *parts)


def test_tensor_parallel_ranks_have_equal_parts_of_the_mlp() -> None:
    """Megatron-LM's layers assert it (`divide` in its tensor_parallel/layers.py)."""
    layers = [c for own in outer_spaces(toy("model.ffn_hidden_size=258")) for c in own.choices]
    assert {c.tp for c in layers} == {1, 2}
    with pytest.raises(ConfigError, match=r"tp=4 must divide .* the MLP width.*; try 2\.$"):
        outer_spaces(toy("model.ffn_hidden_size=258", "space.tp=4"))


def test_a_micro_batch_is_whole_and_of_a_pinned_size() -> None:
    free = toy().config.space
    pinned = toy("space.micro_batch_size=[2,3]").config.space
    for batch, count, dp in product(range(1, 13), range(1, 5), range(1, 5)):
        sizes = {size for size in range(1, 13) if size * count * dp == batch}
        choice = LayerStrategy(1, dp)
        assert micro_batch_legal(free, batch, count, choice) == bool(sizes)
        assert micro_batch_legal(pinned, batch, count, choice) == bool(sizes & {2, 3})


@pytest.mark.parametrize(
    ("schedules", "executable", "most"),
    [("1f1b", True, 3), ("1f1b,searched", False, 3), ("1f1b,searched", True, 1)],
)
def test_an_executable_order_that_is_searched_has_no_split_backward_pass_under_zero_2(
    schedules: str, executable: bool, most: int
) -> None:
    problem = toy(f"space.schedules=[{schedules}]", f"space.executable={executable}")
    for space in outer_spaces(problem):
        stages = {choice.zero_stage for choice in space.choices}
        assert max(stages) == (3 if space.pp == 1 else most)


def test_tensor_degrees_divide_kv_heads_and_stay_inside_a_node() -> None:
    assert tensor(toy()) == [1, 2, 4]
    assert tensor(toy("model.num_kv_heads=2")) == [1, 2]
    assert tensor(load_problem(["model=gpt2_xl"])) == [1]  # 25 heads on nodes of 4


def refusal(problem: Problem) -> str:
    with pytest.raises(ConfigError) as caught:
        outer_spaces(problem)
    return str(caught.value)


def test_a_list_allows_values_and_the_illegal_ones_among_them_never_enter() -> None:
    # 25 heads: tp 2 and 4 are illegal for GPT-2 XL, which leaves tp 1
    problem = load_problem(
        ["model=gpt2_xl", "training=gpt2_xl", "space.tp=[1,2,4]", "space.pp=[3,8]"]
    )
    (space,) = outer_spaces(problem)
    assert space.pp == 8
    assert {choice.tp for choice in space.choices} == {1}


ALONE = [
    ("space.pp=3", 2),
    ("space.pp=8", 4),
    ("space.pp=[3,5]", 2),
    ("space.tp=3", 2),
    ("space.tp=16", 4),
    ("space.dp=5", 4),
    ("space.num_micro_batches=3", 2),
    ("space.micro_batch_size=5", 4),
    ("space.cp=3", 2),
    ("space.cp=16", 8),
    ("space.virtual_stages=9", 3),
]


@pytest.mark.parametrize(("pin", "nearest"), ALONE)
def test_a_value_that_no_product_matches_is_refused_and_the_nearest_one_works(
    pin: str, nearest: int
) -> None:
    key = pin.split("=")[0]
    sentence = refusal(toy(pin))
    assert sentence.startswith(f"{key}=")
    assert sentence.endswith(f"try {nearest}.")
    assert outer_spaces(toy(f"{key}={nearest}"))


@pytest.mark.parametrize(
    "pins",
    [
        ["space.pp=1", "space.tp=2", "space.dp=2"],
        ["space.dp=8", "space.num_micro_batches=16"],
        ["space.num_micro_batches=16", "space.micro_batch_size=16"],
        ["space.tp=4", "space.dp=8"],
        ["space.tp=[2,4]", "space.dp=8"],
        ["training.global_batch_size=6", "space.dp=2", "space.num_micro_batches=2"],
        ["space.cp=8", "space.dp=2"],
        ["space.pp=1", "space.virtual_stages=2"],
        ["space.virtual_stages=2", "space.num_micro_batches=1"],
    ],
)
def test_pins_that_contradict_each_other_are_refused_and_every_advice_works(
    pins: list[str],
) -> None:
    sentence = refusal(toy(*pins))
    plain = sentence.replace(" ", "")  # lists are shown with blanks
    assert all(pin in plain for pin in pins if pin.startswith("space."))
    ways = re.search(r"try (.*)\.$", sentence)
    for way in ways.group(1).split(" or "):
        key = way.split("=")[0]
        assert outer_spaces(toy(*[pin for pin in pins if not pin.startswith(key)], way)), way


def test_a_batch_that_no_product_divides_is_refused_and_the_nearest_one_works() -> None:
    large = ["model=toy", "training=toy", "cluster=h100_8x8"]
    sentence = refusal(load_problem([*large, "training.global_batch_size=3"]))
    assert sentence.startswith("training.global_batch_size=3 must be a multiple")
    nearest = re.search(r"try (\d+)\.$", sentence)
    assert outer_spaces(load_problem([*large, f"training.global_batch_size={nearest.group(1)}"]))


def test_small_nodes_do_not_bound_the_tensor_degree_and_what_is_left_out_is_named() -> None:
    single = [
        "model=llama3_70b",
        "training=llama3_70b",
        "cluster=h100_8x8",
        "cluster.nodes.0.gpus=1",
    ]
    problem = load_problem([*single, "cluster.nodes.0.count=32"])
    assert tensor(problem) == [1, 2, 4, 8]
    assert omitted(problem) == ("cp 1", "vpp 1")
    assert omitted(load_problem([*single, "cp=null", "vpp=null"])) == ()
    assert omitted(load_problem([*single, "cp=null", "pp=1"])) == ()
    wide = load_problem(["model=gpt3_175b", "training=gpt3_175b", "cluster=a100_80_16x8"])
    assert omitted(wide) == ("cp 1", "vpp 1", "tp ≤ 8")
    pinned = ["model=gpt3_175b", "training=gpt3_175b", "cluster=a100_80_16x8", "space.tp=8"]
    assert omitted(load_problem(pinned)) == ("cp 1", "vpp 1")


def test_orders_of_nodes_that_are_not_tried_are_named_and_too_many_refused() -> None:
    mixed = ["model=toy", "training=toy", "cluster=toy_mixed", "training.global_batch_size=64"]
    many = [*mixed, "cluster.nodes.0.count=16", "cluster.nodes.1.count=16", "model.num_layers=40"]
    problem = load_problem([*many, "space.pp=32"])
    assert omitted(problem)[2:] == ("no node orders that mix the types (space.node_orders)",)
    assert omitted(load_problem(mixed)) == ("cp 1", "vpp 1")
    with pytest.raises(ConfigError, match=r"node_orders=all means 601,080,390 orders.*; try "):
        outer_spaces(load_problem([*many, "space.pp=32", "space.node_orders=all"]))


def test_a_batch_that_divides_badly_is_said_with_one_that_divides() -> None:
    assert batch_note(8, 64) == ""
    note = batch_note(8, 3)
    assert note.startswith("training.global_batch_size=3 divides over dp 1 at most of 8 GPUs")
    assert batch_note(8, 2) == ""
    near = re.search(r"and (\d+) would divide over dp 2", note)
    assert int(near.group(1)) % 2 == 0
    # not 2 * 8: 16 does not divide 24 GPUs
    assert batch_note(24, 512).endswith("and 504 would divide over dp 24")


def test_a_trainer_without_a_plan_gets_a_batch_that_gives_it_one() -> None:
    three = ["model=llama3_8b", "cluster=box", "gpu=h200", "gpus=8", "nodes=3"]
    job = [*three, "trainer=accelerate"]
    with pytest.raises(ConfigError, match=r"; try space.trainer=null, or (\S+)\.$") as refused:
        outer_spaces(load_problem(job))
    proposed = str(refused.value).rpartition(" or ")[2].removesuffix(".")
    assert proposed == "training.global_batch_size=504"
    assert outer_spaces(load_problem([*job, proposed]))


def test_free_stages_per_device_divide_the_blocks_evenly() -> None:
    problem = toy("model.num_layers=12", "space.virtual_stages=null")
    assert virtual_stage_counts(problem.config.space, problem.model, 2) == [1, 2, 3, 6]


def test_a_schedule_of_two_chunks_needs_a_layer_for_each() -> None:
    problem = toy("model.num_layers=12", "space.schedules=[zero_bubble_v]")
    space, model = problem.config.space, problem.model
    assert schedule_choices(space, model, 4) == [ScheduleChoice(2, "zero_bubble_v")]
    assert schedule_choices(space, model, 8) == []


def test_schedules_with_one_stage_a_device_come_first() -> None:
    problem = toy("space.schedules=[zero_bubble_v,1f1b]")
    found = schedule_choices(problem.config.space, problem.model, 2)
    assert [choice.schedule for choice in found] == ["1f1b", "zero_bubble_v"]


@pytest.mark.parametrize(("pin", "counts"), [((), {2, 3}), (("2",), {2}), (("[1,3]",), {3})])
def test_interleaved_stages_that_are_named_have_the_pinned_numbers_or_any(
    pin: tuple[str, ...], counts: set[int]
) -> None:
    words = ["space.schedules=[interleaved]", "model.num_layers=6"]
    problem = toy(*words, *(f"space.virtual_stages={value}" for value in pin))
    found = schedule_choices(problem.config.space, problem.model, 2)
    assert {choice.virtual_stages for choice in found} == counts


def test_every_divisor_above_1_of_the_data_parallel_ranks_is_a_shard_size() -> None:
    pins = ("space.pp=2", "space.tp=1")
    for size in (2, 4):
        (space, *_) = outer_spaces(toy(*pins, f"space.shard_size={size}"))
        assert {choice.shard_size for choice in space.choices} <= {0, size}
    with pytest.raises(ConfigError, match=r"space\.shard_size=3 must be .* or [24]\."):
        outer_spaces(toy(*pins, "space.shard_size=3"))


@pytest.mark.parametrize(("count", "near"), [(5, 4), (11, 10)])
def test_the_closest_nodes_that_divide_into_equal_stages_are_proposed(
    count: int, near: int
) -> None:
    mixed = "cluster=toy_mixed"
    with pytest.raises(ConfigError, match=rf"try cluster\.nodes\[0\]\.count={near}\.") as error:
        outer_spaces(toy(mixed, f"cluster.nodes.0.count={count}"))
    assert "must divide into equal stages of one node type each" in str(error.value)
    assert outer_spaces(toy(mixed, f"cluster.nodes.0.count={near}"))
