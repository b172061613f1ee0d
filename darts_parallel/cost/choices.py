"""The strategies of a space as tensors, so that costs are computed for all of them at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.config import RECOMPUTE, TrainingConfig
from darts_parallel.plans import LayerStrategy


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
        choices: tuple[LayerStrategy, ...],
        cp: int = 1,
    ) -> "ChoiceTensors":
        """Return the tensors of `choices` for every number of micro-batches in `counts`."""
        tp = float_tensor([c.tp for c in choices])
        ranks = float_tensor([c.dp * cp for c in choices])
        total = float(training.global_batch_size * training.seq_len)
        return ChoiceTensors(
            tp=tp,
            ranks=ranks,
            cp=cp,
            zero_stage=float_tensor([c.zero_stage for c in choices]),
            recompute=torch.tensor([RECOMPUTE.index(c.recompute) for c in choices]),
            sequence_shards=float_tensor([c.tp if c.sequence_parallel else 1 for c in choices]),
            tp_comm_bits=float_tensor([c.tp_comm_bits for c in choices]),
            grad_comm_bits=float_tensor([c.grad_comm_bits for c in choices]),
            shards=float_tensor([(c.zero_stage and c.shard_size) or c.dp * cp for c in choices]),
            ep=float_tensor([c.ep for c in choices]),
            etp=float_tensor([c.etp for c in choices]),
            expert_replicas=float_tensor(
                [max(c.tp * c.dp * cp // (c.etp * c.ep), 1) for c in choices]
            ),
            tokens=total / (float_tensor(list(counts)).unsqueeze(1) * ranks),
        )


def float_tensor(values: Sequence[float]) -> Tensor:
    """Return numbers as float64."""
    return torch.tensor(values, dtype=torch.float64)


def element_bytes(training: TrainingConfig) -> int:
    """Return the bytes of one activation element; fp8 training keeps activations in 16 bits."""
    return 4 if training.precision == "fp32" else 2
