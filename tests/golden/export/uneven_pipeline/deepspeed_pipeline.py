"""DeepSpeed pipeline of a plan."""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 1 · pp 4 · micro-batch 2 × 4 · ZeRO-1

from collections.abc import Sequence
from typing import Any

from deepspeed.pipe import PipelineModule

PARTS = [0, 1, 4, 5, 6]
"""First layer of every stage, and the end: embedding, blocks, head."""


class PlannedPipeline(PipelineModule):
    """Stages as the plan cuts them; DeepSpeed has no setting for that."""

    def _partition_layers(self, method: str = "plan") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


def planned_pipeline(layers: Sequence[Any], loss_fn: Any, block: str) -> PlannedPipeline:
    """The module for deepspeed.initialize: 6 layers (LayerSpec, TiedLayerSpec or modules).

    Args:
        layers: Embedding, blocks and head in order.
        loss_fn: Of output and labels.
        block: Name of the class of the blocks, which alone are recomputed.
    """
    if len(layers) != PARTS[-1]:
        raise ValueError(f"{len(layers)} layers, but the plan has {PARTS[-1]}")
    return PlannedPipeline(
        layers=list(layers),
        num_stages=4,
        loss_fn=loss_fn,
        activation_checkpoint_interval=0,
        checkpointable_layers=[block],
    )
