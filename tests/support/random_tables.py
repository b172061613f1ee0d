"""Random small cost tables: all the terms that a real one can hold, at sizes that enumeration reaches."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.plans.strategy import LayerStrategy


def random_table(
    seed: int,
    *,
    pp: int = 2,
    num_layers: int = 5,
    num_choices: int = 3,
    num_layouts: int = 2,
    num_outer: int = 2,
    equal_layers: bool = False,
    tightness: float = 0.6,
) -> CostTable:
    """A table of random costs.

    Args:
        seed: Of everything random.
        pp: Stages, K.
        num_layers: Layers, L; at least K + 1, the last may be joined.
        num_choices: Strategies, C.
        num_layouts: Activation layouts, at most C.
        num_outer: Numbers of micro-batches.
        equal_layers: Runs of layers that cost the same, as a Transformer's blocks do.
        tightness: Capacity of a device; 0: what the leanest even plan needs, 1: what a typical one needs.
    """
    rng = torch.Generator().manual_seed(seed)
    rand = partial(torch.rand, generator=rng, dtype=torch.float64)
    kinds, borders = 1 + int(rand(1) * 2), 1 + int(rand(1) * 2)
    like = _layer_pattern(num_layers, equal_layers, rng)
    by_layer, by_kind = _layer_costs(rand, num_outer, kinds, num_choices, like)
    between = (num_layers, num_layouts, num_layouts)
    reshard = 0.3 * rand(num_outer, kinds, *between)[:, :, like[1:]]
    counts = torch.tensor(sorted({1, 2, 3, 6}))[torch.randperm(4, generator=rng)[:num_outer]]
    in_flight = torch.minimum(pp - torch.arange(pp), counts.unsqueeze(1)).to(torch.float64)
    capacity = _capacity(by_layer, in_flight, tightness) * (0.9 + 0.4 * rand(pp))
    fused_to_previous = torch.zeros(num_layers, dtype=torch.bool)
    fused_to_previous[-1] = bool(rand(1) < 0.5)
    allowed = rand(num_outer, num_choices) < 0.85
    allowed[torch.arange(num_outer), torch.randint(num_choices, (num_outer,), generator=rng)] = True
    layout = torch.cat(
        [torch.arange(num_layouts), torch.randint(num_layouts, (num_choices,), generator=rng)]
    )
    runs = _kind_allowed(seed, kinds, allowed)
    by_layer["per_iteration"] *= (torch.arange(num_layers) == 0).unsqueeze(1) * float(rand(1) < 0.5)
    return CostTable(
        num_micro_batches=counts,
        choices=tuple(LayerStrategy(1, c + 1) for c in range(num_choices)),
        layout=layout[:num_choices],
        allowed=allowed,
        stage_kind=torch.randint(kinds, (pp,), generator=rng),
        boundary_kind=torch.randint(borders, (pp - 1,), generator=rng),
        fused_to_previous=fused_to_previous,
        reshard=reshard * float(rand(1) < 0.8),
        p2p=0.3 * rand(num_outer, borders, *between)[:, :, like[1:]],
        capacity=capacity,
        in_flight=in_flight,
        causes={},
        distinct=torch.arange(num_layers),
        kind_allowed=runs,
        for_weights=by_layer["activation"],
        **by_layer,
        **by_kind,
    )


def _kind_allowed(seed: int, kinds: int, allowed: Tensor) -> Tensor | None:
    """Draw strategies that one of two kinds of stage cannot run, `(Q, C)`; None in most tables."""
    if seed % 3 or kinds == 1:
        return None
    number = allowed.shape[1]
    refused = int(torch.randint(number, (1,), generator=torch.Generator().manual_seed(seed)))
    others = torch.arange(number) != refused
    if not (allowed & others).any(1).all():
        return None
    return torch.stack([torch.ones_like(others), others])


def tables_of_one_model(seed: int) -> list[CostTable]:
    """Tables of one model at two pipeline degrees: the same layers are joined in both."""
    tables = [
        random_table(seed, pp=pp, num_layers=5, num_choices=3, tightness=1.2) for pp in (1, 3)
    ]
    return [replace(table, fused_to_previous=tables[0].fused_to_previous) for table in tables]


def _layer_costs(
    rand: Callable[..., Tensor], outer: int, kinds: int, choices: int, like: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw what layers cost whatever the stage, `(O, L, C)`, and by its kind, `(O, Q, L, C)`."""
    by_layer = {
        name: rand(outer, len(like), choices)[:, like]
        for name in ("per_iteration", "static", "activation", "working")
    }
    by_kind = {
        name: rand(outer, kinds, len(like), choices)[:, :, like]
        for name in ("forward", "backward", "sync")
    }
    return by_layer, by_kind | {"weight_gradient": 0.4 * by_kind["backward"]}


def _layer_pattern(num_layers: int, equal: bool, rng: torch.Generator) -> Tensor:
    """Layer whose costs every layer takes, `(L,)`: itself, or one of two that come in runs."""
    if not equal:
        return torch.arange(num_layers)
    pattern = torch.ones(num_layers, dtype=torch.long)
    pattern[int(torch.randint(2, num_layers, (1,), generator=rng)) :] = 2
    pattern[0] = 0
    return pattern


def _capacity(by_layer: dict[str, Tensor], in_flight: Tensor, tightness: float) -> float:
    """Bytes of a device, from what lean and typical strategies need when layers are dealt out evenly."""
    total = by_layer["static"] + in_flight.amax(1).view(-1, 1, 1) * by_layer["activation"]
    spare = by_layer["working"].mean()
    lean, typical = (
        float(x.mean(0).sum() + spare) / in_flight.shape[1]
        for x in (total.amin(-1), total.mean(-1))
    )
    return lean + tightness * (typical - lean)
