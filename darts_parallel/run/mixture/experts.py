"""A block's routed experts as modules: router, experts, shared experts.

Top-k of a softmax, the chosen weights scaled to sum 1 (Mixtral, arXiv 2401.04088, section 2.1), dropless,
without a loss of its own for balance: every token passes its experts, so that the loss does not depend on
how ranks divide the batch.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from darts_parallel.config.model import ModelConfig
from darts_parallel.run.mixture.exchange import ExpertGroups, Route
from darts_parallel.run.units import local

ALONE = ExpertGroups(None, None)


class Expert(nn.Module):
    """One expert: an MLP of `width` inner features, or this rank's part of them."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.up = nn.Linear(hidden, width, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False) if config.gated_mlp else None
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of shape `(N, H)` to the same; of a split expert partial sums."""
        inner = functional.linear(rows, local(self.up.weight))
        if self.gate is None:
            inner = functional.gelu(inner)
        else:
            inner = functional.silu(functional.linear(rows, local(self.gate.weight))) * inner
        return functional.linear(inner, local(self.down.weight))

    def split(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the inner features, in place; every rank holds the whole before."""
        for name, dim in (("up", 0), ("gate", 0), ("down", 1)):
            linear = getattr(self, name)
            if linear is not None:
                part = linear.weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
                whole = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
                linear.weight = nn.Parameter(whole)


class ExpertBank(nn.Module):
    """The experts of a layer that this rank holds, by their number in the layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
        numbers = range(config.num_experts or 0)
        self.each = nn.ModuleDict({str(number): Expert(config, width) for number in numbers})

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows of shape `(N, H)`, `counts` of them for each expert in turn, to the same."""
        parts = torch.split(rows, counts)
        return torch.cat([expert(part) for expert, part in zip(self.each.values(), parts, strict=True)])

    def keep(self, mesh: DeviceMesh) -> None:
        """Forget the experts of other ranks, and the parts of those that are split, in place.

        Args:
            mesh: With the dimensions `ep` and `tp`, which splits an expert.
        """
        ranks, rank = mesh["ep"].size(), mesh["ep"].get_local_rank()
        mine = list(self.each)[rank * len(self.each) // ranks : (rank + 1) * len(self.each) // ranks]
        self.each = nn.ModuleDict({number: self.each[number] for number in mine})
        if mesh["tp"].size() > 1:
            for expert in self.each.values():
                assert isinstance(expert, Expert)
                expert.split(mesh["tp"])


class Mixture(nn.Module):
    """What stands in the place of a block's MLP: a router, its experts, and shared ones beside them.

    Args:
        config: The model.
        shared: The MLP that every token passes, None without one.
    """

    def __init__(self, config: ModelConfig, shared: nn.Module | None) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.top_k = config.moe_router_topk
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=config.moe_router_bias)
        self.bank = ExpertBank(config)
        self.shared = shared
        gated = shared is not None and config.moe_shared_expert_gate
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False) if gated else None
        self.groups = ALONE

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts and remember who has the others."""
        self.bank.keep(mesh)
        between, within = (mesh[name] for name in ("ep", "tp"))
        self.groups = ExpertGroups(
            between.get_group() if between.size() > 1 else None,
            within.get_group() if within.size() > 1 else None,
        )

    def forward(self, state: Tensor) -> Tensor:
        """States of shape `(B, t, H)` to the same; every rank of a stage has tokens of its own."""
        scores: Tensor = torch.softmax(self.router(state), -1).flatten(0, 1)
        weights, chosen = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens, of_token = state.flatten(0, 1), order // self.top_k
        route = Route(torch.bincount(chosen.flatten(), minlength=scores.shape[-1]), self.groups)
        rows = route.back(self.bank(route.to_experts(tokens[of_token]), route.counts))
        rows = rows * weights.flatten()[order, None]
        result = torch.zeros_like(tokens).index_add(0, of_token, rows).view_as(state)
        if self.shared is None:
            return result
        beside: Tensor = self.shared(state)
        if self.shared_gate is not None:
            beside = torch.sigmoid(self.shared_gate(state)) * beside
        return result + beside


def expert_bank(layer: nn.Module) -> ExpertBank | None:
    """The experts inside a layer; None where it is dense."""
    return next((module for module in layer.modules() if isinstance(module, ExpertBank)), None)
