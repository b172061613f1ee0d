"""Proofs and bounds for plans whose pipeline is simulated.

Exact planners rest on the closed form: a sum and a maximum over stages. The longest path through a
schedule has no such form, so only spaces that can be priced plan by plan are proven; elsewhere the plan
that is optimal by the closed form is priced by the simulation, and only a lower bound is proven, from
paths. `brute_force` is the referee of all exact planners.

For any fixed path through the schedule the seconds are a sum over layers, weighted by how often the path
takes the stage; the cheapest plan of that sum is found by dynamic programming, and no plan is faster by the
true schedule, whose longest path is longer. So it is for any mixture of paths, less a price for the bytes
that a device lacks. Mixture and prices are those of a matrix game of the paths and plans known so far
(a double oracle: McMahan et al. 2003, Planning in the presence of cost functions controlled by an adversary),
solved by regret matching (Tammelin 2014, arXiv 1407.5042): the cheapest plan against them is added, and its
critical path. A mixture of plans can share layers that no device can split; where stages are placed as a V
a dynamic programme over nested stages keeps layers whole, for the paths through all passes of one device.
`bounds.py` has the bounds from the devices' work.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from itertools import combinations, islice, product
from math import comb, inf, isfinite
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import (
    BOUND_TOLERANCE,
    Array,
    CostTable,
    HardPlans,
    PricedPlan,
    evaluate_batch,
    prefix_sums,
    without_offloadable_memory,
)
from darts_parallel.exact._chain import Chain, DeviceCosts, FoldedSplits, PathCounts, weights_behind
from darts_parallel.exact._pareto import price_grid
from darts_parallel.exact.bounds import outer_lower_bounds
from darts_parallel.exact.result import OFFLOADING, DeadlineError, TableResult, Verification
from darts_parallel.plans import Plan
from darts_parallel.schedules import find

ROUNDS = 40
"""Plans and paths of a game."""
SOLVED = 5e-4
"""Relative distance of a game's value on the known plans from what is proven at which it counts as solved."""
TURNS = 400
"""Steps of regret matching."""
MEANS = 4
"""Ways in which the bound of an outer choice is made better, one after the other."""
SCALE = 0.2
"""Weight of the shares of a device's bytes against those of the seconds."""
LEAST_WALKED = 0.1
"""Share of a mixture that at least counts as paths."""
PRICES = 8
"""Prices of memory."""
MOST = 3.0
"""Times its bound from the devices' work beyond which a V is not looked at without a known plan."""


def _mixture(payoff: Array) -> Array:
    """Return the mixture of rows, `(rows,)`, that maximizes the least column, by regret matching."""
    regrets = [np.zeros(size) for size in payoff.shape]
    mean = np.zeros(len(payoff))

    def shares(regret: Array) -> Array:
        total = regret.sum()
        return regret / total if total > 0 else np.full(len(regret), 1.0 / len(regret))

    for turn in range(1, TURNS + 1):
        rows = shares(regrets[0])
        loss = rows @ payoff
        columns = shares(regrets[1])
        regrets[1] = np.maximum(regrets[1] + columns @ loss - loss, 0.0)
        gain = payoff @ shares(regrets[1])
        regrets[0] = np.maximum(regrets[0] + gain - rows @ gain, 0.0)
        mean += turn * rows
    return np.asarray(mean / mean.sum())


def chain_bound(
    table: CostTable,
    outer: int,
    *,
    enough: float = np.inf,
    rounds: int = ROUNDS,
    deadline: float = np.inf,
    splits: FoldedSplits | None = None,
) -> float:
    """Bound from mixtures of paths, for one outer choice.

    Args:
        enough: Seconds beyond which a better bound is of no use.
        deadline: `time.monotonic()` after which no further path is added.
        splits: Those of the plans that are bounded; None: all.

    Returns:
        Seconds; infinite where no plan fits the memory.
    """
    chain, best = Chain.read(table, outer), 0.0
    paths, points = chain.devices_paths(), list[PathCounts]()
    shares, prices = np.full(len(paths), 1.0 / len(paths)), np.zeros(table.pp)
    for _ in range(rounds):
        passes, messages = (
            np.tensordot(shares, np.stack(rows), 1) for rows in zip(*paths, strict=True)
        )
        value, plans, point = chain.cheapest((passes, messages), prices, splits)
        best = max(best, value)
        if point is None or best >= enough or monotonic() > deadline:
            break
        points.append(point)
        paths.append(chain.path(plans))
        seconds = chain.per_iteration + np.array(
            [
                [(row * at.seconds).sum() + (ways * at.message).sum() for at in points]
                for row, ways in paths
            ]
        )
        # as shares of what is proven, so that a device's lack of bytes compares with a path's length
        lacking = SCALE * np.stack([at.lacking for at in points], axis=1)
        payoff = np.concatenate([seconds / best - 1.0, lacking])
        found = _mixture(payoff)
        walked = found[: len(paths)].sum()
        if walked > LEAST_WALKED and (found @ payoff).min() < SOLVED * walked:
            break
        # where every known plan lacks bytes the mixture is of prices alone
        shares = found[: len(paths)] / walked if walked else np.full(len(paths), 1.0 / len(paths))
        prices = best * SCALE * found[len(paths) :] / max(walked, LEAST_WALKED)
    return best * (1 - BOUND_TOLERANCE)


