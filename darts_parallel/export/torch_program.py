"""Train by a plan with PyTorch alone: device mesh, parallel modules, sharding and pipeline schedule.

Run on every node, with data of your own in `batch`:
    torchrun --nnodes NODES --nproc-per-node GPUS FILE [--steps 10]
It takes nccl where every process has a GPU, else gloo on the CPU.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from darts_parallel.export.torch_model import Block, Embedding, Head

PLAN: dict[str, Any] = {}
"""The plan and the sizes of the model; `parts` are the layers of every pipeline chunk."""


def build_layer(index: int, device: torch.device) -> nn.Module:
    """Layer `index` of embedding, blocks, head; equal whatever the parts."""
    sizes = PLAN["model"]
    last = sizes["num_layers"] + 1
    # a tied head begins as the embedding does
    torch.manual_seed(0 if index == last and sizes["tie_embeddings"] else index)
    with torch.device(device):
        layer = Embedding(sizes) if index == 0 else Head(sizes) if index == last else Block(sizes)
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    return layer


def divide(layer: nn.Module, tp: DeviceMesh) -> None:
    """Tensor parallelism of one layer; with sequence parallelism the norms' regions are divided too."""
    sequence = PLAN["sequence_parallel"]
    state = Shard(1) if sequence else Replicate()
    whole = PrepareModuleInput(input_layouts=(state,), desired_input_layouts=(Replicate(),))
    if isinstance(layer, Embedding):
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        styles: dict[str, Any] = {"tokens": rows}
        parallelize_module(layer, tp, styles)
        if sequence:
            cut = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))
            parallelize_module(layer, tp, cut)
        return
    if isinstance(layer, Head):
        styles = {"output": ColwiseParallel(input_layouts=state, output_layouts=Replicate())}
        norms = ["norm"]
    else:
        norms = ["attention_norm", "mlp_norm"]
        styles = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        styles |= {"mlp.up": ColwiseParallel(), "attention.output": RowwiseParallel(output_layouts=state)}
        styles |= {"mlp.down": RowwiseParallel(output_layouts=state)}
        if PLAN["model"]["gated_mlp"]:
            styles["mlp.gate"] = ColwiseParallel()
        if sequence:
            styles |= {"attention": whole, "mlp": whole}
    if sequence:
        styles |= {name: SequenceParallel() for name in norms}
    parallelize_module(layer, tp, styles)


def prepared(first: int, end: int, mesh: DeviceMesh, device: torch.device) -> nn.Sequential:
    """Layers `first` to `end - 1` with tensor parallelism, recomputation and sharding as the plan says.

    A layer is divided before the next one is built: a whole stage may not fit on a device.
    """
    shard = PLAN["zero_stage"] and PLAN["dp"] > 1
    keep: dict[str, Any] = {}
    if shard:
        half = torch.bfloat16 if PLAN["precision"] == "bf16" and device.type == "cuda" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        keep = {"mesh": mesh["dp"], "mp_policy": policy, "reshard_after_forward": PLAN["zero_stage"] == 3}
    layers: list[nn.Module] = []
    for index in range(first, end):
        layer = build_layer(index, device)
        if PLAN["tp"] > 1:
            divide(layer, mesh["tp"])
        if index in PLAN["recomputed"]:
            layer = checkpoint_wrapper(layer)
        if shard:
            fully_shard(layer, **keep)
        layers.append(layer)
    part = nn.Sequential(*layers)
    if shard:
        fully_shard(part, **keep)
    return part


class ShardingStage(PipelineStage):
    """A stage that reduces gradients and lets go of whole parameters after every micro-batch.

    torch's own stage keeps both whole until the last micro-batch, which ZeRO-2 and ZeRO-3 are there to avoid.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Gradients of the inputs of one micro-batch."""
        part = self.submod
        if not isinstance(part, FSDPModule) or PLAN["zero_stage"] < 2:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        part.set_is_last_backward(True)
        part.set_reshard_after_backward(PLAN["zero_stage"] == 3)
        part.set_requires_gradient_sync(True)
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        return stage_backward(outputs, gradients, bwd_kwargs["input_values"]), None


def synchronise_tied(parts: list[nn.Sequential], tied: Any) -> None:
    """Sum the gradients of an embedding and a head that hold one table."""
    layers = [layer for part in parts for layer in part]
    tables = [m.tokens.weight for m in layers if isinstance(m, Embedding)]
    tables += [m.output.weight for m in layers if isinstance(m, Head)]
    local = [_local(table.grad) for table in tables]
    total = sum(local[1:], local[0].clone()) if local else None
    if total is not None:
        if tied is not None:
            dist.all_reduce(total, group=tied)
        for part in local:
            part.copy_(total)


