"""Bytes of a layer on one device: state by ZeRO stage, activations by recomputation.

State: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), section 3. Activations: Korthikanti et al.
2022 (arXiv 2205.05198), equations 1-6; the terms of a layer stand in `model.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.choices import float_tensor
from darts_parallel.problem import (
    COMMON,
    VOCABULARY_MULTIPLE,
    Cluster,
    LayerSpec,
    Software,
    StageTopology,
)

OUTPUT_SPLITS = ("column", "vocabulary")
"""Splits of products whose output features are divided over tensor-parallel ranks."""


MOMENTS = {
    "adam": 8.0,
    "sgd": 4.0,
    "adam_bf16_moments": 4.0,
    "adam_8bit": 2.0 + 2.0 * 4.0 / 256.0,
    "lion": 4.0,
    "muon": 4.0,
    "adafactor": 0.0,
}
"""Bytes a parameter of the optimizer's state without master weights. 8-bit Adam has a float32 scale
for 256 numbers (bitsandbytes); Adafactor keeps sums of rows and columns alone."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of mixed-precision training."""

    parameter: float
    gradient: float
    optimizer: float
    copy: float = 0.0
    """A 16-bit gradient next to the float32 one that accumulates it."""
    step: float = 0.0
    """Copies that the optimizer's step makes; the allocator keeps their memory."""


def state_bytes(precision: str, optimizer: str, software: Software = COMMON) -> StateBytes:
    """Return bytes per parameter.

    16-bit training keeps float32 master weights next to Adam's two moments. Gradients are float32
    with bf16 and fp8 (Megatron-LM's `--accumulate-allreduce-grads-in-fp32`, its default there) and
    16-bit with fp16 (ZeRO, section 3.1: 16 bytes in all), where the framework does not say
    otherwise.
    """
    moments = MOMENTS[optimizer]
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
    parameters: Tensor,
    shards: Tensor,
    zero_stage: Tensor,
    state: StateBytes,
) -> Tensor:
    """Return the parameters, gradients and optimizer state of a layer on one device, shape of `parameters`.

    Args:
        shards: Ranks over which the ZeRO stage shards.
    """

    def sharded(size: float, from_stage: int) -> Tensor:
        return torch.where(zero_stage >= from_stage, size / shards, torch.full_like(shards, size))

    optimizer = sharded(state.optimizer + state.step, 1)
    gradient = sharded(state.gradient + state.copy, 2)
    return parameters * (optimizer + gradient + sharded(state.parameter, 3))


def gathered_bytes(parameters: Tensor, zero_stage: Tensor, state: StateBytes) -> Tensor:
    """Return full parameters (ZeRO-3) and gradients (ZeRO-2, 3) that exist while a layer is computed."""
    gradient = torch.where(zero_stage >= 2, state.gradient, 0.0)
    return parameters * (gradient + torch.where(zero_stage == 3, state.parameter, 0.0))


def key_value_bytes(
    layer: LayerSpec,
    tokens: Tensor,
    tp: Tensor,
    width: int,
) -> Tensor:
    """Return the bytes of keys and values of `tokens` tokens on one rank, shape of `tokens * tp`."""
    features = sum(2 * core.kv_heads * core.head_dim for core in layer.cores)
    return width * features * tokens / tp


def weight_gradient_bytes(
    layer: LayerSpec,
    tokens: Tensor,
    tp: Tensor,
    sequence_shards: Tensor,
    width: int,
) -> Tensor:
    """Return the bytes of a micro-batch from which gradients of weights are computed, without terms.

    These are inputs of the products and gradients of their outputs: `32 s b h` bytes of a GPT block
    (Qi et al. 2023, arXiv 2401.10241, table 1), whatever was kept for the gradient of the input.

    Args:
        layer, tokens, tp, sequence_shards, width: As in `activation_bytes`.

    Returns:
        Shape `(O, C)`.
    """
    features = torch.zeros_like(tp + sequence_shards)
    for gemm in layer.trained:
        input_shards = tp if gemm.split == "row" else sequence_shards
        output_shards = tp if gemm.split in OUTPUT_SPLITS else sequence_shards
        inputs = gemm.in_features / input_shards
        outputs = gemm.out_features / output_shards
        features = features + inputs + outputs
    return width * tokens * features


