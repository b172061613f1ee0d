"""The Transformer of a plan as modules, layer by layer as in `darts_parallel.problem.model`.

Every layer maps one tensor to one tensor, so that any contiguous run of them is a pipeline stage.
Dropout is left out: the same seed must give the same loss however the layers are spread. Positions
that are not learned are rotary (Su et al. 2021, arXiv 2104.09864).
"""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from darts_parallel.config import ModelConfig
from darts_parallel.run._experts import Mixture, Mlp

ROTARY_BASE = 10000.0
EPSILON = 1e-5


def norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Make a LayerNorm where the norm has a shift, an RMSNorm where it only has a scale."""
    kind = nn.LayerNorm if config.norm_bias else nn.RMSNorm
    return kind(width or config.hidden_size, EPSILON)


def _table(rows: int, config: ModelConfig) -> nn.Embedding:
    """Make a table without drawing its values: on the meta device torch imports its compiler for them."""
    values = torch.empty(rows, config.hidden_size)
    return nn.Embedding.from_pretrained(values, freeze=False)  # type: ignore[no-untyped-call]


class Embedding(nn.Module):
    """Token table; learned positions, BERT's token types and BLOOM's norm where the model has them.

    All tokens are of the first type.

    Args:
        rows: Rows of the table, at least the vocabulary; those beyond it stay unused.
    """

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.table = _table(rows, config)
        positions = config.max_seq_len if config.learned_positions else 0
        self.positions = _table(positions, config) if positions else None
        self.types = _table(config.token_types, config) if config.token_types else None
        self.norm = norm(config) if config.embedding_norm else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape `(B, T)` to states of shape `(B, T, H)`."""
        state: Tensor = self.table(tokens)
        if self.positions is not None:
            state = state + self.positions.weight[: tokens.shape[1]]
        if self.types is not None:
            state = state + self.types.weight[0]
        return state if self.norm is None else self.norm(state)


