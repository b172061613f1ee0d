from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from darts_parallel.plans import LayerStrategy
from darts_parallel.problem.problem import load_problem
from darts_parallel.run import _units
from darts_parallel.run._chunks import LOSS
from darts_parallel.run._transformer import build_layer, empty_layer
from darts_parallel.run.engine import cross_entropy_sum, global_batch, part_of_rank
from tests.support.running import LLAMA, tiny


@pytest.mark.parametrize(
    "model", ["toy", "gpt2_xl", "llama3_8b", "llama3_70b", "bert_345m", "bloom_176b"]
)
def test_every_layer_has_as_many_parameters_as_the_cost_model_counts(model: str) -> None:
    problem = load_problem([f"model={model}", "training=toy", "cluster=toy"])
    config = problem.model.config
    for spec in problem.model.layers:
        if spec.name != LOSS:
            layer = empty_layer(config, True, spec.name, config.vocab_size)
            assert sum(p.numel() for p in layer.parameters()) == spec.parameters(
                config.vocab_size
            ), spec.name


def test_tables_without_values_draw_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "normal_", None)  # it imports torch's compiler on "meta"
    model = load_problem([*LLAMA, "model.learned_positions=true", "model.token_types=2"]).model
    layer = empty_layer(model.config, True, "embedding", 512)
    assert all(values.requires_grad and values.is_meta for values in layer.parameters())


def test_padding_leaves_the_weights_of_the_vocabulary_as_they_are() -> None:
    config = tiny(1).model.config
    exact = build_layer(config, True, "embedding", config.vocab_size, seed=3)
    padded = build_layer(config, True, "embedding", 128, seed=3)
    assert torch.equal(padded.table.weight[: config.vocab_size], exact.table.weight)
    assert not padded.table.weight[config.vocab_size :].any()
    head = build_layer(config, True, "head", config.vocab_size, seed=3)
    assert torch.equal(head.output.weight, exact.table.weight), (
        "a tied head begins with the same table"
    )


def test_fused_and_unfused_attention_agree() -> None:
    config = tiny(1, *LLAMA).model.config
    state = torch.randn(2, 8, config.hidden_size, generator=torch.Generator().manual_seed(0))
    fused, unfused = (build_layer(config, kind, "layers.0", 0, seed=1) for kind in (True, False))
    torch.testing.assert_close(fused(state), unfused(state))


def test_halves_compute_what_their_block_computes_bit_for_bit() -> None:
    config = tiny(1, *LLAMA).model.config
    state = torch.randn(2, 8, config.hidden_size, generator=torch.Generator().manual_seed(0))
    names = ("layers.1", "layers.1.attention", "layers.1.mlp")
    block, first, second = (build_layer(config, True, name, 0, seed=1) for name in names)
    assert torch.equal(second(first(state)), block(state))


def test_the_divided_cross_entropy_ignores_the_padding_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator, requires_grad=True)
    targets = torch.randint(5, (2, 3), generator=generator)
    ours = cross_entropy_sum(logits, targets, valid=5)
    expected = functional.cross_entropy(
        logits[..., :5].flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(ours, expected)
    (gradient,) = torch.autograd.grad(3.0 * ours, logits)
    (wanted,) = torch.autograd.grad(3.0 * expected, logits)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_ranks_together_read_every_micro_batch_once_and_in_order(dp: int) -> None:
    batch = global_batch(tiny(1), seed=0, step=0)
    parts = [part_of_rank(batch, 2, dp, index).chunk(2) for index in range(dp)]
    again = torch.cat([torch.cat([parts[rank][micro] for rank in range(dp)]) for micro in range(2)])
    assert torch.equal(again, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sharded_weights_are_gathered_in_the_type_of_the_products(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    policies = []

    def recorded(*_: Any, mp_policy: Any, **others: Any) -> None:
        policies.append(mp_policy)

    monkeypatch.setattr(_units, "fully_shard", recorded)
    one = SimpleNamespace(size=lambda: 1)
    layers = {"layers.0": torch.nn.Linear(2, 2)}
    with pytest.raises(AssertionError):  # nothing was sharded
        _units.Sharded(LayerStrategy(1, 2, 3), layers, {"shard": one, "replicate": one}, dtype)
    (policy,) = policies
    assert (policy.param_dtype or torch.float32) is dtype
    assert policy.reduce_dtype is torch.float32
