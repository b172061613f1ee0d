"""Memory as a chance constraint: a job runs out of it with at most the chance `space.out_of_memory`.

The bytes of a device are off by a normal error. Inside a search every device has `1 / (1 + z s)` of
its memory. `z` is the normal quantile of the chance, `s` the largest standard deviation,
per byte, of any composition of bytes: one number, so that the constraint stays additive and every bound and
proof holds for the tightened problem. The chance of the plan that comes out is then computed for
the whole job, whose devices share their errors (`prediction_intervals.any_above`). Searches leave
the headrooms of a fixed list free, and the fastest plan met that keeps the limit is taken. Where none
does, the plan of least chance is; the median peak fits always.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import exp
from statistics import NormalDist

from darts_parallel.config import Config
from darts_parallel.cost import CostTable, evaluate, kept_bytes
from darts_parallel.errors import InfeasibleError
from darts_parallel.gradient import SearchResult, any_fits
from darts_parallel.planner._session import CHECK_SECONDS, Asked, Session
from darts_parallel.planner._simplest import TIE, effort, simplest_within, with_one_end
from darts_parallel.planner._stage_balance import balance_stages
from darts_parallel.planner.figure_posterior import posterior
from darts_parallel.planner.methods import CHECKS, METHODS, run_phases
from darts_parallel.planner.prediction_intervals import free_share, out_of_memory
from darts_parallel.planner.result import CHOSEN, Planned, Rung
from darts_parallel.planner.some_blocks import some_blocks_plan
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem, worth

SURE = 0.015
"""Chance of running out of memory below which no other plan is offered as safer: both fit with 99 %."""
SAFER = 0.5
"""Share of the chosen plan's chance that a safe plan has at most."""
MOST_EXTRA = 0.15
"""Relative seconds that a safe plan may cost."""
GAIN = 2.0 * TIE
"""Relative seconds from which another plan is faster: above what two ties may cost."""
LEVELS = (0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01, 3e-3, 1e-3, 1e-4)
"""Chances of one device whose headrooms are searched, whatever `space.out_of_memory` is."""
EXACT_LEVELS = (0.35, 0.25)
"""Levels at which exact methods alone look for faster plans: other searches take seconds each."""
LEAST_STEP = 0.01
"""Least first tightening, of the logarithm of the memory."""
SAFE_TRIES = 4
"""Tightenings at most until the safe plan of a space is found."""
LEVEL_SECONDS = 5.0
"""Seconds at most of the exact methods at a level, before the search."""
LEVEL_SHARE = 0.1
"""Share of the search's seconds that they have at most."""
RUNG_SECONDS = 10.0
"""Seconds at most of the exact methods for another risk level, `fastest` or `safe`."""
HALVINGS = 8
"""Halvings of the distance to the tightest memory that some plan fits: to 1/256 of it."""
SETTLED = 8
"""Evaluations until the share of memory that the framework reserves has settled."""

Met = tuple[list[Planned], InfeasibleError | None]
"""Plans met, the last of which may keep the chance, and why no plan fits a level."""


def tightened(problem: Problem, chance: float | None = None) -> Problem:
    """Return the problem with as much of every device left free as a chance asks for.

    Args:
        chance: Of one device; None: `space.out_of_memory`.
    """
    config = problem.config
    chance = config.space.out_of_memory if chance is None else chance
    tight = problem.leaving_free(0.0)
    if chance < 0.5 and config.cost.knows_stages:
        spread = posterior(problem).memory_spread(problem.cluster, problem.software.name)
        for _ in range(SETTLED):  # the less is used, the more of it is the framework's reserve
            distance = _quantile(chance) * spread(1.0 - tight.margin)
            tight = problem.leaving_free(_headroom(distance))
    return tight


def looser_levels(asked: Asked) -> list[Asked]:
    """Return the question with less memory left free, by `LEVELS`, most memory first.

    With less left free than the residual error of all devices asks for, no plan keeps the chance.
    """
    problem = asked.problem
    allowed = problem.config.space.out_of_memory
    least = _headroom(_quantile(allowed) * posterior(problem).residuals.memory)
    headrooms = {
        max(tightened(problem, chance).headroom, least) for chance in LEVELS if chance > allowed
    }
    return [asked.at(headroom) for headroom in sorted(headrooms)]


