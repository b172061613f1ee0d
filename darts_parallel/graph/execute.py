"""A plan on real processes: every operator on its local tensors, DTensor's redistribution between them.

Each rank calls torch's own operators on its parts. A tensor is brought to its consumers' placements by
`DTensor.redistribute`, one collective for each that the plan lists; backward sums the gradients of equal
placement before it moves them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from darts_parallel.graph._layouts import (
    State,
    axis_moves,
    collective,
    forward_state,
    gradient_state,
    local_shape,
)
from darts_parallel.graph._rules import PARTIAL, REPLICATED
from darts_parallel.graph._space import OperatorChoice
from darts_parallel.graph.operators import (
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    GraphOperator,
    TensorArgument,
)
from darts_parallel.graph.plan import GraphPlan

RESHAPES = ("view", "_unsafe_view", "reshape", "expand")
"""Operators that are told the shape of their output."""


def placement(state: str, reduction: str = "sum") -> Placement:
    """Return DTensor's placement of a state."""
    if state == PARTIAL:
        return Partial(reduction)
    return Replicate() if not state.startswith("S") else Shard(int(state[1:]))


@dataclass(frozen=True)
class RankMesh:
    """A mesh as one of its processes sees it."""

    mesh: DeviceMesh

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of every axis."""
        return tuple(self.mesh.shape)

    def move(self, local: Tensor, source: State, target: State) -> Tensor:
        """Bring a local tensor from one placement to another, axis by axis."""
        for axis, old, new in axis_moves(source, target):
            local = self.move_axis(local, axis, old, new)
        return local

    def move_axis(self, local: Tensor, axis: int, old: str, new: str, reduction: str = "sum") -> Tensor:
        """Bring a local tensor from one placement of an axis to another."""
        if old == new:
            return local
        count, rank = self.ranks[axis], self.mesh.get_local_rank(axis)
        if collective(old, new) is not None:
            own = self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[axis]]  # type: ignore
            whole = DTensor.from_local(local.contiguous(), own, [placement(old, reduction)], run_check=False)
            return whole.redistribute(placements=[placement(new, reduction)]).to_local()
        if old == REPLICATED and new == PARTIAL:  # the first rank has the sum
            return local if rank == 0 else torch.zeros_like(local)
        if old == REPLICATED:
            return local.chunk(count, int(new[1:]))[rank].contiguous()
        parts = [torch.zeros_like(local)] * count
        parts[rank] = local
        return torch.cat(parts, int(old[1:]))

    def part(self, whole: Tensor, state: State) -> Tensor:
        """Return a rank's part of a whole tensor."""
        return self.move(whole, (REPLICATED,) * len(state), forward_state(state))


