"""Rounding by a chain's best path: strategies under the prices that the relaxation found.

At a relaxed plan the iteration time has a slope in the seconds of every stage, and the memory constraint a
price for every byte. Under these the cost of hard strategies is a sum over layers and neighbours, so that
the best ones are the shortest path of a chain (Viterbi 1967), where a layer's own largest weight would
forget what its neighbours hold and what the stage's memory is worth.
"""

from dataclasses import replace

import torch
from torch import Tensor

from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.gradient.relaxed_cost import SurrogateCost


def stage_prices(
    cost: SurrogateCost, table: CostTable, multipliers: Tensor, penalty: float, sharpness: float
) -> tuple[Tensor, Tensor]:
    """What a second and a byte of every stage cost, in seconds per iteration.

    Args:
        cost: Of relaxed plans, closed form, stages not interleaved.
        table: Of their outer choices.
        multipliers: Of the memory constraints, `(O, R, pp)`.
        penalty: Quadratic penalty of the augmented Lagrangian.
        sharpness: Of the smooth maximum.

    Returns:
        Two tensors, `(O, R, pp)`.
    """
    seconds, total = cost.stage_seconds.detach(), cost.iteration_time.detach().unsqueeze(-1)
    share = torch.softmax(sharpness * seconds / seconds.amax(-1, keepdim=True).clamp(min=1e-300), dim=-1)
    slope = 1.0 + (table.num_micro_batches.view(-1, 1, 1) - 1.0) * share
    capacity = cost.capacity.detach()
    violation = cost.memory.detach() / capacity - 1.0
    return slope, total * torch.relu(multipliers + penalty * violation) / capacity


def best_paths(plans: HardPlans, table: CostTable, slope: Tensor, price: Tensor) -> HardPlans:
    """The plans with other strategies: the shortest path through layers and layouts.

    Args:
        plans: B plans, whose stages stay.
        table: Not interleaved.
        slope: Seconds per iteration by second of a stage, `(B, pp)`.
        price: Seconds per iteration by byte of a stage, `(B, pp)`.
    """
    stages, outer = plans.stages(), plans.outer
    kinds, layers = table.stage_kind[stages], torch.arange(table.num_layers)
    weight = slope.gather(1, stages)
    rows = outer.unsqueeze(1)
    in_flight = table.in_flight[rows, stages].unsqueeze(-1)
    bytes_ = table.static[outer] + in_flight * table.activation[outer]
    own = weight.unsqueeze(-1) * table.time[rows, kinds, layers] + table.sync[rows, kinds, layers] / table.pp
    own = own + table.per_iteration[outer] + price.gather(1, stages).unsqueeze(-1) * bytes_
    every = torch.arange(len(table.choices)).expand_as(own)
    legal = table.allowed[outer].unsqueeze(1) & table.runs(kinds.unsqueeze(-1), every)
    value, choice = _best_of_layouts(own.masked_fill(~legal, torch.inf), table)
    if table.num_layouts == 1:
        # nothing lies between the layers
        return replace(plans, choices=choice.squeeze(-1))
    change = table.reshard[rows, kinds[:, 1:], layers[:-1]]
    if table.pp > 1:
        border = table.boundary_kind[(stages[:, 1:] - 1).clamp(min=0)]
        cut = (stages[:, 1:] != stages[:, :-1])[..., None, None]
        change = torch.where(cut, table.p2p[rows, border, layers[:-1]], change)
    layouts = _shortest(value, weight[:, 1:, None, None] * change)
    return replace(plans, choices=choice.gather(-1, layouts.unsqueeze(-1)).squeeze(-1))


def _best_of_layouts(own: Tensor, table: CostTable) -> tuple[Tensor, Tensor]:
    """The cheapest strategy of every layout, `(B, L, C)` to costs and numbers `(B, L, Y)`."""
    found = []
    for layout in range(table.num_layouts):
        members = torch.nonzero(table.layout == layout).squeeze(1)
        value, place = own[..., members].min(-1)
        found.append((value, members[place]))
    return torch.stack([v for v, _ in found], -1), torch.stack([c for _, c in found], -1)


def _shortest(value: Tensor, change: Tensor) -> Tensor:
    """Layouts of the shortest path, `(B, L)`; costs `(B, L, Y)`, of changes `(B, L - 1, Y, Y)`."""
    reached, origins = value[:, 0], []
    for layer in range(1, value.shape[1]):
        best, origin = (reached.unsqueeze(-1) + change[:, layer - 1]).min(1)
        reached = best + value[:, layer]
        origins.append(origin)
    path = [reached.argmin(-1)]
    for origin in reversed(origins):
        path.append(origin.gather(1, path[-1].unsqueeze(1)).squeeze(1))
    return torch.stack(path[::-1], dim=1)
