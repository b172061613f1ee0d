"""`cost=searcher`: products dp x tp x pp searched by gradient, checked by scoring all of them.

The closed form knows neither memory nor layers: a product counts only with a uniform plan of even stages that
is legal and fits by the analytic memory model. Every prime factor of the number of GPUs has weights over
(dp, tp, pp), a softmax; a degree is the product of the factors to the power of its weights, so that
`dp * tp * pp` is the number of GPUs for all weights, and at one-hot weights the degrees are whole.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from darts_parallel.config import SearchConfig
from darts_parallel.cost import (
    CONSTANTS,
    CostTable,
    Product,
    SearcherModel,
    build_tables,
    evaluate_batch,
    even_uniform_plans,
    products,
)
from darts_parallel.errors import InfeasibleError, UnsupportedError
from darts_parallel.exact import Verification
from darts_parallel.gradient import (
    INITIAL_NOISE,
    INITIAL_PREFERENCE,
    RECORD_EVERY,
    Adam,
    Schedules,
    SearchResult,
    StepRecord,
    any_fits,
    explain_infeasible,
    geometric,
)
from darts_parallel.planner._session import Method, Session
from darts_parallel.planner.watcher import Watcher
from darts_parallel.plans import Plan, outer_spaces
from darts_parallel.problem import GIB, Problem

OWNERS = ("dp", "tp", "pp")
SPACE = "dp x tp x pp"
SCORED = "every product was scored (configurations.json)"


def product_session(problem: Problem, watcher: Watcher | None = None) -> Session:
    """Begin with a problem that is priced by `cost=searcher`.

    Errors:
        UnsupportedError: the pins leave only plans that the closed form cannot price.
    """
    spaces = [space for space in outer_spaces(problem) if space.cp == space.virtual_stages == 1]
    if not spaces:
        raise UnsupportedError(
            "cost=searcher knows uncut sequences; try space.cp=1 space.virtual_stages=1."
        )
    tables = build_tables(problem, spaces)
    found = {product: plan for table in tables for product, plan in runnable(table).items()}
    search = ProductSearch(
        problem, SearcherModel.of(problem.model, problem.cluster, problem.training), found
    )
    methods = (Method("gradient", search.descend), Method("exhaustive", search.score_all))
    session = Session.of(
        problem, {method.name: method for method in methods}, watcher, tables, SPACE
    )
    session.budgets["verification.max_seconds"] = float("inf")
    return session


def runnable(table: CostTable) -> dict[Product, tuple[Plan | None, str]]:
    """Return the fastest plan of every product of a table, or why none of its plans fits."""
    plans, rows = even_uniform_plans(table), dict[Product, list[int]]()
    cost = evaluate_batch(table, plans)
    lacking = (cost.memory - table.capacity).amax(1)
    seconds = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
    for row, choice in enumerate(plans.choices[:, 0].tolist()):
        rows.setdefault((table.choices[choice].dp, table.choices[choice].tp, table.pp), []).append(
            row
        )
    return {
        product: (plans.to_plan(min(some, key=lambda row: float(seconds[row])), table), "")
        if bool(cost.feasible[some].any())
        else (None, f"lacks {float(lacking[some].min()) / GIB:.1f} GiB of memory")
        for product, some in rows.items()
    }


def prime_factors(number: int) -> list[int]:
    """Return the prime factors with their multiplicity, rising; of 1: none."""
    factor = next((f for f in range(2, number + 1) if number % f == 0), None)
    return [] if factor is None else [factor, *prime_factors(number // factor)]


def relaxed_degrees(weights: Tensor, factors: Tensor) -> Tensor:
    """Return dp, tp and pp, `(..., 3)`, of weights `(..., J, 3)` over the owners of prime factors `(J,)`."""
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

    def __post_init__(self) -> None:
        self.factors = torch.tensor(
            prime_factors(self.problem.cluster.num_devices), dtype=torch.float64
        )

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
        began, config = time.monotonic(), self.problem.config
        self.price(products(self.problem.cluster.num_devices))
        running = self.running()
        if not running:
            if not any_fits(session.tables, config.space.kind):
                raise explain_infeasible(self.problem, session.tables)
            raise InfeasibleError(
                "memory: cost=searcher knows uniform plans with even stages alone, and none of them fits "
                f"model={config.model.name} on cluster={config.cluster.name}; try cost=analytic."
            )
        rows: list[dict[str, Any]] = [
            dict(zip(OWNERS, product, strict=True))
            | {"iteration_time_s": seconds, "reason": reason}
            for seconds, product, _, reason in self.ranked()
        ]
        skipped = list(takewhile(lambda row: row["reason"], rows))
        (seconds, plan), count, took = running[0], len(rows), time.monotonic() - began
        note = (
            f"{SCORED}; {len(skipped)} faster ones do not run and are skipped"
            if skipped
            else SCORED
        )
        answer = Verification("", plan, seconds, 0.0, took, count, True, SPACE, seconds, note)
        session.others = tuple(running)
        session.files["configurations.json"] = {
            "model": config.model.name,
            "cluster": config.cluster.name,
            "training": asdict(self.problem.training),
            "constants": CONSTANTS,
            "configurations": [
                row | {"breakdown_s": self.seen[row["dp"], row["tp"], row["pp"]]} for row in rows
            ],
            "skipped": skipped,
            "seconds": took,
        }
        session.record("exhaustive", SPACE, answer, took)

    def descend(self, session: Session, deadline: float) -> None:
        """Take all steps from random preferences of every factor, and price what the weights round to."""
        c, began = session.settings, time.perf_counter()
        logits = self._first_logits(c)
        optimizer = Adam([(logits, c.learning_rate)])
        history: list[StepRecord] = []
        with session.watcher.progress("search", c.num_steps):
            for step in range(c.num_steps):
                temperature = geometric(c.temperature[0], c.temperature[1], step, c.num_steps)
                weights = torch.softmax(logits / temperature, dim=-1)
                degrees = relaxed_degrees(weights, self.factors).unbind(-1)
                seconds = torch.stack(list(self.model.terms(*degrees).values())).sum(0)
                optimizer.zero_grad()
                seconds.log().sum().backward()  # type: ignore[no-untyped-call]
                if step % RECORD_EVERY == 0 or step == c.num_steps - 1:
                    owners = torch.nn.functional.one_hot(weights.argmax(-1), 3).double()
                    rounded = relaxed_degrees(owners, self.factors).round().long().tolist()
                    self.price((dp, tp, pp) for dp, tp, pp in rounded)
                    history.append(
                        self._record(step, temperature, weights.detach(), seconds.detach())
                    )
                    session.watcher.record(history[-1])
                optimizer.step()
        if self.running():
            (best, plan), *others = self.running()
            session.result = SearchResult(
                plan,
                best,
                plan,
                best,
                tuple(others),
                tuple(history),
                time.perf_counter() - began,
                c.num_steps,
                c.num_restarts,
                c.seed,
                len(self.seen),
                gradient_iteration_time_s=best,
            )
        else:
            self.score_all(session, deadline)

    def _first_logits(self, settings: SearchConfig) -> Tensor:
        """Draw noise, and one preferred owner of every factor of every restart."""
        rng = torch.Generator().manual_seed(settings.seed)
        shape = (settings.num_restarts, len(self.factors), 3)
        logits = INITIAL_NOISE * torch.randn(shape, generator=rng, dtype=torch.float64)
        preferred = torch.randint(3, (*shape[:2], 1), generator=rng)
        strength = torch.full((*shape[:2], 1), INITIAL_PREFERENCE).double()
        return logits.scatter_add_(-1, preferred, strength).requires_grad_()

    def _record(
        self, step: int, temperature: float, weights: Tensor, seconds: Tensor
    ) -> StepRecord:
        """Describe the leading restart at a step."""
        lead = int(seconds.argmin())
        mine, degrees = weights[lead], relaxed_degrees(weights[lead], self.factors)
        shares = degrees.log() / degrees.log().sum().clamp(min=1e-30)
        return StepRecord(
            step=step,
            seconds=0.0,
            schedules=Schedules(temperature, temperature, 1.0),
            loss=float(seconds[lead].log()),
            surrogate_time_s=float(seconds[lead]),
            best_time_s=min((seconds for seconds, _ in self.running()), default=float("inf")),
            entropy=float(torch.special.entr(mine).sum(-1).mean()) if len(self.factors) else 0.0,
            outer_weights=dict(zip(OWNERS, shares.tolist(), strict=True)),
            pp=round(float(degrees[2])),
            choices=OWNERS,
            probabilities=mine,
            rows=tuple(f"factor {prime:g}" for prime in self.factors.tolist()),
        )
