"""Proof that a plan computes the training step of one process, and needs the bytes that it predicts.

The one process rounds as the ranks of a plan do that send few bits: sums of blocks are computed as their
tensor-parallel ranks' partial sums and rounded in both hops; gradients of blocks are computed for every
data-parallel rank and pass the same two hops, with what was kept back.
"""

from dataclasses import dataclass, field, replace
from itertools import chain
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.cost import (
    BLOCK,
    LOSSLESS,
    StateBytes,
    parameters_per_rank,
    state_bytes,
    static_bytes,
)
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem
from darts_parallel.run._chunks import LOSS, head_index, share_one_table, table_rows
from darts_parallel.run._experts import Mlp
from darts_parallel.run._layouts import shard_ranks
from darts_parallel.run._lossy import padded, rounded
from darts_parallel.run._transformer import Block, block_name, build_layer, parameter_names
from darts_parallel.run.engine import Engine, global_batch, make_optimizer, part_of_rank

COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
ROWS = ("attention.out", "mlp.down")


def few_bit_sums(strategy: LayerStrategy) -> bool:
    """Tell whether the layer's tensor-parallel sums are lossy."""
    return strategy.tp > 1 and strategy.tp_comm_bits < LOSSLESS


def few_bit_gradients(strategy: LayerStrategy) -> bool:
    """Tell whether the layer's gradient synchronisation is lossy."""
    return strategy.dp > 1 and strategy.grad_comm_bits < LOSSLESS


def virtual_sum(partials: Tensor, bits: int) -> Tensor:
    """Return what an all-reduce at `bits` of partial sums `(ranks, ...)` delivers; straight-through."""
    exact = partials.sum(0)
    held = partials.detach().flatten(1)
    size = held.shape[1]
    rows = functional.pad(held, (0, padded(size, len(held)) - size))
    reduced = rounded(rows, bits).sum(0, keepdim=True)
    delivered = rounded(reduced, bits)[0, :size]
    return exact + (delivered.view_as(exact) - exact).detach()


class VirtualRows(nn.Linear):
    """A product divided by rows over virtual ranks whose partial sums travel at few bits.

    Args:
        whole: The product; its parameters are shared.
    """

    def __init__(self, whole: nn.Linear, ranks: int, bits: int) -> None:
        bias = whole.bias is not None
        super().__init__(whole.in_features, whole.out_features, bias, device="meta")
        self.weight = whole.weight
        self.bias = whole.bias
        self.ranks = ranks
        self.bits = bits

    def forward(self, state: Tensor) -> Tensor:
        """Map states `(B, T, in)` to `(B, T, out)`."""
        states = state.chunk(self.ranks, -1)
        weights = self.weight.chunk(self.ranks, 1)
        partials = torch.stack(list(map(functional.linear, states, weights)))
        if self.bias is not None:  # each rank adds its share of the bias before the sum
            partials = partials + self.bias / self.ranks
        return virtual_sum(partials, self.bits)


