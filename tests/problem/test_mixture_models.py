from typing import Any

import pytest

from darts_parallel.config.mixture import expert_pattern
from darts_parallel.config.model import ModelConfig
from darts_parallel.errors import ConfigError
from darts_parallel.problem.experts import mlp_of
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import load_problem

# totals: parameters of the classes of transformers 4.57.1, built on the meta device with these sizes; that of
# Grok-1 is ours from the released sizes (its card says 314B). Active, in billions, as the papers print them.
PUBLISHED = {
    "mixtral_8x7b": (46_702_792_704, 12.9, 0.1),
    "mixtral_8x22b": (140_620_634_112, 39.0, 0.2),
    "qwen3_30b_a3b": (30_532_122_624, 3.3, 0.1),
    "qwen3_235b_a22b": (235_093_634_560, 22.0, 0.3),
    "qwen2_57b_a14b": (57_408_658_944, 14.0, 0.3),
    "deepseek_v3": (671_026_404_352, 37.0, 0.7),
    "kimi_k2": (1_026_408_209_408, 32.6, 0.4),
    "llama4_maverick": (400_711_848_960, 17.0, 0.3),
    "gpt_oss_20b": (20_914_757_184, 3.61 + 0.58, 0.01),
    "gpt_oss_120b": (116_829_156_672, 5.13 + 0.58, 0.01),
    "nemotron3_nano_30b_a3b": (31_577_937_344, 3.2, 0.4),
    "grok1": (315_684_034_560, 314 / 4, 6.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameters(name: str) -> None:
    total, active, tolerance = PUBLISHED[name]
    model = load_problem([f"model={name}"]).model
    assert model.num_parameters == total
    assert model.num_active_parameters / 1e9 == pytest.approx(active, abs=tolerance)


def config(**changes: Any) -> ModelConfig:
    sizes = {
        "name": "m",
        "num_layers": 4,
        "hidden_size": 8,
        "num_heads": 2,
        "vocab_size": 16,
        "max_seq_len": 4,
    }
    return ModelConfig(**{**sizes, "num_experts": 4, **changes})


def test_frequencies_and_first_dense_layers() -> None:
    assert expert_pattern(config()) == (True,) * 4
    assert expert_pattern(config(moe_layer_freq=2)) == (True, False, True, False)
    assert expert_pattern(config(moe_layer_freq=[0, 1, 1, 0])) == (False, True, True, False)
    assert expert_pattern(config(first_k_dense_replace=3)) == (False, False, False, True)
    assert expert_pattern(config(num_experts=None)) == (False,) * 4


def test_flops_count_the_experts_that_a_token_passes() -> None:
    one, two = (Model(config(moe_router_topk=k), True).flops_per_token(4) for k in (1, 2))
    experts, _ = mlp_of(config(), 0)
    assert experts is not None
    assert two - one == 6.0 * 4 * experts.hidden * (experts.inputs + experts.width)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_router_topk": 5}, "model.moe_router_topk=5 must be at most 4"),
        ({"moe_router_num_groups": 3}, "model.moe_router_num_groups=3 must divide model.num_experts=4"),
        ({"moe_layer_freq": [1, 0]}, "model.moe_layer_freq=a list of 2 must be"),
        ({"moe_layer_freq": 0}, "model.moe_layer_freq=0 must be at least 1"),
        ({"num_experts": None, "moe_ffn_hidden_size": 4}, "must go with model.num_experts"),
        ({"kv_lora_rank": 4}, "must go with model.multi_latent_attention=true"),
        ({"multi_latent_attention": True}, "model.kv_lora_rank must be given"),
        ({"moe_expert_capacity_factor": 0.0}, "must be above 0"),
        ({"first_k_dense_replace": 5}, "must be at most 4"),
    ],
)
def test_wrong_fields_are_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert words in str(caught.value)
    assert "; try " in str(caught.value)


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_token_reaches_between_one_and_top_k_shares_of_the_experts(parts: int) -> None:
    model = load_problem(["model=deepseek_v3"]).model
    experts = model.layers[10].experts
    assert experts is not None
    assert experts.distinct(parts) + 1e-12 >= 1.0
    assert experts.distinct(parts) <= min(parts, experts.top_k)
    # at most 4 of 8 groups: a token leaves for at most 4 of 8 domains
    assert parts != 8 or 3.0 < experts.distinct(parts) < 4.0