def packed_bound(table: CostTable, outer: int) -> float:
    """Bound by counting whole layers, wherever they lie, for one outer choice: some device has many.

    Every device holds some of the j most expensive layers, and n of them cost it at least as much as its n
    cheapest. So the devices' least seconds for 1, 2, 3, ... of them are put in order: the j-th is a bound.
    Every device pays the way to its first pass, through the first layers, too, and has a price for memory.
    """
    chain, count = Chain.read(table, outer), float(table.num_micro_batches[outer])
    legal, devices = np.isfinite(chain.rows[0]), table.stage_device.numpy()
    forward, backward, _, sync = np.where(legal, chain.rows, 0.0)
    spent = np.where(legal, count * (forward + backward) + sync, np.inf)
    way = prefix_sums(np.where(legal, forward, np.inf).min((0, -1)))
    message = chain.message.min(-1, initial=np.inf) if chain.message.shape[-1] else np.zeros(0)
    charged = np.full((table.pp, PRICES + 2, spent.shape[1]), -np.inf)
    rooms = np.zeros((table.pp, PRICES + 2))
    for device in range(table.pp):
        values = spent[table.stage_kind[device]]
        need, usable = chain.need[devices == device].min(0), np.isfinite(values).all(0)
        prices = price_grid(values[:, usable], need[:, usable], PRICES)
        ways = way[device] + (0.0 if table.pipeline.blocking else message[:device].sum())
        charged[device, : len(prices)] = (values + prices[:, None, None] * need).min(-1)
        rooms[device, : len(prices)] = ways - prices * chain.capacity[device]
    best, descending = 0.0, np.argsort(-spent.min((0, -1)), kind="stable")
    for number in range(1, len(descending) + 1):
        sums = np.sort(charged[..., descending[:number]], axis=-1).cumsum(-1) + rooms[..., None]
        best = max(best, float(np.sort(sums.max(1), axis=None)[number - 1]))
    return (best + chain.per_iteration) * (1 - BOUND_TOLERANCE)


def folded_splits(table: CostTable, outer: int, limit: float) -> FoldedSplits:
    """Return the splits of an outer choice into a V in which no device alone takes more than `limit` seconds.

    Every device takes the way to its first pass and all its passes, with its synchronisation or, but for the
    weights' gradients behind the last backward, with the way back. Memory is priced, for both runs together.
    A plan that is faster than `limit` has one of these splits.
    """
    return FoldedSplits.below(*_two_runs(Chain.read(table, outer), limit))


def device_bound(table: CostTable, outer: int, limit: float, deadline: float = np.inf) -> float:
    """Bound by the slowest device of two stages, as a V or in two rounds; seconds, at most `limit`."""
    chain = Chain.read(table, outer)
    runs, folded = _two_runs(chain, limit), find(table.pipeline.schedule).folded
    slowest = (
        FoldedSplits.below(*runs).slowest.min()
        if folded
        else FoldedSplits.in_rounds(*runs, deadline)
    )
    return min((slowest + chain.per_iteration) * (1 - BOUND_TOLERANCE), limit)


def _two_runs(chain: Chain, limit: float) -> tuple[float, NDArray[np.bool_], list[DeviceCosts]]:
    devices = [_device_costs(chain, device) for device in range(chain.table.pp)]
    begins = ~np.append(chain.table.fused_to_previous.numpy(), False)
    return (limit - chain.per_iteration) * (1 + BOUND_TOLERANCE), begins, devices


