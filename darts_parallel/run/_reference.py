"""One process that trains the whole model, and rounds as the ranks of a plan do that send few bits.

Sums of blocks are computed as their tensor-parallel ranks' partial sums and rounded in both hops; gradients
of blocks are computed for every data-parallel rank and pass the same two hops, with what was kept back.
"""

from dataclasses import dataclass, field
from math import lcm

import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.cost import BLOCK, LOSSLESS
from darts_parallel.plan import LayerStrategy, Plan
from darts_parallel.problem import Problem
from darts_parallel.run._chunks import LOSS
from darts_parallel.run._experts import Mlp
from darts_parallel.run._loss import part_of_rank
from darts_parallel.run._lossy import padded, rounded
from darts_parallel.run._transformer import Block, build_layer, parameter_names
from darts_parallel.run.engine import make_optimizer

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
        """Map states `(B, T, in)` to `(B, T, out)`."""
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
            taken[name], parameter.grad = parameter.grad, None
        return taken

    def reduce(self, finest: list[dict[str, Tensor]]) -> None:
        """Set the sum of the ranks' gradients as it is delivered.

        Args:
            finest: Gradients of the finest data-parallel ranks by parameter; several may be one rank here.
        """
        strategy, each = self.strategy, len(finest) // self.strategy.dp
        ranks = [
            {name: sum((own[name] for own in finest[first + 1 : first + each]), finest[first][name])
             for name in finest[0]}
            for first in range(0, len(finest), each)
        ]  # fmt: skip
        total = {name: torch.zeros_like(gradient) for name, gradient in finest[0].items()}
        divided = [name for name in total if strategy.tp > 1 and _divided_axis(name) is not None]
        whole = [name for name in total if name not in divided]
        for place in range(strategy.tp):
            # a block of numbers holds either divided or whole ones, as on the real ranks
            groups = (divided, whole)
            parts = [torch.stack([self._flat(own, names, place) for own in ranks]) for names in groups]
            delivered = self._delivered(torch.cat(parts, 1), place)
            sizes = [part.shape[1] for part in parts]
            for names, flat in zip(groups, torch.split(delivered, sizes), strict=True):
                first = 0
                for name in names:
                    part = self._part(name, total[name], place)
                    part.copy_(flat[first : first + part.numel()].view(part.shape))
                    first += part.numel()
        for name, parameter in self.layer.named_parameters():
            parameter.grad = total[name]

    def _delivered(self, rows: Tensor, place: int) -> Tensor:
        """Return what both hops leave of the ranks' sum `(N,)`, and keep back the rest for the next time."""
        size, bits = rows.shape[1], self.strategy.grad_comm_bits
        rows = functional.pad(rows, (0, padded(size, len(rows)) - size))
        unsent, undelivered = self.kept.get(place, (torch.zeros_like(rows), torch.zeros_like(rows[0])))
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
    return 0 if owner in COLUMNS else 1 if owner in ROWS and name.endswith("weight") else None


@dataclass
class Reference:
    """The whole model on one device; tied tables are one parameter."""

    problem: Problem
    layers: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    synchronised: dict[str, VirtualGradients]
    """Blocks whose gradients travel at few bits, by name."""

    @staticmethod
    def build(problem: Problem, seed: int, device: torch.device, plan: Plan | None = None) -> "Reference":
        """Build the model with the weights that `seed` gives every process.

        Args:
            problem: Model and job.
            seed: Seed of the weights.
            device: Where it trains.
            plan: Whose ranks' rounding is repeated; None rounds nothing.
        """
        config = problem.model.config
        layers = {
            spec.name: build_layer(
                config, problem.training.fused_attention, spec.name, config.vocab_size, seed
            ).to(device)
            for spec in problem.model.layers
            if spec.name != LOSS
        }
        if config.tie_embeddings:
            layers["head"].output.weight = layers["embedding"].table.weight  # type: ignore[union-attr]
        parameters = list(dict.fromkeys(p for layer in layers.values() for p in layer.parameters()))
        synchronised = {}
        for (name, layer), strategy in zip(layers.items(), plan.layers if plan else (), strict=False):
            if isinstance(layer, Block) and few_bit_gradients(strategy):
                synchronised[name] = VirtualGradients(layer, strategy)
            if isinstance(layer, Block) and few_bit_sums(strategy):
                tp, bits = strategy.tp, strategy.tp_comm_bits
                layer.attention.out = VirtualRows(layer.attention.out, tp, bits)
                assert isinstance(layer.mlp, Mlp)  # experts send whole numbers
                layer.mlp.down = VirtualRows(layer.mlp.down, tp, bits)
        return Reference(problem, layers, make_optimizer(problem, parameters), synchronised)

    def forward_backward(self, batch: Tensor, num_micro_batches: int) -> float:
        """Return the mean loss, nats; gradients stay on the parameters.

        Args:
            batch: Tokens, shape `(B, T + 1)`.
            num_micro_batches: Parts that are computed one after the other.
        """
        batch, total = batch.to(next(self.layers["head"].parameters()).device), 0.0
        # the finest data-parallel ranks, one after the other
        finest = lcm(1, *(own.strategy.dp for own in self.synchronised.values()))
        by_rank = []
        for index in range(finest):
            for part in part_of_rank(batch, num_micro_batches, finest, index).chunk(num_micro_batches):
                state = part[:, :-1]
                for layer in self.layers.values():
                    state = layer(state)
                loss = functional.cross_entropy(state.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
                loss = loss / self.problem.tokens_per_iteration
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            by_rank.append({name: own.take() for name, own in self.synchronised.items()})
        for name, own in self.synchronised.items():
            own.reduce([gradients[name] for gradients in by_rank])
        return total

    def update(self) -> None:
        """Make the optimizer step; gradients are forgotten."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the names that the plan's layers use; a tied table has two."""
        result = {}
        for name, layer in self.layers.items():
            for full, parameter in parameter_names(layer, name):
                assert parameter.grad is not None
                result[full] = parameter.grad
        return result
