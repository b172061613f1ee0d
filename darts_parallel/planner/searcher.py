"""`cost=searcher`: products dp x tp x pp searched by gradient, checked by scoring all of them.

The closed form knows neither memory nor layers, so that a product is worth what it can run: a uniform plan
with even stages that is legal and fits by the analytic memory model. Three degrees relaxed each for itself
would leave the product open. Here every prime factor of the number of GPUs has weights over (dp, tp, pp), a
softmax of its own; a degree is the product of the factors to the power of its weights, so that `dp * tp * pp`
is the number of GPUs whatever the weights, and at one-hot weights the degrees are whole.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.searcher import CONSTANTS, Product, SearcherModel, products
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.errors import InfeasibleError, UnsupportedError
from darts_parallel.exact.result import Verification
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.infeasibility import any_fits, explain_infeasible
from darts_parallel.gradient.relaxation import Schedules, geometric
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.space import outer_spaces
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.session import Method, Session
from darts_parallel.planner.watcher import Watcher
from darts_parallel.problem.cluster import GIB
from darts_parallel.problem.problem import Problem

NAMED = 3
"""Faster products that do not run and are named in the report; configurations.json names all."""
OWNERS = ("dp", "tp", "pp")
SPACE = "dp x tp x pp"


def product_session(problem: Problem, watcher: Watcher | None = None) -> Session:
    """Begin with a problem that is priced by `cost=searcher`.

    Errors:
        UnsupportedError: the pins leave only plans that the closed form cannot price.
    """
    spaces = [space for space in outer_spaces(problem) if space.cp == space.virtual_stages == 1]
    if not spaces:
        raise UnsupportedError(
            "cost=searcher knows uncut sequences alone; try space.cp=1 space.virtual_stages=1."
        )
    tables = build_tables(problem, spaces)
    found = {product: plan for table in tables for product, plan in runnable(table).items()}
    search = ProductSearch(problem, SearcherModel.of(problem), found)
    methods = (Method("gradient", search.descend), Method("exhaustive", search.score_all))
    session = Session.of(problem, {method.name: method for method in methods}, watcher, tables, SPACE)
    # the scores are written whatever is verified: they take a moment
    session.budgets["verification.max_seconds"] = float("inf")
    return session


def runnable(table: CostTable) -> dict[Product, tuple[Plan | None, str]]:
    """Return the fastest plan of every product of a table, or why none of its plans fits."""
    plans, best = even_uniform_plans(table), dict[Product, tuple[float, int]]()
    cost, lacking = evaluate_batch(table, plans), dict[Product, float]()
    more = (cost.memory - table.capacity).amax(1).tolist()
    for row, choice in enumerate(plans.choices[:, 0].tolist()):
        product = (table.choices[choice].dp, table.choices[choice].tp, table.pp)
        lacking[product] = min(lacking.get(product, more[row]), more[row])
        if bool(cost.feasible[row]):
            seconds = float(cost.iteration_time[row])
            best[product] = min(best.get(product, (seconds, row)), (seconds, row))
    return {
        product: (plans.to_plan(best[product][1], table), "")
        if product in best
        else (None, f"lacks {lacking[product] / GIB:.1f} GiB of memory")
        for product in lacking
    }


def prime_factors(number: int) -> list[int]:
    """Return the prime factors with their multiplicity, rising; of 1: none."""
    found, factor = [], 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return found + ([number] if number > 1 else [])


def relaxed_degrees(weights: Tensor, factors: Tensor) -> Tensor:
    """Return the degrees of relaxed products.

    Args:
        weights: Weights of every factor's owners, summing to 1, shape `(..., J, 3)`.
        factors: Prime factors, `(J,)`.

    Returns:
        dp, tp and pp, `(..., 3)`; their product is that of the factors.
    """
    return torch.exp((weights * factors.log().unsqueeze(-1)).sum(-2))


@dataclass
class ProductSearch:
    """Products of one problem: their seconds, and the plans by which they run."""

    problem: Problem
    model: SearcherModel
    plans: dict[Product, tuple[Plan | None, str]]
    """Fastest plan by the analytic model of every product of the space, or why none runs, one clause."""
    seen: dict[Product, dict[str, float]] = field(default_factory=dict)
    """Seconds by cause of every product that was priced."""

    def price(self, some: Iterable[Product]) -> None:
        """Score the products that are new."""
        new = [product for product in dict.fromkeys(some) if product not in self.seen]
        if new:
            self.seen |= zip(new, self.model.breakdowns(new), strict=True)

    def ranked(self) -> list[tuple[float, Product, Plan | None, str]]:
        """Return all priced products with their seconds, and their plans or reasons, fastest first."""
        none = (None, "no legal strategy of the space")
        order = sorted((sum(parts.values()), product) for product, parts in self.seen.items())
        return [(seconds, product, *self.plans.get(product, none)) for seconds, product in order]

    def running(self) -> list[tuple[float, Plan]]:
        """Return the plans of the priced products that run with their seconds, fastest first."""
        return [(seconds, plan) for seconds, _, plan, _ in self.ranked() if plan is not None]

    def score_all(self, session: Session, deadline: float) -> None:
        """Score every product, and keep the fastest that runs.

        Errors:
            InfeasibleError: no product runs.
        """
        began, problem = time.monotonic(), self.problem
        self.price(products(problem.cluster.num_devices))
        running = self.running()
        if not running and not any_fits(problem, session.tables):
            raise explain_infeasible(problem, session.tables)
        if not running:
            raise InfeasibleError(
                "memory: cost=searcher knows uniform plans with even stages alone, and none of them fits "
                f"model={problem.config.model.name} on cluster={problem.cluster.name}; try cost=analytic."
            )
        rows = [
            {**dict(zip(OWNERS, product, strict=True)), "iteration_time_s": seconds, "reason": reason}
            for seconds, product, _, reason in self.ranked()
        ]
        skipped = list(takewhile(lambda row: row["reason"], rows))
        (seconds, plan), count, took = running[0], len(rows), time.monotonic() - began
        answer = Verification("", plan, seconds, 0.0, took, count, True, SPACE, seconds, _note(skipped))
        session.others = tuple(running)
        session.files["configurations.json"] = {
            "model": problem.config.model.name,
            "cluster": problem.cluster.name,
            "training": asdict(problem.training),
            "constants": CONSTANTS,
            "configurations": [
                row | {"breakdown_s": self.seen[product]}
                for row, (_, product, _, _) in zip(rows, self.ranked(), strict=True)
            ],
            "skipped": skipped,
            "seconds": took,
        }
        session.record("exhaustive", SPACE, answer, took)

    def descend(self, session: Session, deadline: float) -> None:
        """Take all steps from random preferences of every factor, and price what the weights round to."""
        c, began = session.settings, time.perf_counter()
        primes = prime_factors(self.problem.cluster.num_devices)
        rng, factors = torch.Generator().manual_seed(c.seed), torch.tensor(primes, dtype=torch.float64)
        shape = (c.num_restarts, len(primes), 3)
        logits = c.initial_noise * torch.randn(shape, generator=rng, dtype=torch.float64)
        preferred = torch.randint(3, (*shape[:2], 1), generator=rng)
        logits.scatter_add_(-1, preferred, torch.full((*shape[:2], 1), c.initial_preference).double())
        logits.requires_grad_()
        optimizer = Adam([(logits, c.learning_rate)], betas=(c.adam_betas[0], c.adam_betas[1]))
        history: list[StepRecord] = []
        with session.watcher.progress("search", c.num_steps):
            for step in range(c.num_steps):
                temperature = geometric(c.temperature[0], c.temperature[1], step, c.num_steps)
                weights = torch.softmax(logits / temperature, dim=-1)
                degrees = relaxed_degrees(weights, factors).unbind(-1)
                seconds = torch.stack(list(self.model.terms(*degrees).values())).sum(0)
                optimizer.zero_grad()
                seconds.log().sum().backward()  # type: ignore[no-untyped-call]
                if step % c.record_every == 0 or step == c.num_steps - 1:
                    self.price([_rounded(row, primes) for row in weights.argmax(-1).tolist()])
                    history.append(self._record(step, temperature, weights.detach(), seconds.detach()))
                    session.watcher.record(history[-1])
                optimizer.step()
        if not self.running():
            return self.score_all(session, deadline)
        (best, plan), *others = self.running()
        session.result = SearchResult(
            plan, best, plan, best, tuple(others), tuple(history), time.perf_counter() - began,
            c.num_steps, c.num_restarts, c.seed, len(self.seen), gradient_iteration_time_s=best,
        )  # fmt: skip
        return None

    def _record(self, step: int, temperature: float, weights: Tensor, seconds: Tensor) -> StepRecord:
        """Describe the leading restart at a step."""
        lead, primes = int(seconds.argmin()), prime_factors(self.problem.cluster.num_devices)
        mine = weights[lead]
        logs = (mine * torch.tensor(primes).double().log().unsqueeze(-1)).sum(0)
        shares = logs / logs.sum().clamp(min=1e-30)
        return StepRecord(
            step=step,
            seconds=0.0,
            schedules=Schedules(temperature, temperature, 1.0),
            loss=float(seconds[lead].log()),
            surrogate_time_s=float(seconds[lead]),
            best_time_s=min((seconds for seconds, _ in self.running()), default=float("inf")),
            entropy=float(-(mine * mine.clamp(min=1e-30).log()).sum(-1).mean()) if primes else 0.0,
            outer_weights=dict(zip(OWNERS, shares.tolist(), strict=True)),
            pp=round(float(logs[2].exp())),
            choices=OWNERS,
            probabilities=mine,
            rows=tuple(f"factor {prime}" for prime in primes),
        )


def _rounded(owners: list[int], primes: list[int]) -> Product:
    """Return the product in which every prime factor goes to its owner."""
    dp, tp, pp = (prod(p for p, owner in zip(primes, owners, strict=True) if owner == o) for o in range(3))
    return dp, tp, pp


def _note(skipped: list[dict[str, Any]]) -> str:
    """Name what was faster and does not run, in one sentence."""
    rows = [
        f"dp {row['dp']}, tp {row['tp']}, pp {row['pp']} ({row['iteration_time_s']:.4g} s: {row['reason']})"
        for row in skipped[:NAMED]
    ]
    more = f" and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
    faster = f"faster, but skipped: {'; '.join(rows)}{more}" if rows else "the fastest runs"
    return f"every product was scored (configurations.json); {faster}"