def _device_costs(chain: Chain, device: int) -> DeviceCosts:
    """Return the seconds of a device of two stages, under two paths for every price of memory."""
    table, count = chain.table, float(chain.table.num_micro_batches[chain.outer])
    model, stages = table.pipeline, np.flatnonzero(table.stage_device.numpy() == device).tolist()
    # any order may leave all gradients of weights for the end
    behind = np.full(table.num_stages, count * model.free)
    if find(model.schedule).split and not model.free:
        behind = weights_behind(model.schedule, table.pp, int(count))
    message = chain.message.min(-1, initial=np.inf) if chain.message.shape[-1] else np.zeros(0)
    forward, backward, weight, sync = chain.rows[:, table.stage_kind.numpy()[stages]]
    legal = np.isfinite(forward)
    forward, backward, weight, sync = (
        np.where(legal, row, 0.0) for row in (forward, backward, weight, sync)
    )
    work = count * (forward + backward)
    late = behind[stages][:, None, None] * weight
    values = np.where(legal, np.stack([work + sync, work - late]), np.inf)
    need, usable = chain.need[stages], legal.all((0, 1))
    prices = price_grid(values[0, 0][:, usable], need[0][:, usable], PRICES)
    charged = values[:, None] + prices[:, None, None, None] * need
    runs = np.moveaxis(
        np.stack([[prefix_sums(row) for row in rows] for rows in charged.min(-1)]), 2, 0
    )
    illegal = np.isinf(chain.rows[0])
    rows = np.where(illegal, 0.0, chain.rows)
    there = np.where(illegal, np.inf, rows[0]).min((0, -1))
    back = np.where(illegal, np.inf, rows[1] - rows[2]).min((0, -1))
    ways = np.stack([prefix_sums(there), prefix_sums(there + back)])
    passed = message[: max(device - model.blocking, 0)].sum()
    ways += passed * np.array([[1.0], [2.0]])
    if model.blocking:
        ways += 2 * count * sum(message[stage - 1] for stage in stages if stage)
    added = ways[:, None] - (prices * chain.capacity[device])[:, None]
    flat = (-1, added.shape[-1])
    return DeviceCosts(runs[0].reshape(flat), runs[1].reshape(flat), added.reshape(flat))


def any_order(table: CostTable) -> CostTable:
    """Return the copy of a table whose bounds hold for any order of passes, where the search may change it.

    A device holds at least one micro-batch, and may leave all gradients of weights for the end.
    """
    if not table.pipeline.free:
        return table
    model = (
        table.pipeline
        if table.virtual_stages > 1
        else replace(table.pipeline, schedule="zero_bubble_h1")
    )
    flying = torch.ones_like(table.in_flight)
    assert table.before is not None
    return replace(table, pipeline=model, in_flight=flying, activation=table.before)


def simulated_lower_bound(
    tables: Sequence[CostTable],
    space_kind: str,
    *,
    known: float = np.inf,
    seconds: float = 4.0,
    deadline: float = np.inf,
) -> float:
    """Return seconds that no feasible plan of any table undercuts by its schedule, or any order where free.

    Args:
        tables: One for each pipeline degree, number of chunks and schedule; simulated.
        known: Seconds of a plan: bounds of outer choices need not exceed it.
        seconds: Time for the bounds from paths; the outer choice of the least bound comes first.
        deadline: `time.monotonic()` at which they end in any case.
    """
    deadline = min(monotonic() + seconds, deadline)
    tables = [any_order(without_offloadable_memory(table)) for table in tables]
    bounds = [
        (float(bound), 0, number, outer)
        for number, table in enumerate(tables)
        for outer, bound in enumerate(
            outer_lower_bounds(table, space_kind, late=lambda: monotonic() > deadline)
        )
    ]
    heapify(bounds)
    # improve the least bound, by cheap means first, until no better one is known
    while bounds and bounds[0][0] < known and bounds[0][1] < MEANS and monotonic() <= deadline:
        least, means, number, outer = bounds[0]
        try:
            better = _better(tables[number], outer, means, least, known, deadline)
        except DeadlineError:  # too many layers
            better = least
        heapreplace(bounds, (max(least, better), means + 1, number, outer))
    return min([known, *(bound for bound, *_ in bounds[:1])])


def _better(
    table: CostTable, outer: int, means: int, least: float, known: float, deadline: float
) -> float:
    """Bound by one of the `MEANS`; `least` is known already."""
    folded = find(table.pipeline.schedule).folded
    limit = min(known, MOST * least)
    if means == 0:
        return max(packed_bound(table, outer), device_bound(table, outer, limit) if folded else 0.0)
    if table.pipeline.free:  # paths through the order of a rule bound that rule alone
        rounds = means == 1 and table.virtual_stages == 2 and not folded
        return device_bound(table, outer, limit, deadline) if rounds else least
    if not folded or np.isinf(known):
        return chain_bound(table, outer, enough=known, deadline=deadline) if means == 1 else least
    # plans below the target have one of its splits: either they are bounded, or there are none
    target = known if means == 1 else (least + known) / 2
    splits = folded_splits(table, outer, target)
    return min(target, chain_bound(table, outer, enough=target, deadline=deadline, splits=splits))


