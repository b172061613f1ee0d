"""Search plans by gradient descent: all outer choices and restarts as one batch, annealed to hard plans.

The problem. L layers l, each under a strategy c; K stages k on pp devices d; an outer choice o is a row of a
`CostTable`: pipeline degree, chunks, schedule, and m micro-batches. Costs are read from the table.

Variables
    o                                  outer choice           -> `promising_outers`, `OuterLogits`
    x[l,c] in {0,1}, sum_c x[l,c] = 1  strategy of a layer    -> `softmax_weights`, `gumbel_weights`
    0 < e[1] < ... < e[K-1] < L        stage boundaries       -> `stage_edges`
    y[l,k] = [e[k] <= l < e[k+1]]      stage of a layer       -> `soft_stages`
    f[d] in [0,1]^2                    shares in host memory  -> `RestartBatch.relax`
    uniform: x[l] = x[0]; stage-wise: x[l] = sum_k y[l,k] z[k]; layer-wise: free -> `RestartBatch.relax`
Objective: minimise log T, linear costs of the expected strategies -> `Surrogate`
    t[k] = sum_l y[l,k] time[k,l] . x[l]                      seconds of a micro-batch
         + sum_l y[l,k] y[l+1,k] x[l] . reshard[l] x[l+1]     layout changes inside a stage
         + sum_l y[l,k-1] y[l+1,k] x[l] . p2p[l] x[l+1]       and between stages -> `_neighbour_seconds`
    s[d] = sum of sync . x[l] over the layers of d            gradient synchronisation, optimizer
    T = sum_k t[k] + (m - 1) max_k t[k] + max_d s[d] + sum_l per_iteration[l] . x[l] -> `pipeline_seconds`
    max as `smooth_max`; other schedules: the longest path of their passes -> `simulated_seconds`
Constraints
    sum over the layers of d of (static + in_flight[k] activation) . x[l] + max of working . x[l]
        <= capacity[d]                 bytes of a device      -> `_memory`, multipliers in `RestartBatch.loss`
    x[l,c] = 0 where c is not allowed in o                    -> `softmax_weights`
    fused layers share a stage                                -> `unit_starts`
Solution: Adam on logits of x, widths between the e, logits of f      -> `GradientSearch.move`
    soft x and y become hard by falling temperatures -> `Schedules.at`; hard plans of them -> `harden`,
    made to fit by `repair`, `fit` and `fill`; the slow half of the restarts leaves at `thin_at`, outer
    choices whose `outer_lower_bounds` exceed the best plan at once; the best are polished by `polish_pool`.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from darts_parallel.config import SearchConfig
from darts_parallel.cost import (
    CostTable,
    build_tables,
    even_uniform_plans,
    lightest_plans,
    without_dominated,
    without_needless_simulation,
)
from darts_parallel.exact import outer_lower_bounds
from darts_parallel.gradient._promising_outers import promising_outers, relaxed_outers
from darts_parallel.gradient._stopwatch import Stopwatch
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.infeasibility import explain_infeasible
from darts_parallel.gradient.orders import OrderSearch
from darts_parallel.gradient.pool import PlanPool, TablePlans
from darts_parallel.gradient.pool_polishing import polish_pool, polish_starts
from darts_parallel.gradient.relaxation import OuterLogits, Schedules
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, SurrogateCost
from darts_parallel.gradient.restarts import RestartBatch
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.step_record import LeadingPlan, StepRecord
from darts_parallel.gradient.winner import Histories
from darts_parallel.problem import Problem

PAGES = 100
"""Steps of which the history of the winning restart holds the weights."""
TOLERANCE = 1.0 + 1e-9
"""Factor on the best plan's seconds: an outer choice whose lower bound is above leaves, rounding aside."""
PRUNE_MARGIN = 0.01
"""Log-seconds behind the best one at which an outer choice leaves at the last step, twice as many at half of
the steps; its plans stay, and polishing looks at it where its lower bound does not exclude it."""
HARD_PRUNE_FACTOR = 3.0
"""Factor on `PRUNE_MARGIN` at which an outer choice leaves by its hard plans alone."""


def descent_seconds(config: SearchConfig) -> float:
    """Return the seconds of the descent: an unpolished plan is worth little, so polishing has its half."""
    return config.max_seconds * (0.5 if config.polish else 1.0)


