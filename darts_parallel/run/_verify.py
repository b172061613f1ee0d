"""Proof that a plan computes the training step of one process, and needs the bytes that it predicts."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.cost import StageContext, Tensors, state_by_kind, state_bytes
from darts_parallel.errors import Amounts
from darts_parallel.plans import OuterSpace, Plan
from darts_parallel.problem import Problem
from darts_parallel.run._chunks import LOSS, head_index, share_one_table, table_rows
from darts_parallel.run._transformer import block_name, build_layer, parameter_names
from darts_parallel.run._units import byte_size
from darts_parallel.run.engine import Engine, global_batch, make_optimizer, of_all_ranks


@dataclass
class Reference:
    """The whole model on one device; tied tables are one parameter."""

    problem: Problem
    layers: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, problem: Problem, seed: int, device: torch.device) -> "Reference":
        """Build the model with the weights that `seed` gives every process."""
        config = problem.model.config
        fused = problem.training.fused_attention
        layers = {}
        for spec in problem.model.layers:
            if spec.name != LOSS:
                layer = build_layer(config, fused, spec.name, config.vocab_size, seed)
                layers[spec.name] = layer.to(device)
        if config.tie_embeddings:
            layers["head"].output.weight = layers["embedding"].table.weight  # type: ignore[union-attr]
        every = [p for layer in layers.values() for p in layer.parameters()]
        parameters = list(dict.fromkeys(every))
        return cls(problem, layers, make_optimizer(problem, parameters))

    def forward_backward(self, batch: Tensor, num_micro_batches: int) -> float:
        """Return the mean loss, nats; gradients stay on the parameters.

        Args:
            batch: Tokens, shape `(B, T + 1)`.
            num_micro_batches: Parts that are computed one after the other.
        """
        device = next(self.layers["head"].parameters()).device
        parts = batch.to(device).chunk(num_micro_batches)
        return sum(map(self.micro_batch, parts))

    def micro_batch(self, part: Tensor) -> float:
        """Return the loss of one micro-batch `(b, T + 1)`, as its share of the batch's mean, nats."""
        state = part[:, :-1]
        for layer in self.layers.values():
            state = layer(state)
        targets = part[:, 1:].flatten()
        loss = functional.cross_entropy(state.flatten(0, 1), targets, reduction="sum")
        loss = loss / self.problem.tokens_per_iteration
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def update(self) -> None:
        """Make the optimizer step; gradients are forgotten."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Tensors:
        """Return gradients by the names that the plan's layers use; a tied table has two."""
        result = {}
        for name, layer in self.layers.items():
            for full, parameter in parameter_names(layer, block_name(name)):
                assert parameter.grad is not None
                result[full] = parameter.grad
        return result


def predicted_bytes(problem: Problem, plan: Plan, stage: int) -> list[float]:
    """Predict bytes of parameters, gradients and optimizer state on a rank of `stage`, in float32."""
    state = state_bytes("fp32", problem.training.optimizer)
    topology = problem.cluster.stage_topology(stage, plan.pp)
    rows = []
    for index, layer in enumerate(problem.model.layers):
        if plan.stage_of_layer[index] == stage:
            shared = index == head_index(problem) and share_one_table(problem, plan)
            space = OuterSpace(plan.pp, (plan.num_micro_batches,), (plan.layers[index],))
            context = StageContext.build(problem, topology, space)
            rows.append(state_by_kind(context, layer, state, counts_table=not shared))
    return [sum(own[kind] for own in rows) for kind in rows[0]]


