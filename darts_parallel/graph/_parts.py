"""Operate on a rank's parts of tensors: `execute` writes these functions into the file of a plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn import functional

from darts_parallel.graph._states import State, axis_moves, forward_state, gradient_state


def placement(state: str, reduction: str = "sum") -> Placement:
    """Return DTensor's placement of a state."""
    if state == "P":
        return Partial(reduction)
    if state.startswith("S"):
        return Shard(int(state[1:]))
    return Replicate()


def distribute(
    tensors: Mapping[str, Any],
    states: Mapping[str, State],
    mesh: DeviceMesh,
) -> dict[str, Any]:
    """Split whole tensors over the mesh as their states say."""
    found = {}
    for name, state in states.items():
        placements = [placement(one) for one in state]
        tensor = tensors[name]
        # libraries of collectives send no complex numbers: every rank takes its own part
        source = None if tensor.is_complex() else 0
        found[name] = distribute_tensor(tensor, mesh, placements, src_data_rank=source)
    return found


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and other tensors of a module by name."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found |= dict(module.named_buffers())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def put(module: nn.Module, name: str, tensor: Any) -> None:
    """Give a module's tensor of a name another value."""
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, tensor)


def split_tensors(
    module: nn.Module, states: Mapping[str, State], mesh: DeviceMesh
) -> dict[str, Any]:
    """Split a module's tensors in place, and return those of the states; tied parameters stay tied."""
    tensors = tensors_of(module)
    weights = distribute(tensors, states, mesh)
    split = {}
    for name, part in weights.items():
        whole = tensors[name]
        if isinstance(whole, nn.Parameter):
            weights[name] = nn.Parameter(part, whole.requires_grad)
        split[id(whole)] = weights[name]
    for name, whole in tensors.items():
        if id(whole) in split:
            put(module, name, split[id(whole)])
    return weights


def enter(mesh: DeviceMesh, tensor: Tensor, state: State) -> DTensor:
    """Return an input in a state; a plain tensor is whole on every rank."""
    if not isinstance(tensor, DTensor):
        whole = [Replicate()] * mesh.ndim
        tensor = DTensor.from_local(tensor, mesh, whole, run_check=False)
    return tensor.redistribute(placements=[placement(one) for one in state])


def move_axis(
    mesh: DeviceMesh,
    local: Tensor,
    axis: int,
    old: str,
    new: str,
    reduction: str = "sum",
    wait: bool = True,
) -> Tensor:
    """Bring a local tensor from one placement of an axis to another, maybe without waiting for it."""
    if old == new:
        return local
    if local.is_complex():  # libraries of collectives know pairs of numbers
        pairs = move_axis(mesh, torch.view_as_real(local), axis, old, new, reduction, wait)
        return torch.view_as_complex(pairs)
    rank = mesh.get_local_rank(axis)
    if new == "P" and old == "R":  # the first rank has the sum
        return local if rank == 0 else torch.zeros_like(local)
    if new == "P":
        parts = [torch.zeros_like(local)] * mesh.size(axis)
        parts[rank] = local
        return torch.cat(parts, int(old[1:]))
    group = mesh
    if mesh.ndim > 1:
        group = mesh[mesh.mesh_dim_names[axis]]  # type: ignore[index]
    placements = [placement(old, reduction)]
    whole = DTensor.from_local(local.contiguous(), group, placements, run_check=False)
    wanted = [placement(new, reduction)]
    moved = whole.redistribute(placements=wanted, async_op=not wait)
    return moved.to_local().contiguous()


def move(
    mesh: DeviceMesh,
    local: Tensor,
    source: State,
    target: State,
) -> Tensor:
    """Bring a local tensor from one placement to another, axis by axis."""
    for axis, old, new in axis_moves(source, target):
        local = move_axis(mesh, local, axis, old, new)
    return local


class Edges(torch.autograd.Function):
    """Bring a tensor to the states of its consumers, and their gradients back to its own."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: DeviceMesh,
        made: State,
        wanted: Sequence[State],
        local: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a local tensor for every wanted state; equal placements are reached once."""
        ctx.mesh = mesh
        ctx.made = made
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        reached: dict[State, Tensor] = {}
        found = []
        for state in wanted:
            target = forward_state(state)
            if target not in reached:
                reached[target] = move(mesh, local, forward_state(made), target)
            found.append(reached[target].view_as(reached[target]))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients of equal placement, bring each sum to the producer's, and add them."""
        sums: dict[State, Tensor] = {}
        for state, gradient in zip(ctx.wanted, gradients, strict=True):
            if gradient is not None:
                key = gradient_state(state)
                sums[key] = sums[key] + gradient if key in sums else gradient
        total = None
        for key, gradient in sums.items():
            moved = move(ctx.mesh, gradient, key, gradient_state(ctx.made))
            total = moved if total is None else total + moved
        return None, None, None, total


def edges(mesh: DeviceMesh, local: Tensor, made: State, *wanted: State) -> tuple[Tensor, ...]:
    """Redistribute a tensor to every state that its consumers want."""
    return Edges.apply(mesh, made, wanted, local)  # type: ignore[no-untyped-call]