def between_passes(
    layer: LayerSpec,
    needed: Tensor,
    whole: Tensor,
    activation: Tensor,
) -> Tensor:
    """Return the bytes of a micro-batch between the gradient of its input and the gradient of the weights.

    Recomputed tensors exist again, as far as products of weights need them. A block that keeps more
    for the gradient of the input counts in full.

    Args:
        needed: Bytes from which the gradients of the weights are computed, shape `(O, C)`.
        whole: Bytes kept for backward without recomputation, `(O, C)`.
        activation: Bytes kept under the recomputation of each strategy, `(O, C)`.
    """
    if not layer.recomputable:
        return layer.share_for_weights * activation
    if layer.frozen:
        return activation
    return torch.maximum(activation, torch.minimum(needed, whole))


@dataclass(frozen=True)
class KeptTensors:
    """The tensors that a job keeps for backward."""

    width: int
    """Bytes of one element; the specification of layers counts 2."""
    modules: tuple[str, ...] = ("core_attn",)
    """Modules that selective recomputation computes again."""
    software: Software = COMMON
    """The framework, which may keep more than others."""


def activation_bytes(
    layer: LayerSpec,
    tokens: Tensor,
    seq_len: int,
    tp: Tensor,
    sequence_shards: Tensor,
    kept: KeptTensors,
) -> dict[str, Tensor]:
    """Return the bytes that a layer keeps for backward per micro-batch in flight, by recomputation.

    Args:
        tokens: Tokens of a micro-batch on one rank, shape `(O, C)`.
        tp, sequence_shards: Degrees of the two regions, shape `(C,)`.

    Returns:
        `none`, `selective` and `full`, each of shape `(O, C)`. Recomputation leaves layers that are
        not blocks as they are.
    """
    linear = _linear_bytes(layer, tp, sequence_shards, kept.software)
    gate = _gate_bytes(layer, tp, kept.software)
    linear = linear + gate
    scores = layer.score_bytes * seq_len / tp
    scale = tokens * (kept.width / 2.0)
    whole = scale * (linear + scores)
    if not layer.recomputable:
        return {"none": whole, "selective": whole, "full": whole}
    dropped = torch.zeros_like(scores)
    if "core_attn" in kept.modules:
        dropped = scores
    if "mlp" in kept.modules:
        dropped = dropped + gate
    for part in layer.parts:
        if part.module in kept.modules:
            dropped = dropped + part.replicated_activation_bytes / sequence_shards
            dropped = dropped + part.sharded_activation_bytes / tp
    selective = scale * (linear + (scores - dropped))
    shards = tp if kept.software.partitioned_checkpoints else sequence_shards
    full = tokens * kept.width * layer.output_elements / shards
    return {"none": whole, "selective": selective, "full": full}


def _linear_bytes(
    layer: LayerSpec,
    tp: Tensor,
    sequence_shards: Tensor,
    software: Software,
) -> Tensor:
    """Return the bytes per token whose number does not depend on the sequence's length, `(C,)`."""
    replicated = layer.replicated_activation_bytes / sequence_shards
    linear = replicated + layer.sharded_activation_bytes / tp
    if layer.kind == "loss":
        linear = linear * (software.loss_bytes / COMMON.loss_bytes)
    if software.gathered_inputs:
        inputs = sum(gemm.in_features for gemm in layer.gemms if gemm.split in OUTPUT_SPLITS)
        linear = linear + 2.0 * inputs * (1.0 - 1.0 / sequence_shards)
    return linear


def _gate_bytes(layer: LayerSpec, tp: Tensor, software: Software) -> Tensor:
    """Return the bytes per token of gates of MLPs, where the framework keeps them, `(C,)`."""
    total = torch.zeros_like(tp)
    if software.gate_kept:
        for part in layer.parts:
            if part.module == "mlp":
                gated, projection = part.gemms
                total = total + 2.0 * (gated.out_features - projection.in_features) / tp
    return total


def capacities(cluster: Cluster, stages: Sequence[StageTopology], margin: float) -> Tensor:
    """Return the bytes that plans may use of every stage's device, `(K,)`; the least of several kinds.

    Args:
        margin: Share of a device's memory that is left free, next to the framework's reserve.
    """
    least = []
    for stage in stages:
        devices = [cluster.groups[group].device for group in stage.groups]
        least.append(min((1.0 - margin) * device.memory - device.reserved for device in devices))
    return float_tensor(least)
