"""Seconds of a layer's kernels on one device: matrix products, attention, streaming kernels.

Roofline (Williams et al. 2009): a kernel takes the longer of its arithmetic and its memory traffic.
Matrix products lose efficiency with small shapes by a saturation curve in each dimension,
`e_max * prod(d / (d + d_half))`, so that a high `tp` or a tiny micro-batch costs (the trend that
Narayanan et al. 2021, section 5.4, measure).
"""

import torch
from torch import Tensor

from darts_parallel.cluster import Device
from darts_parallel.model import VOCABULARY_MULTIPLE, AttentionCore, Gemm, LayerSpec

BACKWARD_FACTOR = 2.0
"""Each matrix product of the forward pass has two in backward (Narayanan et al. 2021, appendix)."""


def padded_vocabulary(vocab_size: int, tp: Tensor) -> Tensor:
    """Rows of the vocabulary table that one rank holds (Megatron-LM's padding), shape of `tp`."""
    multiple = VOCABULARY_MULTIPLE * tp
    return torch.ceil(vocab_size / multiple) * VOCABULARY_MULTIPLE


def gemm_seconds(gemm: Gemm, tokens: Tensor, tp: Tensor, device: Device, width: int) -> Tensor:
    """Forward seconds of a weight product on `tokens` rows, shape of `tokens * tp` broadcast.

    Args:
        tokens: Rows, i.e. tokens of one micro-batch on one rank.
        tp: Tensor-parallel degree.
        width: Bytes of one element.
    """
    columns = torch.as_tensor(float(gemm.out_features), dtype=tokens.dtype)
    inner = torch.as_tensor(float(gemm.in_features), dtype=tokens.dtype)
    if gemm.split == "column":
        columns = columns / tp
    elif gemm.split == "row":
        inner = inner / tp
    elif gemm.split == "vocabulary":
        columns = padded_vocabulary(gemm.out_features, tp)
    half = device.gemm_half_size
    saturation = (tokens / (tokens + half)) * (columns / (columns + half)) * (inner / (inner + half))
    arithmetic = 2.0 * tokens * columns * inner / (device.peak_flops * device.gemm_efficiency * saturation)
    traffic = width * (tokens * inner + inner * columns + tokens * columns)
    return torch.maximum(arithmetic, stream_seconds(traffic, device))


def weight_gradient_seconds(
    layer: LayerSpec, tokens: Tensor, tp: Tensor, device: Device, width: int
) -> Tensor:
    """Seconds of the weight gradients' products in backward, shape `(O, C)`.

    Each has the sizes of its forward product in another order. Arguments as in `forward_seconds`.
    """
    total = torch.zeros_like(tokens)
    for gemm in layer.gemms:
        total = total + gemm_seconds(gemm, tokens, tp, device, width)
    return total


def stream_seconds(size: Tensor, device: Device) -> Tensor:
    """Seconds to move `size` bytes through device memory."""
    return size / (device.memory_bandwidth * device.memory_efficiency)


def attention_seconds(
    core: AttentionCore, tokens: Tensor, seq_len: int, tp: Tensor, device: Device, *, fused: bool, width: int
) -> Tensor:
    """Forward seconds of scores, softmax and weighted sum, shape of `tokens * tp` broadcast.

    Fused (FlashAttention, Dao et al. 2022): half of the products are skipped under a causal mask and
    the scores stay on chip. Unfused: two batched products and five passes over the score matrix.
    """
    flops = 4.0 * tokens * seq_len * core.heads * core.head_dim / tp
    if fused:
        flops = flops * (0.5 if core.causal else 1.0)
        return flops / (device.peak_flops * device.attention_efficiency)
    products = flops / (device.peak_flops * device.gemm_efficiency)
    # written by the product; scale+mask+softmax and dropout each read and write; read by the product
    passes = 6.0 * width * tokens * seq_len * core.heads / tp
    return products + stream_seconds(passes, device)


def forward_seconds(
    layer: LayerSpec,
    tokens: Tensor,
    seq_len: int,
    tp: Tensor,
    sequence_shards: Tensor,
    device: Device,
    *,
    fused: bool,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Forward seconds of one micro-batch of a layer, and the part that is attention core.

    Args:
        tokens: Tokens of a micro-batch on one rank, shape `(O, C)`.
        tp: Tensor-parallel degree, shape `(C,)`.
        sequence_shards: `tp` with sequence parallelism, else 1, shape `(C,)`.
        width: Bytes of one element.

    Returns:
        Seconds and attention seconds, shape `(O, C)`; launch overhead is in neither.
    """
    core = torch.zeros_like(tokens)
    for attention in layer.cores:
        core = core + attention_seconds(attention, tokens, seq_len, tp, device, fused=fused, width=width)
    streamed = width * tokens * (layer.replicated_elements / sequence_shards + layer.sharded_elements / tp)
    total = core + stream_seconds(streamed, device)
    for gemm in layer.gemms:
        total = total + gemm_seconds(gemm, tokens, tp, device, width)
    return total, core
