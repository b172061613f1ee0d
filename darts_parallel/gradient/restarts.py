"""The free parameters of the relaxed plans: logits, stage widths and memory multipliers."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from darts_parallel.config.schema import OFFLOADS
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.critical_paths import PathMemory
from darts_parallel.cost.hard_plans import HardPlans, unit_starts
from darts_parallel.cost.table import CostTable
from darts_parallel.gradient.chain.rounding import best_paths
from darts_parallel.gradient.chain.weights import ChainPrices, chain_weights
from darts_parallel.gradient.kernels.fused_step import FusedStep
from darts_parallel.gradient.kernels.step_parts import StepFigures
from darts_parallel.gradient.pool import TablePlans
from darts_parallel.gradient.relaxation import (
    Schedules,
    gumbel_weights,
    soft_stages,
    softmax_weights,
    stage_edges,
    straight_through,
)
from darts_parallel.gradient.relaxed_cost import (
    NodeOrderTables,
    NodeOrderWeights,
    RelaxedPlans,
    SurrogateCost,
)
from darts_parallel.gradient.rounding import harden


def rank_starts(losses: Tensor, gradient_norms: Tensor) -> Tensor:
    """Starts in the order in which they deserve to go on.

    A start's rank is the sum of its ranks by loss (low first) and by gradient norm (large first: it
    still moves); equal sums go by the loss.

    Args:
        losses, gradient_norms: Shape `(..., N)`.

    Returns:
        Indices, best first, shape `(..., N)`.
    """
    by_loss = losses.argsort(dim=-1, stable=True).argsort(dim=-1)
    by_gradient = gradient_norms.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    count = losses.shape[-1]
    return torch.argsort((by_loss + by_gradient) * count + by_loss, dim=-1, stable=True)


def resample_sources(order: Tensor, survivors: int) -> Tensor:
    """The start that each place goes on from, survivors first and then their copies in turn.

    Args:
        order: Starts by `rank_starts`, shape `(..., N)`.
        survivors: Starts that stay, 1 to N.

    Returns:
        Indices, shape `(..., N)`.
    """
    turn = torch.arange(order.shape[-1]) % survivors
    return order[..., turn]


Moments = dict[int, tuple[Tensor, ...]]
WIDTH_NOISE = 0.05
"""Standard deviation of the initial stage widths, which are otherwise equal."""
FIRST_FRACTION = -2.0
"""Logit of the shares in host memory at the start: 12 %."""
MERIT_PENALTY = 2.0
"""Log-seconds that a stage over its memory counts for in rankings, per relative excess."""


@dataclass
class RestartBatch:
    """All outer choices O and restarts R of one pipeline degree."""

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
    """Of the outer choices, for curves."""
    orders: NodeOrderTables | None = None
    """Orders of the nodes that the group learns to choose from; None where the table's own is meant."""
    order_logits: Tensor | None = None
    """Shape `(O, R, N)`."""
    fraction_logits: Tensor | None = None
    """Logits of the shares in host memory, shape `(O, R, pp, 2)`; None where plans do not offload."""
    paths: PathMemory | None = None
    """Critical paths of a simulated pipeline; None for the closed form."""
    prices: ChainPrices | None = None
    """Of the last step, where weights are a chain's."""
    units: Tensor = field(init=False)
    unit_of_layer: Tensor = field(init=False)
    figures: StepFigures | None = field(init=False)
    """For the fused step; None where autograd has to find the slope."""
    _step: FusedStep | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.units = unit_starts(self.table.fused_to_previous)
        layers = torch.arange(self.table.num_layers)
        self.unit_of_layer = torch.searchsorted(self.units, layers, right=True) - 1
        closed = not self.table.pipeline.simulated and self.table.virtual_stages == 1
        fused = closed and self.space_kind == "layerwise" and self.orders is None and not self.table.offload
        self.figures = StepFigures.build(self.table) if fused else None

    @staticmethod
    def initial(
        table: CostTable,
        space_kind: str,
        config: SearchConfig,
        generator: torch.Generator,
        table_index: int,
        outer: Tensor,
        orders: NodeOrderTables | None = None,
    ) -> "RestartBatch":
        """One strategy preferred by all layers of a restart, plus a little noise for each layer.

        Restarts go through the legal strategies of an outer choice in a random order, so that they
        cover them as evenly as their number allows; they go through the node orders in the same way.
        """
        restarts, count = config.num_restarts, len(table.choices)
        rows = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]
        shape = (table.num_outer, restarts, rows, count)
        logits = config.initial_noise * torch.randn(shape, generator=generator, dtype=torch.float64)
        rank = torch.rand(table.num_outer, count, generator=generator, dtype=torch.float64) + table.allowed
        order = rank.argsort(1, descending=True)
        turn = torch.arange(restarts) % table.allowed.sum(1, keepdim=True)
        preferred = order.gather(1, turn).view(table.num_outer, restarts, 1, 1).expand(-1, -1, rows, -1)
        logits.scatter_add_(-1, preferred, torch.full(shape, config.initial_preference, dtype=torch.float64))
        noise = torch.randn(
            table.num_outer, restarts, table.num_stages, generator=generator, dtype=torch.float64
        )
        first = None
        if orders is not None:
            turns = torch.arange(restarts) % len(orders.tables)
            first = (
                config.initial_preference * torch.nn.functional.one_hot(turns, len(orders.tables)).double()
            )
            first = first.repeat(table.num_outer, 1, 1).requires_grad_()
        return RestartBatch(
            orders=None if orders is None else orders.select(outer),
            order_logits=first,
            fraction_logits=_first_fractions(noise[..., : table.pp]) if table.offload else None,
            table=table,
            space_kind=space_kind,
            logits=_layer_major(logits).requires_grad_(),
            widths=(WIDTH_NOISE * noise).requires_grad_(),
            multipliers=torch.zeros_like(noise[..., : table.pp]),
            table_index=table_index,
            outer_index=outer,
            paths=PathMemory(config.simulate_every) if table.pipeline.simulated else None,
            names=[f"{_name(table, orders)} m{m}" for m in table.num_micro_batches.tolist()],
        )

    @property
    def parameters(self) -> list[Tensor]:
        """Everything that is learned."""
        learned = (self.logits, self.widths, self.order_logits, self.fraction_logits)
        return [values for values in learned if values is not None]

    def begin_near(self, plans: HardPlans, preference: float) -> None:
        """Let the first half of the restarts of some outer choices begin at hard plans.

        Args:
            plans: Of the whole table.
            preference: Logit of a plan's strategies above the others'.
        """
        near = max(self.logits.shape[1] // 2, 1)
        with torch.no_grad():
            for position, outer in enumerate(self.outer_index.tolist()):
                for index in torch.nonzero(plans.outer == outer).flatten()[:1].tolist():
                    starts, choices = plans.first_layers[index], plans.choices[index]
                    rows = {"uniform": choices[:1], "stagewise": choices[starts], "layerwise": choices}[
                        self.space_kind
                    ]
                    logits = self.logits[position, :near]
                    logits.sub_(logits.amax(-1, keepdim=True).clamp(min=0.0))
                    wanted = rows.view(1, -1, 1).expand(near, -1, -1)
                    logits.scatter_(-1, wanted, torch.full(wanted.shape, preference, dtype=logits.dtype))
                    first = torch.searchsorted(self.units, starts)
                    counts = torch.diff(first, append=torch.tensor([len(self.units)]))
                    # the inverse of `stage_edges` but for its least width
                    self.widths[position, :near] = counts.double().log()

    @property
    def edges(self) -> Tensor:
        """Inner stage edges in units, shape `(O, R, K - 1)`."""
        return stage_edges(self.widths, len(self.units))

    def relax(
        self,
        schedules: Schedules,
        gumbel: torch.Generator | None,
        *,
        natural: bool = False,
        chain: bool = False,
    ) -> RelaxedPlans:
        """Weights of all outer choices and restarts.

        Args:
            schedules: Temperatures.
            gumbel: Source of straight-through samples; None for the plain softmax.
            natural: Whether the slope of the logits is the natural one.
            chain: Whether the weights are a chain's marginals; a table without `figures` has none.
        """
        table, allowed = self.table, self.table.allowed[:, None, None, :]
        stages = soft_stages(self.edges, len(self.units), schedules.boundary_temperature)
        if schedules.hard_stages:
            stages = straight_through(stages)
        stages = stages[..., self.unit_of_layer, :]
        pairs = None
        if chain and self.figures is not None:
            rows, pairs = chain_weights(self.logits, stages, table, self.prices, schedules.temperature)
        elif gumbel is not None:
            rows = gumbel_weights(self.logits, allowed, schedules.temperature, gumbel, natural=natural)
        else:
            rows = softmax_weights(self.logits, allowed, schedules.temperature, natural=natural)
        if schedules.hard_choices:
            rows = straight_through(rows)
        if self.space_kind == "stagewise":
            rows = stages @ rows
        placement = None
        if self.orders is not None and self.order_logits is not None:
            weights = torch.softmax(self.order_logits / schedules.temperature, dim=-1)
            weights = straight_through(weights) if schedules.hard_stages else weights
            placement = NodeOrderWeights(weights, self.orders)
        fractions = None
        if self.fraction_logits is not None:
            free = torch.tensor([kind in table.offload for kind in OFFLOADS])
            fractions = torch.sigmoid(self.fraction_logits) * free
        return RelaxedPlans(rows.expand(-1, -1, table.num_layers, -1), stages, placement, fractions, pairs)

    def fused_step(
        self, figures: StepFigures, schedules: Schedules, config: SearchConfig
    ) -> tuple[RelaxedPlans, SurrogateCost]:
        """What `relax`, `surrogate` and `loss` do, and the slopes of the loss in logits and widths."""
        if self._step is None:
            units = self.unit_of_layer, len(self.units)
            self._step = FusedStep(figures, self.logits, self.widths, *units)
        found, capacity = self._step.forward(schedules), self.table.capacity
        shifted = self._shifted_multipliers(found.memory / capacity - 1.0, config)
        self.logits.grad, self.widths.grad = self._step.backward(
            schedules, 1.0 / found.iteration_time, shifted / capacity, natural=config.step == "natural"
        )
        cost = SurrogateCost(
            found.iteration_time, found.stage_seconds, found.memory, found.sync, self.table.capacity
        )
        return RelaxedPlans(found.choices, found.stages), cost

    def hard_plans(
        self, relaxed: RelaxedPlans, prices: tuple[Tensor, Tensor] | None = None
    ) -> Iterator[tuple[TablePlans, Tensor]]:
        """All relaxed plans rounded, those of every order of the nodes apart.

        Args:
            relaxed: As `relax` gave them.
            prices: Of `stage_prices`: strategies are a chain's best path; None takes the largest weights.

        Yields:
            Plans of the whole table, and their places among the `O * R` relaxed ones, integer.
        """
        plans = harden(relaxed.choices.detach(), self.edges.detach(), self.table)
        if self.space_kind == "stagewise":
            first = plans.first_layers.gather(1, plans.stages())
            plans = replace(plans, choices=plans.choices.gather(1, first))
        if prices is not None:
            slope, price = (values.flatten(0, 1) for values in prices)
            plans = best_paths(plans, self.table, slope, price)
        plans = replace(plans, outer=self.outer_index[plans.outer])
        if relaxed.placement is None or self.orders is None:
            yield TablePlans(self.table_index, plans), torch.arange(len(plans))
            return
        chosen = relaxed.placement.weights.detach().argmax(-1).flatten()
        for order in torch.unique(chosen).tolist():
            rows = torch.nonzero(chosen == order).squeeze(1)
            yield TablePlans(self.orders.tables[order], plans[rows]), rows

    def merit(self, cost: SurrogateCost) -> Tensor:
        """How good each relaxed plan is whatever its multipliers: lower is better, shape `(O, R)`."""
        violation = torch.relu(cost.memory / cost.capacity - 1.0).amax(-1)
        return (torch.log(cost.iteration_time) + MERIT_PENALTY * violation).detach()

    def loss(self, cost: SurrogateCost, config: SearchConfig) -> Tensor:
        """Log of the iteration time plus the augmented Lagrangian of memory, shape `(O, R)`.

        Nocedal and Wright, Numerical Optimization, equation 17.65, for inequalities; the multipliers
        are updated on the violation at every call.
        """
        before = self.multipliers
        shifted = self._shifted_multipliers(cost.memory / cost.capacity - 1.0, config)
        memory = (shifted.square() - before.square()).sum(-1) / (2.0 * config.penalty)
        return torch.log(cost.iteration_time) + memory

    def _shifted_multipliers(self, violation: Tensor, config: SearchConfig) -> Tensor:
        """The multipliers that a quadratic penalty makes of `violation` `(O, R, pp)`; updates them after."""
        shifted = torch.relu(self.multipliers + config.penalty * violation)
        with torch.no_grad():
            self.multipliers = torch.relu(self.multipliers + config.multiplier_step * violation)
        return shifted

    @torch.no_grad()
    def resample(self, merit: Tensor, moments: Moments, noise: float, generator: torch.Generator) -> Tensor:
        """Replace the worse half of the restarts by noisy copies of the better half.

        Better are those of low merit and large gradient (`starts.rank_starts`).

        Args:
            merit: Shape `(O, R)`.
            moments: The optimizer's, by the parameter's identity; they are copied along.
            noise: Standard deviation of what is added to the copies' logits; widths get a share of it.
            generator: Source of the noise.

        Returns:
            The restart that each goes on from, shape `(O, R)`.
        """
        assert self.logits.grad is not None
        norms = self.logits.grad.flatten(2).norm(dim=-1)
        survivors = -(-merit.shape[1] // 2)
        source = resample_sources(rank_starts(merit, norms), survivors)
        rows = torch.arange(len(source)).unsqueeze(1)
        copies = torch.arange(merit.shape[1]) >= survivors
        sizes = (noise, WIDTH_NOISE * noise, noise, noise)
        for values, size in zip(self.parameters, sizes, strict=False):
            drawn = size * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(values[rows, source] + drawn * copies.view(1, -1, *[1] * (values.dim() - 2)))
            for moment in moments[id(values)]:
                moment.copy_(moment[rows, source])
        self.multipliers = self.multipliers[rows, source]
        self.prices = self.prices and self.prices.select(rows, source)
        if self.paths is not None:
            self.paths.forget()
        return source

    def select(self, outer: Tensor, restarts: Tensor) -> "RestartBatch":
        """Keep some outer choices and restarts.

        Args:
            outer: Kept outer choices, shape `(O',)`.
            restarts: Kept restarts of each of them, shape `(O', R')`.
        """

        def take(values: Tensor) -> Tensor:
            return values.detach()[outer.unsqueeze(1), restarts].clone()

        def learned(values: Tensor | None) -> Tensor | None:
            return None if values is None else take(values).requires_grad_()

        return RestartBatch(
            prices=self.prices and self.prices.select(outer.unsqueeze(1), restarts),
            table=self.table.select(outer),
            space_kind=self.space_kind,
            logits=_layer_major(take(self.logits)).requires_grad_(),
            widths=take(self.widths).requires_grad_(),
            multipliers=take(self.multipliers),
            table_index=self.table_index,
            outer_index=self.outer_index[outer],
            names=[self.names[o] for o in outer.tolist()],
            paths=self.paths and PathMemory(self.paths.every),
            orders=None if self.orders is None else self.orders.select(outer),
            order_logits=learned(self.order_logits),
            fraction_logits=learned(self.fraction_logits),
        )


def _layer_major(values: Tensor) -> Tensor:
    """Values `(O, R, L, C)` with layers before restarts in memory, as the fused step reads them."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def _first_fractions(noise: Tensor) -> Tensor:
    """Logits of small shares, shape `(O, R, pp, 2)`, from noise `(O, R, pp)`."""
    return (FIRST_FRACTION + noise.unsqueeze(-1).repeat(1, 1, 1, len(OFFLOADS))).requires_grad_()


def _name(table: CostTable, orders: NodeOrderTables | None) -> str:
    """The table's name, without its node order where the group learns it."""
    return table.name if orders is None else replace(table, order_name="").name
