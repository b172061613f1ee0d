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
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.nn import functional

from darts_parallel.graph._layouts import State, axis_moves, forward_state, gradient_state, local_shape
from darts_parallel.graph._rules import PARTIAL, REPLICATED
from darts_parallel.graph._space import OperatorChoice
from darts_parallel.graph.operators import INPUT, OUTPUT, RELAY, SOURCES, GraphOperator
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
        rank = self.mesh.get_local_rank(axis)
        if new == PARTIAL and old == REPLICATED:  # the first rank has the sum
            return local if rank == 0 else torch.zeros_like(local)
        if new == PARTIAL:
            parts = [torch.zeros_like(local)] * self.ranks[axis]
            parts[rank] = local
            return torch.cat(parts, int(old[1:]))
        own = self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[axis]]  # type: ignore
        whole = DTensor.from_local(local.contiguous(), own, [placement(old, reduction)], run_check=False)
        return whole.redistribute(placements=[placement(new, reduction)]).to_local().contiguous()

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
        source, targets = forward_state(made), list(map(forward_state, wanted))
        reached = {target: mesh.move(local, source, target) for target in dict.fromkeys(targets)}
        return tuple(reached[target].view_as(reached[target]) for target in targets)

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
            elif op.op in SOURCES:
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
        local = tensor if self.plan.space.graph.values[name].needs_grad else tensor.detach()
        tensors = FanMove.apply(self.mesh, made, wanted, local)  # type: ignore[no-untyped-call]
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

    def called(self, op: GraphOperator, tensors: list[Tensor], **changed: Any) -> Any:
        """Call torch's function on local tensors and this device, with other values of some arguments."""
        given = iter(tensors)

        def local(value: Any) -> Any:
            if isinstance(value, Node):
                return next(given) if isinstance(value.meta.get("val"), Tensor) else None
            return torch.device(self.mesh.mesh.device_type) if isinstance(value, torch.device) else value

        args, named = map_aggregate((op.node.args, op.node.kwargs), local)
        args = [changed.get(name, value) for name, value in zip(op.arguments, args, strict=False)]
        return op.node.target(*args, **named)

    def _first(self, axis: int, size: int) -> int:
        """Return where the part of this rank begins along an axis, for parts of a size."""
        return self.mesh.mesh.get_local_rank(axis) * size

    def _summed(self, local: Tensor, axis: int) -> Tensor:
        """Return the sum over an axis, whose gradient every rank has."""
        whole = (REPLICATED,) * len(self.mesh.ranks)
        partial = (*whole[:axis], PARTIAL, *whole[axis + 1 :])
        return FanMove.apply(self.mesh, partial, [whole], local)[0]  # type: ignore[no-untyped-call, no-any-return]

    def _mean(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Tensor:
        """Return the mean of a part as its share of the whole mean."""
        ends = zip(choice.inputs[0], choice.outputs[0], self.mesh.ranks, strict=True)
        share = prod(count for given, made, count in ends if given.startswith("S") and made == PARTIAL)
        mean: Tensor = self.called(op, tensors)
        return mean / share

    def _embedding(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Look up the rows that this rank has; zeros for the others."""
        if "vocabulary" not in choice.labels:
            return self.called(op, tensors)
        table, index = tensors
        rows, first = len(table), self._first(choice.labels.index("vocabulary"), len(table))
        inside = (index >= first) & (index < first + rows)
        padding = int(op.argument("padding_idx", -1)) - first
        known = padding if 0 <= padding < rows else None
        found = functional.embedding(torch.where(inside, index - first, 0), table, known)
        return torch.where(inside[..., None], found, 0.0)

    def _cross_entropy_loss(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Tensor:
        """Return the loss of split rows or classes."""
        logits, target = tensors[:2]
        ignored, reduction = int(op.argument("ignore_index", -100)), int(op.argument("reduction", 1))
        if "vocabulary" in choice.labels:
            rows = self._vocabulary_rows(choice.labels.index("vocabulary"), ignored, logits, target)
        else:
            rows = functional.cross_entropy(logits, target, reduction="none", ignore_index=ignored)
        if reduction == 0:
            return rows
        count = (target != ignored).sum().to(rows.dtype)
        for axis, label in enumerate(choice.labels):
            if label == "rows" and reduction == 1:
                count = self.mesh.move_axis(count, axis, PARTIAL, REPLICATED)
        return rows.sum() / count if reduction == 1 else rows.sum()

    def _vocabulary_rows(self, axis: int, ignored: int, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of rows whose classes are split: maxima, sums and target logits are reduced."""
        own = target - self._first(axis, logits.shape[1])
        inside = (own >= 0) & (own < logits.shape[1])
        top = self.mesh.move_axis(logits.detach().amax(1), axis, PARTIAL, REPLICATED, "max")
        total = self._summed(torch.exp(logits - top[:, None]).sum(1), axis)
        picked = logits.gather(1, torch.where(inside, own, 0)[:, None])[:, 0]
        picked = self._summed(torch.where(inside, picked, 0.0), axis)
        return torch.where(target != ignored, torch.log(total) + top - picked, 0.0)

    def _grouped(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Convolve or normalize the groups of this rank."""
        ranks = (n for label, n in zip(choice.labels, self.mesh.ranks, strict=True) if label == "groups")
        name = "num_groups" if op.op == "group_norm" else "groups"
        return self.called(op, tensors, **{name: int(op.argument(name, 1)) // prod(ranks)})

    _conv1d = _conv2d = _conv3d = _group_norm = _grouped

    def _scaled_dot_product_attention(
        self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]
    ) -> Any:
        """Attend with this rank's heads; of whole key-value heads it takes those of its queries."""
        q, k, v, *rest = tensors
        for axis, label in enumerate(choice.labels):
            if label == "heads" and not choice.inputs[1][axis].startswith("S"):
                own = self._first(axis, k.shape[-3]) // self.mesh.ranks[axis]
                k, v = (tensor.narrow(-3, own, 1) for tensor in (k, v))
        return self.called(op, [q, k, v, *rest])

    def _grouped_mm_fallback(self, op: GraphOperator, choice: OperatorChoice, tensors: list[Tensor]) -> Any:
        """Multiply the rows of this rank's experts; zeros for the others."""
        if "experts" not in choice.labels:
            return self.called(op, tensors)
        rows, weights, ends = tensors
        first = self._first(choice.labels.index("experts"), len(weights))
        bounds = functional.pad(ends, (1, 0))[first : first + len(weights) + 1]
        start, stop = int(bounds[0]), int(bounds[-1])
        made = self.called(op, [rows[start:stop], weights, (bounds[1:] - start).to(ends.dtype)])
        return functional.pad(made, (0, 0, start, len(rows) - stop))
