"""Random plans, and random changes of plans, for whole batches at once."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baselines._chains import Chains, PlanSpace


@dataclass(frozen=True)
class MoveWeights:
    """Weigh how likely each kind of change is; weights need not sum to 1.

    In the stage-wise space layers and runs become stages, in the uniform space everything is the whole.
    """

    layer: float = 0.0
    """One layer takes another strategy."""
    run: float = 0.0
    """A run of layers does, its length log-uniform."""
    stage: float = 0.0
    """A stage does."""
    whole: float = 0.0
    """All layers do."""
    edge: float = 0.0
    """Neighbouring stage edges move by one layer together: a layer leaves one stage and another gains one."""
    outer: float = 0.0
    """Another number of micro-batches."""
    jump: float = 0.0
    """Another pipeline degree, with like strategies and stretched stages."""


class RandomMoves:
    """Draw random plans and changes of plans.

    Args:
        space: Tables and their legal strategies.
        weights: Of the changes.
        generator: Of all random numbers.
    """

    def __init__(self, space: PlanSpace, weights: MoveWeights, generator: torch.Generator) -> None:
        self.space, self.generator = space, generator
        self.weights = torch.tensor(list(vars(weights).values()), dtype=torch.float64)
        self.names = list(vars(weights))

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def _below(self, limit: Tensor) -> Tensor:
        """Draw a whole number in [0, limit) for every entry."""
        return (self._uniform(*limit.shape) * limit).long().clamp(max=limit - 1)

    def random_plans(self, count: int) -> Chains:
        """Draw plans from scratch: an outer choice, stages about even, layers in a few runs of one strategy.

        Half of the splits are even to a layer, the others are moved by a few. The number of runs is
        geometric: 1 with probability 1/2. Strategies layer by layer at random would all be bad.
        """
        space = self.space
        table, outer = space.random_outer(count, self.generator)
        spread = torch.where(self._uniform(count, 1) < 0.5, 0.0, 4.0 * self._uniform(count, 1))
        noise = torch.randn(count, space.most_stages, generator=self.generator, dtype=torch.float64)
        starts = space.split(space.pp[table], spread * noise)
        first = space.random_choice(table, outer, self.generator)
        chains = Chains(table, outer, first.unsqueeze(1).repeat(1, space.num_layers), starts)
        growing = torch.ones(count, dtype=torch.bool)
        for _ in range(6 if space.space_kind != "uniform" else 0):
            growing = growing & (self._uniform(count) < 0.5)
            chains = self._region(chains, "run").where(growing, chains)
        return chains

    def propose(self, chains: Chains) -> Chains:
        """Change every plan once; a change that is not possible leaves the plan as it is."""
        change = torch.multinomial(self.weights, len(chains), replacement=True, generator=self.generator)
        result = chains
        for number in torch.unique(change).tolist():
            mine = torch.nonzero(change == number).squeeze(1)
            name = self.names[number]
            change_of = {"edge": self._edges, "outer": self._other_count, "jump": self._jump}.get(name)
            old = chains[mine]
            result = result.put(mine, change_of(old) if change_of else self._region(old, name))
        return result

    def _region(self, chains: Chains, name: str) -> Chains:
        """Give a layer, run, stage, or everything one other strategy."""
        size, count = self.space.num_layers, len(chains)
        space_kind = self.space.space_kind
        if space_kind == "stagewise" and name in ("layer", "run"):
            name = "stage"
        first = self._below(torch.full((count,), size))
        end = first + 1
        if name == "run":
            length = torch.exp(self._uniform(count) * math.log(size + 1.0)).long()
            end = (first + length).clamp(max=size)
        elif name == "stage":
            stage = self._below(self.space.pp[chains.table]).unsqueeze(1)
            bounds = torch.nn.functional.pad(chains.first_layers, (0, 1), value=size)
            first, end = bounds.gather(1, stage)[:, 0], bounds.gather(1, stage + 1)[:, 0]
        if name == "whole" or space_kind == "uniform":
            first, end = torch.zeros_like(first), torch.full_like(end, size)
        layers = torch.arange(size)
        inside = (layers >= first.unsqueeze(1)) & (layers < end.unsqueeze(1))
        choice = self.space.random_choice(chains.table, chains.outer, self.generator).unsqueeze(1)
        return replace(chains, choices=torch.where(inside, choice, chains.choices))

    def _edges(self, chains: Chains) -> Chains:
        """Move the neighbouring stage boundaries a to b by one unit to the same side."""
        space = self.space
        inner = space.pp[chains.table] - 1
        a = self._below(inner.clamp(min=1)) + 1
        b = a + self._below((inner - a + 1).clamp(min=1)) * (self._uniform(len(chains)) < 0.5)
        order = torch.arange(space.most_stages)
        block = (order >= a.unsqueeze(1)) & (order <= b.unsqueeze(1)) & (order <= inner.unsqueeze(1))
        side = torch.where(self._uniform(len(chains), 1) < 0.5, 1, -1)
        position = torch.searchsorted(space.units, chains.first_layers.contiguous()) + block * side
        used = order <= inner.unsqueeze(1)
        gaps = position.diff(dim=1) > 0
        fits = (gaps | ~used[:, 1:]).all(1) & (torch.where(used, position, 0) < len(space.units)).all(1)
        starts = torch.where(used, space.units[position.clamp(0, len(space.units) - 1)], space.num_layers)
        starts = torch.where(fits.unsqueeze(1), starts, chains.first_layers)
        return space.in_kind(replace(chains, first_layers=starts))

    def _other_count(self, chains: Chains) -> Chains:
        """Take another number of micro-batches of the same pipeline degree."""
        possible = self.space.allowed[chains.table].any(2)
        outer = (self._uniform(*possible.shape) * possible + possible).argmax(1)
        return self.space.legal(replace(chains, outer=outer), self.generator)

    def _jump(self, chains: Chains) -> Chains:
        """Take another pipeline degree: like strategies, stages even or nearly so."""
        space = self.space
        table, outer = space.random_outer(len(chains), self.generator)
        choices = space.translation[chains.table, table].gather(1, chains.choices)
        noise = torch.randn(len(chains), space.most_stages, generator=self.generator, dtype=torch.float64)
        starts = space.split(space.pp[table], 0.5 * noise)
        return space.legal(Chains(table, outer, choices, starts), self.generator)
