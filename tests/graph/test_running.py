"""Files of plans run on gloo processes: outputs and gradients of one process, and the plan's collectives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from darts_parallel.graph.execute import operators_script
from darts_parallel.graph.plan import GraphPlan
from darts_parallel.run.workers import Workers
from tests.graph.running import Made, listed, plan_made, run_file
from tests.graph.test_rediscovery import Ends, GroupedExperts, PlainBlock, QueryAttention


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(2))


def block() -> Made:
    return PlainBlock(128), [torch.randn(2, 16, 128)], {}


def grouped_queries() -> Made:
    return QueryAttention(64, 8, 1), [torch.randn(2, 16, 64)], {}


def vocabulary() -> Made:
    return Ends(64, 16), [_ids(2, 16), _ids(2, 16)], {}


def experts() -> Made:
    module = GroupedExperts(16, 4)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module, [torch.randn(4, 8, 16), torch.rand(4, 8, 4, 3)], {}


class Bottleneck(nn.Module):
    """ResNet's block (He et al. 2015, arXiv 1512.03385, figure 5) with a stride and a projected shortcut."""

    def __init__(self, given: int, inner: int, stride: int) -> None:
        super().__init__()
        made = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, made, 1, bias=False), nn.BatchNorm2d(made),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def bottlenecks() -> Made:
    return nn.Sequential(Bottleneck(16, 8, 2), Bottleneck(32, 8, 1)), [torch.randn(4, 16, 8, 8)], {}


class TimedPair(nn.Module):
    """Two convolutions between which the embedding of a time step is added (Ho et al. 2020, appendix B)."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, given), nn.GroupNorm(4, made)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)]
        )
        self.time, self.shortcut = nn.Linear(32, made), nn.Conv2d(given, made, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.convs[0](functional.silu(self.norms[0](x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.convs[1](functional.silu(self.norms[1](h)))


class DiffusionUNet(nn.Module):
    """One level of a diffusion model's U-Net: down, attention over pixels, up, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (TimedPair(16, 16), TimedPair(32, 32), TimedPair(48, 16))
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.qkv, self.out = nn.GroupNorm(4, 32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        skip = self.before(x, time)
        h = self.inside(self.down(skip), time)
        pixels = self.norm(h).flatten(2).transpose(1, 2)
        heads = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(pixels).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        h = h + self.out(attended).transpose(1, 2).unflatten(2, h.shape[2:])
        h = self.up(functional.interpolate(h, scale_factor=2.0))
        return self.after(torch.cat([h, skip], 1), time)


def unet() -> Made:
    return DiffusionUNet(), [torch.randn(4, 16, 8, 8), torch.randn(4, 32)], {}


SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4
}  # fmt: skip


def _language(config: str, **changes: Any) -> Made:
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "vocab_size": 96, **changes}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    return Loss(model), [_ids(2, 16)], {}


def _encoder(config: str, *inputs: torch.Tensor, **changes: Any) -> Made:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_config(getattr(transformers, config)(**changes))
    return First(model), list(inputs), {}


class Loss(nn.Module):
    """The loss of a language model on its own input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, labels=tokens, use_cache=False).loss


class First(nn.Module):
    """The last hidden state of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs)[0]


class Seq2Seq(nn.Module):
    """A model with an encoder and a decoder on equal tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)[0]


def llama() -> Made:
    return _language("LlamaConfig", num_key_value_heads=2)


def mixtral() -> Made:
    return _language("MixtralConfig", num_key_value_heads=2, num_local_experts=4)


def gpt2() -> Made:
    return _language("GPT2Config", n_layer=2, n_embd=64, n_head=4)


def bert() -> Made:
    return _encoder("BertConfig", _ids(2, 16), **SIZES, vocab_size=96)


def vit() -> Made:
    return _encoder("ViTConfig", torch.randn(2, 3, 32, 32), **SIZES, image_size=32, patch_size=8)


def resnet() -> Made:
    return _encoder(
        "ResNetConfig", torch.randn(2, 3, 32, 32), embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]
    )


def convnext() -> Made:
    return _encoder(
        "ConvNextConfig", torch.randn(2, 3, 32, 32), hidden_sizes=[16, 32], depths=[1, 1], num_stages=2
    )


def mamba2() -> Made:
    return _language(
        "Mamba2Config", num_hidden_layers=1, num_heads=8, head_dim=16, n_groups=2, state_size=8, chunk_size=8
    )


def t5() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    return Seq2Seq(transformers.AutoModel.from_config(config)), [_ids(2, 16)], {}


OURS = (block, grouped_queries, vocabulary, experts, bottlenecks, unet)
THEIRS = (llama, mixtral, gpt2, bert, vit, resnet, convnext, t5, mamba2)
"""Modules of transformers: nobody here wrote them."""


def _check(
    workers: Workers, make: Callable[[], Made], *ranks: int, seed: int | None = None, **options: Any
) -> GraphPlan:
    plan = plan_made(make, ranks, seed, **options)
    for differences, ran in workers.run(run_file, make, operators_script(plan), ranks):
        assert max(differences.values()) < 1e-5, differences
        assert ran == listed(plan)
    return plan


@pytest.mark.parametrize("make", OURS + THEIRS)
def test_a_plan_on_two_processes_is_one_process(two: Workers, make: Callable[[], Made]) -> None:
    _check(two, make, 2)


@pytest.mark.parametrize(
    ("make", "seed"), [*((make, 0) for make in OURS), (experts, 1), (llama, 0), (mixtral, 0)]
)
def test_any_choices_on_two_processes_are_one_process(
    two: Workers, make: Callable[[], Made], seed: int
) -> None:
    """Random choices of every operator: each rule is right, and its collectives are those that are listed."""
    _check(two, make, 2, seed=seed)


@pytest.mark.parametrize("make", [llama, bert])
def test_merged_linears_on_two_processes_are_one_process(two: Workers, make: Callable[[], Made]) -> None:
    plan = _check(two, make, 2, merge=True)
    sizes = {len(plan.merged(op)) for op in plan.space.graph.computing}
    assert 3 in sizes, "query, key and value are one product"


def chain() -> Made:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8), nn.ReLU()), [torch.randn(64, 8)], {}


def test_weights_first_in_all_states_on_two_processes_is_one_process(two: Workers) -> None:
    space, ways = plan_made(chain, (2,), merge=True).space, 0
    for group, k in [
        (g, k) for g, own in enumerate(space.groups) for k, c in enumerate(own.choices) if c.weights
    ]:
        changes = space.changes([0] * len(space.groups), group, k)
        plan, ways = GraphPlan(space, tuple(changes.get(g, 0) for g in range(len(space.groups)))), ways + 1
        for differences, ran in two.run(run_file, chain, operators_script(plan), (2,)):
            assert max(differences.values()) < 1e-5, differences
            assert ran == listed(plan)
    assert ways == 5, "rows, columns, a sum, whole with and without a whole gradient"


def test_plans_and_random_choices_on_four_processes() -> None:
    with Workers(4, timeout_s=120.0) as workers:
        _check(workers, block, 2, 2, seed=0)
        _check(workers, experts, 2, 2, seed=3)
        _check(workers, bottlenecks, 2, 2)
        _check(workers, unet, 4)
