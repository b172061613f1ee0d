"""Seconds of a layer's kernels on one device: matrix products, attention, streaming kernels.

Roofline (Williams et al. 2009): a kernel takes the longer of its arithmetic and its memory traffic.
Matrix products lose efficiency with small shapes by a saturation curve in each dimension, `e_max *
prod(d / (d + d_half))`, so that a high `tp` or a tiny micro-batch costs (the trend that Narayanan
et al. 2021, section 5.4, measure), and with shapes that do not fill 128 bytes or, worse, 16 bytes
(NVIDIA, Matrix Multiplication Background User's Guide, section "Tensor Core Requirements"). In fp8
training the weight products of the blocks run in fp8 (mxfp8 and nvfp4 alike); the head stays in 16
bits, and so does attention unless the job says otherwise (`training.fp8_dot_product_attention`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.memory import padded_vocabulary
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.problem import AttentionCore, Device, Gemm, LayerSpec, Scalar, weights

BACKWARD_FACTOR = 2.0
"""Each matrix product of the forward pass has two in backward (Narayanan et al. 2021, appendix)."""
FUSED_BACKWARD_FACTOR = 2.5
"""Fused attention has two products in forward and five in backward, which computes the scores again
(Dao 2023, arXiv 2307.08691, section 4.1)."""
ALIGNED, SLOWEST_ALIGNED = 64, 8
"""Elements of 128 and of 16 bytes in 16-bit numbers: full speed, and the least for tensor cores."""
UNALIGNED_FACTOR = 1.0 / 8.0
"""Speed of batched products whose rows do not begin on 16 bytes: outside the tensor cores, whose
peak is 16 times that of the other 16-bit units (A100 data sheet: 312 and 78 TFLOP/s with FP16,
19.5 FP32)."""
ATTENTION_HALF_SIZE = 32.0
"""Head size at which fused attention reaches half of `attention_efficiency`: at 64 it reaches
2/3 and at 128 4/5 of it, the ratio between the two that Dao 2023 measures on A100 (arXiv
2307.08691, figure 4)."""
IN_BLOCKS = ("column", "row")
"""Splits of the products that run below 16 bits."""
CAST_BYTES = 3.0
"""Memory traffic per element that is cast from 16 to 8 bits."""


def gemm_seconds(
    gemm: Gemm,
    tokens: Tensor,
    tp: Tensor,
    device: Device,
    width: int,
) -> Tensor:
    """Return the forward seconds of a weight product on `tokens` rows, shape of `tokens * tp` broadcast.

    Args:
        tokens: Rows, i.e. tokens of one micro-batch on one rank.
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
    eight_bit = device.eight_bit and gemm.split in IN_BLOCKS
    speed = device.peak_flops * device.fp8_efficiency if eight_bit else device.half_flops
    share = torch.ones(())
    for size in (tokens, columns, inner):
        share = share * (size / (size + device.gemm_half_size))
    rate = speed * device.gemm_efficiency * share
    if gemm.split in IN_BLOCKS:
        divided = columns if gemm.split == "column" else inner
        rate = rate * (divided / (divided + device.divided_half_size))
    rate = rate * alignment(columns, device) * alignment(inner, device)
    arithmetic = 2.0 * tokens * columns * inner / rate
    traffic = width * (tokens * inner + inner * columns + tokens * columns)
    seconds = torch.maximum(arithmetic, stream_seconds(traffic, device))
    if not eight_bit:
        return seconds
    # activations are cast for every micro-batch; weights once an iteration (`weight_cast_seconds`)
    return seconds + stream_seconds(CAST_BYTES * tokens * inner, device)


def weight_cast_seconds(layer: LayerSpec, share: Tensor, device: Device) -> Tensor:
    """Return the seconds per iteration to cast the block weights of a rank below 16 bits, shape of `share`.

    The weights change once an iteration, and the cast ones are kept between micro-batches
    (Transformer Engine: `is_first_microbatch`); frozen ones do not change.

    Args:
        share: Part of the layer's weights that a rank casts.
    """
    elements = weights(g for g in layer.trained if g.split in IN_BLOCKS)
    return stream_seconds(CAST_BYTES * elements * device.eight_bit * share, device)


