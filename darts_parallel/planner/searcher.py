"""`cost=searcher`: products dp x tp x pp searched by gradient, checked by enumeration.

The Searcher report's model knows neither memory nor layers, so that a product is worth what it can run: a
uniform plan with even stages that is legal and fits by the analytic memory model.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.searcher import SearcherModel, configuration_dicts, products
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.errors import InfeasibleError, UnsupportedError
from darts_parallel.exact.verification import Verification
from darts_parallel.gradient.infeasibility import any_fits, explain_infeasible
from darts_parallel.gradient.result import SearchResult
from darts_parallel.plan.file import write_json
from darts_parallel.plan.space import outer_spaces
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.result import Planned
from darts_parallel.planner.searcher_descent import Product, ProductSearch
from darts_parallel.planner.watcher import Watcher
from darts_parallel.problem.cluster import memory_unit
from darts_parallel.problem.problem import Problem

NAMED = 3
"""Faster products that do not run and are named in the report; configurations.json names all."""


@dataclass
class RunnableProducts:
    """Which (dp, tp, pp) of a problem can run, and by which plan; each is looked at once."""

    problem: Problem
    tables: dict[int, CostTable]
    """Cost table of every pipeline degree of the space."""
    _known: dict[Product, tuple[Plan | None, str]] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> "RunnableProducts":
        """The products of a problem's space.

        Errors:
            UnsupportedError: the pins leave only plans that the Searcher report's model has no word for.
        """
        spaces = [space for space in outer_spaces(problem) if space.cp == space.virtual_stages == 1]
        if not spaces:
            raise UnsupportedError(
                "space.cp, space.virtual_stages: cost=searcher knows neither context parallelism nor "
                "interleaving; nearest legal: 1 and 1."
            )
        tables = build_tables(problem, spaces)
        return RunnableProducts(problem, {table.pp: table for table in tables})

    def plan(self, product: Product) -> Plan | None:
        """The product's fastest plan by the analytic model; None where it cannot run."""
        return self._look(product)[0]

    def reason(self, product: Product) -> str:
        """Why a product cannot run, one clause; empty where it can."""
        return self._look(product)[1]

    def _look(self, product: Product) -> tuple[Plan | None, str]:
        if product not in self._known:
            self._known[product] = self._looked(product)
        return self._known[product]

    def _looked(self, product: Product) -> tuple[Plan | None, str]:
        dp, tp, pp = product
        table = self.tables.get(pp)
        if table is None:
            return None, f"pp {pp} is not in the space"
        plans = even_uniform_plans(table)
        degrees = [(table.choices[c].dp, table.choices[c].tp) for c in plans.choices[:, 0].tolist()]
        mine = [row for row, own in enumerate(degrees) if own == (dp, tp)]
        if not mine:
            return None, self._illegal(dp, tp, pp)
        cost = evaluate_batch(table, plans)
        times = cost.iteration_time.tolist()
        fitting = [(times[row], row) for row in mine if bool(cost.feasible[row])]
        if fitting:
            return plans.to_plan(min(fitting)[1], table), ""
        device = self.problem.cluster.groups[0].device
        need = float(cost.memory[mine].amax(1).min()) + device.reserved
        unit, size = memory_unit(device.memory)
        usable = (1.0 - self.problem.config.space.memory_margin) * device.memory
        return None, f"needs {need / size:.1f} {unit} of {usable / size:.1f} {unit}"

    def _illegal(self, dp: int, tp: int, pp: int) -> str:
        """The rule that a product breaks."""
        heads, batch = self.problem.config.model.num_heads, self.problem.training.global_batch_size
        if heads % tp:
            return f"tp {tp} does not divide {heads} attention heads"
        if batch % dp:
            return f"dp {dp} does not divide the global batch of {batch}"
        return f"dp {dp} and tp {tp} are no legal strategy of the space with pp {pp}"

    def nothing_runs(self) -> InfeasibleError:
        """The error where no product can run."""
        ordered = list(self.tables.values())
        if not any_fits(self.problem, ordered):
            return explain_infeasible(self.problem, ordered)
        return InfeasibleError(
            f"memory: cost=searcher knows uniform plans with even stages only, and none of them fits "
            f"model={self.problem.model.config.name} on cluster={self.problem.cluster.name}; "
            "nearest legal: cost=analytic."
        )