@dataclass
class VirtualGradients:
    """The gradient synchronisation of one block: what its ranks send, deliver and keep back.

    Attributes:
        layer: The block, whole.
        strategy: Its strategy.
        kept: What rounding has kept back, by tensor-parallel rank: of every data-parallel rank `(dp, N)`, and
            of the owners `(N,)`.
    """

    layer: nn.Module
    strategy: LayerStrategy
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def take(self) -> dict[str, Tensor]:
        """Return the gradients of the block by parameter, and leave none."""
        taken = {}
        for name, parameter in self.layer.named_parameters():
            assert parameter.grad is not None
            taken[name] = parameter.grad
            parameter.grad = None
        return taken

    def reduce(self, finest: list[dict[str, Tensor]]) -> None:
        """Set the sum of the ranks' gradients as it is delivered.

        Args:
            finest: Gradients of the finest data-parallel ranks by parameter; several may be one rank here.
        """
        ranks = self._by_rank(finest)
        total = {name: torch.zeros_like(gradient) for name, gradient in finest[0].items()}
        # a block of numbers holds either divided or whole ones, as on the real ranks
        groups = self._divided_and_whole(list(total))
        for place in range(self.strategy.tp):
            parts = []
            for names in groups:
                parts.append(torch.stack([self._flat(own, names, place) for own in ranks]))
            delivered = self._delivered(torch.cat(parts, 1), place)
            sizes = [part.shape[1] for part in parts]
            for names, flat in zip(groups, torch.split(delivered, sizes), strict=True):
                self._fill(total, names, flat, place)
        for name, parameter in self.layer.named_parameters():
            parameter.grad = total[name]

    def _by_rank(self, finest: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Add the gradients of the finest ranks that are one rank of this block."""
        each = len(finest) // self.strategy.dp
        ranks = []
        for first in range(0, len(finest), each):
            own = dict(finest[first])
            for more in finest[first + 1 : first + each]:
                own = {name: gradient + more[name] for name, gradient in own.items()}
            ranks.append(own)
        return ranks

    def _divided_and_whole(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Part the parameters by whether tensor-parallel ranks divide them."""
        divided = []
        if self.strategy.tp > 1:
            divided = [name for name in names if _divided_axis(name) is not None]
        return divided, [name for name in names if name not in divided]

    def _fill(
        self,
        total: dict[str, Tensor],
        names: list[str],
        flat: Tensor,
        place: int,
    ) -> None:
        """Copy numbers that lie side by side into what rank `place` holds of the parameters."""
        first = 0
        for name in names:
            part = self._part(name, total[name], place)
            end = first + part.numel()
            part.copy_(flat[first:end].view(part.shape))
            first = end

    def _delivered(self, rows: Tensor, place: int) -> Tensor:
        """Return what both hops leave of the ranks' sum `(N,)`, and keep back the rest for the next time."""
        size = rows.shape[1]
        bits = self.strategy.grad_comm_bits
        rows = functional.pad(rows, (0, padded(size, len(rows)) - size))
        nothing = (torch.zeros_like(rows), torch.zeros_like(rows[0]))
        unsent, undelivered = self.kept.get(place, nothing)
        wanted = rows + unsent
        sent = rounded(wanted, bits)
        owned = sent.sum(0) + undelivered
        delivered = rounded(owned.unsqueeze(0), bits)[0]
        self.kept[place] = wanted - sent, owned - delivered
        return delivered[:size]

    def _flat(self, gradients: dict[str, Tensor], names: list[str], place: int) -> Tensor:
        """Put what tensor-parallel rank `place` holds side by side, in whole blocks, shape `(N,)`."""
        parts = [self._part(name, gradients[name], place).reshape(-1) for name in names]
        flat = torch.cat([torch.zeros(0), *parts])
        return functional.pad(flat, (0, -len(flat) % BLOCK))

    def _part(self, name: str, gradient: Tensor, place: int) -> Tensor:
        """Return what tensor-parallel rank `place` holds of a parameter's gradient, as a view."""
        axis = _divided_axis(name)
        return gradient if axis is None else gradient.chunk(self.strategy.tp, axis)[place]


def _divided_axis(name: str) -> int | None:
    """Return the axis along which tensor-parallel ranks divide a parameter; None where each holds all."""
    owner = name.rpartition(".")[0]
    if owner in COLUMNS:
        return 0
    return 1 if owner in ROWS and name.endswith("weight") else None


def _round_sums(block: Block, strategy: LayerStrategy) -> None:
    """Let the block's sums over tensor-parallel ranks travel at few bits."""
    tp = strategy.tp
    bits = strategy.tp_comm_bits
    if block.attention is not None:
        block.attention.out = VirtualRows(block.attention.out, tp, bits)
    if isinstance(block.mlp, Mlp):  # experts send whole numbers
        block.mlp.down = VirtualRows(block.mlp.down, tp, bits)


@dataclass
class Reference:
    """The whole model on one device; tied tables are one parameter."""

    problem: Problem
    layers: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    synchronised: dict[str, VirtualGradients]
    """Blocks whose gradients travel at few bits, by name."""

    @staticmethod
    def build(
        problem: Problem,
        seed: int,
        device: torch.device,
        plan: Plan | None = None,
    ) -> "Reference":
        """Build the model with the weights that `seed` gives every process.

        Args:
            plan: The one process rounds as the ranks of this plan do; None rounds nothing.
        """
        config = problem.model.config
        fused = problem.training.fused_attention
        layers: dict[str, nn.Module] = {}
        for spec in problem.model.layers:
            if spec.name != LOSS:
                layer = build_layer(config, fused, spec.name, config.vocab_size, seed)
                layers[spec.name] = layer.to(device)
        if config.tie_embeddings:
            layers["head"].output.weight = layers["embedding"].table.weight  # type: ignore[union-attr]
        every = [p for layer in layers.values() for p in layer.parameters()]
        parameters = list(dict.fromkeys(every))
        synchronised = {}
        strategies = () if plan is None else plan.layers
        for name, strategy in zip(layers, strategies, strict=False):
            layer = layers[name]
            if not isinstance(layer, Block):
                continue
            if few_bit_gradients(strategy):
                synchronised[name] = VirtualGradients(layer, strategy)
            if few_bit_sums(strategy):
                _round_sums(layer, strategy)
        return Reference(problem, layers, make_optimizer(problem, parameters), synchronised)

    def forward_backward(self, batch: Tensor, num_micro_batches: int) -> float:
        """Return the mean loss, nats; gradients stay on the parameters.

        Args:
            batch: Tokens, shape `(B, T + 1)`.
            num_micro_batches: Parts that are computed one after the other.
        """
        device = next(self.layers["head"].parameters()).device
        batch = batch.to(device)
        # the finest data-parallel ranks, one after the other
        degrees = [own.strategy.dp for own in self.synchronised.values()]
        finest = lcm(1, *degrees)
        by_rank = []
        total = 0.0
        for index in range(finest):
            mine = part_of_rank(batch, num_micro_batches, finest, index)
            for part in mine.chunk(num_micro_batches):
                total += self._micro_batch(part)
            by_rank.append({name: own.take() for name, own in self.synchronised.items()})
        for name, own in self.synchronised.items():
            own.reduce([gradients[name] for gradients in by_rank])
        return total

    def _micro_batch(self, part: Tensor) -> float:
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

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the names that the plan's layers use; a tied table has two."""
        result = {}
        for name, layer in self.layers.items():
            for full, parameter in parameter_names(layer, block_name(name)):
                assert parameter.grad is not None
                result[full] = parameter.grad
        return result


def predicted_bytes(problem: Problem, plan: Plan, stage: int) -> tuple[float, float, float]:
    """Predict bytes of parameters, gradients and optimizer state on a rank of `stage`, in float32."""
    state = state_bytes("fp32", problem.training.optimizer)
    kinds = [StateBytes(state.parameter, 0, 0), StateBytes(0, state.gradient, 0)]
    kinds.append(StateBytes(0, 0, state.optimizer))
    sums = [0.0, 0.0, 0.0]
    for index in range(len(plan.layers)):
        if plan.stage_of_layer[index] != stage:
            continue
        zero = _scalar(plan.layers[index].zero_stage)
        for parameters, shards in _parameter_groups(problem, plan, index):
            for kind, part in enumerate(kinds):
                sums[kind] += float(static_bytes(parameters, shards, zero, part))
    return sums[0], sums[1], sums[2]


def _parameter_groups(problem: Problem, plan: Plan, index: int) -> list[tuple[Tensor, Tensor]]:
    """Return (parameters of a rank, ranks that shard them) of a layer, experts apart."""
    spec = problem.model.layers[index]
    strategy = plan.layers[index]
    if index == head_index(problem) and share_one_table(problem, plan):
        spec = replace(spec, vocabulary_parameters=0)
    vocabulary = problem.model.config.vocab_size
    parameters = parameters_per_rank(spec, vocabulary, _scalar(strategy.tp))
    groups = [(parameters, _scalar(shard_ranks(strategy)))]
    if spec.experts is not None:
        held = strategy.ep * strategy.etp
        replicas = problem.cluster.num_devices // plan.pp // held
        groups.append((_scalar(spec.experts.parameters / held), _scalar(replicas)))
    return groups


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


TOLERANCE = 1e-5
"""Largest relative difference of the loss and of every gradient, in float32."""
FEW_BITS = 1e-2, 0.3
"""Largest differences of loss and gradients where a plan sends few bits.

The order of a sum decides on which of two levels a number between them falls; one such number moves later
ones. Without such a number losses agree to 1e-7. Four blocks of width 64 at 4 bits differ by 1e-4, a step
later by 2e-3."""
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
    """Compare two training steps of the plan with the same on one process (rank 0); collective."""
    problem = engine.problem
    count = engine.plan.num_micro_batches
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
    shapes = _shapes_everywhere(wanted)
    typical = _typical_gradient(engine, wanted, shapes)
    owners = {name: unit for unit in engine.units for name in unit.parameters}
    errors = torch.zeros(len(shapes), device=engine.device)
    for index, (name, shape) in enumerate(shapes.items()):
        target = torch.empty(shape, device=engine.device)
        if reference:
            target = wanted[name].contiguous()
        dist.broadcast(target, src=0)
        if name in owners:
            errors[index] = _relative(owners[name].full_gradient(name), target, typical)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return dict(zip(shapes, errors.tolist(), strict=True))


def _shapes_everywhere(wanted: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of rank 0's gradients by name, on every rank; collective."""
    shapes: list[Any] = [{name: tuple(gradient.shape) for name, gradient in wanted.items()}]
    dist.broadcast_object_list(shapes, src=0)
    found: dict[str, tuple[int, ...]] = shapes[0]
    return found


def _typical_gradient(
    engine: Engine, wanted: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
) -> float:
    """Return the root mean square of the model's gradients; collective."""
    total = 0.0
    for gradient in dict.fromkeys(wanted.values()):
        total += float(gradient.square().sum())
    square = torch.tensor(total, device=engine.device)
    dist.broadcast(square, src=0)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    return float(torch.sqrt(square / count))


def _relative(gradient: Tensor, target: Tensor, typical: float) -> float:
    difference = (gradient[: target.shape[0]] - target).norm()
    padding = gradient[target.shape[0] :].norm()  # rows beyond the vocabulary get no gradient
    floor = FLOOR * typical * target.numel() ** 0.5
    return float((difference + padding) / max(float(target.norm()), floor))


def _state_bytes(engine: Engine) -> list[Bytes]:
    """Return the bytes of parameters, gradients and moments on this rank."""
    rank = dist.get_rank()
    stage = engine.meshes.stage
    units = engine.units
    parameters, gradients, moments = predicted_bytes(engine.problem, engine.plan, stage)
    rounding = sum(unit.rounding_bytes() for unit in units) + _padded_bias_bytes(engine, stage)
    extra = sum(unit.extra_bytes() for unit in units)
    held = sum(unit.parameter_bytes() for unit in units)
    summed = sum(unit.gradient_bytes() for unit in units)
    found = [Bytes(rank, "parameters", held, parameters, extra, rounding)]
    found.append(Bytes(rank, "gradients", summed, gradients, 0.0, rounding))
    found.append(Bytes(rank, "optimizer", _optimizer_bytes(engine), moments, 0.0, 2 * rounding))
    return found


def _padded_bias_bytes(engine: Engine, stage: int) -> float:
    """Return the bytes by which the head's bias is padded on a rank, as its table is."""
    config = engine.problem.model.config
    index = head_index(engine.problem)
    if not config.output_bias or engine.plan.stage_of_layer[index] != stage:
        return 0.0
    tp = engine.plan.layers[index].tp
    return 4.0 * (table_rows(config.vocab_size, tp) - config.vocab_size) / tp


def _optimizer_bytes(engine: Engine) -> int:
    """Return the bytes of moments; step counters are left out."""
    states = engine.optimizer.state.values()
    total = 0
    for state in states:
        for value in state.values():
            if isinstance(value, Tensor) and value.dim() > 0:
                total += value.numel() * value.element_size()
    return total
