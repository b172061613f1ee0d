from dataclasses import replace
from typing import Any

import pytest

from darts_parallel import plan
from darts_parallel.config.schema import EXPORTS
from darts_parallel.errors import UnsupportedError
from darts_parallel.export import export_plan, refusals
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.schedules import find
from tests.support.commands import QUIET, TOY, Command
from tests.support.export_plans import LLAMA, plan_of


@pytest.fixture(scope="module")
def llama() -> Problem:
    return load_problem(LLAMA)


@pytest.fixture(scope="module")
def bare_toy() -> Problem:
    return load_problem(["model=toy", "cluster=toy", "training=toy"])


Z1 = LayerStrategy(2, 4, 1)
REFUSED: list[tuple[str, LayerStrategy, dict[str, Any], str, str]] = [
    ("torchtitan", Z1, {}, "zero_stage=1", "space=uniform space.zero_stage=[0,2,3]"),
    (
        "torchtitan",
        LayerStrategy(1, 4, 2),
        {"cuts": (5,)},
        "zero_stage=2 with pp=2, and its pipeline keeps",
        "space=uniform space.zero_stage=[0,1]",
    ),
    (
        "torchtitan",
        LayerStrategy(1, 4, 3),
        {"cuts": (5,)},
        "which is zero_stage=1",
        "space.zero_stage=[0,1]",
    ),
    (
        "torchtitan",
        LayerStrategy(1, 2),
        {"cuts": (5,), "cp": 2},
        "its cp shards parameters",
        "space.zero_stage=1",
    ),
    ("accelerate", Z1, {}, "zero_stage=1", "space.zero_stage=[0,2,3]"),
    (
        "accelerate",
        LayerStrategy(1, 4, 3),
        {"cuts": (5,)},
        "pp=2, and it has no pipeline",
        "space.pp=1",
    ),
    (
        "accelerate",
        LayerStrategy(2, 4),
        {},
        "zero_stage=0 with dp=4 and tp=2",
        "space.zero_stage=[2,3]",
    ),
    (
        "galvatron",
        Z1,
        {},
        "zero_stage=1 with 4 copies of the weights, and Galvatron has no ZeRO-1",
        "space.zero_stage=[0,3]",
    ),
    ("nanotron", LayerStrategy(1, 4), {"cp": 2}, "cp=2, and it cannot be written", "space.cp=1"),
    ("accelerate", LayerStrategy(1, 4), {"cp": 2}, "zero_stage=0 with cp=2", "space.zero_stage"),
    (
        "deepspeed",
        LayerStrategy(1, 4, 2),
        {"cuts": (5,)},
        "pp=2 with zero_stage=2",
        "space.zero_stage=[0,1]",
    ),
    ("deepspeed", LayerStrategy(2, 2), {"cuts": (5,)}, "pp=2 with tp=2", "space.tp=1"),
    (
        "deepspeed",
        LayerStrategy(2, 4, sequence_parallel=True),
        {},
        "sequence_parallel=true",
        "space.sequence_parallel=false",
    ),
    ("deepspeed", LayerStrategy(1, 4), {"cp": 2}, "cp=2", "space.cp=1"),
    ("nanotron", LayerStrategy(1, 8, 3), {}, "zero_stage=3", "space.zero_stage=[0,1]"),
    (
        "nanotron",
        LayerStrategy(1, 8, recompute="selective"),
        {},
        "recompute=selective",
        "space.recompute",
    ),
    (
        "megatron",
        LayerStrategy(1, 4, 3),
        {"cuts": (5,)},
        "zero_stage=3 with pp=2",
        "space.zero_stage=[0,1]",
    ),
    (
        "megatron",
        LayerStrategy(1, 4),
        {"cuts": (3, 5, 7), "virtual_stages": 2, "count": 1},
        "num_micro_batches=1 is no multiple of pp=2",
        "space.virtual_stages=1",
    ),
    (
        "deepspeed",
        LayerStrategy(1, 4),
        {"cuts": (3, 5, 7), "virtual_stages": 2},
        "virtual_stages=2",
        "space.virtual_stages=1",
    ),
    (
        "galvatron",
        LayerStrategy(1, 4),
        {"cuts": (1,)},
        "the first stage holds no block",
        "space.pp=1",
    ),
    (
        "galvatron",
        LayerStrategy(1, 8, 3, shard_size=4),
        {},
        "shard_size=4, and this",
        "space.shard_size=0",
    ),
]


