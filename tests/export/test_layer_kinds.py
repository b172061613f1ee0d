"""Models whose layers differ: Megatron-LM writes them, the others name what they lack."""

from typing import Any

import pytest

from darts_parallel.errors import UnsupportedError
from darts_parallel.export.common import Exported
from darts_parallel.export.targets import export_plan
from darts_parallel.plans.legality import parts_beyond, refuse_model
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import load_problem
from tests.support.layer_kinds import HYBRID, PREDICTION, TOY, WINDOWS

MEGATRON = ["model.mamba_chunk_size=128", "model.sliding_window=null"]
ROTARY = [*PREDICTION, "model.learned_positions=false"]
"""With positions that Megatron-LM predicts several tokens with."""
OWN_MODELS = ("torchtitan", "nanotron", "galvatron", "torch")


def exported(
    overrides: list[str], target: str, cuts: tuple[int, ...] = (), **strategy: Any
) -> Exported:
    problem = load_problem(overrides)
    count = len(problem.model.layers)
    stages = len(cuts) + 1
    one = LayerStrategy(**{"tp": 1, "dp": 8 // stages, **strategy})
    return export_plan(problem, Plan(2, (0, *cuts, count), (one,) * count), target)


def script(overrides: list[str], cuts: tuple[int, ...] = (), **strategy: Any) -> str:
    return exported(overrides, "megatron", cuts, **strategy).files["megatron.sh"]


def test_megatron_reads_a_hybrid_from_its_pattern_cut_at_the_stages() -> None:
    text = script([*HYBRID, *MEGATRON], (3,))
    assert '--hybrid-layer-pattern "M-|*-M"' in text
    assert "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec" in text
    assert "pretrain_hybrid.py" in text
    assert "--position-embedding-type learned_absolute" in text  # the toy has a table of positions
    for flag, value in (("state-dim", 16), ("head-dim", 16), ("num-groups", 4)):
        assert f"--mamba-{flag} {value}" in text
    # the pattern takes the place of these (megatron/core/models/hybrid, its migration guide)
    assert "--num-layers" not in text
    assert "--pipeline-model-parallel-layout" not in text
    rotary = script([*HYBRID, *MEGATRON, "model.learned_positions=false"], (3,))
    assert "--position-embedding-type none" in rotary


@pytest.mark.parametrize(
    ("overrides", "cuts", "sentence"),
    [
        (
            [*HYBRID, "model.sliding_window=null"],
            (),
            "mamba_chunk_size=16, and its Mamba mixer has 128",
        ),
        ([*HYBRID, *MEGATRON, "model.mamba_dt_rank=8"], (), "Mamba-1 layers"),
        ([*HYBRID, *MEGATRON], (1,), "a stage has no layer of the hybrid pattern"),
        ([*TOY, "model.block_norms=4"], (), "model.block_norms=4"),
        ([*TOY, "model.qk_norm=true", "model.qk_norm_whole=true"], (), "model.qk_norm_whole=True"),
        ([*TOY, "model.structure=parallel_attn"], (), "model.structure=parallel_attn"),
        ([*TOY, "model.mlp_bias=false"], (), "model.mlp_bias=False"),
        ([*TOY, "model.attention_output_bias=false"], (), "model.attention_output_bias=False"),
    ],
)
def test_megatron_names_what_it_lacks(
    overrides: list[str], cuts: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        script(overrides, cuts)


def test_megatron_counts_the_tokens_before_the_query_and_reads_patterns_as_written() -> None:
    text = script(WINDOWS)
    assert "--window-size 15,0" in text
    assert "--window-attn-skip-freq 2\n" in text
    pattern = script([*WINDOWS, "model.sliding_window_pattern=[1,1,0,0]"])
    assert '--window-attn-skip-freq "[1,1,0,0]"' in pattern
    assert "skip-freq" not in script([*WINDOWS, "model.sliding_window_pattern=null"])


def test_megatron_places_prediction_modules_by_the_layout() -> None:
    assert "--mtp-num-layers 1" in script(ROTARY)
    assert "--pipeline-model-parallel-layout" not in script(ROTARY, (3,))
    assert '--pipeline-model-parallel-layout "Et*3|tmL"' in script(ROTARY, (4,))
    assert '--pipeline-model-parallel-layout "Et*4m|L"' in script(ROTARY, (6,))


def test_first_layers_only_can_be_recomputed_where_layers_differ() -> None:
    problem = load_problem(WINDOWS)
    count = len(problem.model.layers)

    def recomputed(*blocks: int) -> str:
        layers = [
            LayerStrategy(1, 8, recompute="full" if i - 1 in blocks else "none")
            for i in range(count)
        ]
        return export_plan(problem, Plan(2, (0, count), tuple(layers)), "megatron").files[
            "megatron.sh"
        ]

    assert "--recompute-num-layers 2" in recomputed(0, 1)
    with pytest.raises(UnsupportedError, match=r"layers\.0 has recompute=none before a layer"):
        recomputed(1, 3)


@pytest.mark.parametrize("names", ["bloom_176b embedding_norm", "toy embedding_norm"])
def test_megatron_refuses_models_whose_parts_it_would_leave_out(names: str) -> None:
    model, key = names.split()
    with pytest.raises(UnsupportedError, match=f"model.{key}=True.*try export="):
        script([*TOY, f"model={model}", f"model.{key}=true", "training.seq_len=32"])


@pytest.mark.parametrize("target", OWN_MODELS)
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (HYBRID, "hybrid_override_pattern=M-"),
        (WINDOWS, "sliding_window=16"),
        (ROTARY, "mtp_num_layers=1"),
    ],
)
def test_trainers_with_models_of_their_own_refuse_by_name(
    target: str, overrides: list[str], key: str
) -> None:
    with pytest.raises(
        UnsupportedError, match=f"export={target}: .*model.{key}.*try export=megatron"
    ):
        exported(overrides, target)


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_wrappers_take_the_model_that_the_user_brings_but_for_divided_state_spaces(
    target: str,
) -> None:
    assert exported(HYBRID, target, zero_stage=2).files
    with pytest.raises(UnsupportedError, match=r"tp=2 with \d+ Mamba layers"):
        exported(HYBRID, target, tp=2, dp=4, zero_stage=2)


@pytest.mark.parametrize("overrides", [HYBRID, WINDOWS, ROTARY, [*TOY, "model.position_offset=2"]])
def test_what_cannot_run_here_says_so(overrides: list[str]) -> None:
    problem = load_problem(overrides)
    with pytest.raises(UnsupportedError, match="which no block that can run here has"):
        refuse_model(problem.model, problem.training)


@pytest.mark.parametrize("key", ["window_head_dim", "window_kv_heads", "shared_key_values"])
def test_heads_that_differ_with_the_window_are_a_part_in_words(key: str) -> None:
    """Gemma 4 and MiMo-V2: a trainer without such a part refuses it by its key."""
    config = load_problem(
        [*TOY, f"model.{key}={'true' if key == 'shared_key_values' else 2}"]
    ).config
    assert key in dict(parts_beyond(config.model, ()))
    assert key not in dict(parts_beyond(config.model, (key,)))
