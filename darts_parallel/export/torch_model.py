"""The Transformer of the exported program; `torch.py` writes these lines into `torch_program.py`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """Token embedding, and learned positions where the model has them."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"])
        rows = sizes["max_seq_len"] if sizes["learned_positions"] else 0
        self.positions = nn.Embedding(rows, sizes["hidden_size"]) if rows else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `(b, T)` to `(b, T, h)`."""
        x: Tensor = self.tokens(tokens)
        if self.positions is None:
            return x
        placed: Tensor = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return placed


def norm(sizes: dict[str, Any]) -> nn.Module:
    """LayerNorm, or RMSNorm where norms have no bias."""
    kind = nn.LayerNorm if sizes["norm_bias"] else nn.RMSNorm
    return kind(sizes["hidden_size"], eps=1e-5)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions (Su et al. 2021) of `(b, heads, T, d)`, their angles to this base."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(places, base**-exponents)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class Attention(nn.Module):
    """Grouped-query attention; under tensor parallelism a rank has a part of the heads."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        h, self.head_dim = sizes["hidden_size"], sizes["head_dim"]
        width, narrow = sizes["num_heads"] * self.head_dim, sizes["num_kv_heads"] * self.head_dim
        self.query = nn.Linear(h, width, bias=sizes["qkv_bias"])
        self.key = nn.Linear(h, narrow, bias=sizes["qkv_bias"])
        self.value = nn.Linear(h, narrow, bias=sizes["qkv_bias"])
        self.output = nn.Linear(width, h, bias=sizes["linear_bias"])
        self.causal, self.rotary = sizes["causal"], not sizes["learned_positions"]
        self.rotary_base: float = sizes["rotary_base"]

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(b, T, h)` in and out."""
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if self.rotary:
            q, k = rotate(q, self.rotary_base), rotate(k, self.rotary_base)
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Feedforward(nn.Module):
    """MLP with GELU, or gated with SiLU."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        h, inner, bias = sizes["hidden_size"], sizes["ffn_hidden_size"], sizes["linear_bias"]
        self.up = nn.Linear(h, inner, bias=bias)
        self.gate = nn.Linear(h, inner, bias=bias) if sizes["gated_mlp"] else None
        self.down = nn.Linear(inner, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(b, T, h)` in and out."""
        up = self.up(x)
        inner = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        result: Tensor = self.down(inner)
        return result


class Block(nn.Module):
    """Pre-norm Transformer block."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(sizes), Attention(sizes)
        self.mlp_norm, self.mlp = norm(sizes), Feedforward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(b, T, h)` in and out."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Head(nn.Module):
    """Final norm and output projection."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.norm = norm(sizes)
        self.output = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden state to logits `(b, T, V)`."""
        logits: Tensor = self.output(self.norm(x))
        return logits