def _quantile(chance: float) -> float:
    """Return the standard deviations that an error exceeds with a chance."""
    return -NormalDist().inv_cdf(min(max(chance, 1e-9), 1.0 - 1e-9))


def _headroom(distance: float) -> float:
    """Return the share of all memory that leaves `distance` bytes free for every other byte."""
    return distance / (1.0 + distance)


def within_chance(asked: Asked, find: Callable[[float], Planned]) -> Planned:
    """Return the fastest plan met that keeps `space.out_of_memory`; if none does, the safest one.

    Plans are met at the headrooms of `LEVELS`. `search=exact` goes from all memory on, and the first
    plan that keeps the chance is the fastest one: the seconds of optima rise with the headroom. So
    with a looser limit seconds never rise and chances never fall. It searches the level of the limit
    before, so that its plan is known where time ends. The other searches take seconds each. They
    start at the level that exact methods name, or else at that of the limit.

    Args:
        asked: The question with all memory.
        find: Searches the problem with a share of every device's memory left free.

    Errors:
        InfeasibleError: no plan's median peak fits.
    """
    problem = asked.problem
    if not tightened(problem).headroom:
        return find(0.0)
    headrooms = [tightened(problem, chance).headroom for chance in LEVELS]
    search = _ChanceSearch(cache(find), asked, headrooms)
    usual = next(i for i, chance in enumerate(LEVELS) if chance <= search.allowed)
    exact = problem.config.search.method == "exact"
    named = None if exact else search.loosest(usual)
    if exact:
        met, refused = search.exact_levels(usual)
    else:
        met, refused = search.tighter(usual if named is None else named, usual)
    if met and search.keeps(met[-1]):
        if exact:
            return search.explained(met)
        found = search.next_to(met)
        return search.loosened(found, usual) if named is None else found
    if met and met[-1].interrupted:
        return met[-1]
    safest = search.safest(met, refused)
    return search.loosened(safest, usual, sure=True) if search.keeps(safest) else safest


