"""The Transformer of `darts_parallel.run` whose blocks sum as their tensor-parallel ranks would.

Its functions take the weights as a dictionary, so that a step ahead can be differentiated.
Axes: B sequences, T positions, H width, S tensor-parallel ranks, K forward pairs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from darts_parallel.bilevel._quantize import BLOCK, Pair, lossy_sum, straight_through_sum
from darts_parallel.bilevel.space import Candidate
from darts_parallel.config import LOSSLESS, ModelConfig
from darts_parallel.run import Block, empty_layer

Weights = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]
"""An all-reduce: partial sums `(S, B, T, H)` to their sum `(B, T, H)`."""
Run = Callable[[Any, Tensor], Tensor]
"""Runs a block on a state `(B, T, H)`."""
INITIAL_STD = 0.02
RESIDUAL = ("out.weight", "down.weight")
"""Ends of the names of products that add to the residual."""


class RowParallel(nn.Linear):
    """A product whose input features lie on ranks; a hook sums the partial sums of the ranks."""

    ranks = 1
    reduce: Reduce

    def forward(self, inner: Tensor) -> Tensor:
        """Map `(B, T, F)` to `(B, T, H)`."""
        columns = torch.unflatten(inner, -1, (self.ranks, -1))
        rows = torch.unflatten(self.weight, 1, (self.ranks, -1))
        total = self.reduce(torch.einsum("btsf,hsf->sbth", columns, rows))
        return total if self.bias is None else total + self.bias


def summed(
    block: Block,
    state: Tensor,
    ranks: int,
    reduce: Reduce,
) -> Tensor:
    """Run a block with its two all-reduces, shape `(B, T, H)`."""
    for module in block.modules():
        if isinstance(module, RowParallel):
            module.ranks = ranks
            module.reduce = reduce
    return block(state)


class Toy(nn.Module):
    """Embedding, blocks and head without values: its functions take the weights.

    Args:
        block_size: Numbers that share a scale where few bits are sent.
        fused: Whether attention is one kernel, which has no second derivative.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_size: int = BLOCK,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        names = [f"layers.{index}" for index in range(config.num_layers)]
        layers: list[Any] = [
            empty_layer(config, fused, name, config.vocab_size)
            for name in ("embedding", *names, "head")
        ]
        self.embedding, *blocks, head = layers
        for layer in blocks:
            for part, name in ((layer.attention, "out"), (layer.mlp, "down")):
                product = getattr(part, name)
                sizes = (product.in_features, product.out_features, product.bias is not None)
                setattr(part, name, RowParallel(*sizes, device="meta"))
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def initial_weights(self, generator: torch.Generator) -> Weights:
        """Draw weights as GPT-2 does: normal, residual projections smaller by depth."""
        config = self.config
        width = config.hidden_size
        residual_std = INITIAL_STD / (2 * config.num_layers) ** 0.5

        def normal(std: float, *size: int) -> Tensor:
            return torch.randn(*size, generator=generator) * std

        weights = {}
        for name, like in self.named_parameters():
            if like.dim() == 1:
                weights[name] = torch.full(like.shape, float(name.endswith("norm.weight")))
            elif name.startswith("embedding"):
                weights[name] = normal(INITIAL_STD, *like.shape)
            elif name.endswith("query.weight"):
                drawn = normal(width**-0.5, width, config.num_heads, 3, width // config.num_heads)
                parts = drawn.permute(2, 1, 3, 0).flatten(1, 2)
                for part, weight in zip(("query", "key", "value"), parts, strict=True):
                    weights[name.replace("query", part)] = weight
            elif name not in weights:
                std = INITIAL_STD if name.startswith("head") else width**-0.5
                std = residual_std if name.endswith(RESIDUAL) else std
                weights[name] = normal(std, *like.T.shape).T
        return {name: weights[name] for name, _ in self.named_parameters()}

    def forward(self, tokens: Tensor, runs: Sequence[Run]) -> Tensor:
        """Return the mean next-byte cross-entropy, nats.

        Args:
            tokens: Bytes, shape `(B, T + 1)`.
            runs: How each block runs.
        """
        state = self.embedding(tokens[:, :-1])
        for layer, run in zip(self.blocks, runs, strict=True):
            state = run(layer, state)
        scores = self.head(state)
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def loss(self, weights: Weights, tokens: Tensor, runs: Sequence[Run]) -> Tensor:
        """Return `forward` at some weights."""
        return functional_call(self, weights, (tokens, runs), tie_weights=False)

    def plan_loss(self, weights: Weights, tokens: Tensor, plan: Sequence[Candidate]) -> Tensor:
        """Return the loss of the model run by one candidate for each block, nats."""
        return self.loss(weights, tokens, [self.run_of(candidate) for candidate in plan])

    def run_of(self, candidate: Candidate) -> Run:
        """Return how a block runs as one candidate."""
        ranks, bits = candidate.forward_pair
        if bits >= LOSSLESS:
            # exact sums depend on the number of ranks by rounding alone: one product is faster
            ranks = 1
        return partial(
            summed,
            ranks=ranks,
            reduce=lambda parts: straight_through_sum(parts, bits, self.block_size),
        )

    def mixed_loss(
        self,
        weights: Weights,
        tokens: Tensor,
        pair_weights: Tensor,
        pairs: Sequence[Pair],
    ) -> Tensor:
        """Return the loss of the mixed model, nats; `pair_weights` has shape `(blocks, K)`.

        Pairs differ only in their sums, so the products of the ranks are computed once.
        """
        ranks = max(tp for tp, _ in pairs)
        runs = []
        for row in pair_weights:
            mixed = partial(mixed_reduce, pairs=pairs, pair_weights=row, block_size=self.block_size)
            runs.append(partial(summed, ranks=ranks, reduce=mixed))
        return self.loss(weights, tokens, runs)


def mixed_reduce(
    partials: Tensor,
    pairs: Sequence[Pair],
    pair_weights: Tensor,
    block_size: int = BLOCK,
) -> Tensor:
    """Mix several all-reduces of the same partial sums by weights.

    A coarser rank's partial sum is the sum over the finer ranks that it replaces. Backward is
    straight-through for the partial sums and exact for the weights.

    Args:
        partials: Partial sums of the finest division, shape `(S, B, T, H)`.
        pairs: K tensor-parallel degrees and bits.
        pair_weights: Their weights, shape `(K,)`.

    Returns:
        Shape `(B, T, H)`.
    """
    exact = partials.sum(0)
    finest = partials.detach()
    sums = []
    for tp, bits in pairs:
        coarser = torch.unflatten(finest, 0, (tp, -1)).sum(1)
        sums.append(lossy_sum(coarser, bits, block_size))
    mixture = (pair_weights @ torch.stack(sums).flatten(1)).view_as(exact)
    return mixture + exact - exact.detach()
