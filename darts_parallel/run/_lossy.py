"""Sums at few bits over any backend: quantized reduce-scatter, then quantized all-gather.

Each rank sends every other its share of a tensor as packed integers with one scale for each block of numbers,
sums what it receives, and sends the sum on in the same form (the two hops of ZeRO++, Wang et al. 2023, arXiv
2306.10209, section 3.3). Two roundings, as the cost model and the bilevel loop's virtual ranks have them.
Scales travel in float32, twice the 16 bits that the cost model prices: small gradients would underflow.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from darts_parallel.cost import BLOCK
from darts_parallel.run._layouts import moved


class Packed(NamedTuple):
    """Quantized numbers as they travel, one row for each receiving rank."""

    levels: Tensor
    """Packed integers, uint8, `(n, bytes)`."""
    scales: Tensor
    """Scale of each block, float32, `(n, blocks)`."""


def pack(rows: Tensor, bits: int) -> Packed:
    """Quantize to `2^bits - 1` levels of each block's largest magnitude, nearest level.

    Args:
        rows: Shape `(n, N)`, N a multiple of `BLOCK`, float32.
        bits: 8, 4 or 2.
    """
    most = 2 ** (bits - 1) - 1
    blocks = torch.unflatten(rows, 1, (-1, BLOCK))
    smallest = torch.finfo(rows.dtype).tiny * most
    scales = blocks.abs().amax(-1).clamp(min=smallest) / most
    # levels start at 0: a negative number would not fit in few bits
    levels = torch.round(blocks / scales.unsqueeze(-1)) + most
    whole = levels.to(torch.uint8).flatten(1)
    each = 8 // bits
    shifted = torch.unflatten(whole, 1, (-1, each)) << _places(bits)
    packed = shifted.sum(-1, dtype=torch.uint8)
    return Packed(packed.contiguous(), scales.contiguous())


def _places(bits: int) -> Tensor:
    """Return the first bit of every number in a byte."""
    return torch.arange(8 // bits, dtype=torch.uint8) * bits


def unpack(packed: Packed, bits: int) -> Tensor:
    """Return the numbers that a receiver sees, shape `(n, N)`, float32."""
    shifted = packed.levels.unsqueeze(-1) >> _places(bits)
    levels = shifted & (2**bits - 1)
    most = 2 ** (bits - 1) - 1
    values = levels.flatten(1).to(torch.float32) - most
    blocks = torch.unflatten(values, 1, (-1, BLOCK))
    return (blocks * packed.scales.unsqueeze(-1)).flatten(1)


def rounded(rows: Tensor, bits: int) -> Tensor:
    """Return the numbers that a receiver of `rows` sees, shape `(n, N)`; N a multiple of `BLOCK`."""
    return unpack(pack(rows, bits), bits)


def padded(size: int, world: int) -> int:
    """Return the numbers of a tensor of `size` that is dealt to `world` ranks in whole blocks."""
    return -(-size // (world * BLOCK)) * world * BLOCK


def scattered_sum(rows: Tensor, bits: int, group: dist.ProcessGroup | None) -> Tensor:
    """Reduce-scatter: return this rank's share of the sum over all ranks, each of which rounds what it sends.

    Args:
        rows: Of this rank, one row for each receiver, shape `(world, N)`, N a multiple of `BLOCK`.
        bits: 8, 4 or 2.
        group: Ranks; None for all.

    Returns:
        Shape `(N,)`.
    """
    mine = pack(rows, bits)
    theirs = Packed(torch.empty_like(mine.levels), torch.empty_like(mine.scales))
    for received, sent in zip(theirs, mine, strict=True):
        dist.all_to_all_single(received, sent, group=group)
    return unpack(theirs, bits).sum(0)


def gathered_shares(share: Tensor, bits: int, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather shares `(N,)`, each rounded by its sender, to shape `(world * N,)`."""
    world = dist.get_world_size(group)
    gathered = []
    for sent in pack(share.unsqueeze(0), bits):
        received = sent.new_empty(world, sent.shape[1])
        dist.all_gather_single(received.view(-1), sent.view(-1), group=group)
        gathered.append(received)
    return unpack(Packed(*gathered), bits).flatten()


def lossy_all_reduce(tensor: Tensor, bits: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum all ranks' tensors as an all-reduce at `bits` does, the same on every rank.

    Args:
        tensor: Of this rank, float32, any shape.
        bits: 8, 4 or 2.
        group: Ranks; None for all.
    """
    world = dist.get_world_size(group)
    size = tensor.numel()
    numbers = tensor.detach().float().reshape(-1)
    flat = torch.nn.functional.pad(numbers, (0, padded(size, world) - size))
    share = scattered_sum(flat.view(world, -1), bits, group)
    return gathered_shares(share, bits, group)[:size].view_as(tensor)


def straight_through_sum(partial: Tensor, bits: int, group: dist.ProcessGroup) -> Tensor:
    """Take `lossy_all_reduce` with the gradient of the exact sum (Bengio et al. 2013, arXiv 1308.3432).

    Every rank goes on with the sum and has its whole gradient, which is that of the partial sum, too.
    """
    return moved(
        partial, lambda value: lossy_all_reduce(value, bits, group), lambda gradient: gradient
    )


@dataclass
class ErrorFeedback:
    """A gradient all-reduce at few bits that keeps back what rounding takes, and adds it the next time.

    Each rank keeps what it has not sent, and of its share what it has not delivered (Seide et al. 2014, 1-bit
    SGD; two hops as in 1-bit Adam, Tang et al. 2021, arXiv 2102.02888).
    """

    bits: int
    """8, 4 or 2."""
    group: dist.ProcessGroup
    unsent: Tensor | None = None
    undelivered: Tensor | None = None

    def share(self, flat: Tensor) -> Tensor:
        """Return this rank's share of the sum, as it is delivered.

        Args:
            flat: Gradients of this rank, a multiple of `BLOCK` numbers for every rank.
        """
        wanted = flat.view(self.group.size(), -1)
        if self.unsent is not None:
            wanted = wanted + self.unsent
        self.unsent = wanted - rounded(wanted, self.bits)
        owned = scattered_sum(wanted, self.bits, self.group)
        if self.undelivered is not None:
            owned = owned + self.undelivered
        delivered = rounded(owned.unsqueeze(0), self.bits)[0]
        self.undelivered = owned - delivered
        return delivered

    def everywhere(self, flat: Tensor) -> Tensor:
        """Return the whole sum on every rank; argument as `share`."""
        # what is delivered lies on the levels already: rounding it again changes nothing but the last bit
        return gathered_shares(self.share(flat), self.bits, self.group)