@dataclass(frozen=True)
class _ChanceSearch:
    """Searches of one job with more and less memory left free."""

    find: Callable[[float], Planned]
    asked: Asked
    headrooms: Sequence[float]
    """Shares of memory left free, of `LEVELS`."""
    began: float = field(default_factory=time.monotonic)

    @property
    def config(self) -> Config:
        """Configuration of the job."""
        return self.asked.problem.config

    @property
    def allowed(self) -> float:
        """Chance of running out of memory that a plan may have."""
        return self.config.space.out_of_memory

    def keeps(self, found: Planned) -> bool:
        """Return whether a plan keeps the chance."""
        return (found.out_of_memory or 0.0) <= self.allowed

    def exact_levels(self, usual: int) -> Met:
        """Search the level of the limit, and then leave more and more memory free from none on.

        The plan of the limit comes last where time ends, or Ctrl-C, before a faster one is found.
        """
        limit = None
        with suppress(InfeasibleError):
            limit = self.find(self.headrooms[usual])
        stopped = limit is not None and (limit.interrupted or _stopped_late(limit))
        met, refused = self.tighter(usual if stopped else 0, usual)
        if limit is not None and self.keeps(limit):
            last = met[-1]
            if not self.keeps(last) or _seconds(limit) < _seconds(last):
                met.append(replace(limit, interrupted=last.interrupted))
        return met, refused

    def explained(self, met: Sequence[Planned]) -> Planned:
        """Return the last plan; it says so where a level with less memory left free had no proof."""
        found = met[-1]
        if found.result is None or not any(map(_stopped_late, met[:-1])):
            return found
        why = "time ended before it was known whether less memory left free gives a faster plan"
        return replace(found, result=replace(found.result, why=why))

    def loosest(self, usual: int) -> int | None:
        """Return the loosest level whose optimum keeps the chance and saves more than ties may cost.

        Exact methods look for it; None where they have no answer in time.
        """
        known = self._optimum(usual, None) if _checks(self.config) else None
        if known is None:
            return None
        tight = self.asked.at(self.headrooms[usual])
        if all(map(always_fits, tight.tables)):
            return usual
        most = known.seconds * (1.0 - GAIN - self.config.search.tie)
        faster = SearchResult(known.plan, most, most)
        # by bisection: with less memory left free, optima are faster and, as a rule, riskier
        level = usual
        low = 0
        high = usual - 1
        while low <= high:
            middle = (low + high) // 2
            best = self._optimum(middle, faster)
            if best is None:  # only a looser level can gain as much
                high = middle - 1
            elif best.chance <= self.allowed:
                level = middle
                high = middle - 1
            else:
                low = middle + 1
        return level

    def _optimum(self, level: int, known: SearchResult | None) -> Rung | None:
        """Return the best plan of a level by exact methods, whose proof a search there need not repeat.

        Args:
            known: None is returned where no plan is faster.
        """
        asked = self.asked.at(self.headrooms[level])
        share = LEVEL_SHARE * self.config.search.max_seconds
        seconds = min(LEVEL_SECONDS, share, asked.budgets[CHECK_SECONDS])
        session = _answered(asked, known, seconds)
        if session.proven is None:
            return None
        if session.best is not known:
            self.asked.proofs[self.headrooms[level]] = session.found.answers
        best = _rung("", session)
        slow = best and known and best.seconds > known.iteration_time_s
        return None if slow else best

    def tighter(self, first: int, usual: int) -> Met:
        """Leave more and more memory free, from a level on, until a plan keeps the chance.

        Args:
            first: Level of the first search.
            usual: Level of the limit; the next one after a search that had too little time.

        Returns:
            The plans met, and why no plan fits a level, the one of the limit or a later one; None
            where some plan fits at all.
        """
        met: list[Planned] = []
        refused = None
        for level in range(first, len(self.headrooms)):
            headroom = self.headrooms[level]
            tight = self.asked.problem.leaving_free(headroom)
            if met and evaluate(met[-1].plan, tight).feasible:
                continue  # it is the best plan of this level, too
            late = met and _stopped_late(met[-1])
            if level < usual and (late or refused):
                continue
            try:
                met.append(self.find(headroom))
                refused = None
            except InfeasibleError as error:
                if not headroom:
                    raise
                refused = error
                if level < usual:
                    continue
                break
            if self.keeps(met[-1]) or met[-1].interrupted:
                break
        return met, refused

    def next_to(self, met: Sequence[Planned]) -> Planned:
        """Return the last plan, or a faster one that an earlier search met and that keeps the chance.

        Later searches have less memory, and often less time.
        """
        best = met[-1]
        for found in met[:-1]:
            assert found.result is not None
            known = list(found.result.alternatives)
            for answer in found.answers:
                # it may keep the chance where the chosen plan, whose stages were evened, does not
                if answer.plan is not None and answer.plan.within("uniform"):
                    known.append((answer.iteration_time_s, answer.plan))
            for seconds, plan in sorted(known, key=lambda entry: entry[0]):
                if seconds > _seconds(best) * (1.0 - TIE):
                    break
                other = _with_plan(found, plan, seconds)
                if self.keeps(other):
                    best = other
                    break
        return best

    def loosened(self, found: Planned, level: int, *, sure: bool = False) -> Planned:
        """Leave less memory free while the plan is twice as safe as asked for and a faster one may fit.

        One spread for all compositions of bytes may leave more free than the plan needs.

        Args:
            sure: Whether all levels are tried, however safe the plan is.
        """
        if found.asked is None or all(map(always_fits, found.asked.tables)):
            return found
        for looser in reversed(range(level)):
            if LEVELS[looser] in EXACT_LEVELS:
                continue
            late = time.monotonic() - self.began > self.config.search.max_seconds
            worth = sure or self._worth_loosening(found, last=not looser)
            if found.interrupted or late or not worth:
                break
            try:
                other = self.find(self.headrooms[looser])
            except InfeasibleError:  # no plan fits with so much left free
                continue
            found = replace(found, interrupted=other.interrupted)
            if not self.keeps(other):
                break
            if _seconds(other) <= _seconds(found) * (1.0 - TIE):
                found = other
        return found

    def _worth_loosening(self, found: Planned, *, last: bool) -> bool:
        """Return whether a plan is twice as safe as asked for.

        Where plans are checked, a surely safe one stays, and the last search is left out.
        """
        chance = found.out_of_memory or 0.0
        if chance > self.allowed / 2.0:
            return False
        unlikely = last or chance < LEVELS[-1]
        return not unlikely or not self.config.verification.enabled

    def safest(self, met: Sequence[Planned], refused: InfeasibleError | None) -> Planned:
        """Return the plan of least chance; the warning says what a plan that keeps the limit takes.

        Args:
            met: Plans that do not keep the chance.
            refused: Why no plan fits the next level: more memory is left free below it, as far as
                some plan allows.
        """
        warning = f"no plan that keeps space.out_of_memory={self.allowed:g} was found"
        found = list(met)
        if refused is not None:
            # from the tightest level, so that all limits meet the same plan
            distance = _distance_that_fits(self.asked, self.headrooms[-1])
            for own in (distance, distance / 2.0, 0.0)[: 1 if met else None]:
                with suppress(InfeasibleError):
                    found.append(self.find(_headroom(own)))
                    break
            if not found:
                return self.find(0.0)  # which says why none fits
            ways = str(refused).partition("smallest changes that help: ")[2].removesuffix(".")
            warning = f"no plan keeps space.out_of_memory={self.allowed:g}; it takes {ways}"
        best = min(found, key=lambda one: one.out_of_memory or 0.0)
        return best if self.keeps(best) else replace(best, warning=warning)


