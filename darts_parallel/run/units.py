"""The parameters of one layer as data-parallel ranks keep them.

Gradients are summed, not averaged: the loss is already divided by the tokens of the whole batch, so
that layers of different data-parallel degree agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from darts_parallel.plan.strategy import LayerStrategy

Named = dict[str, nn.Parameter]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def byte_size(tensors: Sequence[Tensor]) -> int:
    """Bytes of what this rank holds of all of them."""
    return sum(local(t).numel() * t.element_size() for t in tensors)


class Unit(ABC):
    """The parameters of one layer (of two, where they share a table) and how they are kept.

    Attributes:
        strategy: Of the layer.
        parameters: By name; tensor-parallel ones are DTensors.
        slots: What the optimizer steps on this rank: plain tensors whose `.grad` is set by `reduce`.
    """

    def __init__(self, strategy: LayerStrategy, parameters: Named, mesh: DeviceMesh) -> None:
        self.strategy, self.parameters, self.mesh = strategy, parameters, mesh
        self.slots: list[nn.Parameter] = []

    @abstractmethod
    def reduce(self) -> None:
        """After the last backward pass: gradients of all data-parallel ranks, on `slots`."""

    @abstractmethod
    def publish(self) -> None:
        """After the optimizer step: the new parameters on every rank that computes with them."""

    @abstractmethod
    def full_gradient(self, name: str) -> Tensor:
        """The whole reduced gradient of a parameter, on every rank of the stage (collective)."""

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters.values(), *self.slots):
            parameter.grad = None

    def parameter_bytes(self) -> int:
        """Bytes of parameters that this rank computes with."""
        return byte_size(list(self.parameters.values()))

    def extra_bytes(self) -> int:
        """Bytes of further copies of parameters."""
        return 0

    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds at the end of the backward passes."""
        return byte_size([p.grad for p in self.parameters.values() if p.grad is not None])

    def rounding_bytes(self) -> float:
        """By how many bytes of parameters uneven division may miss the mean over ranks."""
        return 0.0


def aligned(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, divided as the parameter is (a norm's may be a partial sum)."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