@pytest.mark.parametrize(("target", "strategy", "more", "what", "space"), REFUSED)
def test_what_a_target_cannot_express_is_named_with_the_nearest_space(
    target: str,
    strategy: LayerStrategy,
    more: dict[str, Any],
    what: str,
    space: str,
    llama: Problem,
) -> None:
    plan = plan_of(llama, strategy, more.pop("count", 4) if "count" in more else 4, **more)
    with pytest.raises(UnsupportedError) as caught:
        export_plan(llama, plan, target)
    sentence = str(caught.value)
    assert what in sentence
    assert sentence.startswith(f"export={target}: ")
    assert sentence.partition("; closest space to search in: ")[2].find(space) >= 0, sentence


def test_all_reasons_stand_in_one_sentence_and_their_ways_out_are_joined(llama: Problem) -> None:
    strategy = LayerStrategy(2, 2, 1, "selective", sequence_parallel=True)
    with pytest.raises(UnsupportedError) as caught:
        export_plan(llama, plan_of(llama, strategy, 4, (5,)), "accelerate")
    sentence = str(caught.value)
    counts = {"pp=2,": 1, "zero_stage=1,": 1, "sequence_parallel=true": 1, "recompute=": 2}
    assert {word: sentence.count(word) for word in counts} == counts
    assert sentence.endswith(
        "closest space to search in: space=uniform space.pp=1 space.zero_stage=[0,2,3] "
        "space.sequence_parallel=false space.recompute=[none,full]."
    )


def test_deepspeed_names_blocks_of_unequal_recomputation_next_to_other_reasons(
    llama: Problem,
) -> None:
    plan = plan_of(llama, LayerStrategy(2, 4, sequence_parallel=True), 4)
    first, second, *others = plan.layers
    unequal = replace(plan, layers=(first, replace(second, recompute="full"), *others))
    with pytest.raises(UnsupportedError, match=r"sequence_parallel=true.*full for some blocks"):
        export_plan(llama, unequal, "deepspeed")


OTHERS = [
    ("megatron", "training.optimizer=sgd", 1, "takes Adam only"),
    ("nanotron", "model.head_dim=32", 0, "head_dim=32"),
    ("torchtitan", "model.qkv_bias=true", 0, "qkv_bias"),
    ("galvatron", "model.causal=false", 0, "decoders only"),
    (
        "megatron",
        "model.mtp_num_layers=1 model.learned_positions=true",
        0,
        "mtp_num_layers=1 with learned_positions=true, and its multi-token prediction",
    ),
    (
        "torch",
        "training.precision=fp16 +cluster.devices.toy.peak_TFLOPs.fp16=50",
        0,
        "does not scale its",
    ),
]


@pytest.mark.parametrize(("target", "overrides", "zero", "what"), OTHERS)
def test_what_the_real_trainer_takes_for_another_model_is_refused(
    target: str, overrides: str, zero: int, what: str
) -> None:
    problem = load_problem([*LLAMA, *overrides.split()])
    with pytest.raises(UnsupportedError, match=what):
        export_plan(problem, plan_of(problem, LayerStrategy(1, 8, zero), 2), target)


@pytest.mark.parametrize("target", EXPORTS)
def test_gradients_of_16_bits_are_written_or_refused(target: str) -> None:
    problem = load_problem([*LLAMA, "training.gradient_bits=16", "training.precision=bf16"])
    plan = plan_of(problem, LayerStrategy(1, 8, 3 if target == "galvatron" else 0), 2)
    words = {"megatron": "--grad-reduce-in-bf16", "nanotron": "accumulate_grad_in_fp32: false"}
    words |= {"deepspeed": '"grad_accum_dtype": "bf16"'}
    if target in words:
        assert words[target] in "".join(export_plan(problem, plan, target).files.values())
    else:
        with pytest.raises(UnsupportedError, match=r"gradient_bits=16.*training\.gradient_bits=32"):
            export_plan(problem, plan, target)


