"""Plans for sequences of many lengths: padded, packed at a fixed degree, or with dynamic context parallelism.

A step draws `global_batch_size` sequences from the histogram `training.lengths`. Every plan gets the
same draws. Each packing of `sequence_packing.py` makes micro-batches of them, and `_pass_prices.py`
prices these. Under dynamic context parallelism all ranks wait in every micro-batch for its longest
rank, because the groups change between micro-batches.

Even uniform plans are tried in the order of a lower bound: the work of all sequences over all
ranks. For each plan the settings of a packing are searched: the budget of a rank on a geometric
grid, refined around the best ones, then the smallest group. The best plans of the main search, which
may be uneven and differ by layer, are priced over the same draws.

Packed micro-batches hold at most the budget, whatever the lengths. The memory, and with it the
chance of running out, is therefore the same in every step.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from darts_parallel.config import DYNAMIC, PADDED, PIPELINES_INSIDE
from darts_parallel.cost import Array, PipelineModel
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.planner._length_draws import DRAWS, Draws
from darts_parallel.planner._pass_prices import (
    PlanAtLengths,
    PlanPrices,
    PlansAtLengths,
    whole,
)
from darts_parallel.planner.memory_chance import tightened
from darts_parallel.planner.planning import plan as find_plan
from darts_parallel.planner.prediction_intervals import out_of_memory
from darts_parallel.planner.sequence_packing import Packing
from darts_parallel.plans import (
    LayerStrategy,
    OuterSpace,
    Plan,
    divisors,
    job_facts,
    micro_batch_legal,
    outer_spaces,
    trainer_runs,
)
from darts_parallel.problem import Problem, lies_inside_nodes
from darts_parallel.schedules import CLOSED_FORM

QUANTILE = 0.95
"""Quantile over the draws that is told next to the mean."""
FEW = 4
"""Draws over which settings are compared."""
LISTED = 3
"""Plans of every packing that are returned."""
SEARCHED = 10
"""Plans of the main search that are priced."""
LARGEST_BATCH = 2**24
"""Largest `training.global_batch_size`."""
SLACK = 1.05
"""How far above the slowest listed plan others are tried: their budgets are not refined yet."""
NEAR = ((1.0,), (0.25, 0.5), (0.125,), (0.0625,))
"""Binary logarithms of factors between budgets around the best of the first grid, which has factors of 2."""
FINALISTS = 3
"""Settings of a plan that are compared over all draws."""
CLOSE = 1.03
"""How far above the best setting over few draws another is compared."""


class LengthPlan(NamedTuple):
    """A plan and a packing over the draws."""

    plan: Plan
    packing: Packing
    seconds: tuple[float, float]
    """Seconds of a step: mean and `QUANTILE`."""
    tokens_per_s: float
    bound: float
    """Mean seconds that no packing of these sequences on the plan's ranks can beat."""
    chance: float | None = None
    """Probability that the job runs out of memory."""


class LengthPlans(NamedTuple):
    """Plans for a histogram of lengths."""

    plans: list[LengthPlan]
    """The best of every packing, and the plans of the main search, fastest first."""
    refused: dict[str, int]
    """Schedules that are not priced, and how many plans of the main search have each."""
    why: str
    """Why the main search has no plan, a sentence; empty where it has."""


def plan_lengths(problem: Problem) -> LengthPlans:
    """Return the plans with the fewest expected seconds.

    They keep `space.out_of_memory`, or are the least risky where none does.

    Errors:
        ConfigError: the file is bad, or the space has no plan of 1F1B that the closed form prices.
        InfeasibleError: no plan holds the longest sequence.
    """
    draws = Draws.of(problem)
    given, why = _main_plans(problem)
    for own in (tightened(problem), problem):
        search = _PackingSearch(own, draws, _prices(own, draws, given))
        plans = search.run(given)
        if plans:
            break
    else:
        longest = draws.longest_length
        rule = f"no even uniform plan holds its longest sequence, {longest:,} tokens"
        raise InfeasibleError(
            f"training.lengths={problem.training.lengths}: {rule}; try {longest // 2:,}."
        )
    allowed = problem.config.space.out_of_memory
    # the main search may have met an even uniform plan, too: its fastest price counts
    plans.sort(key=lambda own: own.seconds, reverse=True)
    met = {(own.plan, own.packing): own for own in plans}
    plans = [
        own._replace(chance=_chance(problem, own, draws.longest_length)) for own in met.values()
    ]

    def order(own: LengthPlan) -> tuple[bool, float]:
        return (own.chance or 0.0) > allowed, own.seconds[0]

    schedules = [plan.schedule_name for plan in given if plan.schedule_name != CLOSED_FORM]
    return LengthPlans(sorted(plans, key=order), dict(Counter(schedules)), why)


