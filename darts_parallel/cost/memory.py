"""Bytes of a layer on one device: state by ZeRO stage, activations by recomputation.

State: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), section 3. Activations: Korthikanti et al.
2022 (arXiv 2205.05198), equations 1-6; the terms of a layer stand in `model.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.problem import (
    COMMON,
    VOCABULARY_MULTIPLE,
    Cluster,
    LayerSpec,
    Software,
    StageTopology,
)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of mixed-precision training."""

    parameter: float
    gradient: float
    optimizer: float
    copy: float = 0.0
    """A 16-bit gradient beside the float32 one that accumulates it."""
    step: float = 0.0
    """Copies that the optimizer's step makes; the allocator keeps their room."""


def state_bytes(precision: str, optimizer: str, software: Software = COMMON) -> StateBytes:
    """Return bytes per parameter.

    16-bit training keeps float32 master weights next to Adam's two moments. Gradients are float32 with
    bf16 and fp8 (Megatron-LM's `--accumulate-allreduce-grads-in-fp32`, its default there) and 16-bit
    with fp16 (ZeRO, section 3.1: 16 bytes in all), where the framework does not say otherwise.
    """
    moments = {"adam": 8.0, "sgd": 4.0}[optimizer]
    if precision == "fp32":
        return StateBytes(4.0, 4.0, moments)
    bits = software.gradient_bits or (16 if precision == "fp16" else 32)
    copy = 2.0 * (software.gradient_copy and bits > 16)
    return StateBytes(2.0, bits / 8.0, 4.0 + moments, copy, software.step_bytes)


def padded_vocabulary(vocab_size: int, tp: Tensor) -> Tensor:
    """Return the rows of the vocabulary table that one rank holds (Megatron-LM's padding), shape of `tp`."""
    multiple = VOCABULARY_MULTIPLE * tp
    return torch.ceil(vocab_size / multiple) * VOCABULARY_MULTIPLE


def parameters_per_rank(layer: LayerSpec, vocab_size: int, tp: Tensor) -> Tensor:
    """Return the parameters of a layer on one tensor-parallel rank, shape of `tp`."""
    table = layer.vocabulary_parameters * padded_vocabulary(vocab_size, tp)
    return layer.sharded_parameters / tp + layer.replicated_parameters + table


def static_bytes(
    parameters: Tensor, shards: Tensor, zero_stage: Tensor, state: StateBytes
) -> Tensor:
    """Return the parameters, gradients and optimizer state of a layer on one device, shape of `parameters`.

    Args:
        shards: Ranks over which the ZeRO stage shards.
    """

    def sharded(size: float, from_stage: int) -> Tensor:
        return torch.where(zero_stage >= from_stage, size / shards, torch.full_like(shards, size))

    per_parameter = sharded(state.optimizer + state.step, 1) + sharded(
        state.gradient + state.copy, 2
    )
    return parameters * (per_parameter + sharded(state.parameter, 3))


def gathered_bytes(parameters: Tensor, zero_stage: Tensor, state: StateBytes) -> Tensor:
    """Return full parameters (ZeRO-3) and gradients (ZeRO-2, 3) that exist while a layer is computed."""
    gradient = torch.where(zero_stage >= 2, state.gradient, 0.0)
    return parameters * (gradient + torch.where(zero_stage == 3, state.parameter, 0.0))


def key_value_bytes(layer: LayerSpec, tokens: Tensor, tp: Tensor, width: int) -> Tensor:
    """Return the bytes of keys and values of `tokens` tokens on one rank, shape of `tokens * tp`."""
    features = sum(2 * core.kv_heads * core.head_dim for core in layer.cores)
    return width * features * tokens / tp