class ScaledDotProduct(nn.Module):
    """Scores, softmax and weighted sum: what selective recomputation repeats.

    Args:
        causal: Tokens attend to earlier ones only.
        fused: One kernel that keeps no score matrix; else the matrix is kept for backward.
    """

    def __init__(self, causal: bool, fused: bool) -> None:
        super().__init__()
        self.causal = causal
        self.fused = fused

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with queries of shape `(B, heads, T, D)`, keys and values of `(B, kv heads, T, D)`."""
        with nullcontext() if self.fused else sdpa_kernel(SDPBackend.MATH):
            attend = functional.scaled_dot_product_attention
            return attend(query, key, value, is_causal=self.causal, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention; works on the heads that its projections hold."""

    def __init__(self, config: ModelConfig, fused: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = config.head_size
        self.rotary = not config.learned_positions
        heads = config.num_heads * self.head_dim
        kv_heads = config.kv_heads * self.head_dim
        bias = config.linear_bias if config.qkv_bias is None else config.qkv_bias
        self.query = nn.Linear(hidden, heads, bias=bias)
        self.key = nn.Linear(hidden, kv_heads, bias=bias)
        self.value = nn.Linear(hidden, kv_heads, bias=bias)
        self.query_norm = norm(config, self.head_dim) if config.qk_norm else None
        self.key_norm = norm(config, self.head_dim) if config.qk_norm else None
        self.core = ScaledDotProduct(config.causal, fused)
        self.out = nn.Linear(heads, hidden, bias=config.linear_bias)

    def forward(self, state: Tensor) -> Tensor:
        """Map states of shape `(B, T, H)` to the same."""
        query = self._heads(self.query(state))
        key = self._heads(self.key(state))
        value = self._heads(self.value(state))
        if self.query_norm is not None and self.key_norm is not None:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if self.rotary:
            query = rotated(query)
            key = rotated(key)
        mixed = self.core(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        return torch.unflatten(projected, -1, (-1, self.head_dim)).transpose(1, 2)


def rotated(heads: Tensor) -> Tensor:
    """Apply rotary positions: turn pairs of channels by angles that grow with the position.

    Args:
        heads: Shape `(B, heads, T, D)`; a last odd channel stays as it is.
    """
    length = heads.shape[2]
    half = heads.shape[3] // 2
    channels = torch.arange(half, device=heads.device, dtype=torch.float32)
    exponents = channels / max(half, 1)
    positions = torch.arange(length, device=heads.device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    cosine = angles.cos().to(heads.dtype)
    sine = angles.sin().to(heads.dtype)
    first = heads[..., :half]
    second = heads[..., half : 2 * half]
    rest = heads[..., 2 * half :]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*turned, rest], -1)


class Block(nn.Module):
    """One pre-norm Transformer block, dense or with experts, or a half of it: `attention` or `mlp`."""

    def __init__(
        self,
        config: ModelConfig,
        fused: bool,
        index: int,
        half: str | None = None,
    ) -> None:
        super().__init__()
        attends = half != "mlp"
        maps = half != "attention"
        self.attention_norm = norm(config) if attends else None
        self.mlp_norm = norm(config) if maps else None
        self.attention = Attention(config, fused) if attends else None
        kind = Mixture if config.expert_pattern[index] else Mlp
        self.mlp: nn.Module | None = kind(config) if maps else None

    def forward(self, state: Tensor) -> Tensor:
        """Map states of shape `(B, T, H)` to the same."""
        if self.attention is not None and self.attention_norm is not None:
            state = state + self.attention(self.attention_norm(state))
        if self.mlp is not None and self.mlp_norm is not None:
            state = state + self.mlp(self.mlp_norm(state))
        return state


class Head(nn.Module):
    """Final norm and BERT's dense transform where the model has them, and the output projection.

    Args:
        rows: Rows of the output table, at least the vocabulary.
    """

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.norm = norm(config) if config.final_norm else None
        self.dense = nn.Linear(hidden, hidden) if config.head_transform else None
        self.dense_norm = norm(config) if config.head_transform else None
        self.output = nn.Linear(hidden, rows, bias=config.output_bias)

    def forward(self, state: Tensor) -> Tensor:
        """Map states of shape `(B, T, H)` to logits of shape `(B, T, rows)`."""
        state = state if self.norm is None else self.norm(state)
        if self.dense is not None and self.dense_norm is not None:
            state = self.dense_norm(functional.gelu(self.dense(state)))
        return self.output(state)


def build_layer(
    config: ModelConfig,
    fused: bool,
    name: str,
    rows: int,
    seed: int,
) -> nn.Module:
    """Build one layer of the chain with its initial weights, on the CPU.

    The weights of a parameter depend on the seed and its name alone, so that every process draws the
    same ones for the layers that it holds.

    Args:
        name: As in `problem.model.layers`: `embedding`, `layers.<i>` (of half blocks `layers.<i>.mlp`) or
            `head`.
    """
    layer = empty_layer(config, fused, name, rows).to_empty(device="cpu")
    with torch.no_grad():
        for short, weight in layer.named_parameters():
            weight.copy_(initial(config, f"{block_name(name)}.{short}", weight.shape, seed))
    return layer


def empty_layer(
    config: ModelConfig,
    fused: bool,
    name: str,
    rows: int,
) -> nn.Module:
    """Build one layer of the chain without values; arguments as `build_layer`."""
    with torch.device("meta"):
        if name == "embedding":
            return Embedding(config, rows)
        if name == "head":
            return Head(config, rows)
        _, index, *half = name.split(".")
        return Block(config, fused, int(index), *half)


def initial(
    config: ModelConfig,
    name: str,
    shape: torch.Size,
    seed: int,
) -> Tensor:
    """Draw the initial values of a parameter: normal, around 1 for the scales of norms.

    Rows of a vocabulary table beyond the vocabulary are 0; a tied head has the embedding's values.
    """
    table = name in ("embedding.table.weight", "head.output.weight", "head.output.bias")
    if name == "head.output.weight" and config.tie_embeddings:
        name = "embedding.table.weight"
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    drawn = (config.vocab_size, *shape[1:]) if table else tuple(shape)
    values: Tensor = torch.randn(drawn, generator=generator) * config.hidden_size**-0.5
    if table and shape[0] > config.vocab_size:
        padding = values.new_zeros(shape[0] - config.vocab_size, *shape[1:])
        values = torch.cat([values, padding])
    if name.endswith("norm.weight"):
        values += 1.0
    return values


def block_name(name: str) -> str:
    """Return the name of the block that a layer is a half of, else its own."""
    return ".".join(name.split(".")[:2])


def parameter_names(layer: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a layer under the names that every process gives them, wrappers left out."""
    for short, parameter in layer.named_parameters():
        yield f"{name}.{short}".replace("._checkpoint_wrapped_module", ""), parameter
