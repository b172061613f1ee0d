"""Low-rank adapters: their products, and their parameters, the only trained ones (`problem/model.py`)."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from darts_parallel.cost.compute import BACKWARD_FACTOR, gemm_seconds, stream_seconds
from darts_parallel.cost.sharding import FROZEN_BYTES, ShardGroup, layer_shards
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import Contribution, CostTerm
from darts_parallel.problem import LayerSpec

DROPOUT_BYTES = 5.0
"""Bytes an input that dropout moves in forward, and again in backward: read, written, and a mask."""
KEPT_BYTES = 3.0
"""Bytes an input that dropout keeps for backward: its output and the mask."""
OUTPUT_BYTES = 6.0
"""Bytes an output moved to add B's output to that of the frozen product."""
BACKWARD_BYTES = 15.0, 12.0
"""Bytes an input and an output moved in backward next to the products, dropout aside: gradients are
scaled, read by two products, and added."""
TILE = 16
"""Least side of a product on tensor cores (PTX ISA, wmma: m16n16k16), to which smaller ones are
padded: adapters of rank 8 take no longer than those of rank 16."""


class AdapterTerm(CostTerm):
    """Products of adapters next to frozen ones, and their gradients and states."""

    name = "adapters"
    formulas: ClassVar = {
        "adapters": (
            "3 x 2 tokens x rank x (in + out) / (peak x e x saturation) + bytes of dropout and sums",
            "Hu et al. 2021",
        )
    }

    def present(self, layer: LayerSpec) -> bool:
        """Return whether all weights of the layer but its adapters are frozen."""
        return layer.frozen

    def layer_cost(self, stage: StageContext, layer: LayerSpec) -> Contribution:
        """Price the adapters' products; those of frozen weights are priced with the layer."""
        choices = stage.choices
        device = stage.device
        seconds = partial(
            gemm_seconds,
            tokens=choices.tokens,
            tp=choices.tp,
            device=device,
            width=stage.width,
        )
        rank = max(stage.training.lora_rank, TILE)
        sizes = (TILE, max(rank - 1, TILE), rank)
        inputs = torch.zeros_like(choices.tokens)
        one = inputs
        outputs = inputs
        for first, second in zip(layer.adapters[::2], layer.adapters[1::2], strict=True):
            rows = choices.tp if first.split == "row" else 1.0
            columns = choices.tp if second.split == "column" else 1.0
            # efficiencies are fitted to wide products: below, more columns would take fewer seconds
            down = [seconds(replace(first, out_features=size)) for size in sizes]
            up = [seconds(replace(second, in_features=size)) for size in sizes]
            one = one + torch.stack(down).amax(0) + torch.stack(up).amax(0)
            inputs = inputs + choices.tokens * first.in_features / rows
            outputs = outputs + choices.tokens * second.out_features / columns
        drops = stage.training.lora_dropout > 0
        dropout = DROPOUT_BYTES * drops
        per_input, per_output = BACKWARD_BYTES
        forward = stream_seconds(dropout * inputs + OUTPUT_BYTES * outputs, device)
        backward = stream_seconds((dropout + per_input) * inputs + per_output * outputs, device)
        widened = _widening_seconds(stage, layer)
        forward = one + forward + widened
        backward = BACKWARD_FACTOR * one + backward + widened
        kept = KEPT_BYTES * drops * inputs
        return Contribution(forward=forward, backward=backward, weight_gradient=one, kept=kept)

    def shard_groups(self, stage: StageContext, layer: LayerSpec) -> list[ShardGroup]:
        """Return the adapters' parameters on a rank, sharded as the layer's."""
        numbers = layer.adapter_parameters / stage.choices.tp + layer.replicated_adapter_parameters
        return [layer_shards(stage, numbers)]


def _widening_seconds(stage: StageContext, layer: LayerSpec) -> Tensor:
    """Return the seconds to write a layer's narrow frozen weights in 16 bits for a pass, `(C,)`.

    Products in 8 bits read weights of 8 bits as they are.
    """
    bits = stage.training.frozen_bits
    if bits not in FROZEN_BYTES or (bits == 8 and stage.device.eight_bit):
        return torch.zeros_like(stage.choices.tp)
    weights = layer.sharded_parameters / stage.choices.tp + layer.replicated_parameters
    return stream_seconds((FROZEN_BYTES[bits] + stage.width) * weights, stage.device)


TERM = AdapterTerm()