def weight_gradient_bytes(
    layer: LayerSpec, tokens: Tensor, tp: Tensor, sequence_shards: Tensor, width: int
) -> Tensor:
    """Return the bytes of a micro-batch from which gradients of weights are computed, terms left aside.

    Inputs of the products and gradients of their outputs: of a GPT block `32 s b h` bytes (Qi et al. 2023,
    arXiv 2401.10241, table 1), whatever was kept for the gradient of the input.

    Args:
        layer, tokens, tp, sequence_shards, width: As in `activation_bytes`.

    Returns:
        Shape `(O, C)`.
    """
    features = torch.zeros_like(tp + sequence_shards)
    for gemm in layer.trained:
        inside = gemm.in_features / (tp if gemm.split == "row" else sequence_shards)
        outside = gemm.out_features / (
            tp if gemm.split in ("column", "vocabulary") else sequence_shards
        )
        features = features + inside + outside
    return width * tokens * features


def between_passes(layer: LayerSpec, needed: Tensor, whole: Tensor, activation: Tensor) -> Tensor:
    """Return the bytes of a micro-batch between the gradient of its input and that of the weights.

    What recomputation threw away is there again, as far as products of weights need it. A block that keeps
    more for the gradient of the input counts in full.

    Args:
        needed: What the gradients of the weights are computed from, shape `(O, C)`.
        whole, activation: Kept for backward without recomputation, and with that of each strategy, `(O, C)`.
    """
    if not layer.recomputable:
        return layer.share_for_weights * activation
    return activation if layer.frozen else torch.maximum(activation, torch.minimum(needed, whole))


def activation_bytes(
    layer: LayerSpec,
    tokens: Tensor,
    seq_len: int,
    tp: Tensor,
    sequence_shards: Tensor,
    width: int,
    modules: Sequence[str] = ("core_attn",),
    software: Software = COMMON,
) -> dict[str, Tensor]:
    """Return the bytes that a layer keeps for backward per micro-batch in flight, by recomputation.

    Args:
        tokens: Tokens of a micro-batch on one rank, shape `(O, C)`.
        tp, sequence_shards: Degrees of the two regions, shape `(C,)`.
        width: Bytes of one element (the specification counts for 2).
        software: Says what a framework keeps beyond that.

    Returns:
        `none`, `selective` and `full`, each of shape `(O, C)`. Recomputation leaves layers that are
        not blocks as they are.
    """
    scale = width / 2.0
    linear = (
        layer.replicated_activation_bytes / sequence_shards + layer.sharded_activation_bytes / tp
    )
    if layer.kind == "loss":
        linear = linear * (software.loss_bytes / COMMON.loss_bytes)
    if software.gathered_inputs:
        inputs = sum(
            gemm.in_features for gemm in layer.gemms if gemm.split in ("column", "vocabulary")
        )
        linear = linear + 2.0 * inputs * (1.0 - 1.0 / sequence_shards)
    mlps = [part.gemms for part in layer.parts if part.module == "mlp" and software.gate_kept]
    gate = sum(
        (2.0 * (ins.out_features - out.in_features) / tp for ins, out in mlps), torch.zeros_like(tp)
    )
    linear = linear + gate
    scores = layer.score_bytes * seq_len / tp
    kept = tokens * scale * (linear + scores)
    if not layer.recomputable:
        return {"none": kept, "selective": kept, "full": kept}
    dropped = scores if "core_attn" in modules else torch.zeros_like(scores)
    dropped = dropped + gate if "mlp" in modules else dropped
    for part in layer.parts:
        if part.module in modules:
            dropped = dropped + part.replicated_activation_bytes / sequence_shards
            dropped = dropped + part.sharded_activation_bytes / tp
    selective = tokens * scale * (linear + (scores - dropped))
    full = tokens * width * layer.output_elements / sequence_shards
    return {"none": kept, "selective": selective, "full": full}


def capacities(cluster: Cluster, stages: Sequence[StageTopology], margin: float) -> Tensor:
    """Return the bytes that plans may use of every stage's device, the least of several kinds, `(K,)`.

    Args:
        margin: Share of its memory that is left free, next to what its framework reserves.
    """
    kinds = [[cluster.groups[kind].device for kind in stage.groups] for stage in stages]
    free = [min((1.0 - margin) * d.memory - d.reserved for d in own) for own in kinds]
    return torch.tensor(free, dtype=torch.float64)
