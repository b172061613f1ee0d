"""One process that rounds as the ranks of a plan do: the reference of plans that send few bits.

Sums of blocks are computed as their tensor-parallel ranks' partial sums and rounded in both hops; gradients
of blocks are computed for every data-parallel rank and pass the same two hops, with what was kept back.
"""

from dataclasses import dataclass, field
from math import lcm

import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.cost.collectives import BLOCK, LOSSLESS
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.run.loss import part_of_rank
from darts_parallel.run.lossy.collectives import padded, rounded
from darts_parallel.run.transformer import Block, Mlp

COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
ROWS = ("attention.out", "mlp.down")


def few_bit_sums(strategy: LayerStrategy) -> bool:
    """Whether the layer's tensor-parallel sums are lossy."""
    return strategy.tp > 1 and strategy.tp_comm_bits < LOSSLESS


def few_bit_gradients(strategy: LayerStrategy) -> bool:
    """Whether the layer's gradient synchronisation is lossy."""
    return strategy.dp > 1 and strategy.grad_comm_bits < LOSSLESS


def virtual_sum(partials: Tensor, bits: int) -> Tensor:
    """What ranks hold after an all-reduce at `bits` of partial sums `(ranks, ...)`; straight-through."""
    exact = partials.sum(0)
    held = partials.detach().flatten(1)
    rows = functional.pad(held, (0, padded(held.shape[1], len(held)) - held.shape[1]))
    twice = rounded(rounded(rows, bits).sum(0, keepdim=True), bits)[0, : held.shape[1]]
    return exact + (twice.view_as(exact) - exact).detach()


class VirtualRows(nn.Linear):
    """A product divided by rows over virtual ranks whose partial sums travel at few bits.

    Args:
        whole: The product; its parameters are shared.
        ranks: Tensor-parallel degree.
        bits: Of the sums.
    """

    def __init__(self, whole: nn.Linear, ranks: int, bits: int) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, device="meta")
        self.weight, self.bias = whole.weight, whole.bias
        self.ranks, self.bits = ranks, bits

    def forward(self, state: Tensor) -> Tensor:
        """Shape `(B, T, in)` to `(B, T, out)`."""
        parts = zip(state.chunk(self.ranks, -1), self.weight.chunk(self.ranks, 1), strict=True)
        partials = torch.stack([functional.linear(part, weight) for part, weight in parts])
        if self.bias is not None:  # each rank adds its share of the bias before the sum
            partials = partials + self.bias / self.ranks
        return virtual_sum(partials, self.bits)


@dataclass
class VirtualGradients:
    """The gradient synchronisation of one block: what its ranks send, deliver and keep back.

    Attributes:
        layer: The block, whole.
        strategy: Of the block.
        kept: What rounding has kept back, by tensor-parallel rank: of every data-parallel rank `(dp, N)`, and
            of the owners `(N,)`.
    """

    layer: nn.Module
    strategy: LayerStrategy
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def reduce(self, by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of the ranks' gradients as it is delivered.

        Args:
            by_rank: Gradients of every data-parallel rank, by the names of the layer's parameters.
        """
        strategy, bits = self.strategy, self.strategy.grad_comm_bits
        total = {name: torch.zeros_like(gradient) for name, gradient in by_rank[0].items()}
        divided = [name for name in total if strategy.tp > 1 and self._divided(name) is not None]
        whole = [name for name in total if name not in divided]
        for place in range(strategy.tp):
            # a block of numbers holds either divided or whole ones, as on the real ranks
            ends, parts = [0], []
            for names in (divided, whole):
                flat = torch.stack([self._flat(own, names, place) for own in by_rank])
                parts.append(functional.pad(flat, (0, -flat.shape[1] % BLOCK)))
                ends.append(ends[-1] + parts[-1].shape[1])
            rows = torch.cat(parts, 1)
            rows = functional.pad(rows, (0, padded(rows.shape[1], strategy.dp) - rows.shape[1]))
            unsent, undelivered = self.kept.get(place, (torch.zeros_like(rows), torch.zeros_like(rows[0])))
            wanted = rows + unsent
            sent = rounded(wanted, bits)
            owned = sent.sum(0) + undelivered
            delivered = rounded(owned.unsqueeze(0), bits)[0]
            self.kept[place] = wanted - sent, owned - delivered
            for names, first in zip((divided, whole), ends, strict=False):
                for name in names:
                    part = self._part(name, total[name], place)
                    part.copy_(delivered[first : first + part.numel()].view(part.shape))
                    first += part.numel()
        return total

    def _flat(self, gradients: dict[str, Tensor], names: list[str], place: int) -> Tensor:
        """What tensor-parallel rank `place` holds of some gradients, side by side, shape `(N,)`."""
        parts = [self._part(name, gradients[name], place).reshape(-1) for name in names]
        return torch.cat([torch.zeros(0), *parts])

    def _divided(self, name: str) -> int | None:
        """Axis along which a parameter is divided over tensor-parallel ranks; None where each holds all."""
        owner = name.rpartition(".")[0]
        return 0 if owner in COLUMNS else 1 if owner in ROWS and name.endswith("weight") else None

    def _part(self, name: str, gradient: Tensor, place: int) -> Tensor:
        """What tensor-parallel rank `place` holds of a parameter's gradient, as a view."""
        axis = self._divided(name)
        return gradient if axis is None else gradient.chunk(self.strategy.tp, axis)[place]


@dataclass
class VirtualRanks:
    """The blocks of a plan that send few bits, in the layers of a whole model.

    Attributes:
        plan: Checked for execution.
        synchronised: Blocks whose gradients travel at few bits, by name.
    """

    plan: Plan
    synchronised: dict[str, VirtualGradients]

    @staticmethod
    def of(plan: Plan, layers: dict[str, nn.Module]) -> "VirtualRanks":
        """Make the layers of a whole model round as the plan's ranks do."""
        synchronised = {}
        for (name, layer), strategy in zip(layers.items(), plan.layers, strict=False):
            if not isinstance(layer, Block):
                continue
            if few_bit_gradients(strategy):
                synchronised[name] = VirtualGradients(layer, strategy)
            if few_bit_sums(strategy):
                tp, bits = strategy.tp, strategy.tp_comm_bits
                layer.attention.out = VirtualRows(layer.attention.out, tp, bits)
                assert isinstance(layer.mlp, Mlp)  # experts send whole numbers
                layer.mlp.down = VirtualRows(layer.mlp.down, tp, bits)
        return VirtualRanks(plan, synchronised)

    def groups(self, batch: Tensor) -> list[Tensor]:
        """The global batch as the finest data-parallel ranks read it."""
        finest = lcm(1, *(own.strategy.dp for own in self.synchronised.values()))
        return [part_of_rank(batch, self.plan.num_micro_batches, finest, i) for i in range(finest)]

    def reduce(self, by_group: list[dict[str, dict[str, Tensor]]]) -> None:
        """Put the delivered gradients of the lossy blocks in the place of the exact ones.

        Args:
            by_group: Gradients of every finest group, by block and parameter.
        """
        for name, own in self.synchronised.items():
            each = len(by_group) // own.strategy.dp
            by_rank = [
                {
                    parameter: torch.stack([group[name][parameter] for group in by_group[first:][:each]]).sum(
                        0
                    )
                    for parameter in by_group[0][name]
                }
                for first in range(0, len(by_group), each)
            ]
            delivered = own.reduce(by_rank)
            for parameter, tensor in own.layer.named_parameters():
                tensor.grad = delivered[parameter]