TOLERANCE = 1e-5
"""Largest relative difference of the loss and of every gradient, in float32."""
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

    losses: tuple[tuple[float, float], ...]
    """Losses of the plan and of one process, before and after the optimizer step."""
    gradients: Amounts
    """Largest relative difference by parameter."""
    bytes: tuple[Bytes, ...]

    @property
    def loss_error(self) -> float:
        """Relative difference of the loss, before or after the optimizer step."""
        return max(abs(own / wanted - 1.0) for own, wanted in self.losses)

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most, and by how much."""
        return max(self.gradients.items(), key=lambda item: item[1])

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        agree = max(self.loss_error, self.worst[1]) <= TOLERANCE
        return agree and all(entry.passed for entry in self.bytes)


def verify(engine: Engine, seed: int) -> StepComparison:
    """Compare two training steps of the plan with the same on one process (rank 0); collective."""
    problem = engine.problem
    count = engine.plan.num_micro_batches
    reference = None
    if dist.get_rank() == 0:
        reference = Reference.build(problem, seed, engine.device)
    losses = []
    gradients: Amounts = {}
    mine: list[Bytes] = []
    for step in range(2):
        batch = global_batch(problem, seed, step)
        loss = engine.forward_backward(batch)
        engine.synchronise()
        wanted = torch.tensor(reference.forward_backward(batch, count) if reference else 0.0)
        if step == 0:
            gradients = _compare(engine, reference)
            mine = _state_bytes(engine)
        engine.update()
        if reference:
            reference.update()
        if step == 0:
            mine[2] = replace(mine[2], measured=_optimizer_bytes(engine))
        losses.append((loss, float(wanted)))
    return StepComparison(tuple(losses), gradients, tuple(chain(*of_all_ranks(mine))))


def _compare(engine: Engine, reference: Reference | None) -> Amounts:
    """Return the relative difference of every gradient; each is sent to all ranks, one by one."""
    wanted = reference.gradients() if reference else {}
    # shapes and the sum of squares of rank 0's gradients, on every rank
    own = {name: tuple(gradient.shape) for name, gradient in wanted.items()}
    total = sum(float(one.square().sum()) for one in dict.fromkeys(wanted.values()))
    sent: list[Any] = [own, total]
    dist.broadcast_object_list(sent, src=0)
    shapes, squares = sent
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    typical = float(torch.sqrt(torch.tensor(squares) / count))
    owners = {name: unit for unit in engine.units for name in unit.parameters}
    errors = torch.zeros(len(shapes), device=engine.device)
    for index, (name, shape) in enumerate(shapes.items()):
        target = torch.empty(shape, device=engine.device)
        if reference:
            target = wanted[name].contiguous()
        dist.broadcast(target, src=0)
        if name in owners:
            gradient = owners[name].full_gradient(name)
            rows = len(target)
            # rows beyond the vocabulary get no gradient
            difference = (gradient[:rows] - target).norm() + gradient[rows:].norm()
            floor = FLOOR * typical * target.numel() ** 0.5
            errors[index] = difference / max(float(target.norm()), floor)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return dict(zip(shapes, errors.tolist(), strict=True))


def _state_bytes(engine: Engine) -> list[Bytes]:
    """Return the bytes of parameters, gradients and moments on this rank."""
    rank = dist.get_rank()
    stage = engine.meshes.stage
    units = engine.units
    parameters, gradients, moments = predicted_bytes(engine.problem, engine.plan, stage)
    rounding = sum(unit.rounding_bytes() for unit in units)
    config = engine.problem.model.config
    head = head_index(engine.problem)
    if config.output_bias and engine.plan.stage_of_layer[head] == stage:
        # the bias is padded as its table is
        tp = engine.plan.layers[head].tp
        rounding += 4.0 * (table_rows(config.vocab_size, tp) - config.vocab_size) / tp
    extra = sum(unit.extra_bytes() for unit in units)
    held = sum(unit.parameter_bytes() for unit in units)
    summed = sum(unit.gradient_bytes() for unit in units)
    found = [Bytes(rank, "parameters", held, parameters, extra, rounding)]
    found.append(Bytes(rank, "gradients", summed, gradients, 0.0, rounding))
    # of moments there are none before the first step
    found.append(Bytes(rank, "optimizer", 0.0, moments, 0.0, 2 * rounding))
    return found


def _optimizer_bytes(engine: Engine) -> int:
    """Return the bytes of moments; step counters are left out."""
    every = chain.from_iterable(own.values() for own in engine.optimizer.state.values())
    return byte_size(one for one in every if isinstance(one, Tensor) and one.dim() > 0)