BATCH = 1 << 14
"""Plans that are priced at once."""
MAX_PLANS = 50_000_000
"""Plans that are still called tiny."""


def brute_force(tables: Sequence[CostTable], space_kind: str) -> TableResult:
    """Return the cheapest feasible plan of all tables and outer choices.

    Args:
        tables: One for each pipeline degree; tiny.

    Errors:
        ValueError: there are more than `MAX_PLANS` plans.
    """
    best: PricedPlan | None = None
    count = 0
    for number, table in enumerate(tables):
        for plans in _all_plans(table, space_kind):
            count += len(plans)
            if count > MAX_PLANS:
                raise ValueError(
                    f"brute force: the {space_kind} space has more than {MAX_PLANS} plans."
                )
            cost = evaluate_batch(table, plans)
            total = torch.where(cost.feasible, cost.iteration_time, torch.inf)
            row = int(total.argmin())
            if total[row] < (float("inf") if best is None else best.time):
                best = PricedPlan(number, plans[torch.tensor([row])], float(total[row]))
    return TableResult(best, float("inf") if best is None else best.time, True, count)


def _all_plans(table: CostTable, space_kind: str) -> Iterator[HardPlans]:
    """Return all plans of a table in batches: outer choices x splits x strategies."""
    layers = range(1, table.num_layers)
    for starts in combinations(
        [x for x in layers if not bool(table.fused_to_previous[x])], table.num_stages - 1
    ):
        split = torch.tensor([0, *starts])
        widths = torch.diff(split, append=torch.tensor([table.num_layers]))
        for outer in range(table.num_outer):
            for block in _assignments(table, outer, space_kind):
                if space_kind == "stagewise":
                    choices = block.repeat_interleave(widths, dim=1)
                else:
                    choices = block.expand(-1, table.num_layers)
                size = len(choices)
                yield HardPlans(torch.full((size,), outer), choices, split.expand(size, -1))


def _assignments(table: CostTable, outer: int, space_kind: str) -> Iterator[torch.Tensor]:
    """Return allowed strategies of the model, of every stage or of every layer: `(n, 1 | K | L)`."""
    allowed = np.flatnonzero(table.allowed[outer].numpy()).tolist()
    slots = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]
    every = product(allowed, repeat=slots)
    while block := list(islice(every, BATCH)):
        yield torch.tensor(block)


MAX_PRICED_PLANS = 20_000
"""Plans that are priced one by one; about a second."""


def find_simulated_plan(
    tables: Sequence[CostTable],
    space_kind: str,
    closed_form: Callable[[], Plan | None],
    price: Callable[[Plan], float],
    *,
    deadline: float = inf,
) -> Verification:
    """Find the optimal plan of a small space, or price the closed form's optimum by the simulation.

    Args:
        tables: Simulated, of the whole space.
        closed_form: Returns the plan that is optimal by the closed form.
        price: Returns the simulated seconds of a plan; infinite where it does not fit or is not in the space.
        deadline: `time.monotonic()` after which bounds are not improved any more.
    """
    if any(table.host for table in tables):
        floor = simulated_lower_bound(tables, space_kind, deadline=deadline)
        return TableResult(None, floor, False, 0, note=OFFLOADING).verification(tables, 0.0)
    if number_of_plans(tables, space_kind) <= MAX_PRICED_PLANS:
        answer = replace(brute_force(tables, space_kind), note="every plan was simulated")
        if any(table.pipeline.free for table in tables):
            note = "every plan was simulated by the rules alone, not by other orders of passes"
            floor = simulated_lower_bound(tables, space_kind, known=answer.cost, deadline=deadline)
            answer = replace(answer, proven=False, lower_bound=floor, note=note)
        return answer.verification(tables, 0.0)
    plan = closed_form()
    seconds = inf if plan is None else price(plan)
    floor = simulated_lower_bound(tables, space_kind, known=seconds, deadline=deadline)
    priced = "its plan is the best by the closed form, priced by the simulation"
    missing = "the best plan by the closed form does not fit these schedules"
    note = f"{priced if isfinite(seconds) else missing}; only the bound is proven"
    answer = TableResult(None, floor, False, 0, note=note)
    entry = answer.verification(tables, 0.0)
    return replace(entry, plan=plan if isfinite(seconds) else None, iteration_time_s=seconds)


def number_of_plans(tables: Sequence[CostTable], space_kind: str) -> int:
    """Count the plans of a space: splits times assignments of strategies."""
    total = 0
    for table in tables:
        slots = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[
            space_kind
        ]
        cuts = int((~table.fused_to_previous[1:]).sum())
        choices = sum(int(row.sum()) ** slots for row in table.allowed)
        total += comb(cuts, table.num_stages - 1) * choices
    return total
