"""One training step of a plan on this rank: schedule, loss, reduction of gradients, optimizer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from darts_parallel.errors import Amounts
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.run._chunks import StageChunk, build, compute_dtype, head_index, table_rows
from darts_parallel.run._layouts import Meshes, converted_logits, local
from darts_parallel.run._units import TiedTables


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    valid: int,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """Return the summed cross-entropy, nats; equal on all ranks of the mesh.

    Megatron-LM's vocabulary-parallel loss (Shoeybi et al. 2019, arXiv 1909.08053, section 3), which never
    gathers the logits, is `loss_parallel` of PyTorch: it must be on here and in the backward pass. Columns
    beyond the vocabulary count as impossible.

    Args:
        logits: This rank's columns, shape `(b, T, V / tp)`.
        targets: Shape `(b, T)`.
        valid: Size of the vocabulary; columns from there on are padding.
        mesh: Ranks that hold the other columns, in order; None: there are none.
    """
    first = mesh.get_local_rank() * logits.shape[-1] if mesh else 0
    columns = first + torch.arange(logits.shape[-1], device=logits.device)
    logits = logits.float().masked_fill(columns >= valid, -torch.inf).flatten(0, 1)
    if mesh is not None:
        logits = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
    return local(functional.cross_entropy(logits, targets.flatten(), reduction="sum"))


def global_batch(problem: Problem, seed: int, step: int) -> Tensor:
    """Draw the tokens of one optimizer step, shape `(global batch, seq_len + 1)`: inputs and targets."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    shape = (problem.training.global_batch_size, problem.training.seq_len + 1)
    return torch.randint(problem.model.config.vocab_size, shape, generator=generator)


def part_of_rank(
    batch: Tensor,
    num_micro_batches: int,
    dp: int,
    index: int,
) -> Tensor:
    """Return what data-parallel rank `index` of `dp` reads, one micro-batch after the other.

    Every micro-batch is a contiguous run of the global batch, and a rank has a contiguous run of
    every micro-batch: layers of different `dp` then see the same micro-batches.
    """
    parts = torch.unflatten(batch, 0, (num_micro_batches, dp, -1))
    return parts[:, index].flatten(0, 1)


LEARNING_RATE = 1e-3


PHASES = ("forward", "backward", "waiting", "synchronisation", "optimizer")
"""Phases of one step; `waiting` is the schedule without its computation."""


def of_all_ranks(value: Any) -> list[Any]:
    """Return the value of every rank, in order; collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def no_seconds() -> Amounts:
    """Return 0 seconds for every phase."""
    return dict.fromkeys(PHASES, 0.0)


@dataclass
class Clock:
    """Adds up seconds by name; on a GPU it waits for the device at every reading where `exact`."""

    device: torch.device
    exact: bool = False
    phases: Amounts = field(default_factory=no_seconds)
    """Seconds on this rank by phase."""

    def now(self) -> float:
        """Return seconds."""
        if self.exact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the seconds of the body."""
        began = self.now()
        yield
        self.phases[name] += self.now() - began


