"""Plans of models of transformers against the plans that come with them."""

import pytest
import torch

from darts_parallel.graph.plan import plan_module
from darts_parallel.graph.report import graph_dict, tensor_parallel_plan
from tests.graph.test_programme import mesh
from tests.graph.test_running import First

transformers = pytest.importorskip("transformers")


def test_the_plan_of_llama_is_the_one_that_comes_with_it() -> None:
    """Two layers of Llama 3 8B on 8 H100: every linear layer has its style of `base_model_tp_plan`."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = (
            First(transformers.AutoModel.from_config(config)),
            torch.zeros(1, 8192, dtype=torch.long),
        )
    planned = plan_module(model, [tokens], mesh(8))
    theirs = {f"model.{name}": style for name, style in config.base_model_tp_plan.items()}
    ours = tensor_parallel_plan(planned)
    assert ours
    assert ours == {name: style for name, style in theirs.items() if name in ours}
    assert {name.rpartition(".")[2] for name in ours} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    data = graph_dict(planned)
    assert data["proven"]
    assert data["unknown_operators"] == []
    assert data["tp_plan"] == ours
