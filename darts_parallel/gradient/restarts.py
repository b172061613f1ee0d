"""The free parameters of the relaxed plans: logits, stage widths and memory multipliers."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from darts_parallel.config import OFFLOADS, SearchConfig
from darts_parallel.cost import CostTable, HardPlans, PathMemory, filled, unit_starts
from darts_parallel.exact import number_of_slots
from darts_parallel.gradient.boundary_rounding import Rounding
from darts_parallel.gradient.relaxation import (
    Schedules,
    soft_stages,
    softmax_weights,
    stage_edges,
    stage_widths,
    straight_through,
)
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, Surrogate, SurrogateCost
from darts_parallel.gradient.rounding import harden, round_counts, round_to_fit

INITIAL_NOISE = 0.3
"""Standard deviation of the per-layer noise on the initial preference of a restart."""
INITIAL_PREFERENCE = 3.0
"""Logit of the strategy that all layers of a restart prefer at first."""
WIDTH_NOISE = 0.05
"""Standard deviation of the initial stage widths, which are otherwise equal."""
FIRST_FRACTION = -2.0
"""Logit of the shares in host memory at the start: 12 %."""
AIM = 0.97
"""Share of the capacity that the multipliers aim at: rounding to whole layers needs the rest."""
LEAST_WEIGHT = 0.02
"""Weight from which every strategy begins the last steps: at less its logit would not return in time."""
MERIT_PENALTY = 2.0
"""Log-seconds that a stage over its memory counts for in rankings, per relative excess."""
SIMULATE_EVERY = 5
"""Steps between simulations of all restarts; in between, seconds follow the last critical paths."""

OF_RESTARTS = ("logits", "widths", "multipliers", "fraction_logits")
"""Fields of a `RestartBatch` with a row for every restart."""


@dataclass(frozen=True)
class KeptRestarts:
    """Restarts of one group that stay while others are dropped."""

    group: int
    """Index of the group before anything is dropped."""
    outer: Tensor
    """Kept pipeline configurations, shape `(O',)`."""
    restarts: Tensor
    """Kept restarts of each of them, shape `(O', R')`."""

    @staticmethod
    def best(group: int, outer: Tensor, merits: Tensor, count: int) -> "KeptRestarts":
        """Keep the `count` restarts of lowest merit, merits `(O, R)`, in their order."""
        order = merits[outer].argsort(dim=1, stable=True)
        restarts = order[:, :count].sort(1).values
        return KeptRestarts(group, outer, restarts)

    def of(self, values: Tensor) -> Tensor:
        """Select from values of all restarts, `(O, R, ...)`; of leaves, as leaves."""
        selected = values.detach()[self.outer.unsqueeze(1), self.restarts]
        return selected.requires_grad_(values.requires_grad)


@dataclass
class RestartBatch:
    """Hold all pipeline configurations O and restarts R of one cost table."""

    table: CostTable
    space_kind: str
    logits: Tensor
    """Shape `(O, R, J, C)`; J is 1, K or L for uniform, stagewise and layerwise."""
    widths: Tensor
    """Shape `(O, R, K)`."""
    multipliers: Tensor
    """Memory multipliers, shape `(O, R, pp)`."""
    table_index: int
    outer_index: Tensor
    """Row of the whole table for each row of `table`, shape `(O,)`."""
    fraction_logits: Tensor | None = None
    """Logits of the shares in host memory, `(O, R, pp, 2)`; None where plans do not offload."""
    averages: tuple[Tensor, Tensor] | None = None
    """Means of weights `(O, R, L, C)` and stage boundaries `(O, R, K - 1)` over the last steps."""
    aims: Tensor | None = None
    """Shares of the capacity that each restart aims at once its boundaries are whole, `(R, 1)`."""
    paths: PathMemory | None = field(init=False)
    """Critical paths of a simulated pipeline; None for the closed form."""
    units: Tensor = field(init=False)
    """First layers of the units that stage boundaries cannot part."""
    centres: Tensor = field(init=False)
    """Centre of every layer's unit, `(L,)`."""
    price: Surrogate = field(init=False)
    """Prices the relaxed plans of the table."""

    def __post_init__(self) -> None:
        table = self.table
        self.units = unit_starts(table.fused_to_previous)
        layers = torch.arange(table.num_layers)
        passed = torch.searchsorted(self.units, layers, right=True)
        self.centres = passed - 0.5
        self.price = Surrogate(table)
        self.paths = PathMemory(SIMULATE_EVERY) if table.simulated else None

    @staticmethod
    def initial(
        table: CostTable,
        space_kind: str,
        config: SearchConfig,
        generator: torch.Generator,
        table_index: int,
        outer: Tensor,
    ) -> "RestartBatch":
        """Prefer one strategy for all layers of a restart, plus a little noise for each layer."""
        restarts = config.num_restarts
        logits = _initial_logits(table, space_kind, restarts, generator).requires_grad_()
        shape = (table.num_outer, restarts, table.num_stages)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        widths = (WIDTH_NOISE * noise).requires_grad_()
        by_device = noise[..., : table.pp]
        none = torch.zeros_like(by_device)
        batch = RestartBatch(table, space_kind, logits, widths, none, table_index, outer)
        if table.host:
            repeated = by_device.unsqueeze(-1).repeat(1, 1, 1, len(OFFLOADS))
            batch.fraction_logits = (FIRST_FRACTION + repeated).requires_grad_()
        return batch

    @property
    def names(self) -> list[str]:
        """Name every pipeline configuration, for curves."""
        counts = self.table.num_micro_batches.tolist()
        return [f"{self.table.name} m{count}" for count in counts]

    @property
    def parameters(self) -> list[Tensor]:
        """Return everything that is learned."""
        learned = (self.logits, self.fraction_logits)
        found = [values for values in learned if values is not None]
        if self.aims is None:
            found.append(self.widths)
        return found

    def settle(self, first_layers: Tensor, aims: Tensor) -> None:
        """Fix the stages of all restarts; logits begin again at the mean weights.

        Args:
            first_layers: Of every stage, `(O, R, K)`.
            aims: Share of the capacity that each restart aims at, `(R,)`.
        """
        assert self.averages is not None
        size = len(self.units)
        first = torch.searchsorted(self.units, first_layers)
        end = torch.full_like(first[..., :1], size)
        counts = torch.diff(first, append=end)
        self.widths = stage_widths(counts.double(), size)
        self.multipliers = torch.zeros_like(self.multipliers)
        self.aims = aims.unsqueeze(1)
        self.logits = self.averages[0].clamp(min=LEAST_WEIGHT).log().requires_grad_()
        self.averages = None

    @property
    def edges(self) -> Tensor:
        """Return inner stage boundaries in units, shape `(O, R, K - 1)`."""
        return stage_edges(self.widths, len(self.units))

    def relax(self, schedules: Schedules) -> RelaxedPlans:
        """Return weights of all pipeline configurations and restarts."""
        table = self.table
        allowed = table.allowed[:, None, None, :]
        stages = soft_stages(self.edges, self.centres, schedules.boundary_temperature)
        if schedules.hard_stages:
            stages = straight_through(stages)
        rows = softmax_weights(self.logits, allowed, schedules.temperature)
        if self.space_kind == "stagewise":
            rows = stages @ rows
        choices = rows.expand(-1, -1, table.num_layers, -1)
        return RelaxedPlans(choices, stages, self._fractions())

    def _fractions(self) -> Tensor | None:
        """Return shares in host memory; 0 of what the space does not offload."""
        host = self.table.host
        if self.fraction_logits is None or host is None:
            return None
        if host.fractions is not None:
            return host.fractions.expand_as(self.fraction_logits)
        offloaded = torch.tensor([kind in host.kinds for kind in OFFLOADS])
        return torch.sigmoid(self.fraction_logits) * offloaded

    def remember(self, relaxed: RelaxedPlans, steps: int) -> None:
        """Add one step to the means of weights and stage boundaries over so many steps."""
        now = (relaxed.choices.detach(), self.edges.detach())
        before = self.averages or now
        weights = before[0].lerp(now[0], 1.0 / steps)
        edges = before[1].lerp(now[1], 1.0 / steps)
        self.averages = (weights, edges)

    def hard_plans(self, relaxed: RelaxedPlans) -> HardPlans:
        """Round all relaxed plans to plans of the whole table, `O * R` in the order of restarts."""
        weights = relaxed.choices.detach()
        plans = harden(weights, self.edges.detach(), self.table)
        return self._of_whole_table(plans)

    def average_plans(self) -> HardPlans:
        """Round the means to as many plans; equal layers of a stage share their expected counts."""
        assert self.averages is not None
        weights, edges = self.averages
        plans = harden(weights, edges, self.table)
        if self.space_kind == "layerwise":
            rule = round_counts if self.aims is None else round_to_fit
            plans = rule(weights.flatten(0, 1), plans, self.table)
        return self._of_whole_table(plans)

    def rounding(self, row: int, whole: CostTable) -> Rounding:
        """Return the roundings of the means of restart `row` of `O * R`, as plans of the whole table."""
        assert self.averages is not None
        weights, edges = (mean.flatten(0, 1)[row] for mean in self.averages)
        outer = self.outer_index[row // self.logits.shape[1]]
        return Rounding(whole, int(outer), weights, edges)

    def _of_whole_table(self, plans: HardPlans) -> HardPlans:
        """Number pipeline configurations as the whole table; in stage-wise spaces first layers decide."""
        if self.space_kind == "stagewise":
            first = plans.first_layers.gather(1, plans.stages())
            plans = replace(plans, choices=plans.choices.gather(1, first))
        outer = self.outer_index[plans.outer]
        return replace(plans, outer=outer)

    def merit(self, cost: SurrogateCost) -> Tensor:
        """Rank relaxed plans whatever their multipliers: log-seconds, lower is better, `(O, R)`."""
        violation = torch.relu(cost.memory / cost.capacity - 1.0)
        penalty = MERIT_PENALTY * violation.amax(-1)
        return (torch.log(cost.iteration_time) + penalty).detach()

    def loss(self, cost: SurrogateCost, config: SearchConfig) -> Tensor:
        """Return log iteration time plus the augmented Lagrangian of memory, shape `(O, R)`.

        Nocedal and Wright, Numerical Optimization, equation 17.65, for inequalities; the multipliers
        are updated on the violation at every call.
        """
        before = self.multipliers
        aim = AIM if self.aims is None else self.aims
        violation = cost.memory / (aim * cost.capacity) - 1.0
        shifted = torch.relu(before + config.penalty * violation)
        self.multipliers = torch.relu(before + violation.detach())
        grown = (shifted.square() - before.square()).sum(-1)
        memory = grown / (2.0 * config.penalty)
        return torch.log(cost.iteration_time) + memory

    def select(self, kept: KeptRestarts) -> "RestartBatch":
        """Keep some pipeline configurations and restarts."""
        table = self.table.select(kept.outer)
        part = replace(self, table=table, outer_index=self.outer_index[kept.outer])
        for name in OF_RESTARTS:
            values = getattr(self, name)
            if values is not None:
                setattr(part, name, kept.of(values))
        if self.averages is not None:
            weights, edges = self.averages
            part.averages = (kept.of(weights), kept.of(edges))
        return part


def _initial_logits(
    table: CostTable, space_kind: str, restarts: int, generator: torch.Generator
) -> Tensor:
    """Draw logits `(O, R, J, C)`: noise, and one preferred strategy for all rows of a restart.

    Restarts go through the legal strategies of a pipeline configuration in a random order, so that
    they cover them as evenly as their number allows.
    """
    count = len(table.choices)
    rows = number_of_slots(table, space_kind)
    shape = (table.num_outer, restarts, rows, count)
    logits = INITIAL_NOISE * torch.randn(shape, generator=generator, dtype=torch.float64)
    rank = torch.rand(table.num_outer, count, generator=generator, dtype=torch.float64)
    # legal strategies rank first
    order = (rank + table.allowed).argsort(1, descending=True)
    legal = table.allowed.sum(1, keepdim=True)
    turn = torch.arange(restarts) % legal
    preferred = order.gather(1, turn).view(-1, restarts, 1, 1)
    preferred = preferred.expand(-1, -1, rows, -1)
    strength = filled(INITIAL_PREFERENCE, *shape)
    return logits.scatter_add_(-1, preferred, strength)
