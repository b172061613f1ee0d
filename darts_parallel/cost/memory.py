"""Bytes of a layer's state on one device, by ZeRO stage.

ZeRO: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.
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
    bits = software.summed_bits(precision)
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
        return size / torch.where(zero_stage >= from_stage, shards, 1.0)

    optimizer = sharded(state.optimizer + state.step, 1)
    gradient = sharded(state.gradient + state.copy, 2)
    return parameters * (optimizer + gradient + sharded(state.parameter, 3))


def gathered_bytes(parameters: Tensor, zero_stage: Tensor, state: StateBytes) -> Tensor:
    """Return full parameters (ZeRO-3) and gradients (ZeRO-2, 3) that exist while a layer is computed."""
    gradient = torch.where(zero_stage >= 2, state.gradient, 0.0)
    return parameters * (gradient + torch.where(zero_stage == 3, state.parameter, 0.0))


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
