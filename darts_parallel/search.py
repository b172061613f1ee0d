"""The gradient search: all outer choices and restarts as one batch, annealed to hard plans."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from darts_parallel.adam import Adam
from darts_parallel.bounds import outer_lower_bounds
from darts_parallel.candidates import Candidate, CandidatePool, even_uniform_plans
from darts_parallel.config import SearchConfig
from darts_parallel.discretize import harden, unit_starts
from darts_parallel.infeasible import explain_infeasible, lightest_plans
from darts_parallel.objective import RelaxedPlans, SurrogateCost, surrogate
from darts_parallel.polish import polish
from darts_parallel.problem import Problem
from darts_parallel.relaxation import (
    geometric,
    gumbel_weights,
    soft_stages,
    softmax_weights,
    stage_edges,
)
from darts_parallel.space import outer_spaces
from darts_parallel.strategy import Plan
from darts_parallel.table import CostTable, build_tables


@dataclass(frozen=True)
class Schedules:
    """The annealed quantities at one step."""

    temperature: float
    boundary_temperature: float
    sharpness: float


@dataclass(frozen=True)
class StepRecord:
    """What the search looked like at one step; tensors belong to the leading relaxed plan."""

    step: int
    seconds: float
    schedules: Schedules
    loss: float
    surrogate_time_s: float
    best_time_s: float
    entropy: float
    outer_weights: dict[str, float]
    pp: int
    choices: tuple[str, ...]
    probabilities: Tensor
    """Shape `(L, C)`."""
    memory: Tensor
    capacity: Tensor
    multipliers: Tensor
    stage_seconds: Tensor


@dataclass(frozen=True)
class SearchResult:
    """The best plan, the best before polishing, and how the search went."""

    plan: Plan
    iteration_time_s: float
    raw_plan: Plan
    raw_iteration_time_s: float
    alternatives: tuple[tuple[float, Plan], ...]
    """The best plan of every other outer choice that was visited, fastest first."""
    history: tuple[StepRecord, ...]
    seconds: float
    steps: int
    restarts: int
    seed: int
    plans_evaluated: int
    interrupted: bool


@dataclass
class _Group:
    """Free parameters of all outer choices and restarts of one pipeline degree."""

    table: CostTable
    logits: Tensor
    """Shape `(O, R, J, C)`; J is 1, K or L for uniform, stagewise and layerwise."""
    widths: Tensor
    """Shape `(O, R, K)`."""
    multipliers: Tensor
    """Memory multipliers, shape `(O, R, K)`."""
    units: Tensor = field(init=False)
    unit_of_layer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.units = unit_starts(self.table.joined)
        layers = torch.arange(self.table.num_layers)
        self.unit_of_layer = torch.searchsorted(self.units, layers, right=True) - 1


class GradientSearch:
    """The optimisation loop over the relaxed plans of a list of cost tables.

    Args:
        tables: One for each pipeline degree.
        kind: `uniform`, `stagewise` or `layerwise`.
        config: Settings.
        seed: Of all random numbers.
    """

    def __init__(self, tables: Sequence[CostTable], kind: str, config: SearchConfig, seed: int) -> None:
        self.config, self.kind, self.seed = config, kind, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.began = time.perf_counter()
        self.pool = CandidatePool(list(tables))
        bounds = [outer_lower_bounds(table) for table in tables]
        self.pool.add_all(lightest_plans(tables, kind))
        self.pool.add_all(self._uniform_plans(tables))
        self.groups = self._groups(tables, bounds)
        names = [f"pp{g.table.pp} m{m}" for g in self.groups for m in g.table.num_micro_batches.tolist()]
        self.outer_names = tuple(names)
        self.outer_logits = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
        self.step = 0

    def _uniform_plans(self, tables: Sequence[CostTable]) -> list[Candidate]:
        """Where the restarts begin: one strategy for all layers and even stages."""
        return [Candidate(index, even_uniform_plans(table)) for index, table in enumerate(tables)]

    def _groups(self, tables: Sequence[CostTable], bounds: list[Tensor]) -> list[_Group]:
        """Parameters of the outer choices whose lower bound the best known plan does not exclude."""
        groups, self.table_of_group, self.outer_of_group = [], [], []
        limit = self.pool.best_time
        for index, (table, bound) in enumerate(zip(tables, bounds, strict=True)):
            alive = torch.nonzero(bound <= limit * (1 + 1e-9)).squeeze(1)
            alive = alive[table.allowed[alive].any(1)]
            if not len(alive):
                continue
            part = table.select(alive)
            groups.append(self._initial(part))
            self.table_of_group.append(index)
            self.outer_of_group.append(alive)
        return groups

    def _initial(self, table: CostTable) -> _Group:
        """One strategy preferred by all layers of a restart, plus a little noise for each layer."""
        config, restarts = self.config, self.config.num_restarts
        rows = {"uniform": 1, "stagewise": table.pp, "layerwise": table.num_layers}[self.kind]
        shape = (table.num_outer, restarts, rows, len(table.choices))
        logits = config.initial_noise * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        chances = table.allowed.double()
        # without replacement: restarts cover the strategies as evenly as they can
        order = torch.rand(table.num_outer, restarts, len(table.choices), generator=self.generator) * chances.unsqueeze(1)
        turn = torch.arange(restarts) % chances.sum(1, keepdim=True).long()
        ranked = order[:, :1].argsort(-1, descending=True).expand(-1, restarts, -1)
        preferred = ranked.gather(-1, turn.unsqueeze(-1))
        logits.scatter_add_(-1, preferred.unsqueeze(2).expand(-1, -1, rows, -1),
                            torch.full(shape, config.initial_preference, dtype=torch.float64))  # fmt: skip
        widths = 0.05 * torch.randn(table.num_outer, restarts, table.pp, generator=self.generator, dtype=torch.float64)
        return _Group(table, logits.requires_grad_(), widths.requires_grad_(), torch.zeros_like(widths))

    def schedules(self) -> Schedules:
        """Annealed quantities of the current step."""
        c, step, steps = self.config, self.step, self.config.num_steps
        return Schedules(
            geometric(*c.temperature, step, steps),
            geometric(*c.boundary_temperature, step, steps),
            geometric(*c.sharpness, step, steps),
        )

    def run(self, on_record: Callable[[StepRecord], None] = lambda record: None) -> tuple[list[StepRecord], bool]:
        """All steps; returns the records and whether Ctrl-C or the time limit cut them short."""
        c, records = self.config, []
        optimizer = Adam(
            [
                *((group.logits, c.learning_rate) for group in self.groups),
                *((group.widths, c.boundary_learning_rate) for group in self.groups),
                (self.outer_logits, c.learning_rate),
            ],
            betas=(c.adam_betas[0], c.adam_betas[1]),
        )
        try:
            while self.step < c.num_steps:
                record = self._one_step(optimizer)
                self.step += 1
                if record is not None:
                    records.append(record)
                    on_record(record)
                if time.perf_counter() - self.began > c.max_seconds:
                    return records, True
        except KeyboardInterrupt:
            return records, True
        return records, False

    def _one_step(self, optimizer: Adam) -> StepRecord | None:
        schedules = self.schedules()
        optimizer.zero_grad()
        losses, costs, weights = [], [], []
        for group in self.groups:
            relaxed = self.relax(group, schedules)
            cost = surrogate(relaxed, group.table, schedules.sharpness)
            losses.append(self._loss(group, cost))
            costs.append(cost)
            weights.append(relaxed)
        leading = torch.cat([loss.detach().amin(1) for loss in losses])
        outer_loss = (torch.softmax(self.outer_logits, 0) * leading).sum()
        total = outer_loss
        for loss in losses:
            total = total + loss.sum()
        total.backward()  # type: ignore[no-untyped-call]
        last = self.step == self.config.num_steps - 1
        record = None
        if last or self.step % self.config.hard_every == 0:
            self._collect(weights)
            record = self._record(schedules, losses, costs, weights)
        optimizer.step()
        return record

    def relax(self, group: _Group, schedules: Schedules) -> RelaxedPlans:
        """Weights of all outer choices and restarts of a group."""
        table, allowed = group.table, group.table.allowed[:, None, None, :]
        if self.config.relaxation == "gumbel":
            rows = gumbel_weights(group.logits, allowed, schedules.temperature, self.generator)
        else:
            rows = softmax_weights(group.logits, allowed, schedules.temperature)
        edges = stage_edges(group.widths, len(group.units))
        stages = soft_stages(edges, len(group.units), schedules.boundary_temperature)
        stages = stages[..., group.unit_of_layer, :]
        if self.kind == "stagewise":
            rows = stages @ rows
        return RelaxedPlans(rows.expand(-1, -1, table.num_layers, -1), stages)

    def _loss(self, group: _Group, cost: SurrogateCost) -> Tensor:
        """Log of the iteration time plus the augmented Lagrangian of memory, shape `(O, R)`."""
        rho = self.config.penalty
        violation = cost.memory / group.table.capacity - 1.0
        shifted = torch.relu(group.multipliers + rho * violation)
        memory = (shifted.square() - group.multipliers.square()).sum(-1) / (2.0 * rho)
        with torch.no_grad():
            group.multipliers = torch.relu(group.multipliers + self.config.multiplier_step * violation)
        return torch.log(cost.iteration_time) + memory

    def _collect(self, weights: list[RelaxedPlans]) -> None:
        """Discretize every relaxed plan and keep the best."""
        for index, (group, relaxed) in enumerate(zip(self.groups, weights, strict=True)):
            edges = stage_edges(group.widths.detach(), len(group.units))
            plans = harden(relaxed.choices.detach(), edges, group.table)
            if self.kind == "stagewise":
                first = plans.starts.gather(1, plans.stages())
                plans = replace(plans, choices=plans.choices.gather(1, first))
            plans = replace(plans, outer=self.outer_of_group[index][plans.outer])
            self.pool.add(Candidate(self.table_of_group[index], plans), repair_kind=self.kind)

    def _record(
        self, schedules: Schedules, losses: list[Tensor], costs: list[SurrogateCost], weights: list[RelaxedPlans]
    ) -> StepRecord:
        minima = torch.stack([loss.detach().min() for loss in losses])
        lead = int(minima.argmin())
        group, cost = self.groups[lead], costs[lead]
        outer, restart = divmod(int(losses[lead].detach().argmin()), losses[lead].shape[1])
        probabilities = weights[lead].choices[outer, restart].detach()
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1).mean()
        outer_weights = torch.softmax(self.outer_logits.detach(), 0).tolist()
        return StepRecord(
            step=self.step,
            seconds=time.perf_counter() - self.began,
            schedules=schedules,
            loss=float(minima[lead]),
            surrogate_time_s=float(cost.iteration_time[outer, restart].detach()),
            best_time_s=self.pool.best_time,
            entropy=float(entropy),
            outer_weights=dict(zip(self.outer_names, outer_weights, strict=True)),
            pp=group.table.pp,
            choices=tuple(choice.label() for choice in group.table.choices),
            probabilities=probabilities.clone(),
            memory=cost.memory[outer, restart].detach(),
            capacity=group.table.capacity,
            multipliers=group.multipliers[outer, restart],
            stage_seconds=cost.stage_seconds[outer, restart].detach(),
        )


def search(
    problem: Problem,
    seed: int | None = None,
    *,
    config: SearchConfig | None = None,
    on_record: Callable[[StepRecord], None] = lambda record: None,
) -> SearchResult:
    """Search a plan by gradient descent on relaxed plans.

    Args:
        problem: What to search for.
        seed: Of all random numbers; None takes `problem.config.search.seed`.
        config: Settings; None takes the problem's.
        on_record: Called every `hard_every` steps.

    Errors:
        InfeasibleError: no plan of the space fits; names the binding constraint.
    """
    config = config or problem.config.search
    tables = build_tables(problem, outer_spaces(problem))
    result = search_tables(tables, problem.config.space.kind, config, problem.config.search.seed if seed is None else seed,
                           on_record=on_record)  # fmt: skip
    if result is None:
        raise explain_infeasible(problem, tables)
    return result


def search_tables(
    tables: Sequence[CostTable],
    kind: str,
    config: SearchConfig,
    seed: int,
    *,
    on_record: Callable[[StepRecord], None] = lambda record: None,
) -> SearchResult | None:
    """Search over cost tables; None when no feasible plan was met."""
    began = time.perf_counter()
    run = GradientSearch(tables, kind, config, seed)
    records, interrupted = run.run(on_record) if run.groups else ([], False)
    raw = run.pool.best
    if raw is None:
        return None
    if config.polish and not interrupted:
        _polish_pool(run.pool, kind, config, began)
    best = run.pool.best
    assert best is not None
    plan, raw_plan = run.pool.plan(best), run.pool.plan(raw)
    return SearchResult(
        plan=plan,
        iteration_time_s=best.time,
        raw_plan=raw_plan,
        raw_iteration_time_s=raw.time,
        alternatives=tuple((entry.time, run.pool.plan(entry)) for entry in run.pool.by_outer()[1:]),
        history=tuple(records),
        seconds=time.perf_counter() - began,
        steps=run.step,
        restarts=config.num_restarts,
        seed=seed,
        plans_evaluated=run.pool.evaluated,
        interrupted=interrupted,
    )


def _polish_pool(pool: CandidatePool, kind: str, config: SearchConfig, began: float) -> None:
    def late() -> bool:
        return time.perf_counter() - began > config.max_seconds

    try:
        for entry in pool.top(config.polish_starts):
            if late():
                break
            plan, _, evaluated = polish(pool.tables[entry.table], entry.plan, kind, stop=late)
            pool.evaluated += evaluated
            pool.add(Candidate(entry.table, plan))
    except KeyboardInterrupt:
        return