def _local(gradient: Any) -> Tensor:
    tensor: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return tensor


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of a micro-batch."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int, dp_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this data-parallel rank: random tokens, yours to replace."""
    rows, length = PLAN["global_batch_size"], PLAN["seq_len"]
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(PLAN["model"]["vocab_size"], (rows, length + 1), generator=generator)
    mine = tokens.unflatten(0, (PLAN["num_micro_batches"], PLAN["dp"], -1))[:, dp_rank].flatten(0, 1)
    return mine[:, :-1].to(device), mine[:, 1:].to(device)


def tied_group(mesh: DeviceMesh) -> Any:
    """First and last stage of this rank's column, where they hold one table; else None."""
    if not PLAN["model"]["tie_embeddings"] or PLAN["pp"] == 1:
        return None
    mine, columns = None, mesh.mesh.flatten(1)
    for column in range(columns.shape[1]):
        ranks = [int(columns[0, column]), int(columns[-1, column])]
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def train(steps: int, device: torch.device) -> None:
    """`steps` optimizer steps; the last stage prints the mean loss of its micro-batches."""
    mesh = init_device_mesh(
        device.type, (PLAN["pp"], PLAN["dp"], PLAN["tp"]), mesh_dim_names=("pp", "dp", "tp")
    )
    stage, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    chunks = [(i, part) for i, part in enumerate(PLAN["parts"]) if i % PLAN["pp"] == stage]
    parts = [prepared(part[0], part[1], mesh, device) for _, part in chunks]
    tied, count = tied_group(mesh), PLAN["num_micro_batches"]
    schedule: Any = None
    if PLAN["pp"] > 1:
        group, total = mesh["pp"].get_group(), len(PLAN["parts"])
        stages = [
            ShardingStage(part, i, total, device, group=group)
            for (i, _), part in zip(chunks, parts, strict=True)
        ]
        interleaved = len(stages) > 1
        schedule = (
            ScheduleInterleaved1F1B([*stages], count, loss_fn=loss_of)
            if interleaved
            else Schedule1F1B(stages[0], count, loss_fn=loss_of)
        )
    parameters = [parameter for part in parts for parameter in part.parameters()]
    kind: Any = torch.optim.AdamW if PLAN["optimizer"] == "adam" else torch.optim.SGD
    optimizer = kind(parameters, lr=1e-3, foreach=False)
    sharded = PLAN["zero_stage"] and PLAN["dp"] > 1
    for step in range(steps):
        inputs, targets = batch(step, dp_rank, device)
        lower = PLAN["precision"] == "bf16" and device.type == "cuda" and not sharded
        with torch.autocast(device.type, torch.bfloat16, enabled=lower):
            losses = accumulate(schedule, parts, stage, inputs, targets, count)
        finish_gradients(parts, parameters, mesh, tied)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            if dp_rank == 0 and mesh.get_local_rank("tp") == 0:
                print(f"step {step} loss {float(loss) / PLAN['dp']:.6f}", flush=True)


def accumulate(
    schedule: Any, parts: list[nn.Sequential], stage: int, inputs: Tensor, targets: Tensor, count: int
) -> list[Tensor]:
    """Gradients of all micro-batches; returns their losses on the last stage."""
    losses: list[Tensor] = []
    if schedule is not None:
        last = stage == PLAN["pp"] - 1
        schedule.step(
            *([inputs] if stage == 0 else []), **({"target": targets, "losses": losses} if last else {})
        )
        return [loss.detach() for loss in losses]
    for index, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
        if PLAN["zero_stage"] == 1 and PLAN["dp"] > 1:
            parts[0].set_requires_gradient_sync(index == count - 1)  # type: ignore[operator]
        loss = loss_of(parts[0](x), y)
        (loss / count).backward()
        losses.append(loss.detach())
    return losses


def finish_gradients(parts: list[nn.Sequential], parameters: list[Any], mesh: DeviceMesh, tied: Any) -> None:
    """Average over data-parallel ranks what sharding has not averaged, and join tied tables."""
    for parameter in parameters:
        gradient = parameter.grad  # an embedding's may lie otherwise than its table
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    if PLAN["zero_stage"] == 0 and PLAN["dp"] > 1:
        for parameter in parameters:
            gradient = _local(parameter.grad)
            dist.all_reduce(gradient, group=mesh["dp"].get_group())
            gradient /= PLAN["dp"]
    if PLAN["model"]["tie_embeddings"]:
        synchronise_tied(parts, tied)


def main() -> None:
    """Join the processes, check their number, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    world, needed = int(os.environ.get("WORLD_SIZE", "1")), PLAN["pp"] * PLAN["dp"] * PLAN["tp"]
    if world != needed:
        raise SystemExit(f"WORLD_SIZE={world} must be pp * dp * tp = {needed}: start it by torchrun.")
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    on_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(steps, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
