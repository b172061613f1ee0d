"""A block of your own, for `darts-parallel graph` and `model=module`.

PYTHONPATH=examples darts-parallel graph module=own_module:make_block "inputs=[[2,512,1024]]" cluster=h100_1x8
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 1024
HEADS = 16


class Block(nn.Module):
    """A Transformer block with a gate on the output of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of `x`: sequences, tokens, width."""
        h = self.norm(x)
        query, key, value = self.qkv(h).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        heads = (t.transpose(1, 2) for t in (query, key, value))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        attended = attended.transpose(1, 2).flatten(-2)
        x = x + self.out(attended * torch.sigmoid(self.gate(h)))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


def make_block() -> Block:
    """Return the block that is planned."""
    return Block()