def alignment(size: Tensor, device: Device) -> Tensor:
    """Return the share of the speed that products with a side of `size` elements keep, shape of `size`."""
    misaligned = size.long() % ALIGNED != 0
    return 1.0 - misaligned.to(size.dtype) * (1.0 - device.misaligned_efficiency)


def products_seconds(
    gemms: Sequence[Gemm],
    tokens: Tensor,
    tp: Tensor,
    device: Device,
    width: int,
) -> Tensor:
    """Return the forward seconds of weight products one after the other, shape `(O, C)`.

    Args:
        tokens: Rows of every product, `(O, C)`.
        tp: Tensor-parallel degree, `(C,)`.
        width: Bytes of one element.
    """
    each = (gemm_seconds(gemm, tokens, tp, device, width) for gemm in gemms)
    return sum(each, torch.zeros_like(tokens))


def stream_seconds(size: Tensor, device: Device) -> Tensor:
    """Return the seconds to move `size` bytes through device memory."""
    return size / (device.memory_bandwidth * device.memory_efficiency)


def fused_attention_seconds(
    core: AttentionCore,
    tokens: Tensor,
    seq_len: int,
    tp: Tensor,
    device: Device,
    eight_bit: bool,
) -> Tensor:
    """Return the forward seconds of scores, softmax and weighted sum, shape of `tokens * tp` broadcast.

    FlashAttention (Dao et al. 2022): half of the products are skipped under a causal mask, and so
    are the products before a window. The scores stay on chip.

    Args:
        eight_bit: Whether the products run in 8 bits.
    """
    flops = 4.0 * tokens * core.keys(seq_len) * core.heads * core.head_dim / tp
    flops = flops * (0.5 if core.causal else 1.0)
    filled = core.head_dim / (core.head_dim + ATTENTION_HALF_SIZE)
    narrow = min(device.fp8_efficiency, device.eight_bit_share)
    speed = device.peak_flops * (narrow if eight_bit else device.half_share)
    return flops / (speed * device.attention_efficiency * filled)


def unfused_attention_seconds(
    core: AttentionCore,
    tokens: Tensor,
    seq_len: int,
    tp: Tensor,
    device: Device,
    width: int,
) -> Tensor:
    """Return the forward seconds of two batched products and their passes over the score matrix.

    A fused kernel scales, masks and takes the softmax, as Megatron's (FusedScaleMaskSoftmax).

    Args:
        width: Bytes of one element.
    """
    flops = 4.0 * tokens * seq_len * core.heads * core.head_dim / tp
    saturation = core.head_dim / (core.head_dim + device.gemm_half_size)
    aligned = 1.0 if core.head_dim % SLOWEST_ALIGNED == 0 else UNALIGNED_FACTOR
    products = flops / (device.half_flops * device.gemm_efficiency * saturation * aligned)
    # written by a product; softmax and dropout each read and write; read by the other product
    passes = 4.0 + 2.0 * core.dropout
    traffic = passes * width * tokens * seq_len * core.heads / tp
    return products + stream_seconds(traffic, device)


def forward_kernels(stage: StageContext, layer: LayerSpec) -> dict[str, list[Tensor]]:
    """Return the seconds of every kernel of a layer's forward pass, by what it does, each `(O, C)`."""
    device = stage.device
    width = stage.width
    tokens = stage.choices.tokens
    tp = stage.choices.tp
    replicated = layer.replicated_elements / stage.choices.sequence_shards
    elements = replicated + layer.sharded_elements / tp
    streamed = device.streaming_factor * width * tokens * elements
    launches = stage.training.launches * device.layer_overhead
    kernels = {"attention": [_attention_seconds(stage, core) for core in layer.cores]}
    kernels["streaming kernels"] = [stream_seconds(streamed, device)]
    kernels["matrix products"] = [
        gemm_seconds(gemm, tokens, tp, device, width) for gemm in layer.gemms
    ]
    none = torch.zeros_like(tokens)
    running = sum((sum(alike, none) for alike in kernels.values()), none)
    kernels["launch overhead"] = [launch_gap(running, launches) + device.kernel_gap]
    return kernels