@pytest.mark.parametrize("target", [name for name in EXPORTS if name not in ("galvatron", "torch")])
def test_a_layer_wise_plan_is_refused_by_trainers_of_one_strategy(
    target: str, llama: Problem
) -> None:
    plan = plan_of(llama, LayerStrategy(1, 8), 2)
    mixed = replace(plan, layers=(*plan.layers[:3], LayerStrategy(2, 4), *plan.layers[4:]))
    with pytest.raises(UnsupportedError, match=r"layers\.2 has tp=2 .* search in: space=uniform"):
        export_plan(llama, mixed, target)


@pytest.mark.parametrize("target", EXPORTS)
def test_lossy_collectives_are_refused(target: str, llama: Problem) -> None:
    plan = plan_of(llama, LayerStrategy(1, 8, grad_comm_bits=8), 2)
    with pytest.raises(
        UnsupportedError, match=r"grad_comm_bits=8.*space(\.grad_comm_bits=16|=executable)"
    ):
        export_plan(llama, plan, target)


def test_a_model_that_a_trainer_lacks_is_refused(bare_toy: Problem) -> None:
    plan = plan_of(bare_toy, LayerStrategy(1, 8), 2)
    for target in ("torchtitan", "nanotron"):
        with pytest.raises(UnsupportedError, match=r"gated_mlp=false.*try a model such as"):
            export_plan(bare_toy, plan, target)
    t5 = load_problem(["model=t5_1_3b", "training=t5_1_3b", "cluster=toy"])
    with pytest.raises(UnsupportedError, match="has num_encoder_layers=24, and its runtime"):
        export_plan(t5, plan_of(t5, LayerStrategy(1, 8), 4), "galvatron")


@pytest.mark.parametrize(
    ("change", "strategy", "cuts", "sentence"),
    [
        ("model.num_layers=6", LayerStrategy(1, 8), (), "as many decoder layers; .*num_layers=4"),
        ("model.qk_norm=true", LayerStrategy(1, 8), (), "no norms of queries and keys"),
        ("model.dropout=false", LayerStrategy(1, 4), (4,), "its T5 has no pipeline"),
    ],
)
def test_the_refusals_of_megatrons_t5(
    change: str, strategy: LayerStrategy, cuts: tuple[int, ...], sentence: str
) -> None:
    t5 = load_problem([*TOY, "model.num_encoder_layers=2", change])
    with pytest.raises(UnsupportedError, match=sentence):
        export_plan(t5, plan_of(t5, strategy, 2, cuts), "megatron")


def test_megatrons_t5_recomputes_all_blocks_or_none() -> None:
    """`--recompute-num-layers` counts the blocks of the encoder and those of the decoder."""
    t5 = load_problem([*TOY, "model.num_encoder_layers=2"])
    whole = plan_of(t5, LayerStrategy(1, 8), 2)
    layers = list(whole.layers)
    layers[1] = replace(layers[1], recompute="full")
    some = replace(whole, layers=tuple(layers))
    assert refusals(t5, whole, "megatron") == []
    why, _ = refusals(t5, some, "megatron")[0]
    assert "counts the encoder's and the decoder's each" in why


def test_a_table_of_relative_positions_is_written_for_megatrons_t5() -> None:
    relative = [
        "model.num_encoder_layers=2",
        "model.learned_positions=false",
        "model.relative_position_buckets=32",
    ]
    t5 = load_problem([*TOY, *relative])
    exported = export_plan(t5, plan_of(t5, LayerStrategy(1, 8), 2), "megatron")
    script = exported.files["megatron.sh"]
    assert "--position-embedding-type relative" in script
    assert "--relative-attention-num-buckets 32" in script
    flash = load_problem([*TOY, *relative, "training.attention_kernel=fa2"])
    with pytest.raises(UnsupportedError, match="no table of relative positions"):
        export_plan(flash, plan_of(flash, LayerStrategy(1, 8), 2), "megatron")


@pytest.mark.parametrize("gated", [True, False])
def test_megatrons_t5_says_which_activation_is_written(gated: bool) -> None:
    t5 = load_problem([*TOY, "model.num_encoder_layers=2", f"model.gated_mlp={gated}"])
    exported = export_plan(t5, plan_of(t5, LayerStrategy(1, 8), 2), "megatron")
    assert ("--swiglu" in exported.files["megatron.sh"]) == gated
    assert any("written as SiLU; T5 v1.1 has GELU" in note for note in exported.notes) == gated


