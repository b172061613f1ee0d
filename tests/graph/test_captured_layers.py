"""Captured blocks in the main problem."""

import json
from itertools import product

import pytest

from darts_parallel import LayerStrategy, Plan, Problem, evaluate, load_problem, plan
from darts_parallel.errors import DartsParallelError
from darts_parallel.export import require_trainers
from darts_parallel.graph.layers import _graphs
from darts_parallel.graph.operators import INPUT
from darts_parallel.planner import intervals, sensitivity
from tests.graph.named_modules import WIDTH

JOB = [
    "cluster=h100_1x8",
    "cluster.nodes.0.gpus=2",
    "training=llama3_8b",
    "training.seq_len=4096",
    "training.global_batch_size=16",
]
OWN = [
    "model=module",
    "model.path=tests.graph.llama_block:LlamaBlock",
    "model.inputs=[[1,4096,4096]]",
    "model.num_layers=4",
    "model.hidden_size=4096",
    "model.vocab_size=128256",
]


@pytest.fixture(scope="module")
def captured() -> Problem:
    pytest.importorskip("transformers")
    return load_problem([*JOB, *OWN])


def test_llamas_block_agrees_with_the_preset(captured: Problem) -> None:
    """Seconds of every strategy to 3.5 %, bytes to 0.1 %, parameters and FLOP exactly.

    Without sequence parallelism the programme may keep a norm's input divided, which the preset keeps whole.
    """
    preset = load_problem([*JOB, "model=llama3_8b", "model.num_layers=4"])
    ours, theirs = captured.model.layers[1], preset.model.layers[1]
    assert ours.parameters(0) == theirs.parameters(0)
    assert captured.model.flops_per_token(4096) == pytest.approx(preset.model.flops_per_token(4096))
    for (tp, sp), recompute, size in product(
        [(1, False), (2, False), (2, True)], ["none", "full"], [1, 4]
    ):
        chain = (LayerStrategy(tp, 2 // tp, 1, recompute, sp),) * preset.num_layers
        given = Plan(16 * tp // 2 // size, (0, preset.num_layers), chain)
        ours, theirs = evaluate(given, captured), evaluate(given, preset)
        assert ours.iteration_time_s == pytest.approx(theirs.iteration_time_s, rel=0.035), given
        spared = 4 * size * 4096 * 4096 * 2 / tp if tp > 1 and not sp else 0
        whole = theirs.memory_bytes[0]
        assert 0.999 * whole - spared < ours.memory_bytes[0] < 1.001 * whole, given


def test_launches_join_the_kernels_of_every_micro_batch() -> None:
    """Where launching takes longer than a sequence's kernels, and less than those of eight, to 3 %."""
    pytest.importorskip("transformers")
    job = [*JOB, "cluster.devices.h100.layer_overhead_us=15000"]
    ours, preset = (
        load_problem([*job, *OWN]),
        load_problem([*job, "model=llama3_8b", "model.num_layers=4"]),
    )
    for size in (1, 2, 8):
        chain = (LayerStrategy(1, 2, 1, "none", False),) * preset.num_layers
        given = Plan(8 // size, (0, preset.num_layers), chain)
        seconds, wanted = (evaluate(given, one).iteration_time_s for one in (ours, preset))
        assert seconds == pytest.approx(wanted, rel=0.03), size


def test_llamas_block_is_as_unsure_as_the_preset(captured: Problem) -> None:
    """It is priced from the same figures of the hardware, not measured."""
    preset = load_problem([*JOB, "model=llama3_8b", "model.num_layers=4"])
    given = Plan(
        8, (0, preset.num_layers), (LayerStrategy(2, 1, 0, "none", True),) * preset.num_layers
    )
    ours, theirs = (
        intervals(given, one, evaluate(given, one), sensitivity(given, one))
        for one in (captured, preset)
    )
    assert ours is not None
    assert theirs is not None
    assert ours.half_width == pytest.approx(theirs.half_width, rel=0.1)
    assert ours.memory_bytes[0] == pytest.approx(theirs.memory_bytes[0], rel=0.03)


def test_a_stack_of_blocks_is_planned_and_proven(captured: Problem) -> None:
    planned = plan(captured)
    assert planned.plan.cp == 1
    assert {layer.tp for layer in planned.plan.layers} <= {1, 2}
    assert evaluate(planned.plan, captured).feasible


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.inputs=[[1,64,4096]]", r"try \[\[1, 4096, 4096\]\]"),
        ("model.path=tests.graph.llama_block:Nothing", "has no function Nothing"),
        (
            "model.path=tests.graph.llama_block:narrowing",
            r"returns \[\(1, 4096, 64\)\] for the input",
        ),
        ("training.precision=fp8", "try bf16"),
        ("training.lora_rank=4", "try training.lora_rank=0"),
        ("export=megatron", "model=LlamaBlock has .*custom blocks"),
    ],
)
def test_what_a_block_cannot_be_is_one_sentence(change: str, words: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(DartsParallelError, match=words):
        require_trainers(load_problem([*JOB, *OWN, change]))


def test_a_block_returns_its_first_input_and_may_have_others() -> None:
    shapes = [[1, 16, WIDTH], [1, 16, "bool"]]
    graphs = _graphs("tests.graph.named_modules:scaled_to_zero", json.dumps(shapes))
    inputs = [graph.shapes([op.outputs[0] for op in graph.of_kind(INPUT)]) for graph in graphs]
    assert inputs == [[(1, 16, WIDTH), (1, 16)], [(2, 16, WIDTH), (2, 16)]]
