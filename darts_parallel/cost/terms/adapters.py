"""Low-rank adapters: their products, and their parameters, the only trained ones (`problem/model.py`)."""

from typing import ClassVar

from darts_parallel.cost.compute import BACKWARD_FACTOR, products_seconds
from darts_parallel.cost.sharding import ShardGroup, layer_shards
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import Contribution, CostTerm
from darts_parallel.problem import LayerSpec


class AdapterTerm(CostTerm):
    """Products of adapters next to frozen ones, and their gradients and states."""

    name = "adapters"
    formulas: ClassVar = {
        "adapters": ("3 x 2 tokens x rank x (in + out) / (peak x e x saturation)", "Hu et al. 2021")
    }

    def present(self, layer: LayerSpec) -> bool:
        """Return whether all weights of the layer but its adapters are frozen."""
        return layer.frozen

    def layer_cost(self, stage: StageContext, layer: LayerSpec) -> Contribution:
        """Price the adapters' products; those of frozen weights are priced with the layer."""
        choices = stage.choices
        one = products_seconds(
            layer.adapters, choices.tokens, choices.tp, stage.device, stage.width
        )
        return Contribution(forward=one, backward=BACKWARD_FACTOR * one, weight_gradient=one)

    def shard_groups(self, stage: StageContext, layer: LayerSpec) -> list[ShardGroup]:
        """Return the adapters' parameters on a rank, sharded as the layer's."""
        numbers = layer.adapter_parameters / stage.choices.tp + layer.replicated_adapter_parameters
        return [layer_shards(stage, numbers)]


TERM = AdapterTerm()
