"""Many plans of many tables as one batch: what the planners that try plans at random walk over."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines._incumbent import Incumbent
from darts_parallel.cost import CostTable, HardPlans, even_uniform_plans, lightest_plans, unit_starts
from darts_parallel.plan import LayerStrategy

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
        space_kind: `uniform`, `stagewise` or `layerwise`.
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
                chains.outer[mine], chains.choices[mine], chains.first_layers[mine, : table.num_stages]
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
        parts = [self.of_table(index, even_uniform_plans(table)) for index, table in enumerate(tables)]
        parts += [
            self.of_table(index, plans) for index, plans in enumerate(lightest_plans(tables, self.space_kind))
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
    return (abs(a.tp - b.tp), a.recompute != b.recompute, abs(a.zero_stage - b.zero_stage), bits,
            a.sequence_parallel != b.sequence_parallel, abs(a.dp - b.dp),
            abs(a.ep - b.ep) + abs(a.etp - b.etp))  # fmt: skip
