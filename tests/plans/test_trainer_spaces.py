"""A trainer's space holds all that its own source can run; the rest is refused by name."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from darts_parallel.cost import build_tables
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.planner.planning import plan
from darts_parallel.plans.legality import _has
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.plans.trainers import trainer_parts
from darts_parallel.problem.problem import Problem, load_problem

NODE = ("cluster=h100_1x8", "space=uniform", "space.pp=1", "space.num_micro_batches=8")
FAST = ("verification.enabled=false", "search.num_steps=2", "search.num_restarts=1")


def problem(*words: str) -> Problem:
    return load_problem([*NODE, *FAST, *words])


@pytest.mark.parametrize("trainer", ["torchtitan", "deepspeed", "accelerate"])
def test_most_trainers_share_key_value_heads_evenly(trainer: str) -> None:
    """Qwen3-30B-A3B has 4: torchtitan, DeepSpeed's AutoTP and accelerate divide these by tp."""
    with pytest.raises(ConfigError, match="must divide the heads, the KV heads"):
        outer_spaces(problem("model=qwen3_30b_a3b", "space.tp=8", f"trainer={trainer}"))


def test_megatron_copies_key_value_heads() -> None:
    """Its number of query groups is a multiple or a divisor of tp."""
    spaces = outer_spaces(problem("model=qwen3_30b_a3b", "space.tp=8", "trainer=megatron"))
    assert {choice.tp for space in spaces for choice in space.choices} == {8}
    with pytest.raises(ConfigError, match="try"):
        outer_spaces(problem("model=toy", "model.num_kv_heads=2", "space.tp=8", "trainer=megatron"))


@pytest.mark.parametrize(
    ("model", "trainer", "sentence"),
    [
        ("gemma3_27b", "accelerate", "its context parallelism attends to all tokens"),
        ("nemotron_h_8b", "accelerate", "its context parallelism passes no state between ranks"),
        ("gpt_oss_20b space.tp=8 cluster.nodes.0.count=2", "megatron", "divides key-value heads"),
    ],
)
def test_context_parallelism_of_windows_and_states(model: str, trainer: str, sentence: str) -> None:
    """Accelerate's pull request 4177 refuses both; Megatron-LM exchanges heads (TransformerEngine#2541)."""
    with pytest.raises(ConfigError, match=sentence):
        outer_spaces(problem(f"trainer={trainer}", "space.cp=2", *f"model={model}".split()))


def test_megatron_exchanges_the_heads_of_windows_and_sinks() -> None:
    """Megatron-Bridge#2298 and Megatron-LM#2222: no kernel has a ring (p2p) for them; GPT-OSS has 8 heads."""
    words = ("model=gpt_oss_20b", "trainer=megatron", "space.cp=2", "space.tp=2", "space.ep=4")
    job = problem(*words, "search=exact", "seq=4096", "gbs=64")
    script = export_plan(job, plan(job).plan, "megatron").files["megatron.sh"]
    assert "--context-parallel-size 2\n    --cp-comm-type a2a\n" in script
    ring = problem("model=toy", "trainer=megatron", "space.cp=2", "search=exact", "gbs=64")
    assert (
        "--cp-comm-type" not in export_plan(ring, plan(ring).plan, "megatron").files["megatron.sh"]
    )


def test_interleaved_stages_want_a_multiple_of_pp_micro_batches() -> None:
    """NVIDIA-NeMo/RL#1126: mcore's interleaved schedule raises where micro-batches are no multiple of pp."""
    pins = ("space.pp=4", "space.virtual_stages=2", "space.tp=1", "space.micro_batch_size=1")
    words = ("space.num_micro_batches=null", "gbs=6", "cluster.nodes.0.gpus=4")
    with pytest.raises(ConfigError, match="virtual stages want a multiple of pp micro-batches"):
        outer_spaces(problem("model=llama3_8b", "trainer=megatron", *words, *pins))


def test_a_copied_head_costs_what_a_head_a_rank_costs() -> None:
    """With 2 heads on 4 ranks each rank holds one, as of a model of 4 heads."""

    def table(heads: int) -> Any:
        words = (f"model.num_kv_heads={heads}", "space.tp=[1,4]", "trainer=megatron")
        (found,) = build_tables(problem("model=llama3_8b", *words))
        return found

    copied, whole = table(2), table(4)
    four = torch.tensor([choice.tp == 4 for choice in whole.choices])
    for name in ("forward", "backward", "static", "activation"):
        mine, its = getattr(copied, name), getattr(whole, name)
        assert torch.equal(mine[..., four], its[..., four]), name
        assert (mine <= its).all()
    assert (copied.static[..., ~four].sum() < whole.static[..., ~four].sum()).item()


def test_accelerate_trains_models_with_experts_by_fsdp() -> None:
    """FSDP2 shards experts as any other module: ep 1 (huggingface/trl, PR 6845)."""
    job = problem("model=qwen3_30b_a3b", "cluster=h100_8x8", "trainer=accelerate")
    found = plan(job).plan
    assert {(own.ep, own.etp, own.tp) for own in found.layers} == {(1, 1, 1)}
    assert "fsdp_config" in export_plan(job, found, "accelerate").files["accelerate.yaml"]
    with pytest.raises(ConfigError, match="and it divides no experts"):
        outer_spaces(problem("model=qwen3_30b_a3b", "trainer=accelerate", "space.ep=2"))


