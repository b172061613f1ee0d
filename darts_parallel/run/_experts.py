"""A block's routed experts as modules, and the way of tokens to the ranks that hold them and back.

Top-k of a softmax, the chosen weights scaled to sum 1 (Mixtral, arXiv 2401.04088, section 2.1), dropless,
without a loss of its own for balance: every token passes its experts, so that the loss does not depend on
how ranks divide the batch.

An all-to-all over `ep` ranks brings every row to a rank that holds its expert, a gather over `etp` ranks
completes the rows of a split expert; a reduce-scatter and a second all-to-all bring the results back (MoE
Parallel Folding, arXiv 2504.14960, section 3.2). How many rows go where is known only when tokens are
routed, so ranks send unequal numbers, none included.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from darts_parallel.config import ModelConfig
from darts_parallel.run._layouts import Way, local, moved

Group = dist.ProcessGroup | None
"""Ranks that share something; None where there is one rank."""


def _gathered(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Gather rows in the order of the ranks; padded on the way, since gloo gathers equal shapes."""
    longest = max(counts)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _own_sum(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    total = rows.contiguous().clone()
    dist.all_reduce(total, group=group)
    return torch.split(total, counts)[dist.get_rank(group)].contiguous()


class Route:
    """The way of one micro-batch's rows of a layer to the experts that this rank holds, and back.

    Making it is collective over the ranks of both groups.

    Args:
        counts: Rows that this rank sends to each expert of the layer, shape `(E,)`.
        between: Ranks that share the experts of the layer among them (`ep`).
        within: Ranks that share each expert among them (`etp`).
    """

    def __init__(self, counts: Tensor, between: Group, within: Group) -> None:
        self.between = between
        self.within = within
        received = sent = counts.reshape(between.size() if between else 1, -1)
        if between is not None:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent.contiguous(), group=between)
        self._sent: list[int] = sent.sum(1).tolist()
        self._received: list[int] = received.sum(1).tolist()
        parts = [received]
        if within is not None:
            parts = [torch.empty_like(received) for _ in range(within.size())]
            dist.all_gather(parts, received, group=within)
        self._gathered: list[int] = [int(part.sum()) for part in parts]
        runs = torch.cat(parts)
        """Rows by sending rank and expert, in the order of arrival."""
        # from the order of arrival into that of the experts, whose rows then lie side by side
        experts = torch.arange(runs.shape[1], device=runs.device).repeat(len(runs))
        self._order = experts.repeat_interleave(runs.flatten()).argsort(stable=True)
        self.counts: list[int] = runs.sum(0).tolist()
        """Rows of each expert that this rank holds."""

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send rows in the order of the layer's experts; return rows in the order of this rank's experts."""
        rows = self._exchanged(rows, self._sent, self._received)
        if self.within is not None:
            # gradients are summed, since every rank computes with all rows
            rows = moved(rows, *self._ways_within(_gathered, _own_sum))
        return rows[self._order]

    def back(self, rows: Tensor) -> Tensor:
        """Send results back, partial results of a split expert summed."""
        rows = rows[self._order.argsort()]
        if self.within is not None:
            rows = moved(rows, *self._ways_within(_own_sum, _gathered))
        return self._exchanged(rows, self._received, self._sent)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self.between is None:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        return all_to_all_single(  # type: ignore[no-untyped-call]
            out, rows.contiguous(), received, sent, self.between
        )

    def _ways_within(self, *ways: Callable[..., Tensor]) -> Iterator[Way]:
        return (partial(way, counts=self._gathered, group=self.within) for way in ways)


class Mlp(nn.Module):
    """Two projections around GELU, or three around SiLU where gated (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, width: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = width or config.mlp_width
        bias = bias and config.linear_bias
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.gate = nn.Linear(hidden, inner, bias=bias) if config.gated_mlp else None
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, state: Tensor) -> Tensor:
        """Map states of shape `(B, T, H)` to the same."""
        inner = self.projected(self.up, state)
        if self.gate is None:
            inner = functional.gelu(inner)
        else:
            inner = functional.silu(self.projected(self.gate, state)) * inner
        return self.projected(self.down, inner)

    def projected(self, projection: nn.Linear, state: Tensor) -> Tensor:
        """Apply one of the projections."""
        return projection(state)


