"""Tensor parallelism of one layer by PyTorch's column, row and sequence parallel styles.

The layout is Megatron-LM's (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
al. 2022, arXiv 2205.05198): projections into heads and the MLP's inner size are divided by columns,
those back by rows, vocabulary tables by rows of the table.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from darts_parallel.cost import LOSSLESS
from darts_parallel.run._experts import Mixture, Mlp
from darts_parallel.run._lossy import straight_through_sum
from darts_parallel.run._transformer import Block, Embedding, Head


class LossyRowwise(RowwiseParallel):
    """A product divided by rows whose partial sums travel at few bits.

    Args:
        bits: Of both hops of the all-reduce.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def _prepare_output_fn(  # type: ignore[override]
        self, output_layouts: Any, use_local_output: bool, module: nn.Module, outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:  # fmt: skip
        # the gradient of the sum is whole on every rank, and so is that of each partial sum
        partial = outputs.to_local(grad_placements=(Replicate(),))
        return straight_through_sum(partial, self.bits, device_mesh.get_group())


def divide(layer: nn.Module, mesh: DeviceMesh, sequence_parallel: bool, bits: int = LOSSLESS) -> None:
    """Divide the weights of a layer over the ranks of a one-dimensional mesh, in place.

    Every rank holds the same whole weights before, so nothing is sent.

    Args:
        layer: Of `transformer.build_layer`.
        mesh: The tensor-parallel ranks.
        sequence_parallel: Norms and residuals work on a run of the sequence each.
        bits: Of the sums of a block; below 16 only without sequence parallelism.
    """
    if mesh.size() > 1:
        parallelize_module(layer, mesh, _styles(layer, sequence_parallel, bits), src_data_rank=None)


def _styles(layer: nn.Module, sequence_parallel: bool, bits: int) -> dict[str, ParallelStyle]:
    outside = Shard(1) if sequence_parallel else Replicate()
    if isinstance(layer, Embedding):
        # positions are added to whole sequences, so the state leaves the table whole
        return {"table": RowwiseParallel(input_layouts=Replicate())}
    styles: dict[str, ParallelStyle] = {}
    if isinstance(layer, Head):
        if sequence_parallel:
            names = ("norm", "dense", "dense_norm")
            styles = {name: SequenceParallel() for name in names if getattr(layer, name) is not None}
        return styles | {"output": ColwiseParallel(input_layouts=outside)}
    assert isinstance(layer, Block)
    if sequence_parallel:
        styles = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    whole = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    rows = RowwiseParallel(output_layouts=outside) if bits >= LOSSLESS else LossyRowwise(bits)
    styles |= {"attention": whole, "attention.out": rows}
    styles |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    dense: nn.Module | None = layer.mlp
    place = "mlp"
    if isinstance(layer.mlp, Mixture):
        styles |= _beside_experts(layer.mlp)
        dense, place = layer.mlp.shared, "mlp.shared"
    if isinstance(dense, Mlp):
        columns = ["up"] if dense.gate is None else ["up", "gate"]
        styles |= {place: whole, f"{place}.down": rows}
        styles |= {f"{place}.{name}": ColwiseParallel() for name in columns}
    if layer.attention.query_norm is not None:
        # each rank norms its own heads, the second dimension, with the same scale
        heads = SequenceParallel(sequence_dim=1, use_local_output=True)
        styles |= {"attention.query_norm": heads, "attention.key_norm": heads}
    return styles


def _beside_experts(mixture: Mixture) -> dict[str, ParallelStyle]:
    """Let router and gate read each rank's own run of the sequence, with the same weights."""
    own = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True)
    styles: dict[str, ParallelStyle] = {"mlp": own}
    names = ["router"] if mixture.shared_gate is None else ["router", "shared_gate"]
    return styles | {f"mlp.{name}": SequenceParallel(use_local_output=True) for name in names}
