"""Measure kernels and training steps of small Llama models on this machine, in at most eight minutes.

    python -m experiments.measure_gpu                           # on a GPU: 4 blocks of Llama 3 8B
    python -m experiments.measure_gpu size=small seconds=20     # on a CPU, to try it

`kernels.csv` has the seconds of matrix products and attention kernels, of RMSNorm, SwiGLU and
cross-entropy with their backward passes, and of a block so small that launches alone take time. `runs.csv`
has seconds and peak memory of training steps without parallelism: all weights, adapters (LoRA) and a fused
loss. Its columns are those of `data=FOLDER`, so `validate_cost_model data=FOLDER` compares the steps with
their predictions. A case that this machine cannot run is printed with its reason and left out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from darts_parallel.config import (
    ModelConfig,
    given_values,
    load_config,
    one_of,
    ranged,
    read_yaml,
    run_main,
)
from darts_parallel.errors import Entries
from darts_parallel.machine import MeasuredKernels, MeasuredMachine, gemm_shapes, this_machine
from darts_parallel.plans import write_text
from darts_parallel.report import csv_text
from darts_parallel.run import build_layer
from experiments.data import DATA
from experiments.data.table import word_tables

Work = Callable[[], object]
SIZES: dict[str, str] = read_yaml(DATA / "problems.yaml")["measured"]
"""Changes of Llama 3 8B and of its job, by size."""
COLUMNS = {"kv_heads": "kv_heads", "ffn": "ffn_hidden_size", "seq_len": "max_seq_len"}
"""Columns of a row that sizes of the model fill, next to `size_cells` of `words.yaml`."""
FIXED = [
    "gpus_per_node=1",
    "n_gpus=1",
    "micro_batch=1",
    "global_batch=1",
    "precision=bf16",
    "recompute=none",
    "attention_kernel=sdpa",
]
"""Columns that every row fills alike."""
RANK = 16
"""Rank of the measured adapters, which lie at queries, keys and values."""
KERNEL_SHARE = 0.4
"""Share of the seconds for kernels."""
MODES = ("eager", "compiled")
BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
"""Attention kernels that torch knows by these names."""


@dataclass
class MeasureOptions:
    """Options of the command."""

    out: str = "outputs/measure_gpu"
    size: str | None = one_of(None, tuple(SIZES))
    """null: large on a GPU, small on a CPU."""
    seconds: float = ranged(300.0, 0.0, 480.0)
    """Wall-clock of all measurements; compiling takes up to three minutes more."""
    modes: list[str] = one_of(list(MODES), MODES)


@dataclass(frozen=True)
class Case:
    """Something that is measured."""

    kernel: str
    mode: str
    shape: str
    make: Callable[[], Work]
    """Allocates the inputs, and returns the work."""


@dataclass(frozen=True)
class TrainingStep:
    """A training step whose seconds and memory are measured."""

    compiled: bool = False
    lora: bool = False
    loss: str = "full"


STEPS = (
    TrainingStep(),
    TrainingStep(compiled=True),
    TrainingStep(loss="fused"),
    TrainingStep(lora=True),
)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter next to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, state: Tensor) -> Tensor:
        """Return the product of the frozen weights, plus that of the adapter."""
        added: Tensor = self.up(self.down(state))
        return added + self.frozen(state)


def model_of(size: str) -> ModelConfig:
    """Return the model of a size."""
    return load_config(["model=llama3_8b", *SIZES[size].split()]).model


def kernel_cases(machine: MeasuredMachine, config: ModelConfig, modes: Iterable[str]) -> list[Case]:
    """List the kernels at the sizes of a model, with their backward passes but for the products.

    The largest product has twice the hidden size on each side.
    """
    tokens = config.max_seq_len
    hidden = config.hidden_size
    wide = config.ffn_hidden_size or hidden
    own = MeasuredKernels(machine, "bf16", 2 * hidden)
    cases = [
        Case("product", "eager", _shape(sizes), partial(own.gemm, *sizes))
        for sizes in gemm_shapes(own.largest)
    ]
    heads = (1, config.num_heads, tokens, config.head_size)
    for name in BACKENDS:
        attend = partial(_attention, getattr(SDPBackend, name))
        make = partial(_both, attend, [heads] * 3)
        cases.append(Case(f"attention {name.lower()}", "eager", _shape(heads), make))
    kernels: list[tuple[Callable[..., Tensor], tuple[int, int], int]] = [
        (rms_norm, (tokens, hidden), 1),
        (swiglu, (tokens, wide), 2),
        (cross_entropy, (tokens, config.vocab_size), 1),
    ]
    for mode in modes:
        compiled = mode == "compiled"
        for kernel, shape, count in kernels:
            called = torch.compile(kernel) if compiled else kernel
            make = partial(_both, called, [shape] * count)
            cases.append(Case(kernel.__name__, mode, _shape(shape), make))
        launches = partial(own.launches, compiled=compiled)
        cases.append(Case("launches of a block", mode, "1x1x16", launches))
    return cases


def rms_norm(state: Tensor) -> Tensor:
    """Return the normed states `(T, H)`."""
    return functional.rms_norm(state, state.shape[1:])


def swiglu(gate: Tensor, state: Tensor) -> Tensor:
    """Return the gated states."""
    return functional.silu(gate) * state


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the loss of logits `(T, V)`, in float32."""
    labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits.float(), labels)