def test_the_refusals_of_the_torchtitan_pipeline() -> None:
    tied = load_problem([*LLAMA, "model.tie_embeddings=true"])
    with pytest.raises(UnsupportedError, match="tie_embeddings=true with pp=2"):
        export_plan(tied, plan_of(tied, LayerStrategy(1, 4), 4, (5,)), "torchtitan")


# the commands


def test_the_command_exports_what_it_found_and_the_same_from_its_plan_file(
    command: Command,
) -> None:
    outcome = command(*TOY, *QUIET, "space=uniform", "space.zero_stage=[0,1]", "export=megatron")
    assert outcome.status == 0, outcome.err
    plan = command.plan_file()
    script = plan.parent / "megatron.sh"
    assert f"megatron: {script}" in outcome.out
    # the plan's own problem is taken: no model, cluster or training is named
    again = command(
        f"plan={plan}", "export=megatron", "hydra.run.dir=again", "output.tensorboard=false"
    )
    assert again.status == 0, again.err
    assert (command.folder / "again" / "megatron.sh").read_text() == script.read_text()


def test_a_refused_export_ends_with_one_sentence_and_leaves_what_was_found(
    command: Command,
) -> None:
    early = command(*TOY, *QUIET, "export=nanotron", "hydra.run.dir=model")
    assert early.status == 2
    assert early.err.startswith("darts-parallel: export=nanotron: model=toy has")
    assert not early.files  # no plan of this model helps
    outcome = command(*TOY, *QUIET, "space.pp=2", "export=accelerate", "hydra.run.dir=found")
    assert outcome.status == 2
    assert outcome.err.startswith("darts-parallel: export=accelerate: ")
    assert "pp=2, and it has no pipeline" in outcome.err
    assert "found/plan.json" in outcome.files
    before = set(outcome.files)
    given = command("plan=found/plan.json", "export=accelerate", "hydra.run.dir=refused")
    assert given.status == 2
    assert set(given.files) == before
    wrong = command(*TOY, *QUIET, "export=megatrn")
    assert wrong.status == 2
    assert "export=megatrn must be one of" in wrong.err


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("gpipe", "GPipe"),
        ("zero_bubble_v", "ZBVZeroBubble"),
        ("dualpipe", "DualPipeV"),
        ("v_half", "ZBVZeroBubble"),
    ],
)
def test_torchtitan_takes_pytorchs_schedules_and_megatron_refuses_them(
    llama: Problem, schedule: str, name: str
) -> None:
    problem, chunks = llama, 1 if schedule == "gpipe" else 2
    cuts = (5,) if chunks == 1 else (2, 5, 7)
    layer = LayerStrategy(1, 4, 1)
    plan = replace(plan_of(problem, layer, 4, cuts, virtual_stages=chunks), schedule=schedule)
    files = export_plan(problem, plan, "torchtitan").files
    assert f'pipeline_parallel_schedule = "{name}"' in "".join(files.values())
    with pytest.raises(UnsupportedError, match=r"space\.schedules=\[1f1b,interleaved\]"):
        export_plan(problem, plan, "megatron")
    rows = [row.split(",") for row in files.get("torchtitan_order.csv", "").splitlines()]
    assert rows == (plan.pass_names if schedule == "v_half" else [])
    beside = 'schedule_csv = str(Path(__file__).with_name("torchtitan_order.csv"))'
    assert (beside in "".join(files.values())) == bool(rows)
    searched = replace(plan, schedule=find(schedule).code(2, plan.num_micro_batches, chunks))
    with pytest.raises(UnsupportedError, match=r"closest rule.* takes 3 s instead of 2 s"):
        export_plan(problem, searched, "megatron", lambda own: 2.0 + (own.schedule is None))


def test_the_library_refuses_what_the_command_refuses() -> None:
    with pytest.raises(UnsupportedError, match=r"^space\.trainer=nanotron"):
        plan(
            load_problem(["model=toy_moe", "cluster=toy", "training=toy", "space.trainer=nanotron"])
        )


@pytest.mark.parametrize(("count", "name"), [(1, "GPipe"), (2, "1F1B")])
def test_torchs_1f1b_wants_as_many_micro_batches_as_stages(
    llama: Problem, count: int, name: str
) -> None:
    files = export_plan(
        llama, plan_of(llama, LayerStrategy(1, 4, 1), count, (5,)), "torchtitan"
    ).files
    assert f'pipeline_parallel_schedule = "{name}"' in "".join(files.values())