class Engine:
    """A plan on this rank.

    Args:
        problem: Model and job, trained in float32, or with products and activations of 16 bits.
        plan: Checked by `refuse_unexecutable`.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        seed: int,
        device: torch.device,
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.device = device
        self.clock = Clock(device)
        self.dtype = compute_dtype(problem)
        self.meshes = Meshes(plan, device.type, problem.model.has_experts)
        self.local = build(problem, plan, self.meshes, seed, device)
        self.units = list(dict.fromkeys(self.local.units.values()))
        self.tied = TiedTables(problem.model.config, self.local.units, self.meshes.tied)
        slots = [slot for unit in self.units for slot in unit.slots]
        self.optimizer = make_optimizer(problem, slots)
        self.schedule: Any = self._schedule() if plan.pp > 1 else None

    def step(self, batch: Tensor) -> float:
        """Make one training step; return the mean loss of the batch, nats, on every rank.

        Args:
            batch: Tokens of the whole global batch, shape `(B, T + 1)`.
        """
        loss = self.forward_backward(batch)
        self.synchronise()
        self.update()
        return loss

    def forward_backward(self, batch: Tensor) -> float:
        """Run all micro-batches; return the loss as `step` does."""
        first = self.plan.layers[0]
        last = self.plan.layers[-1]
        inputs = self._part(batch[:, :-1], first.tp, first.dp)
        targets = self._part(batch[:, 1:], last.tp, last.dp)
        phases = self.clock.phases
        before = phases["forward"] + phases["backward"]
        few_bits = self.dtype is torch.bfloat16
        own_types = torch.autocast(self.device.type, self.dtype, enabled=few_bits)
        with self.clock.timed("waiting"), own_types, loss_parallel():
            if self.schedule is None:
                losses = self._in_turn(inputs, targets)
            else:
                losses = self._pipelined(inputs, targets)
        phases["waiting"] -= phases["forward"] + phases["backward"] - before
        mean = torch.zeros((), device=self.device)
        if losses and self.meshes.position % last.tp == 0:
            mean += torch.stack(losses).sum()
        dist.all_reduce(mean)
        return float(mean)

    def synchronise(self) -> None:
        """Sum the gradients of all ranks that share a parameter."""
        with self.clock.timed("synchronisation"):
            for unit in self.units:
                unit.reduce()
            self.tied.sum()

    def update(self) -> None:
        """Make the optimizer step; gradients are forgotten."""
        with self.clock.timed("optimizer"):
            self.optimizer.step()
            for unit in self.units:
                unit.publish()
                unit.clear()

    def _part(self, tokens: Tensor, tp: int, dp: int) -> Tensor:
        index = self.meshes.position // tp
        return part_of_rank(tokens, self.plan.num_micro_batches, dp, index).to(self.device)

    def _in_turn(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        (chunk,) = self.local.chunks.values()
        losses = []
        count = self.plan.num_micro_batches
        for tokens, wanted in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            with self.clock.timed("forward"):
                loss = self.loss(chunk(tokens), wanted)
            with self.clock.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _pipelined(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        arguments = (inputs,) if 0 in self.local.chunks else ()
        last = self.plan.num_chunks - 1 in self.local.chunks
        options = {"target": targets, "losses": losses} if last else {}
        self.schedule.step(*arguments, return_outputs=False, **options)
        return [loss.detach() for loss in losses]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the mean loss over all tokens of the batch, nats."""
        head = self.plan.layers[head_index(self.problem)]
        last = self.plan.layers[-1]
        vocabulary = self.problem.model.config.vocab_size
        rows = (table_rows(vocabulary, head.tp), table_rows(vocabulary, last.tp))
        logits = converted_logits(logits, head.tp, last.tp, self.meshes, rows)
        mesh = self.meshes.tensor(last.tp) if last.tp > 1 else None
        total = cross_entropy_sum(logits, targets, vocabulary, mesh)
        return total / self.problem.tokens_per_iteration

    def _schedule(self) -> Any:
        plan = self.plan
        stages = [self._stage(place, chunk) for place, chunk in sorted(self.local.chunks.items())]
        count = plan.num_micro_batches
        options = {"loss_fn": self.loss, "scale_grads": False}
        name = plan.passes.pytorch_class(plan.pp, count)
        if name is None:
            schedule = _PipelineScheduleRuntime(stages, count, **options)  # type: ignore[no-untyped-call]
            with NamedTemporaryFile("w", suffix=".csv") as file:
                file.write("\n".join(map(",".join, plan.pass_names)))
                file.flush()
                schedule._load_csv(file.name)
            return schedule
        kind: Any = get_schedule_class(name)
        own = stages if plan.virtual_stages > 1 else stages[0]
        return kind(own, count, **options)

    def _stage(self, place: int, chunk: StageChunk) -> PipelineStage:
        group = self.meshes.pipeline
        stage = PipelineStage(chunk, place, self.plan.num_chunks, self.device, group=group)
        for phase in ("forward", "backward"):
            name = f"{phase}_one_chunk"
            setattr(stage, name, self.clock.timed(phase)(getattr(stage, name)))
        return stage


def make_optimizer(problem: Problem, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the job's optimizer with the state that the cost model counts."""
    if problem.training.optimizer == "sgd":
        return torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9)
    return torch.optim.Adam(parameters, LEARNING_RATE)
