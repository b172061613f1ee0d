"""Measured seconds of the Transformer's block on this machine, as a profile file.

For each tensor-parallel degree the shard of one rank is run alone: its columns, its rows, its share
of the heads; for each micro-batch its forward and backward are timed. The CSV has the columns of
published layer profiles (`source, model, gpu, tp, layer_index, layer_kind, forward_s`) and, after
them, what those lack.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from darts_parallel.bilevel.settings import TransformerShape
from darts_parallel.bilevel.transformer import Weights, block, initial_weights
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_of

Case = Callable[[], Sequence[float]]
"""Runs once and returns its seconds, always as many."""


def interleaved_medians(
    cases: Sequence[Case], go_on: Callable[[int], bool], *, warm_up: bool = True
) -> list[tuple[float, ...]]:
    """Medians of the seconds of every case.

    All cases run once in every round, so that a disturbance meets them all alike, and the median leaves it
    out where it was short.

    Args:
        cases: What to run.
        go_on: Whether another round follows, given the rounds that are done; asked once before each.
        warm_up: Run every case once without counting it.

    Returns:
        As many seconds for each case as it returns.
    """
    if warm_up:
        for case in cases:
            case()
    rounds: list[list[Sequence[float]]] = []
    while go_on(len(rounds)):
        rounds.append([case() for case in cases])
    return [
        tuple(median(column) for column in zip(*(one[index] for one in rounds), strict=True))
        for index in range(len(cases))
    ]


@dataclass(frozen=True)
class LayerProfile:
    """One measured row; seconds of one rank's shard of one block for one micro-batch."""

    source: str
    model: str
    gpu: str
    tp: int
    layer_index: int
    layer_kind: str
    forward_s: float
    micro_batch: int
    seq_len: int
    backward_s: float
    parameter_bytes: int
    saved_bytes: int
    """What the forward pass keeps for backward, as autograd saved it."""
    repeats: int


def shard(weights: Weights, tp: int) -> Weights:
    """Weights of the first of `tp` ranks of block 0."""
    heads = weights["0.out"].shape[0]
    width = weights["0.qkv"].shape[0]
    return weights | {
        "0.qkv": weights["0.qkv"].view(width, heads, -1)[:, : heads // tp].reshape(width, -1).contiguous(),
        "0.out": weights["0.out"][: heads // tp].contiguous(),
        "0.up": weights["0.up"].chunk(tp, 1)[0].contiguous(),
        "0.down": weights["0.down"].chunk(tp, 0)[0].contiguous(),
    }


def profile_block(
    shape: TransformerShape,
    degrees: Sequence[int],
    micro_batches: Sequence[int],
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    model: str = "bytes",
    measure: Callable[[Sequence[Case]], list[tuple[float, ...]]] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[LayerProfile]:
    """Median forward and backward seconds of every shard and micro-batch.

    Args:
        shape: Sizes.
        degrees: Tensor-parallel degrees, divisors of the heads.
        micro_batches: Sequences.
        repeats: Timed runs of each; the median ignores those that another process disturbed.
        clock: Seconds, once the device is done.
        model: Name that the rows state.
        measure: Medians of cases; given where something else than `repeats` decides when to stop.
        device: Where it runs.
        dtype: Of weights and states.
    """
    initial = initial_weights(shape, torch.Generator().manual_seed(0))
    weights = {name: w.to(device, dtype) for name, w in initial.items()}
    shards = {
        tp: {name: w.requires_grad_() for name, w in shard(weights, tp).items() if name.startswith("0.")}
        for tp in degrees
    }
    kind = torch.device(device).type
    machine = f"cpu {platform.machine()} x{torch.get_num_threads()}" if kind == "cpu" else kind
    cases = [
        (tp, size, torch.ones(size, shape.context, shape.width, device=device, dtype=dtype))
        for tp in degrees
        for size in micro_batches
    ]
    saved = [_saved_bytes(shards[tp], state) for tp, _, state in cases]
    works = [partial(_time, shards[tp], state, clock) for tp, _, state in cases]
    if measure is None:
        # counting what is saved has warmed up
        times = interleaved_medians(works, lambda done: done < repeats, warm_up=False)
    else:
        times = measure(works)
    return [
        LayerProfile("measured", model, machine, tp, 1, "transformer", forward, size, shape.context, backward,
                     _bytes(shards[tp]), saved[i], repeats)
        for i, ((tp, size, _), (forward, backward)) in enumerate(zip(cases, times, strict=True))
    ]  # fmt: skip


def _time(weights: Weights, state: torch.Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """Forward and backward seconds of one run."""
    began = clock()
    output = block(weights, 0, state.clone().requires_grad_(), 1, lambda partials: partials.sum(0))
    middle = clock()
    torch.autograd.grad(output.sum(), tuple(weights.values()))
    return middle - began, clock() - middle


def _saved_bytes(weights: Weights, state: torch.Tensor) -> int:
    """Bytes that a forward pass keeps for backward; the run warms up, too."""
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {w.untyped_storage().data_ptr() for w in weights.values()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _time(weights, state, time.perf_counter)
    return sum(size for pointer, size in sizes.items() if pointer not in own)


def _bytes(weights: Weights) -> int:
    return sum(w.numel() * w.element_size() for w in weights.values())


def write_profile(path: Path, rows: Sequence[LayerProfile]) -> None:
    """Write the CSV in one piece."""
    write_text(path, csv_of(LayerProfile, rows))