def test_megatron_trains_gpt_oss_by_a_learnable_softmax() -> None:
    free = ("space.num_micro_batches=null", "space.tp=1", "space.recompute=full")
    job = problem("model=gpt_oss_20b", "trainer=megatron", "cluster=h100_8x8", *free)
    found = plan(job).plan
    (script,) = [
        text for text in export_plan(job, found, "megatron").files.values() if "--softmax" in text
    ]
    assert "--softmax-type learnable" in script
    # every second block looks back at 128 tokens, the query itself among them
    assert "--window-size 127,0" in script
    assert "--window-attn-skip-freq 2" in script
    whole = job.with_config(
        model=replace(job.config.model, sliding_window=None, sliding_window_pattern=None)
    )
    with pytest.raises(UnsupportedError, match="learned logit"):
        export_plan(whole, found, "nanotron")


def test_nanotrons_pipelines_have_the_stages_that_it_cuts() -> None:
    """Llama 3 70B: 21, 20, 20 and 19 blocks, as build_model fills the shares of 4 ranks."""
    pins = ("space.pp=4", "space.tp=8", "space.num_micro_batches=null", "search=exact")
    job = problem("model=llama3_70b", "cluster=h100_8x8", "trainer=nanotron", *pins)
    assert {space.cuts for space in outer_spaces(job)} == {(22, 42, 62)}
    assert min(min(space.num_micro_batches) for space in outer_spaces(job)) >= 3
    found = plan(job).plan
    assert found.boundaries == (0, 22, 42, 62, 83)
    assert "pp: 4" in export_plan(job, found, "nanotron").files["nanotron.yaml"]


def test_nanotron_names_its_own_stages() -> None:
    """Its rule cuts the pipeline, and its 1F1B wants at least pp - 1 micro-batches."""
    pins = ("space.pp=8", "space.num_micro_batches=null", "training.global_batch_size=4")
    with pytest.raises(ConfigError, match="a rule of its own and wants at least pp - 1 micro"):
        outer_spaces(problem("model=llama2_7b", "trainer=nanotron", *pins))


def test_torchtitans_selective_repeats_every_second_product() -> None:
    """Its SelectiveAC, the default of its Llama 3: half of a block's seconds and bytes, near enough.

    Runs of torchtitan whose table says selective are priced as full recomputation of every second
    block (`experiments/data/runs.py`).
    """
    pins = ("space.tp=2", "space.dp=4", "space.zero_stage=3", "space.shard_size=0")
    job = problem("model=llama3_8b", "training=llama3_8b", "trainer=torchtitan", *pins)
    (table,) = build_tables(job)
    kinds = {choice.recompute: c for c, choice in enumerate(table.choices)}
    assert set(kinds) == {"none", "selective", "full"}
    block = [layer.kind for layer in job.model.layers].index("block")
    for name in ("backward", "activation"):
        figures = getattr(table, name)[..., block, :].flatten()
        none, selective, full = (float(figures[kinds[kind]]) for kind in kinds)
        assert none != full
        assert selective == pytest.approx((none + full) / 2, rel=1e-3), name
    given = ("trainer=torchtitan", "space.recompute=selective")
    pinned = problem(*pins, "model=llama3_8b", *given, "training.global_batch_size=32")
    files = export_plan(pinned, plan(pinned).plan, "torchtitan").files
    assert "config.activation_checkpoint = SelectiveAC.Config()" in files["torchtitan_plan.py"]
    experts = problem("model=qwen3_30b_a3b", *given)
    with pytest.raises(ConfigError, match="selective checkpointing saves of experts has no price"):
        outer_spaces(experts)


def test_unlike_gpus_are_only_searched_as_stages() -> None:
    with pytest.raises(ConfigError, match="data and tensor parallelism over unlike nodes are not"):
        outer_spaces(load_problem(["model=toy", "cluster=toy_mixed", "space.pp=1"]))


def test_galvatrons_layers_have_every_zero_stage_in_some_part() -> None:
    config = load_problem(["model=llama3_8b", "cluster=h100_1x8", "trainer=galvatron"]).config
    choices = tuple(
        LayerStrategy(tp=2, dp=4, zero_stage=stage, recompute="full", sequence_parallel=parallel)
        for stage in (0, 2, 3)
        for parallel in (False, True)
    )
    parts = trainer_parts(config, choices)
    assert {own for part in parts for own in part} == set(choices)
    for part in parts:
        assert len({own.sequence_parallel for own in part}) == 1
        assert len({own.zero_stage for own in part} - {3}) == 1


def test_mamba_1_is_a_part_of_models_with_mamba_layers_alone() -> None:
    def config(pattern: str | None) -> Any:
        return SimpleNamespace(mamba_dt_rank=8, hybrid_override_pattern=pattern)

    assert _has(config("M*"), "mamba_dt_rank")
    assert not _has(config(None), "mamba_dt_rank")
    assert not _has(config("*-"), "mamba_dt_rank")