def always_fits(table: CostTable) -> bool:
    """Return whether any plan fits, legal or not: one stage holds all layers at their heaviest."""
    in_flight = table.in_flight.amax(1).view(-1, 1, 1)
    kept = kept_bytes(table.static, table.activation, in_flight)
    heaviest = (kept + table.working).amax(-1)
    most = heaviest.sum(1).max()
    return table.moments is None and bool(most <= table.stage_capacity.min())


def _with_plan(found: Planned, plan: Plan, seconds: float) -> Planned:
    """Return an answer with another plan that its search met."""
    assert found.result is not None
    assert found.asked is not None
    result = replace(found.result, plan=plan, iteration_time_s=seconds)
    answers = tuple(answer.with_gap(seconds) for answer in found.answers)
    chance = out_of_memory(plan, found.asked.problem)
    return replace(found, plan=plan, result=result, answers=answers, out_of_memory=chance)


def _stopped_late(planned: Planned) -> bool:
    """Return whether the time ended a search."""
    return planned.result is not None and planned.result.stopped_by == "time_limit"


def _seconds(planned: Planned) -> float:
    return planned.result.iteration_time_s if planned.result else 0.0


def _distance_that_fits(asked: Asked, headroom: float) -> float:
    """Return the largest distance below that of a headroom at which some plan may fit.

    A distance is the bytes that are left free, per byte that is not (`_headroom`).
    """
    low = 0.0
    high = headroom / (1.0 - headroom)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if any_fits(asked.at(_headroom(middle)).tables, asked.space_kind):
            low = middle
        else:
            high = middle
    return low


def _checks(config: Config) -> bool:
    """Return whether exact methods check a job; not where it is simulated."""
    return config.solved and config.verification.enabled


def ladder(planned: Planned) -> list[Rung]:
    """Return the risk levels: the fastest plan whose median peak fits, the chosen one, and a safe one.

    The fastest is left out where it gains no more than ties may cost. The safe one is the cheapest
    that is met with at most half the chosen plan's chance of running out of memory (`SAFER`); it is
    left out where the chosen one fits with 99 % (`SURE`), or where such a plan costs more than
    `MOST_EXTRA`. The simplest is easiest to run of the plans that the model cannot tell from the
    chosen one; it is left out where none is easier than that one. The others come from the exact
    methods, each within `RUNG_SECONDS`, where plans are checked at all. A plan that breaks the budget
    or the deadline is left out.
    """
    asked = planned.asked
    result = planned.result
    if asked is None or result is None or planned.out_of_memory is None:
        return []
    chosen = Rung(CHOSEN, planned.plan, result.iteration_time_s, planned.out_of_memory)
    rungs = [chosen]
    checks = _checks(asked.problem.config)
    if checks and asked.problem.headroom:
        fastest = _rung("fastest", _answered(asked.at(0.0), result, RUNG_SECONDS))
        if fastest is not None and fastest.seconds < chosen.seconds * (1.0 - GAIN):
            rungs.append(fastest)
    if checks and chosen.chance > SURE:
        rungs += _safe_rungs(asked, chosen)
    if asked.problem.config.solved:
        known = [answer.plan for answer in planned.answers if answer.plan is not None]
        others = [plan for _, plan in result.alternatives]
        rungs += _simplest_rung(asked, chosen, [*known, *others])
    limits = partial(worth, asked.problem.config.objective, asked.problem.cluster)
    kept = [rung for rung in rungs if rung is chosen or limits(rung.seconds)[1]]
    return sorted(kept, key=lambda rung: rung.seconds)


