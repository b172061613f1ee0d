"""From a problem to a verified plan: descend, round, polish, check by exact methods, take the best.

`search.method` says how the plan is found. `gradient`, the default, descends always, whatever the problem;
`exact` asks the exact methods alone; `auto` asks them for a moment and descends where they have no proof.
What was found by descent is then checked by exhaustive search and dynamic programming, for
`verification.max_seconds` together; where a check finds a better plan, that plan is the result.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.hard_plans import PricedPlan
from darts_parallel.cost.pruning import without_dominated
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.errors import ConfigError
from darts_parallel.exact import layerwise as dynamic_programming
from darts_parallel.exact import uniform as exhaustive
from darts_parallel.exact.result import PlannerResult
from darts_parallel.exact.simulated import find_plan as find_simulated
from darts_parallel.exact.verification import Verification
from darts_parallel.gradient.descent import search_tables
from darts_parallel.gradient.infeasibility import explain_infeasible
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.file import read_own_problem, read_plan
from darts_parallel.planner import automatic as auto
from darts_parallel.planner.evenness import most_even
from darts_parallel.planner.node_choice import Rental, rent
from darts_parallel.planner.replanning import replan
from darts_parallel.planner.result import Planned
from darts_parallel.planner.searcher import plan_products
from darts_parallel.planner.state_moves import state_moves
from darts_parallel.planner.watcher import Watcher
from darts_parallel.problem.billing import price_per_hour
from darts_parallel.problem.problem import Problem


def plan(
    problem: Problem,
    *,
    rental: Rental | None = None,
    watcher: Watcher | None = None,
    folder: Path | None = None,
) -> Planned:
    """Find a plan and check it, as the command `darts-parallel` does.

    Args:
        problem: Model, cluster, job, and how to search.
        rental: How the nodes of the problem were chosen out of an offer (`choose_nodes`); None chooses
            them here where the objective may.
        watcher: Told what goes on; None: nobody.
        folder: Gets `configurations.json` where `cost=searcher`; None: nothing is written.

    Returns:
        The plan, how the search went, and what the checks say of it.

    Errors:
        InfeasibleError: no plan of the space fits; names the binding constraint.
        ConfigError: `search.method=exact` where no exact method reaches.
    """
    watcher, config = watcher or Watcher(), problem.config
    if config.plan is not None:
        return Planned(read_plan(config.plan, problem))
    if rental is None:
        problem, rental = choose_nodes(problem)
    if not config.cost.knows_stages and config.replan.get("from") is None:
        return plan_products(problem, watcher, folder)
    job = PlanningJob(problem, watcher)
    source = config.replan.get("from")
    old = None if source is None else read_plan(source, problem, "replan.from")
    planned = job.found() if old is None else job.verified(replan(problem, old, tables=job.tables))
    result = planned.result
    assert result is not None
    if rental is not None and rental.iteration_time_s < result.iteration_time_s:
        result = rental.instead_of(result)
    planned = Planned.of(job.tidied(result), planned.answers, interrupted=planned.interrupted)
    if source is not None and old is not None:
        moves = state_moves(old, read_own_problem(source), planned.plan, problem)
        planned = replace(planned, moves=moves, source=source)
    return replace(planned, rental=rental)


def choose_nodes(problem: Problem) -> tuple[Problem, Rental | None]:
    """The problem on the nodes that its objective chooses, and their plan, where it may choose."""
    objective = problem.config.objective
    if objective.name != "time":
        price_per_hour(problem)
    if not objective.choose_nodes or problem.config.plan is not None:
        return problem, None
    rental = rent(problem)
    return rental.problem, rental


@dataclass
class PlanningJob:
    """One problem on its way to a verified plan; its cost tables are built once."""

    problem: Problem
    watcher: Watcher
    _uniform: PricedPlan | None = None
    """The best uniform plan, once it is enumerated."""

    @cached_property
    def tables(self) -> list[CostTable]:
        """Cost tables of the whole space, one for each pipeline degree and node order."""
        return build_tables(self.problem)

    @cached_property
    def pruned(self) -> list[CostTable]:
        """The tables without dominated strategies: no optimum is lost."""
        return [without_dominated(table) for table in self.tables]

    def found(self) -> Planned:
        """Find a plan by `search.method`, and check it."""
        method = self.problem.config.search.method
        if method == "gradient":
            return self.verified(self.descended())
        budget = self.problem.config.search.max_seconds if method == "exact" else None
        with self.watcher.progress("exact search") as update:
            planned, why = auto.attempt(self.problem, lambda title: update(0, title), self.tables, budget)
        if planned is not None:
            return planned
        if method == "exact":
            raise ConfigError(
                f"search.method=exact has no plan: {why}; nearest legal: search.method=gradient."
            )
        return self.verified(replace(self.descended(), why=why))

    def descended(self) -> SearchResult:
        """Search by gradient, and polish.

        Errors:
            InfeasibleError: no plan of the space fits; names the binding constraint.
        """
        config = self.problem.config.search
        with self.watcher.progress("search", config.num_steps) as update:

            def on_record(record: StepRecord) -> None:
                update(record.step, f"best {record.best_time_s:.4f} s/iteration")
                self.watcher.record(record)

            space_kind = self.problem.config.space.kind
            result = search_tables(self.pruned, space_kind, config, config.seed, on_record=on_record)
        if result is None:
            raise explain_infeasible(self.problem, self.tables)
        return result

    def verified(self, result: SearchResult) -> Planned:
        """Check a result; where an exact method has a better plan, take that."""
        answers, interrupted = self._answers(result)
        better = auto.refined(result, answers, self.problem.config.space.kind)
        return Planned.of(better, answers, interrupted=interrupted)

    def _answers(self, result: SearchResult) -> tuple[list[Verification], bool]:
        """Ask every exact method that proves something for the space, within their common time.

        Returns:
            The answers until Ctrl-C, and whether it came.
        """
        settings = self.problem.config.verification
        if not settings.enabled or result.stopped_by == "user":
            return [], result.stopped_by == "user"
        space_kind, found = self.problem.config.space.kind, result.iteration_time_s
        deadline = time.monotonic() + settings.max_seconds
        answers: list[Verification] = []
        try:
            with self.watcher.progress("verification by exhaustive"):
                answers.append(Verification.of("exhaustive", "uniform", self._enumerated(deadline), found))
            if space_kind != "uniform":
                with self.watcher.progress("verification by dynamic programming"):
                    best = self._programmed(deadline, found)
                    answers.append(Verification.of("dynamic_programming", space_kind, best, found))
        except KeyboardInterrupt:
            self.watcher.say(
                "verification interrupted: the plan stands, unverified by what is missing below."
            )
            return answers, True
        return answers, False

    @property
    def _simulated(self) -> bool:
        return self.problem.config.cost.pipeline == "simulated"

    def _enumerated(self, deadline: float) -> PlannerResult:
        """The best uniform plan."""
        began = time.monotonic()
        if self._simulated:
            return self._simulated_answer("uniform", exhaustive.find_plan, deadline)
        answer = exhaustive.solve_uniform(self.pruned, deadline=deadline)
        self._uniform = answer.best if answer.proven else None
        return answer.to_baseline(self.pruned, time.monotonic() - began)

    def _simulated_answer(
        self, mode: str, exact: Callable[..., PlannerResult], deadline: float
    ) -> PlannerResult:
        """What an exact method says of simulated pipelines."""

        def closed_form(problem: Problem) -> PlannerResult:
            return exact(problem, budget=max(deadline - time.monotonic(), 0.0))

        return find_simulated(self.problem, mode, closed_form, tables=self.tables, deadline=deadline)

    def _programmed(self, deadline: float, incumbent: float) -> PlannerResult:
        """The best plan of the space, or a bound on it."""
        began, space_kind = time.monotonic(), self.problem.config.space.kind
        if self._simulated:
            return self._simulated_answer(space_kind, dynamic_programming.find_plan, deadline)
        answer = dynamic_programming.solve(
            self.pruned, space_kind, incumbent, deadline, uniform=self._uniform
        )
        return answer.to_baseline(self.pruned, time.monotonic() - began)

    def tidied(self, result: SearchResult) -> SearchResult:
        """The result with the most even of the plans that cost the same."""
        even = most_even(result.plan, self.problem)
        if even == result.plan:
            return result
        return replace(result, plan=even, iteration_time_s=evaluate(even, self.problem).iteration_time_s)
