"""Search plans by gradient descent: all pipeline configurations and restarts as one batch.

The problem. L layers l, each under a strategy c; K stages k on pp devices d; a pipeline
configuration o is a row of a `CostTable`: pipeline degree, chunks, schedule, and m micro-batches.
Costs are read from the table.

Variables
    o                                  pipeline config.  -> `promising_outers`, `GradientSearch.outer_weights`
    x[l,c] in {0,1}, sum_c x[l,c] = 1  strategy of a layer    -> `softmax_weights`
    0 < e[1] < ... < e[K-1] < L        stage boundaries       -> `stage_edges`
    y[l,k] = [e[k] <= l < e[k+1]]      stage of a layer       -> `soft_stages`
    f[d] in [0,1]^2                    shares in host memory  -> `RestartBatch.relax`
    uniform: x[l] = x[0]; stage-wise: x[l] = sum_k y[l,k] z[k]; layer-wise: free
Objective: minimise log T, linear costs of the expected strategies -> `Surrogate`
    t[k] = sum_l y[l,k] time[k,l] . x[l]                      seconds of a micro-batch
         + sum_l y[l,k] y[l+1,k] x[l] . reshard[l] x[l+1]     layout changes inside a stage
         + sum_l y[l,k-1] y[l+1,k] x[l] . p2p[l] x[l+1]       between stages: `_neighbour_seconds`
    s[d] = sum of sync . x[l] over the layers of d            gradient synchronisation, optimizer
    T = sum_k t[k] + (m - 1) max_k t[k] + max_d s[d] + sum_l per_iteration[l] . x[l]
    max as `smooth_max`; other schedules: the longest path of their passes -> `simulated_seconds`
Constraints
    sum over the layers of d of (static + in_flight[k] activation) . x[l] + max of working . x[l]
        <= capacity[d]                 bytes of a device -> `_memory`, `RestartBatch.loss`
    x[l,c] = 0 where c is not allowed in o               -> `softmax_weights`
    fused layers share a stage                           -> `unit_starts`
Solution: Adam on logits of x, widths between the e, logits of f -> `GradientSearch.move`
    Falling temperatures make soft x and y hard -> `Schedules.at`. They are rounded by `harden`, and
    made to fit by `repair`, `fit` and `fill`. Learning rates fall, so that boundaries and multipliers
    settle (`DECAY_FROM`). Then the best roundings of the boundaries are fixed, and x settles again
    (`settled`). A restart's mean over the last steps is rounded by `round_to_fit`, and the best one
    made to fit by `repair`. Half of the restarts is dropped at each of
    `THIN_AT`. Configurations whose `outer_lower_bounds` exceed the best plan are dropped at once. The
    best plans are polished by `polish_pool`.
What the gradient is worth stands in docs/explanation/gradient.md: it decides the repaired plan and
    helps the fitted one; after polishing, noise and frozen logits reach the same optimum.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from operator import index as whole_number
from operator import itemgetter

import torch
from torch import Tensor

from darts_parallel.config import SearchConfig
from darts_parallel.cost import (
    COST_TOLERANCE,
    HardPlans,
    PricedPlan,
    Tables,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
    filled,
    flatnonzero,
    float_tensor,
    lightest_plans,
    without_dominated,
    without_needless_simulation,
)
from darts_parallel.exact import outer_lower_bounds
from darts_parallel.gradient._promising_outers import promising_outers, relaxed_outers
from darts_parallel.gradient._stopwatch import Stopwatch
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.boundary_rounding import merits
from darts_parallel.gradient.host_shares import with_finished_shares
from darts_parallel.gradient.infeasibility import NoPlanFitsError
from darts_parallel.gradient.orders import OrderSearch
from darts_parallel.gradient.pool import PlanPool
from darts_parallel.gradient.pool_polishing import polish_pool
from darts_parallel.gradient.relaxation import BOUNDARY_RATE, Schedules
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, SurrogateCost
from darts_parallel.gradient.restarts import (
    KeptRestarts,
    RestartBatch,
)
from darts_parallel.gradient.rounding import repair
from darts_parallel.gradient.settling import (
    SETTLE_FROM,
    SETTLING_BETAS,
    can_settle,
    settled,
)
from darts_parallel.gradient.step_record import LeadingPlan, PlanStage, SearchResult, StepRecord
from darts_parallel.problem import Problem

THIN_AT = (0.05, 0.15, 0.3, 0.5)
"""Shares of the steps after which the worse half of the restarts is dropped."""
AVERAGED_FROM = 2 / 3
"""Share of the steps from which weights and stage boundaries are averaged."""
HARD_EVERY = 10
"""Steps between two roundings of all restarts. With 20 the raw plan of BERT in tight memory is
17 % slower, and nothing is saved: polishing then takes longer."""
RECORD_EVERY = 10
"""Steps between two points of the curves."""
PRUNE_MARGIN = 0.01
"""Log-seconds behind the best at which thinning drops a pipeline configuration at the last step.
Twice as many at half of the steps. Polishing may still return to the dropped ones."""
HARD_PRUNE_FACTOR = 3.0
"""Factor on `PRUNE_MARGIN` at which hard plans alone drop a pipeline configuration."""
START_SHARE = 0.5
"""Share of the descent's seconds after which its first step begins, half of them for first plans: known
plans and bounds help it, and large problems with offloading have no end of them."""
POLISH_SHARE = 0.5
"""Share of the time limit that is left for polishing: an unpolished plan is worth little."""


OnRecord = Callable[[StepRecord], None]


def ignore(record: StepRecord) -> None:
    """Do nothing with a record."""


def descent_seconds(config: SearchConfig) -> float:
    """Return the time limit of the descent in seconds."""
    share = 1.0 - POLISH_SHARE if config.polish else 1.0
    return config.max_seconds * share


class GradientSearch:
    """Descend over the relaxed plans of a list of cost tables.

    Args:
        clock: Counts the search's seconds; None begins now.
    """

    def __init__(
        self,
        tables: Tables,
        space_kind: str,
        config: SearchConfig,
        seed: int,
        clock: Stopwatch | None = None,
    ) -> None:
        self.config = config
        self.space_kind = space_kind
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.clock = clock or Stopwatch()
        self.pool = PlanPool(list(tables), space_kind, self.clock)
        self._add_first_plans()
        self.bounds = self._lower_bounds()
        self._add_simulated_plans()
        self.groups = self._initial_groups()
        self.outer_places = {key: place for place, key in enumerate(self._live_keys())}
        """Place of every pipeline configuration, by table and row, among the logits."""
        self.outer_logits = filled(0.0, len(self.outer_places)).requires_grad_()
        self.optimizer = self._new_optimizer()
        self.step = 0
        self.settling_step = config.num_steps
        """Step from which stage boundaries are whole; none where it is the number of steps."""
        if can_settle(self.pool.tables, space_kind):
            step = int(SETTLE_FROM * config.num_steps)
            self.settling_step = max(step, 1)
        self.thinning_steps = {max(int(share * config.num_steps), 1) for share in THIN_AT}
        self.merits: list[Tensor] = []
        """Rankings of all groups at the last step, `(O, R)` each."""
        self.stopped_by: str | None = None
        """`user` or `time_limit` where the search ended before its last step."""

    def _add_first_plans(self) -> None:
        """Add the lightest plans, and one strategy for all layers on even stages, while there is time."""
        for index, table in enumerate(self.pool.tables):
            if self.pool.best is not None and self._late(START_SHARE / 2):
                return
            self.pool.add(index, lightest_plans([table], self.space_kind)[0])
            self.pool.add(index, even_uniform_plans(table))

    def _late(self, share: float = 1.0) -> bool:
        """Return whether a share of the seconds of the descent is over."""
        return self.clock.seconds >= share * descent_seconds(self.config)

    def _lower_bounds(self) -> list[Tensor]:
        """Return a lower bound of the seconds of every pipeline configuration, by table `(O,)`."""
        known = self.pool.best_time * (1.0 + COST_TOLERANCE)
        tables = self.pool.tables
        late = partial(self._late, START_SHARE)
        return [outer_lower_bounds(table, known=known, late=late) for table in tables]

    def _may_win(self, bounds: Tensor) -> Tensor:
        """Return which lower bounds the best plan does not exclude, bool of the same shape."""
        return bounds <= self.pool.best_time * (1.0 + COST_TOLERANCE)

    def _add_simulated_plans(self) -> None:
        """Add plans of balanced stages to simulated tables."""
        tables = self.pool.tables
        for index, table in enumerate(tables):
            if table.simulated and not self._late(START_SHARE):
                alive = flatnonzero(self._may_win(self.bounds[index]))
                self.pool.add_balanced(index, alive.tolist())

    def _initial_groups(self) -> list[RestartBatch]:
        """Make parameters of every configuration whose lower bound the best plan does not exclude."""
        groups = []
        tables = self.pool.tables
        possible = []
        for table, bounds in zip(tables, self.bounds, strict=True):
            # an infinite bound means that no plan fits, whatever the best known one
            possible.append(bounds.isfinite() & self._may_win(bounds) & table.allowed.any(1))
        known = self.pool.by_outer()
        relaxed = relaxed_outers(tables, known, self.config.num_restarts, possible)
        for index, table in enumerate(tables):
            alive = flatnonzero(relaxed[index])
            if len(alive):
                part = table.select(alive)
                settings = (self.space_kind, self.config, self.generator)
                groups.append(RestartBatch.initial(part, *settings, index, alive))
        return groups

    def _new_optimizer(self) -> Adam:
        config = self.config
        rates = [(self.outer_logits, config.learning_rate)]
        for group in self.groups:
            for values in group.parameters:
                rate = BOUNDARY_RATE if values is group.widths else config.learning_rate
                rates.append((values, rate))
        return Adam(rates)

    def schedules(self) -> Schedules:
        """Return annealed quantities of the current step."""
        taken = self.step - self.settling_step
        left = self.config.num_steps - self.settling_step
        if left and taken >= 0:
            return Schedules.settling(self.config, taken / left)
        return Schedules.at(self.config, self.step, self.settling_step)

    def run(self, on_record: OnRecord = ignore) -> list[StepRecord]:
        """Take steps until the last one, Ctrl-C or the time limit; return the records."""
        records: list[StepRecord] = []
        try:
            while self._goes_on():
                record = self._one_step()
                self.step += 1
                if record is not None:
                    records.append(record)
                    with self.clock.paused():
                        on_record(record)
                if self.step == self.settling_step < self.config.num_steps:
                    self._settle()
                elif self.step in self.thinning_steps:
                    self._thin()
                elif record is not None:
                    self._drop_excluded()
        except KeyboardInterrupt:
            self.stopped_by = "user"
        return records

    def _goes_on(self) -> bool:
        """Return whether to take another step; note where the time limit forbids it."""
        if self.step >= self.config.num_steps or not self.groups:
            return False
        if not self._late():
            return True
        self.stopped_by = "time_limit"
        return False

    def _one_step(self) -> StepRecord | None:
        """Move all parameters once; return a record where one is due."""
        schedules = self.schedules()
        self.optimizer.zero_grad()
        weights = [group.relax(schedules) for group in self.groups]
        costs = []
        for group, relaxed in zip(self.groups, weights, strict=True):
            costs.append(group.price(relaxed, schedules.sharpness, group.paths))
        self._find_gradients(costs)
        averaged = self._averaged_steps()
        if averaged > 0:
            for group, relaxed in zip(self.groups, weights, strict=True):
                group.remember(relaxed, averaged)
        last = self.step == self.config.num_steps - 1
        moving = self.step < self.settling_step
        if last or (moving and self.step % HARD_EVERY == 0):
            self._collect(weights, costs)
        record = None
        if last or self.step % RECORD_EVERY == 0:
            record = self._record(weights, costs)
        self.move()
        return record

    def _averaged_steps(self) -> int:
        """Return the number of steps in the means: the last third of the steps of equal boundaries."""
        first = 0
        end = self.settling_step
        if self.step >= end:
            first = end
            end = self.config.num_steps
        skipped = int(AVERAGED_FROM * (end - first))
        return self.step + 1 - first - skipped

    def _find_gradients(self, costs: list[SurrogateCost]) -> None:
        """Set the gradients of all parameters, and rank all restarts."""
        self.merits = []
        losses = []
        for group, cost in zip(self.groups, costs, strict=True):
            losses.append(group.loss(cost, self.config).sum())
            self.merits.append(group.merit(cost))
        best = torch.cat([merit.amin(1) for merit in self.merits])
        losses.append((self.outer_weights() * best).sum())
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    def outer_weights(self) -> Tensor:
        """Return the weights of the configurations that are searched, in their order; they sum to 1."""
        places = [self.outer_places[key] for key in self._live_keys()]
        return torch.softmax(self.outer_logits[places], 0)

    def _record(self, weights: list[RelaxedPlans], costs: list[SurrogateCost]) -> StepRecord:
        """Return the state of the search at this step."""
        leading = LeadingPlan.of(self.groups, self.merits, weights, costs)
        names = [name for group in self.groups for name in group.names]
        outer_weights = dict(zip(names, self.outer_weights().tolist(), strict=True))
        return leading.record(
            step=self.step,
            seconds=self.clock.seconds,
            schedules=self.schedules(),
            best_time_s=self.pool.best_time,
            outer_weights=outer_weights,
        )

    def move(self) -> None:
        """Move all parameters against their gradients; controls of the ablation replace this."""
        self.optimizer.step(self.schedules().rate)

    def _live_keys(self) -> list[tuple[int, int]]:
        """Return table and row of all configurations that are searched: names may be equal."""
        keys = []
        for group in self.groups:
            for outer in group.outer_index.tolist():
                keys.append((group.table_index, outer))
        return keys

    def _thin(self) -> None:
        """Keep the better half of the restarts, and the configurations that are likely to win."""
        half = [max(merit.shape[1] // 2, 1) for merit in self.merits]
        self._keep(half, PRUNE_MARGIN * self.config.num_steps / self.step)

    def _drop_excluded(self) -> None:
        """Drop the configurations that cannot win; the others go on as if nothing happened."""
        for group in self.groups:
            if not bool(self._may_win(self._group_bounds(group)).all()):
                self._keep([merit.shape[1] for merit in self.merits])
                return

    def _group_bounds(self, group: RestartBatch) -> Tensor:
        """Return lower bounds of a group's pipeline configurations, `(O,)`."""
        return self.bounds[group.table_index][group.outer_index]

    def _gap_to_best(self, group: RestartBatch, merit: Tensor, leading: float) -> Tensor:
        """Return log-seconds to the best, `(O,)`: in relaxed and hard plans, or far in hard ones.

        Zero, so that nothing is dropped, in the uniform space, and where polishing has no programs
        that return to a dropped configuration. Simulated ones are dropped all the same: their steps
        are expensive.
        """
        droppable = group.table.simulated or group.table.has_plain_stages
        if self.space_kind == "uniform" or not droppable:
            return filled(0.0, len(merit))
        hard = self.pool.gap_to_best(group.table_index, group.outer_index)
        gap = torch.minimum(merit.amin(1) - leading, hard)
        far = hard.nan_to_num(posinf=0.0) / HARD_PRUNE_FACTOR
        return gap.maximum(far)

    def _keep(self, counts: list[int], margin: float = torch.inf) -> None:
        """Keep the best restarts of every group, and the configurations that can still win.

        Args:
            counts: Restarts that each group keeps.
            margin: Log-seconds; configurations further behind the best are dropped, too.
        """
        parts: list[KeptRestarts] = []
        leading = min(float(merit.min()) for merit in self.merits)
        for index, group in enumerate(self.groups):
            merit = self.merits[index]
            close = self._gap_to_best(group, merit, leading) <= margin
            possible = self._may_win(self._group_bounds(group))
            outer = flatnonzero(possible & close)
            if len(outer):
                parts.append(KeptRestarts.best(index, outer, merit, counts[index]))
        self._select(parts)

    def _select(self, parts: list[KeptRestarts]) -> None:
        """Go on with some restarts; the moments of their parameters stay."""
        groups: list[RestartBatch] = []
        moments = self.optimizer.state()
        for kept in parts:
            group = self.groups[kept.group]
            thinner = group.select(kept)
            for old, new in zip(group.parameters, thinner.parameters, strict=True):
                moments[id(new)] = tuple(kept.of(moment) for moment in moments[id(old)])
            groups.append(thinner)
        self.groups = groups
        self.merits = [kept.of(self.merits[kept.group]) for kept in parts]
        steps = self.optimizer.steps
        self.optimizer = self._new_optimizer()
        self.optimizer.restore(moments, steps)

    def _settle(self) -> None:
        """Go on with the best roundings of stage boundaries; their logits begin again."""
        if any(group.averages is None for group in self.groups):
            return
        chosen = settled(self.groups, self.merits, self.pool.tables)
        self._select([entry.kept for entry in chosen])
        for group, entry in zip(self.groups, chosen, strict=True):
            aims = [start.aim for start in entry.starts]
            shares = float_tensor(aims)
            group.settle(entry.first_layers, shares)
        self.optimizer = self._new_optimizer()
        self.optimizer.betas = SETTLING_BETAS

    def _collect(self, weights: list[RelaxedPlans], costs: list[SurrogateCost]) -> None:
        """Round every relaxed plan, keep the best, repair the most promising that do not fit."""
        for group, relaxed, cost in zip(self.groups, weights, costs, strict=True):
            score = group.merit(cost).flatten() if self.space_kind == "layerwise" else None
            plans = group.hard_plans(relaxed)
            self.pool.add(group.table_index, plans, score, fitting=self.config.fitting)

    def polish(self) -> None:
        """Polish the best plans, then search pass orders; nothing after Ctrl-C."""
        config = self.config
        if not config.polish or self.stopped_by == "user":
            return
        hurry = self.stopped_by is not None
        ended_by = polish_pool(self.pool, self.space_kind, config, hurry=hurry, bounds=self.bounds)
        self.stopped_by = ended_by or self.stopped_by
        if self.stopped_by is None and config.order_passes:
            orders = OrderSearch(self.pool, self.space_kind, config, self.seed, self.bounds)
            self.stopped_by = orders.search()

    def own_plans(self) -> list[PlanStage]:
        """Describe the winning restart's plan, rounded, then repaired; none where no step was taken.

        Equal layers change their strategies together, so that a plan oscillates about the limit of
        the memory. The mean over the last steps is the mixture that the multipliers aim at.
        """
        if not self.merits:
            return []
        index, relaxed = self._best_rounding()
        table = self.pool.tables[index]
        # an exchange of one layer leaves the other spaces
        layerwise = self.space_kind == "layerwise"
        repaired = repair(table, relaxed, inf)[0] if layerwise else relaxed
        found = []
        for name, plan in (("relaxed", relaxed), ("repaired", repaired)):
            cost = evaluate_batch(table, plan)
            found.append(PlanStage(name, float(cost.iteration_time[0]), bool(cost.feasible[0])))
        return found

    def _best_rounding(self) -> tuple[int, HardPlans]:
        """Return the table and the plan of the restart whose rounded plan has the least merit."""
        ranked = []
        for group in self.groups:
            if group.averages is None:
                group.remember(group.relax(self.schedules()), 1)
            plans = group.average_plans()
            found = merits(self.pool.tables[group.table_index], plans)
            row = int(found.argmin())
            ranked.append((float(found[row]), group.table_index, plans[row : row + 1]))
        _, index, plan = min(ranked, key=itemgetter(0))
        return index, plan

    def result(self, fitted: PricedPlan, records: list[StepRecord]) -> SearchResult:
        """Describe the search that has ended.

        Args:
            fitted: Best plan before polishing.
        """
        pool = self.pool
        best, *others = pool.by_outer()
        stages = self.own_plans()
        raw_time = stages[-1].iteration_time_s if stages and stages[-1].fits else inf
        table = pool.tables[best.table]
        chosen = pool.plan(best)
        finished, seconds = with_finished_shares(table, best, chosen)
        stages.append(PlanStage("fitted", fitted.time, fits=True))
        stages.append(PlanStage("polished", seconds, fits=True))
        alternatives = [(entry.time, pool.plan(entry)) for entry in others]
        found = SearchResult(
            plan=finished,
            iteration_time_s=seconds,
            raw_iteration_time_s=raw_time,
            alternatives=tuple(alternatives),
            gradient_iteration_time_s=seconds,
        )
        found = replace(
            found,
            history=tuple(records),
            stages=tuple(stages),
            stopped_by=self.stopped_by,
        )
        return replace(
            found,
            seconds=self.clock.seconds,
            steps=self.step,
            restarts=self.config.num_restarts,
            seed=self.seed,
            plans_evaluated=pool.evaluated,
        )


