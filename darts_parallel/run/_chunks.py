"""The layers of this rank: built, divided, wrapped, and joined to the chunks of the pipeline.

Tensor parallelism is by PyTorch's styles in Megatron-LM's layout (Shoeybi et al. 2019, arXiv 1909.08053;
sequence parallelism: Korthikanti et al. 2022, arXiv 2205.05198): projections into heads and the MLP's inner
size are divided by columns, those back by rows, vocabulary tables by rows of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
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

from darts_parallel.config import LOSSLESS
from darts_parallel.cost import padded_vocabulary
from darts_parallel.plans import LayerStrategy, Layout, Plan
from darts_parallel.problem import Problem
from darts_parallel.run._experts import Mixture, Mlp, expert_bank
from darts_parallel.run._layouts import Meshes, converted
from darts_parallel.run._lossy import straight_through_sum
from darts_parallel.run._transformer import (
    Block,
    Embedding,
    Head,
    block_name,
    build_layer,
)
from darts_parallel.run._units import Modules, Replicated, Sharded, Unit


class LossyRowwise(RowwiseParallel):
    """A product divided by rows whose partial sums travel at few bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def _prepare_output_fn(  # type: ignore[override]
        self,
        output_layouts: Any,
        use_local_output: bool,
        module: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        # the gradient of the sum is whole on every rank, and so is that of each partial sum
        partial = outputs.to_local(grad_placements=(Replicate(),))
        return straight_through_sum(partial, self.bits, device_mesh.get_group())


def divide(
    layer: nn.Module,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    bits: int = LOSSLESS,
) -> None:
    """Divide the weights of a layer over the ranks of a one-dimensional mesh, in place.

    Every rank holds the same whole weights before, so nothing is sent.

    Args:
        sequence_parallel: Norms and residuals work on a run of the sequence each.
        bits: Of the sums of a block; below 16 only without sequence parallelism.
    """
    if mesh.size() > 1:
        parallelize_module(layer, mesh, _styles(layer, sequence_parallel, bits), src_data_rank=None)


def _styles(layer: nn.Module, sequence_parallel: bool, bits: int) -> dict[str, ParallelStyle]:
    """Return how each module of a layer is divided, by its name."""
    outside = Shard(1) if sequence_parallel else Replicate()
    if isinstance(layer, Embedding):
        # positions are added to whole sequences, so the state leaves the table whole
        return {"table": RowwiseParallel(input_layouts=Replicate())}
    if isinstance(layer, Head):
        styles = _norm_styles(layer, sequence_parallel)
        return styles | {"output": ColwiseParallel(input_layouts=outside)}
    if not isinstance(layer, Block):
        raise TypeError(f"{type(layer).__name__} is no layer of the chain")
    styles = _norm_styles(layer, sequence_parallel)
    whole = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    rows = RowwiseParallel(output_layouts=outside) if bits >= LOSSLESS else LossyRowwise(bits)
    if layer.attention is not None:
        styles |= {"attention": whole, "attention.out": rows}
        for name in ("query", "key", "value"):
            styles[f"attention.{name}"] = ColwiseParallel()
        if layer.attention.query_norm is not None:
            # each rank norms its own heads, the second dimension, with the same scale
            heads = SequenceParallel(sequence_dim=1, use_local_output=True)
            styles |= {"attention.query_norm": heads, "attention.key_norm": heads}
    dense = layer.mlp
    place = "mlp"
    if isinstance(layer.mlp, Mixture):
        styles |= _router_styles(layer.mlp)
        dense = layer.mlp.shared
        place = "mlp.shared"
    if isinstance(dense, Mlp):
        styles |= {place: whole, f"{place}.down": rows, f"{place}.up": ColwiseParallel()}
        if dense.gate is not None:
            styles[f"{place}.gate"] = ColwiseParallel()
    return styles


def _norm_styles(layer: nn.Module, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Let norms, and what lies between them, work on each rank's run of the sequence."""
    if not sequence_parallel:
        return {}
    names = [name for name, _ in layer.named_children() if name.endswith("norm")]
    if isinstance(layer, Head) and layer.dense is not None:
        names.append("dense")
    return {name: SequenceParallel() for name in names}


def _router_styles(mixture: Mixture) -> dict[str, ParallelStyle]:
    """Let router and gate read each rank's own run of the sequence, with the same weights."""
    run = Shard(1)
    own = PrepareModuleInput(input_layouts=run, desired_input_layouts=run, use_local_output=True)
    styles: dict[str, ParallelStyle] = {"mlp": own}
    styles["mlp.router"] = SequenceParallel(use_local_output=True)
    if mixture.shared_gate is not None:
        styles["mlp.shared_gate"] = SequenceParallel(use_local_output=True)
    return styles


LOSS = "loss"
BANK = "mlp.bank"
"""Where the experts of a block stand in it."""


def compute_dtype(problem: Problem) -> torch.dtype:
    """Return the type of products and activations; parameters, reductions and moments are float32."""
    return torch.bfloat16 if problem.training.precision == "bf16" else torch.float32


def table_rows(vocab_size: int, tp: int) -> int:
    """Return the rows of a vocabulary table with the padding that the cost model counts, over all ranks."""
    return int(padded_vocabulary(vocab_size, torch.tensor(float(tp)))) * tp


def share_one_table(problem: Problem, plan: Plan) -> bool:
    """Tell whether embedding and head hold one and the same table: on one stage, divided alike."""
    if not problem.model.config.tie_embeddings or plan.pp > 1:
        return False
    first = plan.layers[0]
    head = plan.layers[head_index(problem)]
    alike = first.tp == head.tp and first.zero_stage == head.zero_stage
    return alike and first.shard_ranks() == head.shard_ranks()


def head_index(problem: Problem) -> int:
    """Return the position of the head in the chain."""
    kinds = [layer.kind for layer in problem.model.layers]
    return kinds.index("head")


Units = dict[str, Unit]
"""Units by layer; two layers that share a table have the same unit."""
PlacedLayer = tuple[str, nn.Module, LayerStrategy]
"""A layer of a chunk and its name."""


class StageChunk(nn.Module):
    """A contiguous run of layers with the moves between their layouts.

    Args:
        layers: Layers in order.
        before: Layout of the tensor that arrives; None where tokens do.
    """

    def __init__(
        self,
        layers: list[PlacedLayer],
        before: Layout | None,
        meshes: Meshes,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.names, modules, self.strategies = zip(*layers, strict=True)
        self.layers = nn.ModuleList(modules)
        self.before = before
        self.meshes = meshes
        self.dtype = dtype

    def forward(self, state: Tensor) -> Tensor:
        """Map tokens `(b, T)` or states `(b, t, H)` to states, or to logits `(b, T, rows / tp)`."""
        layout = self.before
        for name, layer, strategy in zip(self.names, self.layers, self.strategies, strict=True):
            wanted = strategy.layout
            if layout is None:
                # the embedding works on whole sequences and passes on its own layout
                state = layer(state).to(self.dtype)
                state = converted(state, Layout(strategy.tp), wanted, self.meshes)
            elif name != LOSS:
                state = converted(state, layout, wanted, self.meshes)
                state = layer(state).to(self.dtype)
            layout = wanted
        return state


@dataclass(frozen=True)
class Local:
    """Model of this rank: its chunks by their place in the pipeline, and all parameters."""

    chunks: dict[int, StageChunk]
    units: Units


def build(
    problem: Problem,
    plan: Plan,
    meshes: Meshes,
    seed: int,
    device: torch.device,
) -> Local:
    """Build all chunks of this rank; collective where groups are warmed up."""
    shared = share_one_table(problem, plan)
    dtype = compute_dtype(problem)
    chunks = {}
    units: Units = {}
    apart = (LOSS, "embedding", "head") if shared else (LOSS,)
    for place, (first, end) in enumerate(pairwise(plan.boundaries)):
        if plan.chunk_devices[place] != meshes.stage:
            continue
        layers = []
        # a layer is divided before the next one is built: a whole stage may not fit on a device
        names = [layer.name for layer in problem.model.layers[first:end]]
        for name, strategy in _joined(names, plan.layers[first:end]):
            module = _module(problem, name, strategy, meshes, seed, device)
            if name not in apart:
                units |= _units(name, module, strategy, meshes, dtype)
            layers.append((name, module, strategy))
        before = plan.layers[first - 1].layout if first else None
        chunks[place] = StageChunk(layers, before, meshes, dtype)
    if shared:
        (chunk,) = chunks.values()
        units |= _shared_unit(chunk, meshes, dtype)  # last: its root takes what no other unit has
    return Local(chunks, units)


def _joined(names: list[str], layers: Sequence[LayerStrategy]) -> list[tuple[str, LayerStrategy]]:
    """Name layers with their strategies; halves of one strategy are a block, unless they send few bits."""
    found: list[tuple[str, LayerStrategy]] = []
    for name, own in zip(names, layers, strict=True):
        block = block_name(name)
        lossless = min(own.tp_comm_bits, own.grad_comm_bits) == LOSSLESS
        first_half = (f"{block}.attention", own)
        if name.endswith(".mlp") and found[-1:] == [first_half] and lossless:
            found[-1] = block, own
        else:
            found.append((name, own))
    return found


def _module(
    problem: Problem,
    name: str,
    strategy: LayerStrategy,
    meshes: Meshes,
    seed: int,
    device: torch.device,
) -> nn.Module:
    if name == LOSS:
        return nn.Identity()
    config = problem.model.config
    rows = table_rows(config.vocab_size, strategy.tp)
    layer = build_layer(config, problem.training.fused_attention, name, rows, seed).to(device)
    divide(layer, meshes.of(strategy)["tp"], strategy.sequence_parallel, strategy.tp_comm_bits)
    if isinstance(layer, Block):
        if isinstance(layer.mlp, Mixture):
            layer.mlp.divide(meshes.of_experts(strategy))
        if strategy.recompute == "selective" and layer.attention is not None:
            core = checkpoint_wrapper(layer.attention.core, preserve_rng_state=False)
            layer.attention.register_module("core", core)
        elif strategy.recompute == "full":
            return checkpoint_wrapper(layer, preserve_rng_state=False)
    return layer


def _units(
    name: str,
    module: nn.Module,
    strategy: LayerStrategy,
    meshes: Meshes,
    dtype: torch.dtype,
) -> Units:
    """Return the units of a layer: its experts, which have other replicas, and all the rest."""
    units = {}
    bank = expert_bank(module)
    if bank is not None:
        place = f"{block_name(name)}.{BANK}"
        units[place] = _unit({place: bank}, strategy, meshes.of_experts(strategy), dtype)
    units[name] = _unit({block_name(name): module}, strategy, meshes.of(strategy), dtype)
    return units


def _unit(
    modules: Modules,
    strategy: LayerStrategy,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    root: nn.Module | None = None,
) -> Unit:
    if mesh["shard"].size() == 1:  # one rank would keep all anyway
        strategy = replace(strategy, zero_stage=0)
    if strategy.zero_stage >= 2:
        return Sharded(strategy, modules, mesh, dtype, root)
    return Replicated(strategy, modules, mesh)


def _shared_unit(chunk: StageChunk, meshes: Meshes, dtype: torch.dtype) -> Units:
    """Return one unit of embedding and head, whose table is the embedding's."""
    index = chunk.names.index("head")
    embedding = chunk.layers[0]
    head = chunk.layers[index]
    head.output.weight = embedding.table.weight  # type: ignore[union-attr]
    strategy = chunk.strategies[0]
    modules = {"embedding": embedding, "head": head}
    unit = _unit(modules, strategy, meshes.of(strategy), dtype, chunk)
    return {"embedding": unit, "head": unit}
