"""Train by a plan with PyTorch alone: device mesh, parallel modules, sharding and pipeline schedule.

Run on every node, with data of your own in `batch`:
    torchrun --nnodes NODES --nproc-per-node GPUS FILE [--steps 10]
It takes nccl where every process has a GPU, else gloo on the CPU.
"""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 8 · tp 1 · pp 1 · micro-batch 1 × 2 · ZeRO-0

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

PLAN: dict[str, Any] = {'pp': 1,
 'dp': 8,
 'tp': 1,
 'sequence_parallel': False,
 'zero_stage': 0,
 'num_micro_batches': 2,
 'parts': [[0, 6]],
 'recomputed': [],
 'global_batch_size': 16,
 'seq_len': 64,
 'precision': 'bf16',
 'optimizer': 'adam',
 'model': {'num_layers': 4,
           'hidden_size': 64,
           'num_heads': 4,
           'num_kv_heads': 4,
           'head_dim': 16,
           'ffn_hidden_size': 256,
           'gated_mlp': False,
           'vocab_size': 256,
           'max_seq_len': 64,
           'learned_positions': True,
           'rotary_base': 10000.0,
           'causal': True,
           'linear_bias': True,
           'qkv_bias': True,
           'norm_bias': True,
           'tie_embeddings': True}}
"""The plan and the sizes of the model; `parts` are the layers of every pipeline chunk."""


class Embedding(nn.Module):
    """Token embedding, and learned positions where the model has them."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"])
        rows = sizes["max_seq_len"] if sizes["learned_positions"] else 0
        self.positions = nn.Embedding(rows, sizes["hidden_size"]) if rows else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `(b, T)` to `(b, T, h)`."""
        x: Tensor = self.tokens(tokens)
        if self.positions is None:
            return x
        placed: Tensor = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return placed


def norm(sizes: dict[str, Any]) -> nn.Module:
    """LayerNorm, or RMSNorm where norms have no bias."""
    kind = nn.LayerNorm if sizes["norm_bias"] else nn.RMSNorm
    return kind(sizes["hidden_size"], eps=1e-5)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions (Su et al. 2021) of `(b, heads, T, d)`, their angles to this base."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(places, base**-exponents)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class Attention(nn.Module):
    """Grouped-query attention; under tensor parallelism a rank has a part of the heads."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        h, self.head_dim = sizes["hidden_size"], sizes["head_dim"]
        width, narrow = sizes["num_heads"] * self.head_dim, sizes["num_kv_heads"] * self.head_dim
        self.query = nn.Linear(h, width, bias=sizes["qkv_bias"])
        self.key = nn.Linear(h, narrow, bias=sizes["qkv_bias"])
        self.value = nn.Linear(h, narrow, bias=sizes["qkv_bias"])
        self.output = nn.Linear(width, h, bias=sizes["linear_bias"])
        self.causal, self.rotary = sizes["causal"], not sizes["learned_positions"]
        self.rotary_base: float = sizes["rotary_base"]

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(b, T, h)` in and out."""
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if self.rotary:
            q, k = rotate(q, self.rotary_base), rotate(k, self.rotary_base)
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


class Feedforward(nn.Module):
    """MLP with GELU, or gated with SiLU."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        h, inner, bias = sizes["hidden_size"], sizes["ffn_hidden_size"], sizes["linear_bias"]
        self.up = nn.Linear(h, inner, bias=bias)
        self.gate = nn.Linear(h, inner, bias=bias) if sizes["gated_mlp"] else None
        self.down = nn.Linear(inner, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(b, T, h)` in and out."""
        up = self.up(x)
        inner = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        result: Tensor = self.down(inner)
        return result


class Block(nn.Module):
    """Pre-norm Transformer block."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(sizes), Attention(sizes)
        self.mlp_norm, self.mlp = norm(sizes), Feedforward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Shape `(b, T, h)` in and out."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Head(nn.Module):
    """Final norm and output projection."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.norm = norm(sizes)
        self.output = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden state to logits `(b, T, V)`."""
        logits: Tensor = self.output(self.norm(x))
        return logits


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
