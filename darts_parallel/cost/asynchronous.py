"""Pipelines that do not wait for their last micro-batch: no fill, and older versions of the weights.

An asynchronous 1F1B pipeline takes the next batch before the gradients of the last one are back. Its fill is
paid once in a training, so an iteration takes `m max_k t_k` and the synchronisation. With at least as many
micro-batches as stages two versions of the weights are enough (PipeDream-2BW, Narayanan et al. 2021, arXiv
2006.09503).
"""

from dataclasses import replace
from typing import Any

import torch

from darts_parallel.config import TrainingConfig
from darts_parallel.cost.choices import element_bytes, float_tensor
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.memory import parameters_per_rank
from darts_parallel.problem import Model

ENDLESS = 2**40
"""Iterations that share one fill: so many times the micro-batches, each in so small a part of its seconds.

All exact methods and searches read such a table as any other. The fill is 1e-12 of its seconds, below what
they count as a difference; a power of two rounds no seconds.
"""
PER_MICRO_BATCH = ("forward", "backward", "weight_gradient", "reshard", "p2p")
"""Fields of a table that are seconds of one micro-batch."""
WHOLE = 1
"""Highest ZeRO stage that keeps whole weights and gradients."""


def endless(table: CostTable) -> CostTable:
    """Return a table whose plans never drain their pipeline; its causes stay as they are."""
    fields: dict[str, Any] = {name: getattr(table, name) / ENDLESS for name in PER_MICRO_BATCH}
    return replace(table, num_micro_batches=table.num_micro_batches * ENDLESS, **fields)


def with_versions(
    table: CostTable,
    model: Model,
    training: TrainingConfig,
) -> CostTable:
    """Return a table with the memory of a pipeline that does not wait; it may have no outer choice left.

    Args:
        table: Of one stage a device.
    """
    enough = table.num_micro_batches >= table.pp
    table = table.select(enough.nonzero().flatten())
    tp = float_tensor([choice.tp for choice in table.choices])
    whole = torch.tensor([choice.zero_stage <= WHOLE for choice in table.choices])
    vocabulary = model.config.vocab_size
    numbers = [parameters_per_rank(layer, vocabulary, tp) for layer in model.layers]
    version = element_bytes(training) * torch.stack(numbers)
    return replace(table, allowed=table.allowed & whole, static=table.static + version)
