"""Proof that a plan computes the training step of one process, and needs the bytes that it predicts."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from darts_parallel.cost import StateBytes, parameters_per_rank, state_bytes, static_bytes
from darts_parallel.plan import Plan
from darts_parallel.problem import Problem
from darts_parallel.run._chunks import head_index, share_one_table, table_rows
from darts_parallel.run._layouts import shard_ranks
from darts_parallel.run._loss import global_batch
from darts_parallel.run._reference import Reference, few_bit_gradients, few_bit_sums
from darts_parallel.run.engine import Engine


def predicted_bytes(problem: Problem, plan: Plan, stage: int) -> tuple[float, float, float]:
    """Predict bytes of parameters, gradients and optimizer state on a rank of `stage`, in float32."""
    state = state_bytes("fp32", problem.training.optimizer)
    parts = (
        StateBytes(state.parameter, 0, 0),
        StateBytes(0, state.gradient, 0),
        StateBytes(0, 0, state.optimizer),
    )
    sums = [0.0, 0.0, 0.0]
    for index, spec in enumerate(problem.model.layers):
        if plan.stage_of_layer[index] != stage:
            continue
        if index == head_index(problem) and share_one_table(problem, plan):
            spec = replace(spec, vocabulary_parameters=0)
        strategy = plan.layers[index]
        parameters = parameters_per_rank(spec, problem.model.config.vocab_size, _scalar(strategy.tp))
        shards, zero = _scalar(shard_ranks(strategy)), _scalar(strategy.zero_stage)
        groups = [(parameters, shards)]
        if spec.experts is not None:
            held = strategy.ep * strategy.etp
            replicas = problem.cluster.num_devices // plan.pp // held
            groups.append((_scalar(spec.experts.parameters / held), _scalar(replicas)))
        for kind, part in enumerate(parts):
            sums[kind] += sum(float(static_bytes(*group, zero, part)) for group in groups)
    return sums[0], sums[1], sums[2]


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


TOLERANCE = 1e-5
"""Largest relative difference of the loss and of every gradient, in float32."""
FEW_BITS = 1e-2, 0.3
"""Largest differences of loss and gradients where a plan sends few bits: a number between two levels falls
to one side here and to
the other there, by the order of a sum, jumps by a level, and moves later numbers over theirs. Without such a
number losses agree to 1e-7; measured with four blocks of width 64 at 4 bits: 1e-4, a step later 2e-3."""
FLOOR = 0.1
"""Gradients are compared to their own norm, or to this share of the model's root mean square where they
are smaller: the gradient of a key's bias is 0 but for rounding, because softmax ignores a shift."""


@dataclass(frozen=True)
class Bytes:
    """Measured and predicted bytes of one kind on one rank."""

    rank: int
    kind: str
    measured: float
    predicted: float
    extra: float = 0.0
    """Bytes of further copies that the model does not count, named in the report."""
    rounding: float = 0.0
    """Bytes by which uneven division may miss the prediction."""

    @property
    def passed(self) -> bool:
        """Whether the prediction holds."""
        return abs(self.measured - self.predicted) <= self.rounding + 0.5


