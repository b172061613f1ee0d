"""The best plan of a global batch size at the learned prices, and its checks by the exact methods.

The objective is `log T + S` with T seconds a step and S log slowdown. A plan that minimises it also minimises
`T + m S` at the price m = T of its own: the convex curve of equal objective lies above its tangent. For a
given m this is an ordinary problem of the exact methods, with `m S` among the seconds that are paid once. So
m follows the seconds of the plan found until nothing improves: from 0, where steps cost nothing, and from a
price at which no seconds are worth a step. The better of both ends is taken.
"""

import time
from dataclasses import replace

from darts_parallel.bilevel.space import BatchPlan, JointSpace, LogSlowdown, priced
from darts_parallel.errors import Entries
from darts_parallel.exact import Verification, find_layerwise_plan, find_uniform_plan

AGREEMENT = 1e-9
"""Differences of the objective below this are rounding."""
MAX_ROUNDS = 8
RATIO = 1e3
"""Price of a log step, in seconds of the fastest plan, at which no seconds are worth a step."""


def find_optimum(
    space: JointSpace,
    prices: LogSlowdown,
    batch: int,
    budget: float,
) -> BatchPlan | None:
    """Find the best plan of one global batch size; None where none fits the memory.

    Args:
        budget: Wall-clock seconds; after them the best plan found stands without a proof.
    """
    deadline = time.monotonic() + budget
    fastest = _followed(space, prices, batch, 0.0, deadline)
    if fastest is None:
        return None
    fewest = _followed(space, prices, batch, RATIO * fastest.seconds, deadline)
    return min(fastest, fewest or fastest, key=lambda plan: plan.value)


def _followed(
    space: JointSpace,
    prices: LogSlowdown,
    batch: int,
    price: float,
    deadline: float,
) -> BatchPlan | None:
    """Solve at a price, then at the seconds of the plan found, until nothing improves."""
    numbers = space.of_batch(batch)
    best: BatchPlan | None = None
    proven = True
    for _ in range(MAX_ROUNDS):
        tables = [priced(space.tables[number], prices, price) for number in numbers]
        answer = find_layerwise_plan(tables, "layerwise", deadline=deadline)
        proven = answer.proven
        if answer.best is None:
            break
        found = space.price(numbers[answer.best.table], answer.best.plan, prices)
        if found is None or (best is not None and found.value > best.value - AGREEMENT):
            break
        best = found
        price = found.seconds
    return None if best is None else replace(best, proven=proven)


def verify(
    space: JointSpace,
    prices: LogSlowdown,
    found: BatchPlan,
    budget: float,
) -> list[Verification]:
    """Solve by exhaustive search and by dynamic programming at the learned prices; bits are free, too.

    Seconds of the entries hold what bits cost in steps beyond the found plan's, at its seconds a step.
    """
    numbers = space.of_batch(found.batch)
    tables = [priced(space.tables[number], prices, found.seconds) for number in numbers]
    paid = found.seconds * (found.log_slowdown - prices.by_batch[found.batch])
    began = time.monotonic()
    uniform = find_uniform_plan(tables, deadline=began + budget)
    middle = time.monotonic()
    every = find_layerwise_plan(tables, "layerwise", deadline=middle + budget, uniform=uniform)
    spent = time.monotonic() - middle
    first = uniform.verification(tables)
    second = every.verification(tables)
    answers = [
        replace(first, name="exhaustive", space="uniform", seconds=middle - began),
        replace(second, name="dynamic_programming", space="layerwise", seconds=spent),
    ]
    entries = []
    for answer in answers:
        noted = [] if answer.proven else [answer.note]
        shown: Entries = {"note": ", ".join([*noted, "at the learned prices"])}
        shown["iteration_time_s"] = answer.iteration_time_s - paid
        shown["lower_bound_s"] = answer.lower_bound_s - paid
        entries.append(replace(answer, **shown).with_gap(found.seconds))
    return entries
