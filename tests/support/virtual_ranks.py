"""One process that rounds as the ranks of a plan that sends few bits do: the oracle of such plans.

Sums of blocks are computed as their tensor-parallel ranks' partial sums and rounded in both hops;
gradients of blocks are computed for every data-parallel rank and pass the same two hops, with what
was kept back.
"""

from dataclasses import dataclass, field
from math import lcm
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.config import LOSSLESS
from darts_parallel.cost import BLOCK
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem
from darts_parallel.run import _verify
from darts_parallel.run._experts import Mlp
from darts_parallel.run._lossy import padded, rounded
from darts_parallel.run._transformer import Block
from darts_parallel.run._verify import Reference, StepComparison, verify
from darts_parallel.run.engine import Engine, part_of_rank

COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate")
ROWS = ("attention.out", "mlp.down")


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
class VirtualReference(Reference):
    """The whole model on one device, with the rounding of a plan's ranks."""

    synchronised: dict[str, VirtualGradients] = field(default_factory=dict)
    """Blocks whose gradients travel at few bits, by name."""

    @classmethod
    def of(cls, problem: Problem, seed: int, device: torch.device, plan: Plan) -> Reference:
        """Build the model, which rounds as the ranks of a plan do."""
        found = cls.build(problem, seed, device)
        assert isinstance(found, VirtualReference)
        for (name, layer), strategy in zip(found.layers.items(), plan.layers, strict=False):
            if not isinstance(layer, Block):
                continue
            if strategy.dp > 1 and strategy.grad_comm_bits < LOSSLESS:
                found.synchronised[name] = VirtualGradients(layer, strategy)
            if strategy.tp > 1 and strategy.tp_comm_bits < LOSSLESS:
                _round_sums(layer, strategy)
        return found

    def forward_backward(self, batch: Tensor, num_micro_batches: int) -> float:
        """Return the mean loss, of the finest data-parallel ranks one after the other."""
        finest = lcm(1, *(own.strategy.dp for own in self.synchronised.values()))
        by_rank = []
        total = 0.0
        for index in range(finest):
            mine = part_of_rank(batch, num_micro_batches, finest, index)
            total += super().forward_backward(mine, num_micro_batches)
            by_rank.append({name: own.take() for name, own in self.synchronised.items()})
        for name, own in self.synchronised.items():
            own.reduce([gradients[name] for gradients in by_rank])
        return total


def rounded_alike(problem: Problem, plan: Plan, seed: int) -> StepComparison:
    """A job: a plan of few bits against one process that rounds as its ranks do."""
    engine = Engine(problem, plan, seed, torch.device("cpu"))

    def build(problem: Problem, seed: int, device: torch.device) -> Reference:
        return VirtualReference.of(problem, seed, device, plan)

    _verify.Reference = SimpleNamespace(build=build)  # type: ignore[assignment,misc]
    try:
        return verify(engine, seed)
    finally:
        _verify.Reference = Reference  # type: ignore[misc]