def plan_products(problem: Problem, watcher: Watcher, folder: Path | None) -> Planned:
    """Search dp x tp x pp by gradient (but for `search.method=exact`), and check by scoring all of them.

    Args:
        problem: Priced by `cost=searcher`.
        watcher: Told what goes on.
        folder: Gets `configurations.json`; None: nothing is written.

    Errors:
        InfeasibleError: no product runs.
    """
    runnable = RunnableProducts.of(problem)
    result = None if problem.config.search.method == "exact" else _descended(problem, runnable, watcher)
    began = time.perf_counter()
    data = configuration_dicts(problem, list(products(problem.cluster.num_devices)))
    ordered: list[Product] = [(row["dp"], row["tp"], row["pp"]) for row in data["configurations"]]
    rank = next((i for i, product in enumerate(ordered) if runnable.plan(product) is not None), None)
    if rank is None:
        raise runnable.nothing_runs()
    best, seconds = runnable.plan(ordered[rank]), data["configurations"][rank]["iteration_time_s"]
    assert best is not None
    skipped = [_skipped(data["configurations"][i], runnable.reason(ordered[i])) for i in range(rank)]
    elapsed = time.perf_counter() - began
    if folder is not None:
        write_json(folder / "configurations.json", data | {"skipped": skipped, "seconds": elapsed})
    answer = Verification(
        name="exhaustive",
        plan=best,
        iteration_time_s=seconds,
        gap=0.0,
        seconds=elapsed,
        plans_evaluated=len(ordered),
        proven=True,
        space="dp x tp x pp",
        lower_bound_s=seconds,
        note=_note(skipped),
    )
    if result is None:
        return Planned(best, answers=(answer,))
    if seconds < result.iteration_time_s * (1 - 1e-12):
        result = replace(result, plan=best, iteration_time_s=seconds, method="exhaustive")
    return Planned.of(result, [answer])


def _skipped(row: dict[str, Any], reason: str) -> dict[str, Any]:
    return {key: row[key] for key in ("dp", "tp", "pp", "iteration_time_s")} | {"reason": reason}


def _note(skipped: list[dict[str, Any]]) -> str:
    """What was faster and does not run, one sentence."""
    if not skipped:
        return "every product was scored; the fastest runs"
    named = [
        f"dp {row['dp']}, tp {row['tp']}, pp {row['pp']} ({row['iteration_time_s']:.4g} s: {row['reason']})"
        for row in skipped[:NAMED]
    ]
    more = f" and {len(skipped) - NAMED} more (configurations.json)" if len(skipped) > NAMED else ""
    return f"every product was scored; faster, but skipped: {'; '.join(named)}{more}"


def _descended(problem: Problem, runnable: RunnableProducts, watcher: Watcher) -> SearchResult:
    """The fastest product that descent and polishing found.

    Errors:
        InfeasibleError: no product runs.
    """
    began, config = time.perf_counter(), problem.config.search
    search = ProductSearch(
        SearcherModel.of(problem),
        problem.cluster.num_devices,
        config,
        lambda product: runnable.plan(product) is not None,
    )
    with watcher.progress("search", config.num_steps):
        search.descend(config.seed, watcher.record)
    raw = search.best
    if config.polish or raw is None:
        search.polish()
    best = search.best
    if best is None:
        raise runnable.nothing_runs()
    raw = best if raw is None else raw
    plan, raw_plan = runnable.plan(best), runnable.plan(raw)
    assert plan is not None
    assert raw_plan is not None
    others = sorted((seconds, product) for product, seconds in search.seen.items() if product != best)
    alternatives = ((seconds, runnable.plan(product)) for seconds, product in others)
    return SearchResult(
        plan=plan,
        iteration_time_s=search.seen[best],
        raw_plan=raw_plan,
        raw_iteration_time_s=search.seen[raw],
        alternatives=tuple((seconds, other) for seconds, other in alternatives if other is not None),
        history=tuple(search.history),
        seconds=time.perf_counter() - began,
        steps=config.num_steps,
        restarts=config.num_restarts,
        seed=config.seed,
        plans_evaluated=len(search.seen),
        gradient_iteration_time_s=search.seen[best],
    )
