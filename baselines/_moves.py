"""Batches of plans of many tables, random plans, and random changes, for the random planners."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baselines._planner import Incumbent
from darts_parallel.cost import (
    CostTable,
    HardPlans,
    Rows,
    even_uniform_plans,
    flatnonzero,
    float_tensor,
    lightest_plans,
    round_edges,
    unit_starts,
)
from darts_parallel.plans import LayerStrategy

PENALTY = 10.0
"""Log-seconds that memory beyond a stage's capacity counts for, relative to the capacity."""
MAX_SPREAD = 4.0
"""Largest standard deviation, in layers, of the stage boundaries of a random plan."""
JUMP_SPREAD = 0.5
"""Standard deviation, in layers, of the stage boundaries after a jump."""
MAX_RUNS = 6
"""Runs of another strategy that a random plan can have."""


@dataclass(frozen=True)
class Chains(Rows):
    """Hold N plans; all fields integer.

    `table` (N,): number of the table; `outer` (N,): its row; `choices` (N, L): strategy of every
    layer; `first_layers` (N, K): first layer of every stage, K the largest pipeline degree, L where a
    plan has fewer stages.
    """

    table: Tensor
    outer: Tensor
    choices: Tensor
    first_layers: Tensor

    def where(
        self,
        mask: Tensor,
        other: "Chains",
    ) -> "Chains":
        """Return these plans where `mask` (N,) holds, those of `other` elsewhere."""
        rows = flatnonzero(mask)
        return other.put(rows, self[rows])

    def put(
        self,
        index: Tensor,
        other: "Chains",
    ) -> "Chains":
        """Return these plans with those of `other` in the rows `index`."""
        own = vars(self).values()
        pairs = zip(own, vars(other).values(), strict=True)
        mixed = [mine.index_copy(0, index, theirs) for mine, theirs in pairs]
        return Chains(*mixed)