class GradientSearch:
    """Descend over the relaxed plans of a list of cost tables.

    Args:
        clock: Counts the search's seconds; None begins now.
    """

    orders: ClassVar[type[OrderSearch]] = OrderSearch
    """Class that searches orders of passes after polishing; a rival takes another."""

    def __init__(
        self,
        tables: Sequence[CostTable],
        space_kind: str,
        config: SearchConfig,
        seed: int,
        clock: Stopwatch | None = None,
    ) -> None:
        self.config, self.space_kind = config, space_kind
        self.generator = torch.Generator().manual_seed(seed)
        self.gumbel = self.generator if config.relaxation == "gumbel" else None
        self.clock = Stopwatch() if clock is None else clock
        self.pool = PlanPool(list(tables), space_kind, self.clock)
        lightest = enumerate(lightest_plans(tables, space_kind))
        self.pool.add_all(TablePlans(index, plans) for index, plans in lightest)
        # where the restarts begin: one strategy for all layers, and even stages
        self.pool.add_all(
            TablePlans(index, even_uniform_plans(table)) for index, table in enumerate(tables)
        )
        known = self.pool.best_time * TOLERANCE
        limit = descent_seconds(config)
        self.bounds = [
            outer_lower_bounds(table, known=known, late=lambda: self.clock.seconds >= limit)
            for table in tables
        ]
        simulated = [i for i, table in enumerate(tables) if table.pipeline.simulated]
        for index in simulated:
            alive = torch.nonzero(self.bounds[index] <= self.pool.best_time * TOLERANCE).flatten()
            self.pool.add_balanced(index, alive.tolist())
        # restarts begin at plans that are not polished: where those would lead to, polishing has been
        near = [
            (entry.table, entry.plan) for entry in self.pool.by_outer() if entry.table in simulated
        ]
        if simulated and config.polish:
            polish_starts(self.pool, space_kind, config)
        self.groups = self._initial_groups(tables)
        for group in self.groups:
            for plans in (plans for number, plans in near if number == group.table_index):
                group.initialize_from(plans, config.initial_preference)
        self.outer_logits = OuterLogits(self._live_keys())
        self.optimizer = self._new_optimizer()
        self.step = 0
        self.histories = Histories(max(config.num_steps // PAGES, 1))
        self.merits: list[Tensor] = []
        """Rankings of all groups at the last step, `(O, R)` each."""
        self.stopped_by: str | None = None
        """`user` or `time_limit` where the descent ended before its last step."""

    def _initial_groups(self, tables: Sequence[CostTable]) -> list[RestartBatch]:
        """Make parameters of the outer choices whose lower bound the best known plan does not exclude."""
        groups = []
        taken = relaxed_outers(tables, self.pool.by_outer(), self.config.num_restarts)
        for index, (table, bound) in enumerate(zip(tables, self.bounds, strict=True)):
            # an infinite bound means that no plan fits, whatever the best known one
            possible = (
                bound.isfinite() & (bound <= self.pool.best_time * TOLERANCE) & table.allowed.any(1)
            )
            alive = torch.nonzero(possible & taken[index]).squeeze(1)
            if len(alive):
                part = table.select(alive)
                settings = (self.space_kind, self.config, self.generator)
                groups.append(RestartBatch.initial(part, *settings, index, alive))
        return groups

    def _new_optimizer(self) -> Adam:
        c = self.config
        parameters = [(group.logits, c.learning_rate) for group in self.groups]
        parameters += [(group.widths, c.boundary_learning_rate) for group in self.groups]
        fractions = [group.fraction_logits for group in self.groups]
        parameters += [(logits, c.learning_rate) for logits in fractions if logits is not None]
        parameters.append((self.outer_logits.values, c.learning_rate))
        return Adam(parameters, betas=(c.adam_betas[0], c.adam_betas[1]))

    def schedules(self) -> Schedules:
        """Return annealed quantities of the current step."""
        return Schedules.at(self.config, self.step, self.config.num_steps)

    def run(
        self, on_record: Callable[[StepRecord], None] = lambda record: None
    ) -> list[StepRecord]:
        """Take all steps, or those that Ctrl-C or the time limit leave; returns the records."""
        records: list[StepRecord] = []
        thin_at = list(self.config.thin_at)
        limit = descent_seconds(self.config)
        try:
            while self.step < self.config.num_steps and self.groups:
                if self.clock.seconds >= limit:
                    self.stopped_by = "time_limit"
                    break
                record, merits = self._one_step()
                self.step += 1
                if record is not None:
                    records.append(record)
                    with self.clock.paused():
                        on_record(record)
                if self._reached(thin_at):
                    self._thin(merits)
                elif record is not None:
                    self._drop_excluded(merits)
        except KeyboardInterrupt:
            self.stopped_by = "user"
        return records

    def _reached(self, shares: list[float]) -> bool:
        """Return whether a share of the steps is done, and take out the shares that are."""
        left = [share for share in shares if int(share * self.config.num_steps) > self.step]
        reached, shares[:] = len(left) < len(shares), left
        return reached

    def _one_step(self) -> tuple[StepRecord | None, list[Tensor]]:
        schedules = self.schedules()
        self.optimizer.zero_grad()
        weights = [group.relax(schedules, self.gumbel) for group in self.groups]
        pairs = zip(self.groups, weights, strict=True)
        costs = [group.price(own, schedules.sharpness, group.paths) for group, own in pairs]
        losses = [
            group.loss(cost, self.config) for group, cost in zip(self.groups, costs, strict=True)
        ]
        merits = [group.merit(cost) for group, cost in zip(self.groups, costs, strict=True)]
        self.outer_logits.find_slope(torch.cat([merit.amin(1) for merit in merits]))
        torch.stack([loss.sum() for loss in losses]).sum().backward()  # type: ignore[no-untyped-call]
        self.merits = merits
        self.histories.record(self.step, self.groups, weights, costs)
        record, last = None, self.step == self.config.num_steps - 1
        if last or self.step % self.config.hard_every == 0:
            self._collect(weights, costs)
        if last or self.step % self.config.record_every == 0:
            record = LeadingPlan.of(self.groups, merits, weights, costs).record(
                step=self.step,
                seconds=self.clock.seconds,
                schedules=schedules,
                best_time_s=self.pool.best_time,
                outer_weights=self._weights_by_outer(),
            )
        self.move()
        return record, merits

    def move(self) -> None:
        """Move all parameters against their gradients; a control of the ablation does otherwise."""
        self.optimizer.step()

    def _live_keys(self) -> list[tuple[int, int]]:
        """Return table and outer choice of all that are searched; names of two tables may be equal."""
        return [
            (group.table_index, outer)
            for group in self.groups
            for outer in group.outer_index.tolist()
        ]

    def _weights_by_outer(self) -> dict[str, float]:
        names = (name for group in self.groups for name in group.names)
        return dict(zip(names, self.outer_logits.weights.tolist(), strict=True))

    def _thin(self, merits: list[Tensor]) -> None:
        """Keep the better half of the restarts, and the outer choices that can still win, most likely."""
        half = [max(merit.shape[1] // 2, 1) for merit in merits]
        self._keep(merits, half, PRUNE_MARGIN * self.config.num_steps / self.step)

    def _drop_excluded(self, merits: list[Tensor]) -> None:
        """Drop the outer choices that cannot win: how they go on changes nothing for the others."""
        limit = self.pool.best_time * TOLERANCE
        if any(bool((self._own_bounds(group) > limit).any()) for group in self.groups):
            self._keep(merits, [merit.shape[1] for merit in merits])

    def _own_bounds(self, group: RestartBatch) -> Tensor:
        """Return lower bounds of a group's outer choices, `(O,)`."""
        return self.bounds[group.table_index][group.outer_index]

    def _gap_to_best(self, group: RestartBatch, merit: Tensor, leading: float) -> Tensor:
        """Return log-seconds to the best, `(O,)`: in relaxed and hard plans, or far in hard ones alone."""
        # a step of simulated pipelines is expensive; of others polishing has programs that look at what left
        if not (group.paths or group.table.has_plain_stages) or self.space_kind == "uniform":
            return torch.zeros(len(merit), dtype=torch.float64)
        hard = self.pool.gap_to_best(group.table_index, group.outer_index)
        gap = torch.minimum(merit.amin(1) - leading, hard)
        return gap.maximum(hard.nan_to_num(posinf=0.0) / HARD_PRUNE_FACTOR)

    def _keep(self, merits: list[Tensor], counts: list[int], margin: float = torch.inf) -> None:
        """Keep of every group so many of the best restarts, of the outer choices that can still win.

        Outer choices that are behind by more than `margin` go, too.
        """
        leading = min(float(merit.min()) for merit in merits)
        groups: list[RestartBatch] = []
        kept: list[tuple[int, Tensor, Tensor]] = []
        moments = self.optimizer.state()
        for place, (group, merit, count) in enumerate(
            zip(self.groups, merits, counts, strict=True)
        ):
            possible = self._own_bounds(group) <= self.pool.best_time * TOLERANCE
            outer = torch.nonzero(
                possible & (self._gap_to_best(group, merit, leading) <= margin)
            ).squeeze(1)
            if not len(outer):
                continue
            order = merit[outer].argsort(dim=1, stable=True)
            restarts = order[:, :count].sort(1).values
            thinner = group.select(outer, restarts)
            for old, new in zip(group.parameters, thinner.parameters, strict=True):
                taken = (moment[outer.unsqueeze(1), restarts] for moment in moments[id(old)])
                moments[id(new)] = tuple(torch.empty_like(new).copy_(moment) for moment in taken)
            groups.append(thinner)
            kept.append((place, outer, restarts))
        self.groups = groups
        self.outer_logits.keep(self._live_keys())
        self.merits = [
            merits[place][outer.unsqueeze(1), restarts] for place, outer, restarts in kept
        ]
        self.histories.keep(kept)
        steps = self.optimizer.steps
        self.optimizer = self._new_optimizer()
        self.optimizer.restore(moments, steps)

    def _collect(self, weights: list[RelaxedPlans], costs: list[SurrogateCost]) -> None:
        """Discretize every relaxed plan, keep the best, repair the most promising that do not fit."""
        for group, relaxed, cost in zip(self.groups, weights, costs, strict=True):
            score = group.merit(cost).flatten() if self.space_kind == "layerwise" else None
            self.pool.add(group.hard_plans(relaxed), score, fitting=self.config.fitting)


def search(
    problem: Problem,
    seed: int | None = None,
    *,
    config: SearchConfig | None = None,
    on_record: Callable[[StepRecord], None] = lambda record: None,
) -> SearchResult:
    """Search a plan by gradient descent on relaxed plans.

    Args:
        seed: Of all random numbers; None takes `problem.config.search.seed`.
        config: Settings; None takes the problem's.
        on_record: Called every `record_every` steps.

    Errors:
        InfeasibleError: no plan of the space fits; names the binding constraint.
    """
    config = config or problem.config.search
    tables = build_tables(problem)
    chosen = problem.config.search.seed if seed is None else seed
    result = search_tables(tables, problem.config.space.kind, config, chosen, on_record=on_record)
    if result is None:
        raise explain_infeasible(problem, tables)
    return result


def search_tables(
    tables: Sequence[CostTable],
    space_kind: str,
    config: SearchConfig,
    seed: int,
    *,
    on_record: Callable[[StepRecord], None] = lambda record: None,
    loop: type[GradientSearch] = GradientSearch,
) -> SearchResult | None:
    """Search over cost tables; None when no feasible plan was met.

    Args:
        loop: The optimisation loop; ablations give another one.
    """
    threads = torch.get_num_threads()
    # on one thread sums keep one order, and small tensors are faster
    torch.set_num_threads(1)
    try:
        return _search_tables(tables, space_kind, config, seed, on_record, loop)
    finally:
        torch.set_num_threads(threads)


def _search_tables(
    tables: Sequence[CostTable],
    space_kind: str,
    config: SearchConfig,
    seed: int,
    on_record: Callable[[StepRecord], None],
    loop: type[GradientSearch],
) -> SearchResult | None:
    clock = Stopwatch()
    tables = [without_needless_simulation(table) for table in tables]
    pruned = [without_dominated(table) for table in tables]
    promising = promising_outers(pruned)
    run = loop(promising, space_kind, config, seed, clock)
    if run.pool.best is None and promising is not pruned:
        run = loop(pruned, space_kind, config, seed, clock)
    records = run.run(on_record)
    raw, stopped_by = run.pool.best, run.stopped_by
    if raw is None:
        return None
    if config.polish and stopped_by != "user":
        hurry = stopped_by is not None
        stopped_by = (
            polish_pool(run.pool, space_kind, config, hurry=hurry, bounds=run.bounds) or stopped_by
        )
        if stopped_by is None and config.order_passes:
            stopped_by = run.orders(run.pool, space_kind, config, seed).search()
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
        seconds=clock.seconds,
        steps=run.step,
        restarts=config.num_restarts,
        seed=seed,
        plans_evaluated=run.pool.evaluated,
        stopped_by=stopped_by,
        curve=tuple(run.pool.curve),
        gradient_iteration_time_s=best.time,
        winner=run.histories.winner(run.groups, run.merits),
    )
