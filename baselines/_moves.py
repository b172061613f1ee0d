"""Batches of plans of many tables, random ones, and random changes: what the planners by chance walk over."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baselines._planner import Incumbent
from darts_parallel.cost import (
    CostTable,
    HardPlans,
    even_uniform_plans,
    lightest_plans,
    unit_starts,
)
from darts_parallel.plans import LayerStrategy

PENALTY = 10.0
"""Log-seconds that memory beyond a stage's capacity counts for, relative to the capacity."""


@dataclass(frozen=True)
class Chains:
    """Hold N plans; all fields integer.

    `table` (N,): number of the table; `outer` (N,): its outer choice; `choices` (N, L): strategy of every
    layer; `first_layers` (N, K): first layer of every stage, K the largest pipeline degree, L where a
    plan has fewer stages.
    """

    table: Tensor
    outer: Tensor
    choices: Tensor
    first_layers: Tensor

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Tensor | slice) -> "Chains":
        return Chains(*(values[index] for values in vars(self).values()))

    def where(self, mask: Tensor, other: "Chains") -> "Chains":
        """Return these plans where `mask` (N,) holds, those of `other` elsewhere."""
        chosen = torch.nonzero(mask).squeeze(1)
        return other.put(chosen, self[chosen])

    def put(self, index: Tensor, other: "Chains") -> "Chains":
        """Return these plans with those of `other` in the rows `index`."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Chains(*(mine.index_copy(0, index, theirs) for mine, theirs in pairs))

    @staticmethod
    def concatenate(parts: "list[Chains]") -> "Chains":
        """Return all plans of `parts`, in order."""
        return Chains(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))

    def stages(self) -> Tensor:
        """Return stage of every layer, `(N, L)`."""
        positions = torch.arange(self.choices.shape[1]).expand_as(self.choices).contiguous()
        return torch.searchsorted(self.first_layers.contiguous(), positions, right=True) - 1


class PlanSpace:
    """Describe the space of all tables: legal strategies, even splits, prices.

    Args:
        incumbent: Holds the tables, which divide into the same units, and the best plan so far.
    """

    def __init__(self, incumbent: Incumbent, space_kind: str) -> None:
        self.incumbent, self.space_kind = incumbent, space_kind
        tables = incumbent.tables
        self.pp = torch.tensor([table.num_stages for table in tables])
        self.num_layers, self.most_stages = tables[0].num_layers, int(self.pp.max())
        self.units = unit_starts(tables[0].fused_to_previous)
        most_outer = max(table.num_outer for table in tables)
        self.most_choices = max(len(table.choices) for table in tables)
        self.allowed = torch.zeros(len(tables), most_outer, self.most_choices, dtype=torch.bool)
        for index, table in enumerate(tables):
            self.allowed[index, : table.num_outer, : len(table.choices)] = table.allowed
        self.outer_choices = torch.nonzero(self.allowed.any(2))
        """Table and outer choice of every legal outer choice, `(n, 2)`."""
        self.translation = _translation(tables, self.most_choices)

    def price(self, chains: Chains) -> Tensor:
        """Price plans in log-seconds per iteration, more where memory lacks, `(N,)`; the best is kept."""
        energy = torch.empty(len(chains), dtype=torch.float64)
        for index in torch.unique(chains.table).tolist():
            mine = torch.nonzero(chains.table == index).squeeze(1)
            table = self.incumbent.tables[index]
            plans = HardPlans(
                chains.outer[mine],
                chains.choices[mine],
                chains.first_layers[mine, : table.num_stages],
            )
            cost = self.incumbent.offer(index, plans)
            excess = (cost.memory / table.capacity - 1.0).clamp(min=0.0).sum(1)
            # what a kind of stage cannot run costs as much as twice its memory
            excess = torch.where(cost.feasible | (excess > 0), excess, 1.0)
            energy[mine] = torch.log(cost.iteration_time) + PENALTY * excess
        return energy

    def starting_plans(self) -> Chains:
        """Return the plans that the gradient search starts from, too.

        One strategy for all layers on even stages, and the lightest plan of every outer choice.
        """
        tables = self.incumbent.tables
        parts = [
            self.of_table(index, even_uniform_plans(table)) for index, table in enumerate(tables)
        ]
        parts += [
            self.of_table(index, plans)
            for index, plans in enumerate(lightest_plans(tables, self.space_kind))
        ]
        return Chains.concatenate(parts)

    def of_table(self, index: int, plans: HardPlans) -> Chains:
        """Return hard plans of one table as chains."""
        missing = self.most_stages - plans.first_layers.shape[1]
        starts = torch.nn.functional.pad(plans.first_layers, (0, missing), value=self.num_layers)
        return Chains(torch.full((len(plans),), index), plans.outer, plans.choices, starts)

    def random_choice(self, table: Tensor, outer: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a legal strategy for every outer choice; all arguments and the result `(N,)`."""
        allowed = self.allowed[table, outer]
        return (torch.rand(allowed.shape, generator=generator) * allowed + allowed).argmax(1)

    def random_outer(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tables and outer choices, `(count,)` each; every pipeline degree is equally likely."""
        table, _ = self.outer_choices.unbind(1)
        weights = 1.0 / torch.bincount(table).double()[table]
        drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
        return self.outer_choices[drawn, 0], self.outer_choices[drawn, 1]

    def split(self, pp: Tensor, jitter: Tensor) -> Tensor:
        """Return stage starts at even distances, moved by a jitter.

        Args:
            pp: Number of stages, `(N,)`.
            jitter: Shift of every inner edge in units, `(N, K)`.

        Returns:
            Padded starts, `(N, K)`.
        """
        units = len(self.units)
        order = torch.arange(self.most_stages)
        wished = torch.round(order * units / pp.unsqueeze(1) + jitter).long().sort(1).values
        inner = order < pp.unsqueeze(1)
        free = torch.where(inner, wished - order, 0).clamp(min=0)
        free[:, 0] = 0
        position = torch.minimum(free.cummax(1).values, (units - pp).unsqueeze(1)) + order
        starts = self.units[position.clamp(max=units - 1)]
        return torch.where(inner, starts, self.num_layers)

    def legal(self, chains: Chains, generator: torch.Generator) -> Chains:
        """Put an allowed strategy, one for each plan, in place of forbidden ones."""
        allowed = self.allowed[chains.table, chains.outer].gather(1, chains.choices)
        other = self.random_choice(chains.table, chains.outer, generator).unsqueeze(1)
        choices = torch.where(allowed, chains.choices, other)
        if self.space_kind == "uniform":
            choices = torch.where(allowed.all(1, keepdim=True), choices, other)
        return self.in_kind(Chains(chains.table, chains.outer, choices, chains.first_layers))

    def in_kind(self, chains: Chains) -> Chains:
        """Give every layer the strategy of its stage's first, where the space is stage-wise."""
        if self.space_kind != "stagewise":
            return chains
        choices = chains.choices.gather(1, chains.first_layers.gather(1, chains.stages()))
        return Chains(chains.table, chains.outer, choices, chains.first_layers)


def _translation(tables: list[CostTable], width: int) -> Tensor:
    """Return the most similar strategy of every other table, `(T, T, C)`; 0 beyond a table's own."""
    result = torch.zeros(len(tables), len(tables), width, dtype=torch.long)
    for a, mine in enumerate(tables):
        for b, other in enumerate(tables):
            best = [
                min(range(len(other.choices)), key=lambda c: _distance(choice, other.choices[c]))
                for choice in mine.choices
            ]
            result[a, b, : len(best)] = torch.tensor(best)
    return result


def _distance(a: LayerStrategy, b: LayerStrategy) -> tuple[float, ...]:
    """Compare strategies: unlike degrees first, then what else differs."""
    bits = abs(a.tp_comm_bits - b.tp_comm_bits) + abs(a.grad_comm_bits - b.grad_comm_bits)
    return (
        abs(a.tp - b.tp),
        a.recompute != b.recompute,
        abs(a.zero_stage - b.zero_stage),
        bits,
        a.sequence_parallel != b.sequence_parallel,
        abs(a.dp - b.dp),
        abs(a.ep - b.ep) + abs(a.etp - b.etp),
    )


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
    """Draw random plans and changes of plans."""

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
        change = torch.multinomial(
            self.weights, len(chains), replacement=True, generator=self.generator
        )
        result = chains
        for number in torch.unique(change).tolist():
            mine = torch.nonzero(change == number).squeeze(1)
            name = self.names[number]
            change_of = {"edge": self._edges, "outer": self._other_count, "jump": self._jump}.get(
                name
            )
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
        block = (
            (order >= a.unsqueeze(1)) & (order <= b.unsqueeze(1)) & (order <= inner.unsqueeze(1))
        )
        side = torch.where(self._uniform(len(chains), 1) < 0.5, 1, -1)
        position = torch.searchsorted(space.units, chains.first_layers.contiguous()) + block * side
        used = order <= inner.unsqueeze(1)
        gaps = position.diff(dim=1) > 0
        fits = (gaps | ~used[:, 1:]).all(1) & (
            torch.where(used, position, 0) < len(space.units)
        ).all(1)
        starts = torch.where(
            used, space.units[position.clamp(0, len(space.units) - 1)], space.num_layers
        )
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
        noise = torch.randn(
            len(chains), space.most_stages, generator=self.generator, dtype=torch.float64
        )
        starts = space.split(space.pp[table], 0.5 * noise)
        return space.legal(Chains(table, outer, choices, starts), self.generator)