class FanMove(torch.autograd.Function):
    """Bring a tensor to the states of its consumers, and their gradients back to its own."""

    @staticmethod
    def forward(
        ctx: Any, mesh: RankMesh, made: State, wanted: list[State], local: Tensor
    ) -> tuple[Tensor, ...]:
        """Return a local tensor for every wanted state; equal placements are reached once."""
        ctx.mesh, ctx.made, ctx.wanted = mesh, made, wanted
        ctx.set_materialize_grads(False)
        return fan_out(mesh, made, wanted, local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients of equal placement, bring each to the producer's, and sum those."""
        sums: dict[State, Tensor] = {}
        for state, gradient in zip(ctx.wanted, gradients, strict=True):
            if gradient is not None:
                key = gradient_state(state)
                sums[key] = sums[key] + gradient if key in sums else gradient
        target = gradient_state(ctx.made)
        moved = [ctx.mesh.move(gradient, key, target) for key, gradient in sums.items()]
        return None, None, None, sum(moved[1:], moved[0]) if moved else None


def fan_out(mesh: RankMesh, made: State, wanted: list[State], local: Tensor) -> tuple[Tensor, ...]:
    """Return a local tensor for every wanted state."""
    reached: dict[State, Tensor] = {}
    for state in wanted:
        key = forward_state(state)
        if key not in reached:
            reached[key] = mesh.move(local, forward_state(made), key)
    return tuple(reached[forward_state(state)].view_as(reached[forward_state(state)]) for state in wanted)


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of rows whose classes are split: maxima, sums and target logits are reduced."""

    @staticmethod
    def forward(ctx: Any, mesh: RankMesh, axis: int, ignored: int, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every row, 0 where the target is `ignored`."""
        size, rank = logits.shape[1], mesh.mesh.get_local_rank(axis)
        top = mesh.move_axis(logits.detach().amax(1), axis, PARTIAL, REPLICATED, "max")
        exponentials = torch.exp(logits - top[:, None])
        total = mesh.move_axis(exponentials.sum(1), axis, PARTIAL, REPLICATED)
        own = target - rank * size
        inside = (own >= 0) & (own < size)
        place = torch.where(inside, own, 0)
        picked = torch.where(inside, logits.gather(1, place[:, None])[:, 0], 0.0)
        picked = mesh.move_axis(picked, axis, PARTIAL, REPLICATED)
        counted = target != ignored
        ctx.save_for_backward(exponentials / total[:, None], place, inside & counted, counted)
        return torch.where(counted, torch.log(total) + top - picked, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return probabilities minus the target's indicator."""
        probabilities, place, inside, counted = ctx.saved_tensors
        scale = torch.where(counted, gradients[0], 0.0)
        result = probabilities * scale[:, None]
        result.scatter_add_(1, place[:, None], -torch.where(inside, scale, 0.0)[:, None])
        return None, None, None, result, None


@dataclass
class PlanRun:
    """One process's part of a step of a plan.

    Attributes:
        plan: On as many ranks as the mesh has.
        mesh: The processes.
        module: Has the parameters and buffers that the plan's graph names, whole on every process.
        constants: Further tensors that the capture lifted out of the module.
    """

    plan: GraphPlan
    mesh: RankMesh
    module: nn.Module
    constants: Mapping[str, Any]

    def __post_init__(self) -> None:
        state = dict(self.module.named_parameters(remove_duplicate=False))
        self.state: dict[str, Any] = {**self.constants, **dict(self.module.named_buffers()), **state}
        self.leaves: dict[str, Tensor] = {}
        """Local parameters and inputs, whose gradients backward fills."""
        self.wanted: dict[str, dict[State, Tensor]] = {}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the graph on this rank.

        Args:
            inputs: Whole tensors by the name of their input.

        Returns:
            Local outputs by name; they lie as the plan's outputs do.
        """
        outputs = {}
        for op in self.plan.space.graph.operators:
            if op.op == OUTPUT:
                outputs[op.target] = self._inputs(op)[0]
            elif op.op in (PARAMETER, CONSTANT, INPUT):
                whole = inputs[op.target] if op.op == INPUT else self.state[op.target]
                self._keep(op, self._leaf(op, whole))
            else:
                choice = self.plan.choice(op)
                made = self._inputs(op)[0] if op.op == RELAY else self.call(op, choice, self._inputs(op))
                for index, tensor in enumerate(made if isinstance(made, (tuple, list)) else [made]):
                    self._keep(op, tensor, index)
        return outputs

    def _leaf(self, op: GraphOperator, whole: Tensor) -> Tensor:
        local = self.mesh.part(whole.detach(), self.plan.choice(op).outputs[0]).clone()
        if self.plan.space.graph.values[op.outputs[0]].needs_grad:
            self.leaves[op.target] = local.requires_grad_()
        return local

    def _keep(self, op: GraphOperator, tensor: Tensor, index: int = 0) -> None:
        """Bring a new tensor to all states that its consumers want."""
        name = op.outputs[index]
        if name not in self.plan.space.graph.consumers:
            return
        made, wanted = self.plan.produced(name), self.plan.demands(name)
        if tensor.requires_grad and self.plan.space.graph.values[name].needs_grad:
            tensors = FanMove.apply(self.mesh, made, wanted, tensor)  # type: ignore[no-untyped-call]
        else:
            tensors = fan_out(self.mesh, made, wanted, tensor)
        self.wanted[name] = dict(zip(wanted, tensors, strict=True))

    def _inputs(self, op: GraphOperator) -> list[Tensor]:
        states = self.plan.choice(op).inputs
        return [self.wanted[name][state] for name, state in zip(op.inputs, states, strict=True)]

    def call(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Call an operator on local tensors; what its splits change of it is changed."""
        special = getattr(self, f"_{op.op}", None)
        if special is not None and any(label != "none" for label in choice.labels):
            return special(op, choice, tensors)
        if op.op in RESHAPES:
            whole = self.plan.space.graph.values[op.outputs[0]].shape
            shape = local_shape(whole, choice.outputs[0], self.mesh.ranks)
            return tensors[0].expand(shape) if op.op == "expand" else tensors[0].reshape(shape)
        return self.called(op, tensors)

    def called(self, op: GraphOperator, tensors: list[Tensor]) -> Any:
        """Call torch's function on local tensors and this device."""

        def filled(value: Any) -> Any:
            if isinstance(value, TensorArgument):
                return tensors[value.index]
            if isinstance(value, torch.device):
                return torch.device(self.mesh.mesh.device_type)
            return [filled(one) for one in value] if isinstance(value, list) else value

        return op.call(*filled(op.given[0]), **{name: filled(value) for name, value in op.given[1].items()})

    def _mean(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Tensor:
        """Return the mean of a part as its share of the whole mean."""
        mean: Tensor = self.called(op, tensors)
        for axis, state in enumerate(choice.inputs[0]):
            if state.startswith("S") and choice.outputs[0][axis] == PARTIAL:
                mean = mean / self.mesh.ranks[axis]
        return mean

    def _embedding(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Tensor:
        """Look up the rows that this rank has; zeros for the others."""
        table, index = tensors
        padding = int(op.argument("padding_idx", -1))
        if "vocabulary" not in choice.labels:
            return functional.embedding(index, table, padding if padding >= 0 else None)
        axis = choice.labels.index("vocabulary")
        rows = table.shape[0]
        own = index - rows * self.mesh.mesh.get_local_rank(axis)
        inside = (own >= 0) & (own < rows)
        pad = padding - rows * self.mesh.mesh.get_local_rank(axis)
        known = pad if padding >= 0 and 0 <= pad < rows else None
        found = functional.embedding(torch.where(inside, own, 0), table, known)
        return torch.where(inside[..., None], found, 0.0)

    def _cross_entropy_loss(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Tensor:
        """Return the loss of split rows or classes."""
        logits, target = tensors[:2]
        ignored, reduction = int(op.argument("ignore_index", -100)), int(op.argument("reduction", 1))
        if "vocabulary" in choice.labels:
            axis = choice.labels.index("vocabulary")
            rows: Tensor = VocabularyLoss.apply(self.mesh, axis, ignored, logits, target)  # type: ignore
        else:
            rows = functional.cross_entropy(logits, target, reduction="none", ignore_index=ignored)
        if reduction == 0:
            return rows
        count = (target != ignored).sum().to(rows.dtype)
        for axis, label in enumerate(choice.labels):
            if label == "rows" and reduction == 1:
                count = self.mesh.move_axis(count, axis, PARTIAL, REPLICATED)
        return rows.sum() / count if reduction == 1 else rows.sum()

    def _group_norm(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Normalize the groups of this rank's channels."""
        groups = self._own_groups(op, choice, "num_groups", "groups")
        return op.call(tensors[0], groups, *(*tensors[1:], None, None)[:2], float(op.argument("eps", 1e-5)))

    def _conv1d(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Convolve the groups of this rank."""
        groups = self._own_groups(op, choice, "groups", "groups")
        sizes = [op.argument(name) for name in ("stride", "padding", "dilation")]
        return op.call(*tensors[:2], (*tensors[2:], None)[0], *sizes, groups)

    _conv2d = _conv3d = _conv1d

    def _own_groups(self, op: GraphOperator, choice: OperatorChoice, name: str, label: str) -> int:
        ranks = (n for split, n in zip(choice.labels, self.mesh.ranks, strict=True) if split == label)
        return int(op.argument(name, 1)) // prod(ranks)

    def _scaled_dot_product_attention(
        self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]
    ) -> Any:
        """Attend with this rank's heads; of whole key-value heads it takes those of its queries."""
        q, k, v, *rest = tensors
        for axis, chosen in enumerate(choice.group_heads):
            if chosen:
                own = self.mesh.mesh.get_local_rank(axis) * k.shape[-3] // self.mesh.ranks[axis]
                k, v = (tensor.narrow(-3, own, 1) for tensor in (k, v))
        return self.called(op, [q, k, v, *rest])

    def _grouped_mm_fallback(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Multiply the rows of this rank's experts; zeros for the others."""
        if "experts" not in choice.labels:
            return self.called(op, tensors)
        rows, weights, ends = tensors
        first = self.mesh.mesh.get_local_rank(choice.labels.index("experts")) * weights.shape[0]
        start = int(ends[first - 1]) if first else 0
        stop = int(ends[first + weights.shape[0] - 1])
        own = (ends[first : first + weights.shape[0]] - start).to(ends.dtype)
        made = self.called(op, [rows[start:stop], weights, own])
        return functional.pad(made, (0, 0, start, rows.shape[0] - stop))