Loop = type[GradientSearch]


def search(
    problem: Problem,
    seed: int | None = None,
    *,
    config: SearchConfig | None = None,
    on_record: OnRecord = ignore,
) -> SearchResult:
    """Search a plan by gradient descent on relaxed plans.

    Args:
        seed: Of all random numbers; None takes `problem.config.search.seed`.
        config: Settings; None takes the problem's.
        on_record: Called every `RECORD_EVERY` steps.

    Errors:
        InfeasibleError: no plan of the space fits; names the binding constraint.
    """
    config = config or problem.config.search
    tables = build_tables(problem)
    chosen = problem.config.search.seed if seed is None else whole_number(seed)
    result = search_tables(tables, problem.config.space.kind, config, chosen, on_record=on_record)
    if result is None:
        raise NoPlanFitsError(problem, tables)
    return result


def search_tables(
    tables: Tables,
    space_kind: str,
    config: SearchConfig,
    seed: int,
    *,
    on_record: OnRecord = ignore,
    loop: Loop = GradientSearch,
) -> SearchResult | None:
    """Search over cost tables; None when no feasible plan was met.

    Args:
        loop: The optimisation loop; ablations give another one.
    """
    threads = torch.get_num_threads()
    # on one thread sums keep one order, and small tensors are faster
    torch.set_num_threads(1)
    try:
        run = _begin(tables, space_kind, config, seed, loop)
        records = run.run(on_record)
        fitted = run.pool.best
        if fitted is None:
            return None
        run.polish()
        return run.result(fitted, records)
    finally:
        torch.set_num_threads(threads)


def _begin(
    tables: Tables, space_kind: str, config: SearchConfig, seed: int, loop: Loop
) -> GradientSearch:
    """Begin on the promising pipeline configurations; on all where none of those has a plan."""
    clock = Stopwatch()
    plain = [without_needless_simulation(table) for table in tables]
    pruned = [without_dominated(table) for table in plain]
    promising = promising_outers(pruned)
    run = loop(promising, space_kind, config, seed, clock)
    if run.pool.best is None and promising is not pruned:
        run = loop(pruned, space_kind, config, seed, clock)
    return run
