"""A relaxed placement: weights of the node orders, which the logits learn with everything else.

Tables of one pipeline degree that differ in the order of the nodes share all costs of stage kinds. Under
weights of the orders, a stage is of each kind with the weight of the orders that put it there, and its
seconds and its memory's limit are expectations over them: linear in the weights, exact at one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.table import CostTable


@dataclass(frozen=True)
class NodeOrders:
    """What tables differ in, N orders."""

    tables: tuple[int, ...]
    """Number of every order's table."""
    stage_kind: Tensor
    """Kind of every stage, shape `(N, K)`."""
    boundary_kind: Tensor
    """Kind of every boundary, shape `(N, K - 1)`."""
    capacity: Tensor
    """Bytes, shape `(N, pp)`."""
    once: Tensor
    """Seconds per iteration whatever the stage, shape `(N, O, L, C)`."""

    @staticmethod
    def stack(tables: Sequence[CostTable], numbers: Sequence[int]) -> "NodeOrders":
        """The orders of the tables `numbers`, which share everything else."""
        own = [tables[number] for number in numbers]
        return NodeOrders(
            tables=tuple(numbers),
            stage_kind=torch.stack([table.stage_kind for table in own]),
            boundary_kind=torch.stack([table.boundary_kind for table in own]),
            capacity=torch.stack([table.capacity for table in own]),
            once=torch.stack([table.once for table in own]),
        )

    def select(self, outer: Tensor) -> "NodeOrders":
        """The same with fewer outer choices."""
        return replace(self, once=self.once[:, outer])


@dataclass(frozen=True)
class Placement:
    """Weights of node orders for R relaxed plans of O outer choices."""

    weights: Tensor
    """Summing to 1 over the orders, shape `(O, R, N)`."""
    orders: NodeOrders

    def stage_kinds(self, count: int) -> Tensor:
        """Weight of every kind for every stage, shape `(O, R, K, count)`."""
        kinds = torch.nn.functional.one_hot(self.orders.stage_kind, count).to(self.weights.dtype)
        return torch.einsum("orn,nkq->orkq", self.weights, kinds)

    def boundary_kinds(self, count: int) -> Tensor:
        """Weight of every kind for every boundary, shape `(O, R, K - 1, count)`."""
        kinds = torch.nn.functional.one_hot(self.orders.boundary_kind, count).to(self.weights.dtype)
        return torch.einsum("orn,nkp->orkp", self.weights, kinds)

    def capacity(self) -> Tensor:
        """Expected bytes of a device of every stage, shape `(O, R, pp)`."""
        return self.weights @ self.orders.capacity

    def once(self, choices: Tensor) -> Tensor:
        """Expected seconds that are paid once, shape `(O, R)`, for weights `(O, R, L, C)` of the choices."""
        return torch.einsum("orlc,nolc,orn->or", choices, self.orders.once, self.weights)


def on_stages(values: Tensor, kinds: Tensor) -> Tensor:
    """Values by kind, read at the kinds of the stages: `(O, R, L, Q)` to `(O, R, L, K)`.

    Args:
        kinds: Kind of every stage, `(K,)`, or weights of the kinds, `(O, R, K, Q)`.
    """
    if kinds.dim() == 1:
        return values[..., kinds]
    return torch.einsum("orlq,orkq->orlk", values.expand(*kinds.shape[:2], -1, -1), kinds)


def alike(tables: Sequence[CostTable]) -> list[list[int]]:
    """Numbers of the tables that differ in the order of the nodes alone, together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, table in enumerate(tables):
        counts = tuple(table.num_micro_batches.tolist())
        key = (table.pp, table.virtual_stages, table.cp, counts, table.choices)
        groups.setdefault(key, []).append(number)
    return list(groups.values())