def _attention_seconds(stage: StageContext, core: AttentionCore) -> Tensor:
    """Return the forward seconds of one attention core under the job's kernels, `(O, C)`."""
    training = stage.training
    job = (core, stage.choices.tokens, training.seq_len, stage.choices.tp, stage.device)
    if training.fused_attention:
        return fused_attention_seconds(*job, training.fp8_dot_product_attention)
    return unfused_attention_seconds(*job, stage.width)


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of a micro-batch without the terms of `cost/terms` and messages, each `(O, C)`."""

    forward: Tensor
    backward: Tensor
    attention: Tensor
    """Part of `forward` that is attention cores."""
    weight_gradient: Tensor
    """Part of `backward` that is gradients of weights."""


def computation_seconds(stage: StageContext, layer: LayerSpec) -> KernelSeconds:
    """Price the kernels of a layer forward and backward."""
    kernels = forward_kernels(stage, layer)
    none = torch.zeros_like(stage.choices.tokens)
    forward = sum((sum(alike, none) for alike in kernels.values()), none)
    core = sum(kernels["attention"], none)
    # the products of a weight's gradient have the sizes of its forward product in another order
    weights = sum(kernels["matrix products"], none)
    extra = FUSED_BACKWARD_FACTOR - BACKWARD_FACTOR if stage.training.fused_attention else 0.0
    backward = BACKWARD_FACTOR * forward + extra * core
    if layer.frozen:
        # backward of a frozen product is the gradient of the input alone
        backward = backward - weights
        weights = none
    return KernelSeconds(forward, backward, core, weights)


def recomputed_seconds(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the seconds to compute the parts of a block again that the job names, shape `(O, C)`.

    Attention core and the terms of `cost/terms` are not among a layer's parts.
    """
    choices = stage.choices
    tokens = choices.tokens
    device = stage.device
    total = torch.zeros_like(tokens)
    for part in layer.parts:
        if part.module not in stage.training.recompute_modules:
            continue
        if not part.gemms:
            # a streaming kernel writes what was not kept once more, in elements of 2 bytes
            kept = part.replicated_activation_bytes / choices.sequence_shards
            streamed = stream_seconds(stage.width * tokens * kept, device)
            total = total + device.streaming_factor * streamed
        total = total + products_seconds(part.gemms, tokens, choices.tp, device, stage.width)
        if part.module == "mlp":
            total = total - unread_seconds(stage, layer)
    return total


def unread_seconds(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the seconds of products that recomputation leaves out, shape `(O, C)`."""
    left_out = [gemm for gemm in layer.gemms if gemm.module == "linear_fc2"]
    pruned = left_out if stage.software.prunes_recomputation else []
    choices = stage.choices
    return products_seconds(pruned, choices.tokens, choices.tp, stage.device, stage.width)


def exposed(compute: Tensor, communication: Tensor, g: Scalar) -> Tensor:
    """Return the seconds by which `communication` next to `compute` lengthens it.

    `T = (a^g + b^g)^(1/g)` (Pollux, Qiao et al. 2021, equation 11), minus `a`, in a form that is
    exact for small ratios and never overflows: `log(T/a)` is that of the longer one to `a`, and of
    `T` to the longer one. g = 1 hides nothing; a large g hides all of the shorter one.
    """
    ratio = communication / compute
    longer = ratio.clamp(min=1.0)
    shorter = ratio.clamp(max=1.0)
    return compute * torch.expm1(torch.log(longer) + torch.log1p((shorter / longer) ** g) / g)


def launch_gap(kernels: Tensor, launches: Scalar) -> Tensor:
    """Return the seconds by which launching a layer's kernels takes longer than the kernels themselves.

    The processor launches ahead of the device, so the longer of the two counts, but some launches
    wait for results: `(a^2 + b^2)^(1/2) - a`, between the maximum and the sum. Experts have many
    small kernels (Megatron-Core MoE, arXiv 2603.07685: fine-grained experts are bound by launches
    until CUDA graphs take them).

    Args:
        launches: Seconds of the processor.
    """
    return torch.hypot(kernels, torch.as_tensor(launches, dtype=kernels.dtype)) - kernels