def _simplest_rung(asked: Asked, chosen: Rung, others: Sequence[Plan]) -> list[Rung]:
    """Return the plan that is easiest to run of the plans that the model cannot tell from the chosen one."""
    tight = asked.problem
    limit = chosen.seconds * exp(posterior(tight).difference)
    plan = simplest_within([chosen.plan, *others], asked, limit)
    chance = out_of_memory(plan, tight)
    if effort(plan, asked) >= effort(chosen.plan, asked) or chance is None:
        return []
    allowed = tight.config.space.out_of_memory
    # without a limit it is no riskier than the chosen one
    if chance > (allowed if allowed < 0.5 else chosen.chance):
        return []
    return [Rung("simplest", plan, asked.seconds(plan), chance)]


def _safe_rungs(asked: Asked, chosen: Rung) -> list[Rung]:
    """Return the cheaper safe plan of the uniform space and of the whole one; none where neither is found.

    Uniform plans take a tenth of the seconds, so that one is known.
    """
    kinds = dict.fromkeys(("uniform", asked.space_kind))
    found = [_safe(asked.at(0.0), chosen, kind) for kind in kinds]
    return sorted(filter(None, found), key=lambda rung: rung.seconds)[:1]


def _safe(asked: Asked, chosen: Rung, kind: str) -> Rung | None:
    """Return the safe plan: memory is tightened from the chosen plan's on, step by step.

    Args:
        asked: The question with all memory.
    """
    deadline = time.monotonic() + RUNG_SECONDS
    problem = asked.problem
    distance = float(free_share(evaluate(chosen.plan, problem), problem.usable).min())
    chance = chosen.chance
    wanted = SAFER * chance
    # as wide as the chosen plan's own error; from a chance of one half on the quantile is no width
    implied = distance / _quantile(min(chance, 0.49))
    spread = max(posterior(problem).residuals.memory, implied)
    for tries in range(1, SAFE_TRIES + 1):
        missing = (_quantile(wanted) - _quantile(chance)) * spread
        distance += tries * max(missing, LEAST_STEP)
        tight = replace(asked.at(_headroom(distance)), space_kind=kind)
        rung = _rung("safe", _answered(tight, None, deadline - time.monotonic()))
        if rung is None or rung.seconds > chosen.seconds * (1.0 + MOST_EXTRA):
            return None
        if rung.chance <= wanted:
            return rung
        chance = rung.chance
    return None


def _answered(asked: Asked, known: SearchResult | None, seconds: float) -> Session:
    """Ask the exact methods for so many seconds of wall-clock.

    Args:
        known: A plan that is feasible there, which bounds the search.
    """
    session = Session(replace(asked, budgets={CHECK_SECONDS: seconds}), METHODS)
    session.found.result = known
    run_phases(session, (CHECKS,))
    return session


def _rung(name: str, session: Session) -> Rung | None:
    """Return the best plan that exact methods found; None where they found none."""
    asked = session.asked
    best = session.best
    if best is None or best.plan is None:
        return None
    balanced = balance_stages(best.plan, asked)
    plan = with_one_end(balanced, session.found.uniform_plans, asked)
    seconds = asked.seconds(plan)
    # exact methods know no plan that recomputes some blocks of stages
    if blocks := some_blocks_plan(asked, seconds * (1.0 - asked.settings.tie)):
        plan = blocks.to_plan(asked.tables)
        seconds = blocks.time
    chance = out_of_memory(plan, asked.problem)
    return None if chance is None else Rung(name, plan, seconds, chance)