def _shape(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _attention(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _both(function: Callable[..., Tensor], shapes: Iterable[tuple[int, ...]]) -> Work:
    """Return a forward and a backward pass."""
    inputs = [torch.ones(own, dtype=torch.bfloat16, requires_grad=True) for own in shapes]
    gradient = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def training_step(config: ModelConfig, step: TrainingStep) -> Callable[[], float]:
    """Return one step of Adam on one sequence, which returns its loss.

    Weights have float32, products bfloat16. Frozen weights have bfloat16.
    """
    names = ["embedding", *(f"layers.{i}" for i in range(config.num_layers)), "head"]
    layers = [build_layer(config, True, name, config.vocab_size, seed=0) for name in names]
    model = nn.Sequential(*layers)
    if step.lora:
        model.requires_grad_(False).to(torch.bfloat16)
        for block in layers[1:-1]:
            for name in ("query", "key", "value"):
                frozen = getattr(block.attention, name)
                setattr(block.attention, name, Adapted(frozen))
    device = torch.get_default_device()
    model.to(device)
    if step.compiled:
        for block in layers[1:-1]:
            block.compile()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trained, fused=True)
    tokens = torch.zeros(1, config.max_seq_len, dtype=torch.long)

    def work() -> float:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = _loss(model, tokens, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return work


def _loss(model: nn.Sequential, tokens: Tensor, step: TrainingStep) -> Tensor:
    """Return the loss of the next token; a fused one multiplies by the output table itself."""
    head: Any = model[-1]
    labels = tokens.flatten()
    if step.loss == "fused":
        states = head.norm(model[:-1](tokens)).flatten(0, 1)
        weight = head.output.weight
        return functional.linear_cross_entropy(states, weight.to(states.dtype), labels)
    return functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels)


def run_row(config: ModelConfig, step: TrainingStep, seconds: float, gpu: str) -> Entries:
    """Return a row of `runs.csv`; peak memory on a GPU alone."""
    date = datetime.now(timezone.utc).date()
    source = f"measured here: experiments.measure_gpu, torch {torch.__version__}, {date}"
    row: Entries = {"model": "Llama", "gpu": gpu, "source": source}
    sizes = word_tables()["size_cells"] | COLUMNS
    row |= {column: getattr(config, name) for column, name in sizes.items()}
    row |= given_values(FIXED)
    row |= {"compiled": step.compiled, "loss": step.loss, "iteration_s": seconds}
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    row |= {"memory_gb": peak, "notes": "allocated memory"}
    if step.lora:
        row |= {"lora_targets": "linear_qkv", "frozen_bits": 16}
        row["notes"] += f", lora rank {RANK}"
    return row


def measured_kernels(
    machine: MeasuredMachine, cases: Sequence[Case], seconds: float, gpu: str
) -> str:
    """Return the content of `kernels.csv`; all kernels together get so many seconds."""
    rows = []
    for case in cases:
        name = f"{case.kernel} {case.mode} {case.shape}"
        took = _measured(machine, name, case.make, seconds / len(cases))
        if took is not None:
            rows.append((gpu, case.kernel, case.mode, case.shape, took))
    return csv_text(("gpu", "kernel", "mode", "shape", "s"), rows)


def measured_steps(
    machine: MeasuredMachine,
    config: ModelConfig,
    steps: Sequence[TrainingStep],
    seconds: float,
    gpu: str,
) -> str:
    """Return the content of `runs.csv`; all steps together get so many seconds."""
    rows = []
    for step in steps:
        make = partial(training_step, config, step)
        took = _measured(machine, str(step), make, seconds / len(steps))
        if took is not None:
            rows.append(run_row(config, step, took, gpu))
    columns = list(dict.fromkeys(chain(*rows)))
    cells = [list(map(row.get, columns)) for row in rows]
    return csv_text(columns, cells)


def run(options: MeasureOptions) -> int:
    """Measure, and write both files; each is written as soon as its part is done."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    size = options.size or ("large" if kind == "cuda" else "small")
    config = model_of(size)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with this_machine(kind) as machine, torch.device(machine.device):
        gpu = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
        cases = kernel_cases(machine, config, options.modes)
        kernels = measured_kernels(machine, cases, KERNEL_SHARE * options.seconds, gpu)
        write_text(out / "kernels.csv", kernels)
        steps = [step for step in STEPS if MODES[step.compiled] in options.modes]
        left = (1.0 - KERNEL_SHARE) * options.seconds
        write_text(out / "runs.csv", measured_steps(machine, config, steps, left, gpu))
    print(f"files: {out}")
    return 0


def _measured(
    machine: MeasuredMachine, name: str, make: Callable[[], Work], seconds: float
) -> float | None:
    """Return the seconds of a work; None, with the reason printed, where it cannot run."""
    if machine.has_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        (found,) = machine.measure(name, [make()], seconds)
    except Exception as error:  # kernels and compilers refuse by many types
        print(f"{name}: not measured: {str(error).splitlines()[0][:160]}", flush=True)
        return None
    return found


if __name__ == "__main__":
    raise SystemExit(run_main("measure_gpu", run))