class Expert(Mlp):
    """One expert, or this rank's part of its inner features: it maps rows `(N, H)` to partial sums."""

    def projected(self, projection: nn.Linear, state: Tensor) -> Tensor:
        """Apply this rank's part of a projection."""
        return functional.linear(state, local(projection.weight))

    def split(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the inner features, in place; every rank holds the whole before."""
        for name, dim in (("up", 0), ("gate", 0), ("down", 1)):
            linear = getattr(self, name)
            if linear is not None:
                whole = linear.weight.detach()
                divided = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
                linear.weight = nn.Parameter(divided)


class ExpertBank(nn.Module):
    """The experts of a layer that this rank holds, by their number in the layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size
        self.each = nn.ModuleDict()
        for number in range(config.num_experts or 0):
            self.each[str(number)] = Expert(config, width, bias=False)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Map rows of shape `(N, H)`, `counts` of them for each expert in order, to the same."""
        parts = torch.split(rows, counts)
        pairs = zip(self.each.values(), parts, strict=True)
        return torch.cat([expert(part) for expert, part in pairs])

    def keep(self, mesh: DeviceMesh) -> None:
        """Forget the experts of other ranks, and the parts of those that are split, in place.

        Args:
            mesh: With the dimensions `ep` and `tp`, which splits an expert.
        """
        ranks = mesh["ep"].size()
        rank = mesh["ep"].get_local_rank()
        first = rank * len(self.each) // ranks
        end = (rank + 1) * len(self.each) // ranks
        mine = list(self.each)[first:end]
        self.each = nn.ModuleDict({number: self.each[number] for number in mine})
        if mesh["tp"].size() > 1:
            for expert in self.each.values():
                assert isinstance(expert, Expert)
                expert.split(mesh["tp"])


def _group_of(mesh: DeviceMesh) -> Group:
    """Return the group of a one-dimensional mesh; None where it is one rank."""
    return mesh.get_group() if mesh.size() > 1 else None


class Mixture(nn.Module):
    """Stands in the place of a block's MLP: a router, its experts, and shared ones next to them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.top_k = config.moe_router_topk
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=config.moe_router_bias)
        self.bank = ExpertBank(config)
        width = config.moe_shared_expert_intermediate_size
        self.shared = Mlp(config, width) if width else None
        gated = self.shared is not None and config.moe_shared_expert_gate
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False) if gated else None
        self.groups: tuple[Group, Group] = (None, None)

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts and remember the groups that have the others."""
        self.bank.keep(mesh)
        self.groups = (_group_of(mesh["ep"]), _group_of(mesh["tp"]))

    def forward(self, state: Tensor) -> Tensor:
        """Map states of shape `(B, t, H)` to the same; every rank of a stage has tokens of its own."""
        scores: Tensor = self.router(state).softmax(-1).flatten(0, 1)
        weights, chosen = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = state.flatten(0, 1)
        of_token = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])
        route = Route(counts, *self.groups)
        rows = route.to_experts(tokens[of_token])
        rows = route.back(self.bank(rows, route.counts))
        rows = (rows * weights.flatten()[order, None]).to(tokens.dtype)
        result = torch.zeros_like(tokens).index_add(0, of_token, rows).view_as(state)
        if self.shared is None:
            return result
        shared: Tensor = self.shared(state)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(state)) * shared
        return result + shared


def expert_bank(layer: nn.Module) -> ExpertBank | None:
    """Return the experts inside a layer; None where it is dense."""
    banks = (module for module in layer.modules() if isinstance(module, ExpertBank))
    return next(banks, None)