def _main_plans(problem: Problem) -> tuple[list[Plan], str]:
    """Return the best plans of the main search for sequences of `seq_len` tokens, or why it has none."""
    try:
        found = find_plan(problem.with_training(lengths=None))
    except InfeasibleError as error:
        return [], str(error)
    others = () if found.result is None else found.result.alternatives
    plans = dict.fromkeys([found.plan, *(plan for _, plan in others)])
    return list(plans)[:SEARCHED], ""


def _prices(
    problem: Problem,
    draws: Draws,
    given: Sequence[Plan],
) -> list[PlanPrices]:
    """Price the plans of 1F1B, for each pipeline degree and order of the nodes.

    Errors:
        ConfigError: there are none that the closed form prices.
    """
    usual = [plan for plan in given if plan.schedule_name == CLOSED_FORM]
    most = 4 * draws.longest_length * problem.cluster.num_devices

    @cache
    def job_at(length: int) -> Problem:
        times = max(1, min(length, LARGEST_BATCH * length // most))
        batch = min(most * times // length, LARGEST_BATCH)
        return problem.with_training(seq_len=length, global_batch_size=batch, lengths=None)

    result = []
    for spaces in _usual_spaces(problem):
        first = spaces[0]
        degrees: dict[LayerStrategy, list[int]] = defaultdict(list)
        for space in spaces:
            for choice in space.choices:
                degrees[whole(choice, space.cp)].append(space.cp)
        space = replace(first, choices=tuple(degrees), cp=1)
        own = [plan for plan in usual if plan.pp == first.pp]
        own = [plan for plan in own if plan.node_order == first.node_order]
        result.append(PlanPrices(draws, job_at, most, space, degrees, own))
    return result


def _usual_spaces(problem: Problem) -> list[list[OuterSpace]]:
    """Return the spaces of 1F1B, those with equal stages together.

    Errors:
        ConfigError: there are none that the closed form prices.
    """
    config = problem.config
    found: dict[tuple[object, ...], list[OuterSpace]] = defaultdict(list)
    others = set()
    for space in outer_spaces(problem):
        model = PipelineModel.from_config(config.cost, space.virtual_stages, space.schedule)
        if lies_inside_nodes(space.node_order):  # dynamic cp needs neighbouring ranks
            others.add(PIPELINES_INSIDE)
        elif space.offload:
            others.add("offloading")
        elif model.simulated:
            others.add(model.schedule)
        else:
            found[space.pp, space.node_order].append(space)
    if not found:
        rule = "must go with plans of 1f1b that the closed form prices"
        way = "try cost.pipeline=closed_form space.virtual_stages=1"
        others_named = " and ".join(sorted(others))
        raise ConfigError(
            f"training.lengths={config.training.lengths} {rule}, not {others_named}; {way} "
            "space.schedules=null space.offload=null space.axis_order=null."
        )
    return list(found.values())


class _Tried(NamedTuple):
    """A plan with one packing."""

    seconds: float
    """Mean over few draws."""
    plans: PlansAtLengths
    """The plan and others on the same ranks."""
    own: PlanAtLengths
    packing: Packing


@dataclass(frozen=True)
class _PackingSearch:
    """Search of packings for the plans of a job."""

    problem: Problem
    draws: Draws
    prices: Sequence[PlanPrices]

    def run(self, given: Sequence[Plan]) -> list[LengthPlan]:
        """Return the best uniform plans of every packing, and the given ones with their best packing."""
        found = []
        for scheduler in self.problem.training.packings:
            best = self._best_uniform(scheduler)
            found += [self._row(tried) for tried in best]
        for plan in given:
            for prices in self.prices:
                if plan in prices.given:
                    found += self._given_row(prices.given_plan(plan))
        return found

    def _given_row(self, own: PlanAtLengths) -> list[LengthPlan]:
        """Return a plan of the main search with its best packing, where one fits."""
        tried = [
            self._tried(own, self._first(own, name)) for name in self.problem.training.packings
        ]
        fitting = [one for one in tried if one is not None]
        if not fitting:
            return []
        best = min(fitting, key=lambda one: one.seconds)
        return [self._row(best)]

    def _best_uniform(self, scheduler: str) -> list[_Tried]:
        """Return the best plans with a packing, one for each pipeline and tensor-parallel degree."""
        most = 2.0 * self.problem.training.seq_len
        sets = [plans for prices in self.prices for plans in prices.uniform]
        sets.sort(key=lambda plans: _bounds(plans, most).min())
        best: list[_Tried] = []
        for plans in sets:
            limit = SLACK * best[-1].seconds if len(best) == LISTED else inf
            tried = self._tried(plans, self._first(plans.plans[0], scheduler), limit)
            if tried is not None:
                best.append(tried)
                best.sort(key=lambda one: one.seconds)
                best = best[:LISTED]
        return best

    def _tried(
        self,
        plans: PlansAtLengths,
        packings: Iterable[Packing],
        limit: float = inf,
    ) -> _Tried | None:
        """Return the fastest plan and packing over few draws.

        None: none fits and takes less than `limit` seconds.
        """
        best = None
        for packing in packings:
            for bound, own in self._candidates(plans, packing):
                if bound >= limit:
                    break
                seconds = float(self._seconds(own, packing, FEW, limit).mean())
                if seconds < limit:
                    best = _Tried(seconds, plans, own, packing)
                    limit = seconds
        return best

    def _candidates(
        self, plans: PlansAtLengths, packing: Packing
    ) -> list[tuple[float, PlanAtLengths]]:
        """Return the plans that a packing fits, with bounds of their seconds, the lowest first."""
        tokens = packing.tokens(self.draws.longest_length)
        bounds = _bounds(plans, tokens).tolist()
        fits = plans.fits(packing.cp, tokens)
        rows = []
        for bound, own, fitting in zip(bounds, plans.plans, fits, strict=True):
            if fitting and self._runs(own, packing):
                rows.append((bound, own))
        return sorted(rows, key=itemgetter(0))

    def _refined(self, tried: _Tried) -> _Tried:
        """Return a plan with the best settings of its packing nearby, over all draws.

        The settings that are best over few draws are compared over all.
        """
        best = [tried]
        known = {tried.packing}
        for steps in NEAR:
            for near in (self._groups_near, partial(self._budgets_near, steps=steps)):
                limit = CLOSE * best[0].seconds
                packings = set(near(best[0])) - known
                known |= packings
                others = [self._tried(tried.plans, [own], limit) for own in sorted(packings)]
                best += [other for other in others if other is not None]
                best = sorted(best, key=itemgetter(0))[:FINALISTS]
        return min(map(self._over_all, best), key=itemgetter(0))

    def _over_all(self, tried: _Tried) -> _Tried:
        """Return a plan and its packing with the mean over all draws."""
        seconds = self._seconds(tried.own, tried.packing, DRAWS)
        return tried._replace(seconds=float(seconds.mean()))

    def _budgets_near(self, tried: _Tried, steps: Sequence[float]) -> list[Packing]:
        """Return packings with budgets around a plan's budget."""
        own = tried.packing
        if not own.budget or self.problem.training.max_seqlen_per_dp_cp_rank is not None:
            return []
        factors = [2.0**step for step in (*steps, *(-step for step in steps))]
        near = [int(own.budget * factor) for factor in factors]
        found = self._budgets(tried.own, own.scheduler, own.cp, near)
        return [packing._replace(min_cp=own.min_cp) for packing in found]

    def _groups_near(self, tried: _Tried) -> list[Packing]:
        """Return packings with other smallest groups than a plan has."""
        own = tried.packing
        if own.scheduler != DYNAMIC:
            return []
        least = min(self.problem.training.min_dynamic_context_parallel_size, tried.own.ranks)
        sizes = [own.min_cp // 2, 2 * own.min_cp, 4 * own.min_cp]
        return [own._replace(min_cp=size) for size in sizes if least <= size <= tried.own.ranks]

    def _first(self, own: PlanAtLengths, scheduler: str) -> Iterator[Packing]:
        """Yield the packings that are tried first: all of padding, budgets by factors of 2."""
        training = self.problem.training
        if scheduler == PADDED:
            yield from self._padded(own)
        elif not own.mixed:
            most = 2 * training.seq_len
            budgets = [most >> halvings for halvings in range(most.bit_length())]
            if training.max_seqlen_per_dp_cp_rank is not None:
                budgets = [training.max_seqlen_per_dp_cp_rank]
            degrees = [1] if scheduler == DYNAMIC else own.degrees
            for cp in degrees:
                yield from self._budgets(own, scheduler, cp, budgets)

    def _padded(self, own: PlanAtLengths) -> Iterator[Packing]:
        """Yield all padded micro-batches that the job allows."""
        batch = self.problem.training.global_batch_size
        counts = divisors(batch) if own.given is None else [own.given.num_micro_batches]
        layer = own.layers[0]
        for cp in own.degrees:
            dp = layer.dp // cp
            for count in counts:
                rank = replace(layer, dp=dp)
                if micro_batch_legal(self.problem.config.space, batch, count, rank):
                    yield Packing(PADDED, cp, micro_batch_size=batch // (count * dp))

    def _budgets(
        self, own: PlanAtLengths, scheduler: str, cp: int, budgets: Iterable[int]
    ) -> Iterator[Packing]:
        """Yield packings with budgets that hold a sequence of `seq_len` tokens.

        Under dynamic context parallelism all ranks together may hold it. The launch takes the
        smallest degree that holds it, from 2 on: with 1 Megatron-LM sets up none.
        The smallest group is the geometric mean of 1 and all ranks, nearly.
        """
        training = self.problem.training
        batch = training.global_batch_size
        degrees = [cp]
        middle = 1
        if scheduler == DYNAMIC:
            degrees = self._launch_degrees(own.ranks)
            middle = 1 << own.ranks.bit_length() // 2
        degrees = [n for n in degrees if batch % (own.ranks // n) == 0]
        least = min(max(training.min_dynamic_context_parallel_size, middle), own.ranks)
        for budget in budgets:
            holding = [n for n in degrees if n * budget >= training.seq_len]
            if holding:
                packing = Packing(scheduler, holding[0], budget=budget, min_cp=least)
                yield packing._replace(any_size=training.dynamic_context_parallel_sizes == "any")

    def _launch_degrees(self, ranks: int) -> list[int]:
        """Return the degrees of a dynamic launch, from 2 on."""
        sizes = self.problem.training.dynamic_context_parallel_sizes
        if sizes != "any" and ranks.bit_count() > 1:
            return []
        return divisors(ranks)[1:]

    def _runs(self, own: PlanAtLengths, packing: Packing) -> bool:
        """Return whether the space and the trainer have the plan with a packing."""
        if packing.scheduler != DYNAMIC and packing.cp not in own.degrees:
            return False
        config = self.problem.config
        if config.space.trainer is None:
            return True
        training = replace(self.problem.training, sequence_packing_scheduler=packing.scheduler)
        job = job_facts(self.problem.model, training, self.problem.software)
        rules = config.abilities(config.space.trainer)
        plan = own.to_plan(packing.cp, 1)
        return all(
            trainer_runs(rules, job, plan.pp, plan.cp, CLOSED_FORM, layer)
            for layer in set(plan.layers)
        )

    def _seconds(
        self,
        own: PlanAtLengths,
        packing: Packing,
        draws: int,
        limit: float = inf,
    ) -> Array:
        """Return the seconds of the first draws; a bound of them is enough from `limit` on."""
        load = self.draws.load(packing.settings, own.ranks, draws)
        waits = own.waits or packing.scheduler == DYNAMIC
        return own.seconds(load, waits=waits, limit=limit)

    def _row(self, tried: _Tried) -> LengthPlan:
        """Return a plan and its refined packing over all draws."""
        _, _, own, packing = self._refined(tried)
        seconds = self._seconds(own, packing, DRAWS)
        mean = float(seconds.mean())
        quantile = float(np.quantile(seconds, QUANTILE))
        batch = self.problem.training.global_batch_size
        sequences = own.ranks // packing.cp * packing.micro_batch_size
        plan = own.to_plan(packing.cp, batch // sequences)
        tokens = packing.tokens(self.draws.longest_length)
        speed = float(self.draws.tokens.sum(1).mean()) / mean
        bound = float(own.least_seconds(tokens).mean())
        return LengthPlan(plan, packing, (mean, quantile), speed, bound)


def _bounds(plans: PlansAtLengths, tokens: float) -> Array:
    """Return the means of `least_seconds` over few draws, `(V,)`."""
    least = plans.least_seconds(tokens)
    return least[:, :FEW].mean(1)


def _chance(problem: Problem, own: LengthPlan, longest: int) -> float | None:
    """Return the probability that the fullest micro-batch runs out of memory."""
    plan = own.plan
    training = problem.training
    dp = plan.layers[0].dp
    tokens = own.packing.tokens(longest) * plan.cp
    sequences = max(own.packing.micro_batch_size, ceil(tokens / training.seq_len))
    unit = 2 * plan.cp * plan.layers[0].tp  # tokens that are divided among ranks
    length = min(unit * ceil(tokens / (sequences * unit)), training.seq_len)
    batch = dp * sequences * plan.num_micro_batches
    job = problem.with_training(lengths=None, seq_len=length, global_batch_size=batch)
    return out_of_memory(plan, job)
