"""`cost=searcher`: products dp x tp x pp searched by gradient, checked by scoring all of them.

The closed form knows neither memory nor layers: a product counts only with a uniform plan of even
stages that is legal and fits by the analytic memory model. Every prime factor of the number of GPUs
has weights over (dp, tp, pp), a softmax; a degree is the product of the factors to the power of its
weights, so that `dp * tp * pp` is the number of GPUs for all weights, and at one-hot weights the
degrees are whole.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from math import inf
from typing import NamedTuple

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
    float_tensor,
    products,
)
from darts_parallel.errors import Amounts, Entries, InfeasibleError, UnsupportedError
from darts_parallel.exact import Verification
from darts_parallel.gradient import (
    INITIAL_NOISE,
    INITIAL_PREFERENCE,
    RECORD_EVERY,
    Adam,
    NoPlanFitsError,
    PlanStage,
    Schedules,
    StepRecord,
    any_fits,
    geometric,
)
from darts_parallel.planner._session import CHECK_SECONDS, Asked, Method, Reported, Session
from darts_parallel.plans import Plan, outer_spaces
from darts_parallel.problem import GIB, Problem

OWNERS = ("dp", "tp", "pp")
SPACE = "dp x tp x pp"
SCORED = "every product was scored (configurations.json)"
TINY = 1e-30
"""Keeps shares of a product of 1 finite."""


def product_session(problem: Problem, reported: Reported) -> Session:
    """Begin with a problem that is priced by `cost=searcher`.

    Errors:
        UnsupportedError: the pins leave only plans that the closed form cannot price.
    """
    spaces = [space for space in outer_spaces(problem) if space.cp == space.virtual_stages == 1]
    if not spaces:
        raise UnsupportedError(
            "cost=searcher knows uncut sequences; try space.cp=1 space.virtual_stages=1."
        )
    asked = Asked.of(problem, build_tables(problem, spaces))
    plans: dict[Product, Runnable] = {}
    for table in asked.tables:
        plans |= runnable(table)
    config = problem.config
    training = problem.training
    names = {"model": config.model.name, "cluster": config.cluster.name}
    model = SearcherModel.of(problem.model, problem.cluster, training)
    search = ProductSearch(
        names | {"training": asdict(training)},
        problem.cluster.num_devices,
        model,
        plans,
        asked.space_kind,
    )
    methods = (Method("gradient", search.descend), Method("exhaustive", search.score_all))
    budgets = {**asked.budgets, CHECK_SECONDS: inf}
    asked = replace(asked, space_kind=SPACE, budgets=budgets)
    by_name = {method.name: method for method in methods}
    return Session(asked, by_name, reported=reported)


class Runnable(NamedTuple):
    """How a product of degrees runs."""

    plan: Plan | None
    """Fastest plan by the analytic model; None: it does not run."""
    reason: str = ""
    """Why it does not run, one clause."""


class Scored(NamedTuple):
    """A product, its price by the closed form, and how it runs."""

    seconds: float
    product: Product
    plan: Plan | None
    reason: str


def runnable(table: CostTable) -> dict[Product, Runnable]:
    """Return the fastest plan of every product of a table, or why none of its plans fits."""
    plans = even_uniform_plans(table)
    cost = evaluate_batch(table, plans)
    lacking = (cost.memory - table.capacity).amax(1)
    seconds = cost.fitting_seconds
    rows: dict[Product, list[int]] = {}
    first_choices = plans.choices[:, 0].tolist()
    for row, choice in enumerate(first_choices):
        strategy = table.choices[choice]
        product = (strategy.dp, strategy.tp, table.pp)
        rows.setdefault(product, []).append(row)
    result = {}
    for product, own in rows.items():
        if bool(cost.feasible[own].any()):
            fastest = own[int(seconds[own].argmin())]
            result[product] = Runnable(plans.to_plan(fastest, table))
        else:
            missing = float(lacking[own].min()) / GIB
            result[product] = Runnable(None, f"lacks {missing:.1f} GiB of memory")
    return result


def prime_factors(number: int) -> list[int]:
    """Return the prime factors with their multiplicity, rising; of 1: none."""
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *prime_factors(number // factor)]
    return []


def relaxed_degrees(weights: Tensor, factors: Tensor) -> Tensor:
    """Return dp, tp and pp, `(..., 3)`, of weights `(..., J, 3)` over the owners of prime factors `(J,)`."""
    logs = factors.log().unsqueeze(-1)
    return torch.exp((weights * logs).sum(-2))


@dataclass
class ProductSearch:
    """Products of one job: their seconds, and the plans by which they run."""

    job: Entries
    """Model, cluster and training, as `configurations.json` names them."""
    num_devices: int
    model: SearcherModel
    plans: dict[Product, Runnable]
    """How every product of the space runs."""
    plan_space: str
    """Space of the analytic plans by which products run."""
    priced: dict[Product, Amounts] = field(default_factory=dict)
    """Seconds by cause of every product that was priced."""

    def __post_init__(self) -> None:
        self.factors = float_tensor(prime_factors(self.num_devices))

    def price(self, some: Iterable[Product]) -> None:
        """Score the products that are new."""
        new = [product for product in dict.fromkeys(some) if product not in self.priced]
        if new:
            self.priced |= zip(new, self.model.breakdowns(new), strict=True)

    def ranked(self) -> list[Scored]:
        """Return all priced products, fastest first."""
        illegal = Runnable(None, "no legal strategy of the space")
        scored = []
        for product, parts in self.priced.items():
            plan, reason = self.plans.get(product, illegal)
            scored.append(Scored(sum(parts.values()), product, plan, reason))
        return sorted(scored, key=lambda own: (own.seconds, own.product))

    def running(self) -> list[tuple[float, Plan]]:
        """Return the plans of the priced products that run with their seconds, fastest first."""
        found = []
        for own in self.ranked():
            if own.plan is not None:
                found.append((own.seconds, own.plan))
        return found

    def score_all(self, session: Session, deadline: float) -> None:
        """Score every product, and keep the fastest that runs.

        Errors:
            InfeasibleError: no product runs.
        """
        began = time.monotonic()
        self.price(products(self.num_devices))
        running = self.running()
        if not running:
            raise self._infeasible(session.asked)
        ranked = self.ranked()
        skipped = list(takewhile(lambda own: own.plan is None, ranked))
        note = SCORED
        if skipped:
            note += f"; {len(skipped)} faster ones do not run and are skipped"
        took = time.monotonic() - began
        seconds, plan = running[0]
        answer = Verification(
            "",
            plan,
            seconds,
            plans_evaluated=len(ranked),
            proven=True,
            lower_bound_s=seconds,
            note=note,
        )
        session.found.others = tuple(running)
        rows = [_row(own) | {"breakdown_s": self.priced[own.product]} for own in ranked]
        content = self.job | {"constants": CONSTANTS, "configurations": rows}
        content |= {"skipped": [_row(own) for own in skipped], "seconds": took}
        session.reported.files["configurations.json"] = content
        milliseconds = [_degrees(own) | {"milliseconds": 1e3 * own.seconds} for own in ranked]
        session.reported.files["output.json"] = milliseconds
        session.record("exhaustive", SPACE, answer, took)

    def _infeasible(self, asked: Asked) -> InfeasibleError:
        """Return the error for a job none of whose products runs."""
        if not any_fits(asked.tables, self.plan_space):
            return NoPlanFitsError(asked.problem, asked.tables)
        return InfeasibleError(
            "memory: cost=searcher knows uniform plans with even stages alone, and none of them fits "
            f"model={self.job['model']} on cluster={self.job['cluster']}; try cost=analytic."
        )

    def descend(self, session: Session, deadline: float) -> None:
        """Take all steps from random preferences of every factor, and price the rounded weights."""
        settings = session.asked.settings
        watcher = session.reported.watcher
        began = time.perf_counter()
        logits = self._first_logits(settings)
        optimizer = Adam([(logits, settings.learning_rate)])
        history: list[StepRecord] = []
        hottest, coldest = settings.temperature
        with watcher.progress("search", settings.num_steps):
            for step in range(settings.num_steps):
                temperature = geometric(hottest, coldest, step, settings.num_steps)
                weights = torch.softmax(logits / temperature, dim=-1)
                degrees = relaxed_degrees(weights, self.factors).unbind(-1)
                terms = self.model.terms(*degrees).values()
                seconds = torch.stack(list(terms)).sum(0)
                optimizer.zero_grad()
                seconds.log().sum().backward()  # type: ignore[no-untyped-call]
                if step % RECORD_EVERY == 0 or step == settings.num_steps - 1:
                    self._price_rounded(weights)
                    record = self._record(step, temperature, weights.detach(), seconds.detach())
                    history.append(record)
                    watcher.record(record)
                optimizer.step()
        if not self.running():
            self.score_all(session, deadline)
            return
        (best, plan), *others = self.running()
        result = session.result(plan, best, others)
        took = time.perf_counter() - began
        priced = len(self.priced)
        steps = settings.num_steps
        restarts = settings.num_restarts
        result = replace(result, seconds=took, steps=steps, restarts=restarts)
        result = replace(result, plans_evaluated=priced, gradient_iteration_time_s=best)
        stages = (PlanStage("fitted", best, fits=True),)
        session.found.result = replace(result, history=tuple(history), stages=stages)

    def _price_rounded(self, weights: Tensor) -> None:
        """Price the product of every restart whose factors go to their heaviest owner."""
        heaviest = weights.argmax(-1)
        owners = torch.nn.functional.one_hot(heaviest, 3).double()
        degrees = relaxed_degrees(owners, self.factors)
        rounded = degrees.round().long().tolist()
        self.price((dp, tp, pp) for dp, tp, pp in rounded)

    def _first_logits(self, settings: SearchConfig) -> Tensor:
        """Draw noise, and one preferred owner of every factor of every restart."""
        rng = torch.Generator().manual_seed(settings.seed)
        shape = (settings.num_restarts, len(self.factors), 3)
        logits = INITIAL_NOISE * torch.randn(shape, generator=rng, dtype=torch.float64)
        one = (*shape[:2], 1)
        preferred = torch.randint(3, one, generator=rng)
        strength = torch.full(one, INITIAL_PREFERENCE).double()
        return logits.scatter_add_(-1, preferred, strength).requires_grad_()

    def _record(
        self,
        step: int,
        temperature: float,
        weights: Tensor,
        seconds: Tensor,
    ) -> StepRecord:
        """Describe the leading restart at a step."""
        lead = int(seconds.argmin())
        own = weights[lead]
        degrees = relaxed_degrees(own, self.factors)
        logs = degrees.log()
        shares = logs / logs.sum().clamp(min=TINY)
        entropy = 0.0
        if len(self.factors):
            entropy = float(torch.special.entr(own).sum(-1).mean())
        loss = float(seconds[lead].log())
        time_s = float(seconds[lead])
        running = self.running()
        best = running[0][0] if running else inf
        by_owner = dict(zip(OWNERS, shares.tolist(), strict=True))
        pp = round(float(degrees[2]))
        schedules = Schedules(temperature, temperature, 1.0)
        record = StepRecord(
            step, 0.0, schedules, loss, time_s, best, entropy, by_owner, pp, OWNERS, own
        )
        rows = [f"factor {prime:g}" for prime in self.factors.tolist()]
        return replace(record, rows=tuple(rows))


def _row(scored: Scored) -> Entries:
    """Return a product's entry in `configurations.json`."""
    return _degrees(scored) | {"iteration_time_s": scored.seconds, "reason": scored.reason}


def _degrees(scored: Scored) -> Entries:
    """Return the degrees of a product by name."""
    return dict(zip(OWNERS, scored.product, strict=True))
