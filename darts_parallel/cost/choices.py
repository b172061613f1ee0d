"""The strategies of a space as tensors, so that costs are computed for all of them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from darts_parallel.config import RECOMPUTE, TrainingConfig
from darts_parallel.plans import LayerStrategy, Strategies

Tensors = dict[str, Tensor]
"""Tensors by name: seconds by cause, gradients by parameter."""
BothPasses = tuple[Tensor, Tensor]
"""Seconds forward and backward."""
READ = ("tp", "zero_stage", "tp_comm_bits", "grad_comm_bits", "ep", "etp")
"""Fields of `ChoiceTensors` that are fields of a strategy."""


@dataclass(frozen=True)
class ChoiceTensors:
    """The strategies of a space as float64 tensors of shape `(C,)`, and tokens of shape `(O, C)`."""

    tp: Tensor
    ranks: Tensor
    """Data-parallel ranks of a layer's weights, `dp * cp`."""
    cp: int
    zero_stage: Tensor
    recompute: Tensor
    sequence_shards: Tensor
    tp_comm_bits: Tensor
    grad_comm_bits: Tensor
    shards: Tensor
    """Ranks over which ZeRO states are sharded."""
    ep: Tensor
    etp: Tensor
    expert_replicas: Tensor
    """Ranks that hold the same experts, `edp = tp * cp * dp / (etp * ep)`."""
    tokens: Tensor
    """Tokens of one micro-batch on one rank: of a data-parallel rank, divided by `cp`."""

    @staticmethod
    def build(
        training: TrainingConfig,
        counts: tuple[int, ...],
        choices: Strategies,
        cp: int = 1,
    ) -> "ChoiceTensors":
        """Return the tensors of `choices` for every number of micro-batches in `counts`."""

        def column(read: Callable[[LayerStrategy], float]) -> Tensor:
            return float_tensor([read(choice) for choice in choices])

        ranks = column(lambda choice: choice.dp * cp)
        iteration_tokens = float(training.global_batch_size * training.seq_len)
        micro_batches = float_tensor(list(counts)).unsqueeze(1)
        tokens = iteration_tokens / (micro_batches * ranks)
        recompute = torch.tensor([RECOMPUTE.index(choice.recompute) for choice in choices])
        sequence_shards = column(lambda choice: choice.tp if choice.sequence_parallel else 1)
        columns = {name: column(attrgetter(name)) for name in READ}
        shards = column(lambda choice: choice.shard_ranks(cp))
        spread = columns["etp"] * columns["ep"]
        expert_replicas = (columns["tp"] * ranks / spread).floor().clamp(min=1.0)
        return ChoiceTensors(
            ranks=ranks,
            cp=cp,
            recompute=recompute,
            sequence_shards=sequence_shards,
            shards=shards,
            expert_replicas=expert_replicas,
            tokens=tokens,
            **columns,
        )


def filled(value: float, *shape: int) -> Tensor:
    """Return a tensor of equal float64 numbers."""
    return torch.full(shape, value, dtype=torch.float64)


def float_tensor(values: float | Sequence[Any]) -> Tensor:
    """Return a number, or nested ones, as float64."""
    return torch.tensor(values, dtype=torch.float64)


def element_bytes(training: TrainingConfig) -> int:
    """Return the bytes of one activation element; fp8 training keeps activations in 16 bits."""
    return 4 if training.precision == "fp32" else 2