class PlanSpace:
    """Describe the space of all tables: legal strategies, even splits, prices.

    Args:
        incumbent: Holds the tables, which divide into the same units, and the best plan so far.
    """

    def __init__(self, incumbent: Incumbent) -> None:
        tables = incumbent.tables
        self.incumbent = incumbent
        self.pp = torch.tensor([table.num_stages for table in tables])
        self.num_layers = tables[0].num_layers
        self.most_stages = int(self.pp.max())
        self.units = unit_starts(tables[0].fused_to_previous)
        most_outer = max(table.num_outer for table in tables)
        self.most_choices = max(len(table.choices) for table in tables)
        shape = (len(tables), most_outer, self.most_choices)
        self.allowed = torch.zeros(shape, dtype=torch.bool)
        for index, table in enumerate(tables):
            choices = len(table.choices)
            self.allowed[index, : table.num_outer, :choices] = table.allowed
        self.outer_choices = torch.nonzero(self.allowed.any(2))
        """Table and row of every legal pipeline configuration, `(n, 2)`."""
        self.translation = _translation(tables, self.most_choices)

    def price(self, chains: Chains) -> Tensor:
        """Price plans in log-seconds per iteration, more where memory lacks, `(N,)`; keep the best."""
        energy = torch.empty(len(chains), dtype=torch.float64)
        for index in torch.unique(chains.table).tolist():
            rows = flatnonzero(chains.table == index)
            some = chains[rows]
            table = self.incumbent.tables[index]
            starts = some.first_layers[:, : table.num_stages]
            cost = self.incumbent.offer(index, HardPlans(some.outer, some.choices, starts))
            relative = cost.memory / table.capacity - 1.0
            excess = relative.clamp(min=0.0).sum(1)
            # a strategy that a kind of stage cannot run costs as much as twice its memory
            excess = torch.where(cost.feasible | (excess > 0), excess, 1.0)
            energy[rows] = torch.log(cost.iteration_time) + PENALTY * excess
        return energy

    def starting_plans(self) -> Chains:
        """Return the plans that the gradient search starts from, too.

        One strategy for all layers on even stages, and the lightest plan of every configuration.
        """
        tables = self.incumbent.tables
        parts = []
        for index, table in enumerate(tables):
            parts.append(self.of_table(index, even_uniform_plans(table)))
        for index, plans in enumerate(lightest_plans(tables, "layerwise")):
            parts.append(self.of_table(index, plans))
        return Chains.concatenate(parts)

    def of_table(
        self,
        index: int,
        plans: HardPlans,
    ) -> Chains:
        """Return hard plans of one table as chains."""
        missing = self.most_stages - plans.first_layers.shape[1]
        padding = (0, missing)
        starts = torch.nn.functional.pad(plans.first_layers, padding, value=self.num_layers)
        table = torch.full((len(plans),), index)
        return Chains(table, plans.outer, plans.choices, starts)

    def random_choice(
        self,
        table: Tensor,
        outer: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw a legal strategy for every configuration; all arguments and the result `(N,)`."""
        allowed = self.allowed[table, outer]
        drawn = torch.rand(allowed.shape, generator=generator)
        # legal strategies rank above all others
        return (drawn * allowed + allowed).argmax(1)

    def random_outer(
        self,
        count: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Draw tables and their rows, `(count,)` each; every pipeline degree is equally likely."""
        table, _ = self.outer_choices.unbind(1)
        weights = 1.0 / torch.bincount(table).double()[table]
        drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
        table = self.outer_choices[drawn, 0]
        outer = self.outer_choices[drawn, 1]
        return table, outer

    def split(
        self,
        pp: Tensor,
        jitter: Tensor,
    ) -> Tensor:
        """Return stage starts at even distances, moved by a jitter.

        Args:
            pp: Number of stages, `(N,)`.
            jitter: Shift of every inner edge in units, `(N, K)`.

        Returns:
            Padded starts, `(N, K)`.
        """
        units = len(self.units)
        even = torch.arange(self.most_stages) * units / pp.unsqueeze(1)
        wished = (even + jitter).sort(1).values
        starts = torch.full(jitter.shape, self.num_layers)
        for stages in torch.unique(pp).tolist():
            rows = flatnonzero(pp == stages)
            edges = wished[rows, 1:stages]
            starts[rows, :stages] = self.units[round_edges(edges, units)]
        return starts

    def legal(
        self,
        chains: Chains,
        generator: torch.Generator,
    ) -> Chains:
        """Put an allowed strategy, one for each plan, in place of forbidden ones."""
        allowed = self.allowed[chains.table, chains.outer].gather(1, chains.choices)
        other = self.random_choice(chains.table, chains.outer, generator).unsqueeze(1)
        return replace(chains, choices=torch.where(allowed, chains.choices, other))


def _translation(
    tables: list[CostTable],
    width: int,
) -> Tensor:
    """Return the most similar strategy of every other table, `(T, T, C)`; 0 beyond a table's own."""
    result = torch.zeros(len(tables), len(tables), width, dtype=torch.long)
    for a, table in enumerate(tables):
        for b, other in enumerate(tables):
            for c, choice in enumerate(table.choices):
                distances = [_distance(choice, own) for own in other.choices]
                result[a, b, c] = distances.index(min(distances))
    return result


def _distance(
    a: LayerStrategy,
    b: LayerStrategy,
) -> tuple[float, ...]:
    """Compare strategies, the most expensive difference first."""
    tp = abs(a.tp - b.tp)
    zero = abs(a.zero_stage - b.zero_stage)
    bits = abs(a.tp_comm_bits - b.tp_comm_bits) + abs(a.grad_comm_bits - b.grad_comm_bits)
    sequence = a.sequence_parallel != b.sequence_parallel
    experts = abs(a.ep - b.ep) + abs(a.etp - b.etp)
    recompute = a.recompute != b.recompute
    return tp, recompute, zero, bits, sequence, abs(a.dp - b.dp), experts


@dataclass(frozen=True)
class MoveWeights:
    """Weigh how likely each kind of change is; weights need not sum to 1."""

    layer: float = 0.0
    """One layer takes another strategy."""
    run: float = 0.0
    """A run of layers does, its length log-uniform."""
    stage: float = 0.0
    """A stage does."""
    whole: float = 0.0
    """All layers do."""
    edge: float = 0.0
    """Neighbouring stage boundaries move by one layer: one stage loses a layer, another gains one."""
    outer: float = 0.0
    """Another number of micro-batches."""
    jump: float = 0.0
    """Another pipeline degree, with like strategies and stretched stages."""


class RandomMoves:
    """Draw random plans and changes of plans.

    Args:
        generator: None: one of the incumbent's seed.
    """

    def __init__(
        self,
        space: PlanSpace,
        weights: MoveWeights,
        generator: torch.Generator | None = None,
    ) -> None:
        self.space = space
        self.generator = generator or torch.Generator().manual_seed(space.incumbent.seed)
        self.names = list(vars(weights))
        values = list(vars(weights).values())
        self.weights = float_tensor(values)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _below(self, limit: Tensor) -> Tensor:
        """Draw a whole number in [0, limit) for every entry."""
        drawn = self._uniform(*limit.shape) * limit
        return drawn.long().clamp(max=limit - 1)

    def random_plans(self, count: int) -> Chains:
        """Draw plans from scratch: stages about even, layers in a few runs of one strategy.

        Half of the splits are even to a layer, the others are moved by a few layers. The number of
        runs is geometric: 1 with probability 1/2. Strategies layer by layer at random would all be
        bad.
        """
        space = self.space
        table, outer = space.random_outer(count, self.generator)
        even = self._uniform(count, 1) < 0.5
        spread = torch.where(even, 0.0, MAX_SPREAD * self._uniform(count, 1))
        noise = self._normal(count, space.most_stages)
        starts = space.split(space.pp[table], spread * noise)
        first = space.random_choice(table, outer, self.generator)
        choices = first.unsqueeze(1).repeat(1, space.num_layers)
        chains = Chains(table, outer, choices, starts)
        growing = torch.ones(count, dtype=torch.bool)
        for _ in range(MAX_RUNS):
            growing = growing & (self._uniform(count) < 0.5)
            chains = self._region(chains, "run").where(growing, chains)
        return chains

    def propose(self, chains: Chains) -> Chains:
        """Change every plan once; a change that is not possible leaves the plan as it is."""
        count = len(chains)
        drawn = torch.multinomial(self.weights, count, replacement=True, generator=self.generator)
        result = chains
        for number in torch.unique(drawn).tolist():
            rows = flatnonzero(drawn == number)
            changed = self._changed(chains[rows], self.names[number])
            result = result.put(rows, changed)
        return result

    def _changed(
        self,
        chains: Chains,
        name: str,
    ) -> Chains:
        """Make one kind of change, a field of `MoveWeights`."""
        if name == "edge":
            return self._edges(chains)
        if name == "outer":
            return self._other_count(chains)
        if name == "jump":
            return self._jump(chains)
        return self._region(chains, name)

    def _region(
        self,
        chains: Chains,
        name: str,
    ) -> Chains:
        """Give a layer, run, stage, or everything one other strategy."""
        first, end = self._range(chains, name)
        layers = torch.arange(self.space.num_layers)
        begun = layers >= first.unsqueeze(1)
        inside = begun & (layers < end.unsqueeze(1))
        choice = self.space.random_choice(chains.table, chains.outer, self.generator)
        choices = torch.where(inside, choice.unsqueeze(1), chains.choices)
        return replace(chains, choices=choices)

    def _range(
        self,
        chains: Chains,
        name: str,
    ) -> tuple[Tensor, Tensor]:
        """Draw the first layer of a region, and the one after its last, `(N,)` each."""
        size = self.space.num_layers
        count = len(chains)
        first = self._below(torch.full((count,), size))
        end = first + 1
        if name == "run":
            exponent = self._uniform(count) * math.log(size + 1.0)
            length = torch.exp(exponent).long()
            end = (first + length).clamp(max=size)
        elif name == "stage":
            stage = self._below(self.space.pp[chains.table]).unsqueeze(1)
            bounds = torch.nn.functional.pad(chains.first_layers, (0, 1), value=size)
            first = bounds.gather(1, stage)[:, 0]
            end = bounds.gather(1, stage + 1)[:, 0]
        elif name == "whole":
            return torch.zeros_like(first), torch.full_like(end, size)
        return first, end

    def _edges(self, chains: Chains) -> Chains:
        """Move the neighbouring stage boundaries a to b by one unit to the same side."""
        space = self.space
        inner = space.pp[chains.table] - 1
        a = self._below(inner.clamp(min=1)) + 1
        more = self._below((inner - a + 1).clamp(min=1))
        b = a + more * (self._uniform(len(chains)) < 0.5)
        order = torch.arange(space.most_stages)
        used = order <= inner.unsqueeze(1)
        after_first = order >= a.unsqueeze(1)
        block = after_first & (order <= b.unsqueeze(1)) & used
        forward = self._uniform(len(chains), 1) < 0.5
        side = torch.where(forward, 1, -1)
        before = torch.searchsorted(space.units, chains.first_layers.contiguous())
        position = before + block * side
        units = len(space.units)
        gaps = position.diff(dim=1) > 0
        rising = (gaps | ~used[:, 1:]).all(1)
        inside = (torch.where(used, position, 0) < units).all(1)
        moved = space.units[position.clamp(0, units - 1)]
        starts = torch.where(used, moved, space.num_layers)
        legal = (rising & inside).unsqueeze(1)
        starts = torch.where(legal, starts, chains.first_layers)
        return replace(chains, first_layers=starts)

    def _other_count(self, chains: Chains) -> Chains:
        """Take another number of micro-batches of the same pipeline degree."""
        possible = self.space.allowed[chains.table].any(2)
        outer = (self._uniform(*possible.shape) * possible + possible).argmax(1)
        changed = replace(chains, outer=outer)
        return self.space.legal(changed, self.generator)

    def _jump(self, chains: Chains) -> Chains:
        """Take another pipeline degree: like strategies, stages even or nearly so."""
        space = self.space
        table, outer = space.random_outer(len(chains), self.generator)
        choices = space.translation[chains.table, table].gather(1, chains.choices)
        noise = self._normal(len(chains), space.most_stages)
        starts = space.split(space.pp[table], JUMP_SPREAD * noise)
        jumped = Chains(table, outer, choices, starts)
        return space.legal(jumped, self.generator)
