"""Bytes that a layer keeps for backward on one device, by recomputation.

Korthikanti et al. 2022 (arXiv 2205.05198), equations 1-6; the terms of a layer stand in `model.py`.
All bytes are of one micro-batch, of shape `(O, C)`.
"""

import torch
from torch import Tensor

from darts_parallel.cost.choices import Tensors
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.problem import COMMON, LayerSpec

OUTPUT_SPLITS = ("column", "vocabulary")
"""Splits of products whose output features are divided over tensor-parallel ranks."""
FLOAT32_SOFTMAX = 3.0
"""Bytes of scores per byte of 16-bit ones where transformers runs operator by operator: the softmax of
Llama and its kin is in float32, and stays next to its 16-bit copy (its eager_attention_forward)."""


def key_value_bytes(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the bytes of keys and values of a rank's tokens."""
    features = sum(2 * core.kv_heads * core.head_dim for core in layer.cores)
    return stage.width * features * stage.choices.tokens / stage.choices.tp


def weight_gradient_bytes(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the bytes from which gradients of weights are computed, without terms.

    These are inputs of the products and gradients of their outputs: `32 s b h` bytes of a GPT block
    (Qi et al. 2023, arXiv 2401.10241, table 1), whatever was kept for the gradient of the input.
    """
    tp = stage.choices.tp
    shards = stage.choices.sequence_shards
    features = torch.zeros_like(tp + shards)
    for gemm in layer.trained:
        input_shards = tp if gemm.split == "row" else shards
        output_shards = tp if gemm.split in OUTPUT_SPLITS else shards
        inputs = gemm.in_features / input_shards
        outputs = gemm.out_features / output_shards
        features = features + inputs + outputs
    return stage.width * stage.choices.tokens * features


def between_passes(
    layer: LayerSpec,
    needed: Tensor,
    whole: Tensor,
    activation: Tensor,
) -> Tensor:
    """Return the bytes between the gradient of a layer's input and the gradient of its weights.

    Recomputed tensors exist again, as far as products of weights need them. A block that keeps more
    for the gradient of the input counts in full.

    Args:
        needed: Bytes from which the gradients of the weights are computed.
        whole: Bytes kept for backward without recomputation.
        activation: Bytes kept under the recomputation of each strategy.
    """
    if not layer.recomputable:
        return layer.share_for_weights * activation
    if layer.frozen:
        return activation
    return torch.maximum(activation, torch.minimum(needed, whole))


def activation_bytes(stage: StageContext, layer: LayerSpec) -> Tensors:
    """Return the bytes that a layer keeps for backward: `none`, `selective` and `full` recomputation.

    Recomputation leaves layers that are not blocks as they are.
    """
    tokens = stage.choices.tokens
    tp = stage.choices.tp
    shards = stage.choices.sequence_shards
    modules = stage.training.recompute_modules
    gate = stage.software.gate_kept * mlp_bytes(layer, tp, -1.0)
    linear = _linear_bytes(stage, layer) + gate
    softmax = FLOAT32_SOFTMAX if stage.software.eager_blocks and layer.normed else 1.0
    scores = softmax * layer.score_bytes * stage.training.seq_len / tp
    # the specification of layers counts 2 bytes an element
    scale = tokens * (stage.width / 2.0)
    whole = scale * (linear + scores)
    if not layer.recomputable:
        return {"none": whole, "selective": whole, "full": whole}
    dropped = torch.zeros_like(scores)
    if "core_attn" in modules:
        dropped = scores
    if "mlp" in modules:
        dropped = dropped + gate
    for part in layer.parts:
        if part.module in modules:
            dropped = dropped + part.replicated_activation_bytes / shards
            dropped = dropped + part.sharded_activation_bytes / tp
    selective = scale * (linear + (scores - dropped))
    divided = tp if stage.software.partitioned_checkpoints else shards
    full = tokens * stage.width * layer.output_elements / divided
    return {"none": whole, "selective": selective, "full": full}


def _linear_bytes(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the bytes per token whose number does not depend on the sequence's length, `(C,)`."""
    shards = stage.choices.sequence_shards
    linear = layer.replicated_activation_bytes / shards
    linear = linear + layer.sharded_activation_bytes / stage.choices.tp
    if layer.kind == "loss":
        linear = linear * (stage.software.loss_bytes / COMMON.loss_bytes)
    if stage.software.gathered_inputs:
        inputs = sum(gemm.in_features for gemm in layer.gemms if gemm.split in OUTPUT_SPLITS)
        linear = linear + 2.0 * inputs * (1.0 - 1.0 / shards)
    if stage.software.eager_blocks:
        # next to the input in 16 bits; a frozen scale needs no normalized one
        linear = linear + (4.0 - 2.0 * layer.frozen) * layer.normed / shards
    return linear


def mlp_bytes(layer: LayerSpec, tp: Tensor, sign: float) -> Tensor:
    """Return the bytes a token of the inner features of a block's MLP in 16 bits, `(C,)`.

    The first product gives the gate and the value. The second one reads their product.

    Args:
        sign: 1.0 counts gate, value and product. -1.0 takes the product from gate and value, which
            leaves the gate; nothing is left of an MLP without one.
    """
    mlps = [part.gemms for part in layer.parts if part.module in ("mlp", "shared_experts")]
    inner = sum(ins.out_features + sign * outs.in_features for ins, outs in mlps)
    return 2.0 * inner / tp