class Products(torch.autograd.Function):
    """Multiply an input of which a rank keeps a slice; backward gathers it next to the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any, mesh: DeviceMesh, axes: Sequence[int], x: Tensor, *pairs: Any
    ) -> tuple[Tensor, ...]:
        """Return the products with pairs of a weight and its bias, which may be None."""
        weights = pairs[::2]
        biases = pairs[1::2]
        part = x.flatten()
        for axis in reversed(axes):
            slices = part.chunk(mesh.size(axis))
            part = slices[mesh.get_local_rank(axis)]
        ctx.mesh = mesh
        ctx.axes = axes
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(part.clone(), *weights)
        both = zip(weights, biases, strict=True)
        return tuple(functional.linear(x, weight, bias) for weight, bias in both)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gather the input once for the gradients of all weights."""
        part, *weights = ctx.saved_tensors
        for axis in ctx.axes:
            part = move_axis(ctx.mesh, part, axis, "S0", "R", wait=False)
        pairs = zip(gradients, weights, strict=True)
        given = sum(gradient @ weight for gradient, weight in pairs)
        rows = part.view(-1, weights[0].shape[1])
        found: list[Any] = [None, None, given]
        for gradient, biased in zip(gradients, ctx.biased, strict=True):
            flat = gradient.flatten(0, -2)
            found.append(flat.T @ rows)
            found.append(flat.sum(0) if biased else None)
        return tuple(found)


def own_rows(
    mesh: DeviceMesh,
    axis: int,
    table: Tensor,
    index: Tensor,
    padding: int = -1,
) -> Tensor:
    """Look up the rows of a table that this rank has; zeros for the others."""
    rows = len(table)
    first = mesh.get_local_rank(axis) * rows
    inside = (index >= first) & (index < first + rows)
    known = padding - first if 0 <= padding - first < rows else None
    own = torch.where(inside, index - first, 0)
    found = functional.embedding(own, table, known)
    return torch.where(inside[..., None], found, 0.0)


def split_cross_entropy(
    mesh: DeviceMesh,
    labels: Sequence[str],
    logits: Tensor,
    target: Tensor,
    ignored: int,
    reduction: int,
) -> Tensor:
    """Return the loss of split rows or classes; reductions are torch's: 0 none, 1 mean, 2 sum."""
    if "vocabulary" in labels:
        rows = vocabulary_losses(mesh, labels.index("vocabulary"), logits, target, ignored)
    else:
        rows = functional.cross_entropy(logits, target, reduction="none", ignore_index=ignored)
    if reduction == 0:
        return rows
    if reduction == 2:
        return rows.sum()
    count = (target != ignored).sum().to(rows.dtype)
    for axis, label in enumerate(labels):
        if label == "rows":
            count = move_axis(mesh, count, axis, "P", "R")
    return rows.sum() / count


def summed(
    mesh: DeviceMesh,
    local: Tensor,
    axis: int,
) -> Tensor:
    """Return the sum over an axis, whose gradient every rank has."""
    whole = ("R",) * mesh.ndim
    made = list(whole)
    made[axis] = "P"
    return edges(mesh, local, tuple(made), whole)[0]


def vocabulary_losses(
    mesh: DeviceMesh,
    axis: int,
    logits: Tensor,
    target: Tensor,
    ignored: int,
) -> Tensor:
    """Return the loss of every row from a rank's classes: maxima, sums and target logits are reduced."""
    own = target - mesh.get_local_rank(axis) * logits.shape[1]
    inside = (own >= 0) & (own < logits.shape[1])
    top = logits.detach().amax(1)
    top = move_axis(mesh, top, axis, "P", "R", "max")
    total = torch.exp(logits - top[:, None]).sum(1)
    total = summed(mesh, total, axis)
    index = torch.where(inside, own, 0)
    picked = logits.gather(1, index[:, None])[:, 0]
    picked = summed(mesh, torch.where(inside, picked, 0.0), axis)
    losses = torch.log(total) + top - picked
    return torch.where(target != ignored, losses, 0.0)


def own_head(
    mesh: DeviceMesh,
    axis: int,
    heads: Tensor,
) -> Tensor:
    """Return the key-value head of this rank's queries out of all."""
    first = mesh.get_local_rank(axis) * heads.shape[-3]
    return heads.narrow(-3, first // mesh.size(axis), 1)


def own_experts(
    mesh: DeviceMesh,
    axis: int,
    product: Callable[..., Tensor],
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
) -> Tensor:
    """Multiply the rows of this rank's experts; zeros for the others."""
    first = mesh.get_local_rank(axis) * len(weights)
    bounds = functional.pad(ends, (1, 0))
    bounds = bounds[first : first + len(weights) + 1]
    start = int(bounds[0])
    stop = int(bounds[-1])
    own_ends = (bounds[1:] - start).to(ends.dtype)
    made = product(rows[start:stop], weights, own_ends)
    after = len(rows) - stop
    return functional.pad(made, (0, 0, start, after))
