"""Files of plans run on gloo processes: outputs and gradients of one process, and the plan's collectives."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from darts_parallel.graph._parts import own_head, own_rows
from darts_parallel.graph.execute import plan_script
from darts_parallel.graph.plan import GraphPlan
from darts_parallel.graph.verify import Made
from darts_parallel.run.workers import Workers
from tests.fuzz.splits import judge
from tests.graph.running import check_file, forced_plans, on_meta, plan_made
from tests.graph.test_rediscovery import Ends, GroupedExperts, PlainBlock, QueryAttention


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(2))


def block() -> Made:
    return PlainBlock(128), [torch.randn(2, 16, 128)]


def grouped_queries() -> Made:
    return QueryAttention(64, 8, 1), [torch.randn(2, 16, 64)]


def vocabulary() -> Made:
    return Ends(64, 16), [_ids(2, 16), _ids(2, 16)]


def experts() -> Made:
    module = GroupedExperts(16, 4)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module, [torch.randn(4, 8, 16), torch.rand(4, 8, 4, 3)]


class TimedPair(nn.Module):
    """Two convolutions between which the embedding of a time step is added (Ho et al. 2020, appendix B)."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, size) for size in (given, made))
        self.convs = nn.ModuleList(nn.Conv2d(size, made, 3, padding=1) for size in (given, made))
        self.time, self.shortcut = nn.Linear(32, made), nn.Conv2d(given, made, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.convs[0](functional.silu(self.norms[0](x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.convs[1](functional.silu(self.norms[1](h)))


class DiffusionUNet(nn.Module):
    """One level of a diffusion model's U-Net: down, attention over pixels, up, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (
            TimedPair(16, 16),
            TimedPair(32, 32),
            TimedPair(48, 16),
        )
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.attention = QueryAttention(32, 4, 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        skip = self.before(x, time)
        h = self.inside(self.down(skip), time)
        pixels = h.flatten(2).transpose(1, 2)
        h = self.attention(pixels, pixels).transpose(1, 2).unflatten(2, h.shape[2:])
        h = self.up(functional.interpolate(h, scale_factor=2.0))
        return self.after(torch.cat([h, skip], 1), time)


def unet() -> Made:
    return DiffusionUNet(), [torch.randn(4, 16, 8, 8), torch.randn(4, 32)]


BODY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
LANGUAGE = BODY | {"vocab_size": 96}
IMAGES = (2, 3, 32, 32)


class Whole(nn.Module):
    """Return the loss of a language model, the last state of another."""

    def __init__(self, name: str, sizes: dict[str, Any]) -> None:
        import transformers

        super().__init__()
        config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False)
        self.seq2seq = name == "T5"
        self.causal = "vocab_size" in dir(config) and name not in ("Bert", "T5")
        kind = transformers.AutoModelForCausalLM if self.causal else transformers.AutoModel
        self.model = kind.from_config(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = {}
        if self.causal:
            more["labels"] = x
        elif self.seq2seq:
            more["decoder_input_ids"] = x
        return self.model(x, **more)[0]


def theirs(name: str, sizes: dict[str, Any], shape: tuple[int, ...] = (2, 16)) -> Made:
    """Return a model of transformers, which nobody here wrote, and tokens or images."""
    pytest.importorskip("transformers")
    return Whole(name, sizes), [torch.randn(shape) if len(shape) > 2 else _ids(*shape)]


llama = partial(theirs, "Llama", LANGUAGE | {"num_key_value_heads": 2, "num_hidden_layers": 2})
mixtral = partial(theirs, "Mixtral", LANGUAGE | {"num_key_value_heads": 2, "num_local_experts": 4})
gpt2 = partial(theirs, "GPT2", {"vocab_size": 96, "n_layer": 1, "n_embd": 64, "n_head": 4})
bert = partial(theirs, "Bert", LANGUAGE)
vit = partial(theirs, "ViT", BODY | {"image_size": 32, "patch_size": 8}, IMAGES)
resnet = partial(
    theirs, "ResNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}, IMAGES
)
convnext = partial(
    theirs, "ConvNext", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}, IMAGES
)
mamba2 = partial(
    theirs,
    "Mamba2",
    LANGUAGE
    | {
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 8,
        "chunk_size": 8,
    },
)
t5 = partial(
    theirs,
    "T5",
    {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4},
)
falcon = partial(theirs, "Falcon", LANGUAGE | {"alibi": True, "parallel_attn": False, "bias": True})
bloom = partial(theirs, "Bloom", LANGUAGE)
gpt_oss = partial(
    theirs,
    "GptOss",
    LANGUAGE
    | {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
    },
)
swin = partial(
    theirs,
    "Swin",
    {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    IMAGES,
)
OURS = (block, grouped_queries, vocabulary, experts, unet)
THEIRS = (
    llama,
    mixtral,
    gpt2,
    bert,
    vit,
    resnet,
    convnext,
    t5,
    mamba2,
    falcon,
    bloom,
    gpt_oss,
    swin,
)


def named(make: Callable[[], Made]) -> str:
    return str(make.args[0] if isinstance(make, partial) else getattr(make, "__name__", make))


def _check(
    workers: Workers, make: Callable[[], Made], *ranks: int, seed: int | None = None, **options: Any
) -> GraphPlan:
    plan = plan_made(make, ranks, seed, **options)
    check_file(workers, make, plan_script(plan), plan)
    return plan


SLOW = (gpt_oss, swin)
"""Their captures take most of the seconds."""


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.slow if make in SLOW else ()) for make in OURS + THEIRS],
    ids=named,
)
def test_a_plan_on_two_processes_is_one_process(two: Workers, make: Callable[[], Made]) -> None:
    _check(two, make, 2)


@pytest.mark.parametrize(
    ("make", "seed"),
    [*((make, 0) for make in (*OURS, llama, mixtral, resnet)), (experts, 1)],
    ids=named,
)
def test_any_choices_on_two_processes_are_one_process(
    two: Workers, make: Callable[[], Made], seed: int
) -> None:
    """Random choices of every operator: each rule is right, and its collectives are those that are listed."""
    _check(two, make, 2, seed=seed)


@pytest.mark.parametrize("make", [block, llama], ids=named)
def test_slices_gathered_again_on_two_processes_are_one_process(
    two: Workers, make: Callable[[], Made]
) -> None:
    assert any(one.again for one in _check(two, make, 2, sliced=True).collectives)


@pytest.mark.slow
def test_plans_and_random_choices_on_four_processes() -> None:
    with Workers(4, timeout_s=120.0) as workers:
        _check(workers, block, 2, 2, seed=0)
        _check(workers, block, 2, 2, seed=1, sliced=True)
        _check(workers, experts, 2, 2, seed=3)
        _check(workers, resnet, 2, 2)
        _check(workers, unet, 4)


class _Rank:
    """A mesh of which one rank is asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_local_rank(self, axis: int) -> int:
        return self.rank

    def size(self, axis: int) -> int:
        return 4


def test_ranks_look_up_every_row_once() -> None:
    table = torch.randn(8, 3)
    index = torch.arange(8).flip(0)
    parts = [own_rows(_Rank(k), 0, part, index) for k, part in enumerate(table.chunk(2))]  # type: ignore[arg-type]
    assert torch.equal(parts[0] + parts[1], table[index])


class Grouped(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(("heads", "shared"), [(1, True), (2, True), (4, False)])
def test_ranks_that_share_key_value_heads_take_their_own(heads: int, shared: bool) -> None:
    shapes = (1, 8, 4, 16), (1, heads, 4, 16), (1, heads, 4, 16)
    plans = forced_plans(on_meta(Grouped, *shapes), 4)
    (text,) = (one.text for one in plans if "('heads',)" in one.label)
    assert text.count("own_head(mesh, 0, ") == 2 * shared
    if shared:
        q, *others = map(torch.randn, shapes)
        parts = [
            Grouped()(part, *(own_head(_Rank(rank), 0, one) for one in others))  # type: ignore[arg-type]
            for rank, part in enumerate(q.chunk(4, 1))
        ]
        assert torch.allclose(torch.cat(parts, 1), Grouped()(q, *others), atol=1e-6)


@pytest.mark.parametrize(
    "name", ["embedding", "index_select", "cross_entropy", "cross_entropy of ignored rows"]
)
def test_every_split_of_a_table_and_of_a_loss_is_one_process(two: Workers, name: str) -> None:
    assert judge(two, name).outcome == "agreed"
