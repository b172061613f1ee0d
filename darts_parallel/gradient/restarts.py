"""The free parameters of the relaxed plans: logits, stage widths and memory multipliers."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from darts_parallel.config import OFFLOADS, SearchConfig
from darts_parallel.cost import CostTable, HardPlans, PathMemory, unit_starts
from darts_parallel.gradient.pool import TablePlans
from darts_parallel.gradient.relaxation import (
    Schedules,
    gumbel_weights,
    soft_stages,
    softmax_weights,
    stage_edges,
    straight_through,
)
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, Surrogate, SurrogateCost
from darts_parallel.gradient.rounding import harden

WIDTH_NOISE = 0.05
"""Standard deviation of the initial stage widths, which are otherwise equal."""
FIRST_FRACTION = -2.0
"""Logit of the shares in host memory at the start: 12 %."""
MERIT_PENALTY = 2.0
"""Log-seconds that a stage over its memory counts for in rankings, per relative excess."""


@dataclass
class RestartBatch:
    """Hold all outer choices O and restarts R of one pipeline degree."""

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
    """Outer choice of the whole table for each of `table`, shape `(O,)`."""
    names: list[str]
    """Names of the outer choices, for curves."""
    fraction_logits: Tensor | None = None
    """Logits of the shares in host memory, shape `(O, R, pp, 2)`; None where plans do not offload."""
    paths: PathMemory | None = None
    """Critical paths of a simulated pipeline; None for the closed form."""
    units: Tensor = field(init=False)
    centres: Tensor = field(init=False)
    """Centre of every layer's unit, `(L,)`."""
    price: Surrogate = field(init=False)
    """Prices the relaxed plans of the table."""

    def __post_init__(self) -> None:
        self.units = unit_starts(self.table.fused_to_previous)
        layers = torch.arange(self.table.num_layers)
        self.centres = torch.searchsorted(self.units, layers, right=True) - 0.5
        self.price = Surrogate(self.table)

    @staticmethod
    def initial(
        table: CostTable,
        space_kind: str,
        config: SearchConfig,
        generator: torch.Generator,
        table_index: int,
        outer: Tensor,
    ) -> "RestartBatch":
        """Prefer one strategy for all layers of a restart, plus a little noise for each layer.

        Restarts go through the legal strategies of an outer choice in a random order, so that they
        cover them as evenly as their number allows.
        """
        restarts, count = config.num_restarts, len(table.choices)
        rows = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[
            space_kind
        ]
        shape = (table.num_outer, restarts, rows, count)
        logits = config.initial_noise * torch.randn(shape, generator=generator, dtype=torch.float64)
        rank = (
            torch.rand(table.num_outer, count, generator=generator, dtype=torch.float64)
            + table.allowed
        )
        order = rank.argsort(1, descending=True)
        turn = torch.arange(restarts) % table.allowed.sum(1, keepdim=True)
        preferred = (
            order.gather(1, turn).view(table.num_outer, restarts, 1, 1).expand(-1, -1, rows, -1)
        )
        logits.scatter_add_(
            -1, preferred, torch.full(shape, config.initial_preference, dtype=torch.float64)
        )
        sizes = (table.num_outer, restarts, table.num_stages)
        noise = torch.randn(sizes, generator=generator, dtype=torch.float64)
        return RestartBatch(
            fraction_logits=_first_fractions(noise[..., : table.pp]) if table.host else None,
            table=table,
            space_kind=space_kind,
            logits=logits.requires_grad_(),
            widths=(WIDTH_NOISE * noise).requires_grad_(),
            multipliers=torch.zeros_like(noise[..., : table.pp]),
            table_index=table_index,
            outer_index=outer,
            paths=PathMemory(config.simulate_every) if table.pipeline.simulated else None,
            names=[f"{table.name} m{m}" for m in table.num_micro_batches.tolist()],
        )

    @property
    def parameters(self) -> list[Tensor]:
        """Return everything that is learned."""
        learned = (self.logits, self.widths, self.fraction_logits)
        return [values for values in learned if values is not None]

    def initialize_from(self, plans: HardPlans, preference: float) -> None:
        """Let the first half of the restarts of some outer choices begin at hard plans."""
        near = max(self.logits.shape[1] // 2, 1)
        with torch.no_grad():
            for position, outer in enumerate(self.outer_index.tolist()):
                for index in torch.nonzero(plans.outer == outer).flatten()[:1].tolist():
                    starts, choices = plans.first_layers[index], plans.choices[index]
                    by_kind = {
                        "uniform": choices[:1],
                        "stagewise": choices[starts],
                        "layerwise": choices,
                    }
                    rows = by_kind[self.space_kind]
                    logits = self.logits[position, :near]
                    logits.sub_(logits.amax(-1, keepdim=True).clamp(min=0.0))
                    wanted = rows.view(1, -1, 1).expand(near, -1, -1)
                    logits.scatter_(
                        -1, wanted, torch.full(wanted.shape, preference, dtype=logits.dtype)
                    )
                    first = torch.searchsorted(self.units, starts)
                    counts = torch.diff(first, append=torch.tensor([len(self.units)]))
                    # the inverse of `stage_edges` but for its least width
                    self.widths[position, :near] = counts.double().log()

    @property
    def edges(self) -> Tensor:
        """Return inner stage edges in units, shape `(O, R, K - 1)`."""
        return stage_edges(self.widths, len(self.units))

    def relax(self, schedules: Schedules, gumbel: torch.Generator | None) -> RelaxedPlans:
        """Return weights of all outer choices and restarts.

        Args:
            gumbel: Source of straight-through samples; None for the plain softmax.
        """
        table, allowed = self.table, self.table.allowed[:, None, None, :]
        stages = soft_stages(self.edges, self.centres, schedules.boundary_temperature)
        if schedules.hard_stages:
            stages = straight_through(stages)
        if gumbel is not None:
            rows = gumbel_weights(self.logits, allowed, schedules.temperature, gumbel)
        else:
            rows = softmax_weights(self.logits, allowed, schedules.temperature)
        if schedules.hard_choices:
            rows = straight_through(rows)
        if self.space_kind == "stagewise":
            rows = stages @ rows
        fractions = None
        if self.fraction_logits is not None and table.host is not None:
            free = torch.tensor([kind in table.host.kinds for kind in OFFLOADS])
            fractions = torch.sigmoid(self.fraction_logits) * free
        return RelaxedPlans(rows.expand(-1, -1, table.num_layers, -1), stages, fractions)

    def hard_plans(self, relaxed: RelaxedPlans) -> TablePlans:
        """Round all relaxed plans to plans of the whole table, `O * R` in the order of the restarts."""
        plans = harden(relaxed.choices.detach(), self.edges.detach(), self.table)
        if self.space_kind == "stagewise":
            first = plans.first_layers.gather(1, plans.stages())
            plans = replace(plans, choices=plans.choices.gather(1, first))
        return TablePlans(self.table_index, replace(plans, outer=self.outer_index[plans.outer]))

    def merit(self, cost: SurrogateCost) -> Tensor:
        """Rank relaxed plans whatever their multipliers, in log-seconds: lower is better, shape `(O, R)`."""
        violation = torch.relu(cost.memory / cost.capacity - 1.0).amax(-1)
        return (torch.log(cost.iteration_time) + MERIT_PENALTY * violation).detach()

    def loss(self, cost: SurrogateCost, config: SearchConfig) -> Tensor:
        """Return log of the iteration time plus the augmented Lagrangian of memory, shape `(O, R)`.

        Nocedal and Wright, Numerical Optimization, equation 17.65, for inequalities; the multipliers
        are updated on the violation at every call.
        """
        before, violation = self.multipliers, cost.memory / cost.capacity - 1.0
        shifted = torch.relu(before + config.penalty * violation)
        self.multipliers = torch.relu(before + config.multiplier_step * violation.detach())
        memory = (shifted.square() - before.square()).sum(-1) / (2.0 * config.penalty)
        return torch.log(cost.iteration_time) + memory

    def select(self, outer: Tensor, restarts: Tensor) -> "RestartBatch":
        """Keep some outer choices and restarts.

        Args:
            outer: Kept outer choices, shape `(O',)`.
            restarts: Kept restarts of each of them, shape `(O', R')`.
        """

        def take(values: Tensor) -> Tensor:
            return values.detach()[outer.unsqueeze(1), restarts].clone()

        fractions = self.fraction_logits
        return replace(
            self,
            table=self.table.select(outer),
            logits=take(self.logits).requires_grad_(),
            widths=take(self.widths).requires_grad_(),
            multipliers=take(self.multipliers),
            outer_index=self.outer_index[outer],
            names=[self.names[o] for o in outer.tolist()],
            paths=self.paths and PathMemory(self.paths.every),
            fraction_logits=fractions if fractions is None else take(fractions).requires_grad_(),
        )


def _first_fractions(noise: Tensor) -> Tensor:
    """Return logits of small shares, shape `(O, R, pp, 2)`, from noise `(O, R, pp)`."""
    return (FIRST_FRACTION + noise.unsqueeze(-1).repeat(1, 1, 1, len(OFFLOADS))).requires_grad_()
