from typing import Any

import pytest

from darts_parallel.config.model import ModelConfig
from darts_parallel.problem.layer_spec import mlp_of
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import load_problem


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
    assert config().expert_pattern == (True,) * 4
    assert config(moe_layer_freq=2).expert_pattern == (True, False, True, False)
    assert config(moe_layer_freq=[0, 1, 1, 0]).expert_pattern == (False, True, True, False)
    assert config(first_k_dense_replace=3).expert_pattern == (False, False, False, True)
    assert config(num_experts=None).expert_pattern == (False,) * 4


def test_flops_count_the_experts_that_a_token_passes() -> None:
    one, two = (Model(config(moe_router_topk=k), True).flops_per_token(4) for k in (1, 2))
    experts, _ = mlp_of(config(), 0)
    assert two - one == 6.0 * 4 * experts.hidden * (experts.inputs + experts.width)


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_token_reaches_between_one_and_top_k_shares_of_the_experts(parts: int) -> None:
    model = load_problem(["model=deepseek_v3"]).model
    experts = model.layers[10].experts
    assert experts.distinct(parts) + 1e-12 >= 1.0
    assert experts.distinct(parts) <= min(parts, experts.top_k)
    # at most 4 of 8 groups: a token leaves for at most 4 of 8 domains
    assert parts != 8 or 3.0 < experts.distinct(parts) < 4.0
