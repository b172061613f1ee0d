"""An all-reduce at few bits over any backend: quantized reduce-scatter, then quantized all-gather.

Each rank sends every other its share of a tensor as packed integers with one scale for each block of numbers,
sums what it receives, and sends the sum on in the same form (the two hops of ZeRO++, Wang et al. 2023, arXiv
2306.10209, section 3.3). Two roundings, as the cost model and the bilevel loop's virtual ranks have them.
Scales travel in float32, twice the 16 bits that the cost model prices: small gradients would underflow.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from darts_parallel.cost.collectives import BLOCK, LOSSLESS


@dataclass(frozen=True)
class Packed:
    """Quantized numbers as they travel; both along the first axis by the rank that they are for."""

    levels: Tensor
    """Packed integers, uint8, shape `(n, bytes)`."""
    scales: Tensor
    """One for each block, float32, shape `(n, blocks)`."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.levels.numel() + 4 * self.scales.numel()


def pack(rows: Tensor, bits: int) -> Packed:
    """Quantize to `2^bits - 1` levels of each block's largest magnitude, nearest level.

    Args:
        rows: Shape `(n, N)`, N a multiple of `BLOCK`, float32.
        bits: 8, 4 or 2.
    """
    most = 2 ** (bits - 1) - 1
    blocks = torch.unflatten(rows, 1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=torch.finfo(rows.dtype).tiny * most) / most
    # from 0 on: the bytes of a negative number would not fit in few bits
    levels = (torch.round(blocks / scales.unsqueeze(-1)) + most).to(torch.uint8).flatten(1)
    each = 8 // bits
    places = torch.arange(each, dtype=torch.uint8) * bits
    packed = (torch.unflatten(levels, 1, (-1, each)) << places).sum(-1, dtype=torch.uint8)
    return Packed(packed.contiguous(), scales.contiguous())


def unpack(packed: Packed, bits: int) -> Tensor:
    """The numbers that a receiver sees, shape `(n, N)`, float32."""
    most, each = 2 ** (bits - 1) - 1, 8 // bits
    places = torch.arange(each, dtype=torch.uint8) * bits
    levels = (packed.levels.unsqueeze(-1) >> places) & (2**bits - 1)
    values = levels.flatten(1).to(torch.float32) - most
    blocks = torch.unflatten(values, 1, (-1, BLOCK)) * packed.scales.unsqueeze(-1)
    return blocks.flatten(1)


def lossy_all_reduce(tensor: Tensor, bits: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' tensors as an all-reduce at `bits` delivers it, the same on every rank.

    Args:
        tensor: Of this rank, float32, any shape.
        bits: 16 and above send the numbers as they are.
        group: Ranks; None for all.
    """
    world = dist.get_world_size(group)
    if world == 1:
        return tensor.clone()
    if bits >= LOSSLESS:
        exact = tensor.clone()
        dist.all_reduce(exact, group=group)
        return exact
    size = tensor.numel()
    share = -(-size // (world * BLOCK)) * BLOCK
    flat = torch.nn.functional.pad(tensor.detach().reshape(-1), (0, world * share - size))
    mine = pack(flat.view(world, share), bits)
    theirs = Packed(torch.empty_like(mine.levels), torch.empty_like(mine.scales))
    for received, sent in ((theirs.levels, mine.levels), (theirs.scales, mine.scales)):
        dist.all_to_all_single(received, sent, group=group)
    summed = pack(unpack(theirs, bits).sum(0, keepdim=True), bits)
    whole = Packed(
        torch.empty(world, summed.levels.shape[1], dtype=torch.uint8),
        torch.empty(world, summed.scales.shape[1], dtype=torch.float32),
    )
    for received, sent in ((whole.levels, summed.levels), (whole.scales, summed.scales)):
        dist.all_gather_single(received.view(-1), sent.view(-1), group=group)
    return unpack(whole, bits).flatten()[:size].view_as(tensor)


def time_all_reduce(size: int, bits: int, repeats: int) -> float:
    """A job: median seconds of one all-reduce of `size` float32 numbers, all ranks together.

    Args:
        size: Numbers.
        bits: Of the collective.
        repeats: Timed runs.
    """
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        lossy_all_reduce(tensor, bits)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