@dataclass(frozen=True)
class StepComparison:
    """Comparison of one plan with one process."""

    loss: float
    reference_loss: float
    second_loss: float
    """After the optimizer step."""
    second_reference_loss: float
    gradients: dict[str, float]
    """Largest relative difference by parameter."""
    bytes: tuple[Bytes, ...]
    few_bits: bool = False
    """Whether any collective of the plan is lossy: the one process then rounds as the plan's ranks do."""

    @property
    def limits(self) -> tuple[float, float]:
        """Largest relative differences of the loss and of a gradient that pass."""
        return FEW_BITS if self.few_bits else (TOLERANCE, TOLERANCE)

    @property
    def loss_error(self) -> float:
        """Relative difference of the loss, before or after the optimizer step."""
        first = abs(self.loss / self.reference_loss - 1.0)
        return max(first, abs(self.second_loss / self.second_reference_loss - 1.0))

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most, and by how much."""
        return max(self.gradients.items(), key=lambda item: item[1])

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        agree = self.loss_error <= self.limits[0] and self.worst[1] <= self.limits[1]
        return agree and all(entry.passed for entry in self.bytes)


def verify(engine: Engine, seed: int) -> StepComparison:
    """Compare two training steps of the plan with the same on one process (rank 0); collective.

    Args:
        engine: Before its first step.
        seed: Of weights and data.
    """
    problem, count = engine.problem, engine.plan.num_micro_batches
    reference = None
    if dist.get_rank() == 0:
        reference = Reference.build(problem, seed, engine.device, engine.plan)
    losses = []
    gradients: dict[str, float] = {}
    mine: list[Bytes] = []
    for step in range(2):
        batch = global_batch(problem, seed, step)
        loss = engine.forward_backward(batch)
        engine.synchronise()
        wanted = torch.tensor(reference.forward_backward(batch, count) if reference else 0.0)
        if step == 0:
            gradients = _compare(engine, reference)
            mine = _state_bytes(engine)  # of moments there are none yet
        engine.update()
        if reference:
            reference.update()
        if step == 0:
            mine[2] = replace(mine[2], measured=_optimizer_bytes(engine))
        losses.append((loss, float(wanted)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    few_bits = any(few_bit_sums(own) or few_bit_gradients(own) for own in engine.plan.layers)
    return StepComparison(*losses[0], *losses[1], gradients, tuple(chain(*everyone)), few_bits)


def _compare(engine: Engine, reference: Reference | None) -> dict[str, float]:
    """Return the relative difference of every gradient; each is sent to all ranks, one by one."""
    wanted = reference.gradients() if reference else {}
    shapes: list[Any] = [{name: tuple(g.shape) for name, g in wanted.items()} if reference else None]
    dist.broadcast_object_list(shapes, src=0)
    square = torch.tensor(sum(float(g.square().sum()) for g in dict.fromkeys(wanted.values())))
    count = sum(torch.Size(shape).numel() for shape in shapes[0].values())
    square = square.to(engine.device)
    dist.broadcast(square, src=0)
    typical = float(square / count) ** 0.5
    owners = {name: unit for unit in engine.units for name in unit.parameters}
    errors = torch.zeros(len(shapes[0]), device=engine.device)
    for index, (name, shape) in enumerate(shapes[0].items()):
        target = wanted[name].contiguous() if reference else torch.empty(shape, device=engine.device)
        dist.broadcast(target, src=0)
        if name in owners:
            errors[index] = _relative(owners[name].full_gradient(name), target, typical)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return dict(zip(shapes[0], errors.tolist(), strict=True))


def _relative(gradient: Tensor, target: Tensor, typical: float) -> float:
    difference = (gradient[: target.shape[0]] - target).norm()
    padding = gradient[target.shape[0] :].norm()  # rows beyond the vocabulary get no gradient
    floor = FLOOR * typical * target.numel() ** 0.5
    return float((difference + padding) / max(float(target.norm()), floor))


def _state_bytes(engine: Engine) -> list[Bytes]:
    """Return the bytes of parameters, gradients and moments on this rank."""
    rank, stage, units = dist.get_rank(), engine.meshes.stage, engine.units
    plan, config, index = engine.plan, engine.problem.model.config, head_index(engine.problem)
    parameters, gradients, moments = predicted_bytes(engine.problem, plan, stage)
    rounding = sum(unit.rounding_bytes() for unit in units)
    if config.output_bias and plan.stage_of_layer[index] == stage:  # padded here as its table is
        tp = plan.layers[index].tp
        rounding += 4.0 * (table_rows(config.vocab_size, tp) - config.vocab_size) / tp
    extra = sum(unit.extra_bytes() for unit in units)
    return [
        Bytes(rank, "parameters", sum(u.parameter_bytes() for u in units), parameters, extra, rounding),
        Bytes(rank, "gradients", sum(u.gradient_bytes() for u in units), gradients, 0.0, rounding),
        Bytes(rank, "optimizer", _optimizer_bytes(engine), moments, 0.0, 2 * rounding),
    ]


def _optimizer_bytes(engine: Engine) -> int:
    """Return the bytes of moments; step counters are left out."""
    states = engine.optimizer.state.values()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in tensors if value.dim() > 0)
