"""The plans that a bilevel plan is compared with, beyond its own raw plan and 16 bits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import mean

import torch
from torch import Tensor

from darts_parallel.bilevel import (
    FIRST_BLOCK,
    BilevelPlan,
    BilevelSearch,
    JointSpace,
    Maker,
    SeedPlan,
    Training,
    Trainings,
    at_bits,
    find_learned_optimum,
    uniform_plan,
)
from darts_parallel.cost import HardPlans, evaluate_batch

RANDOM_PLANS = 4000
NEAR = 0.01
"""Random plans whose seconds differ by no more than this share count as equally fast."""
FIRST_SELECTION_SEED = 200_000
"""Seeds of the selection of uniform bits lie above those of the retraining: luck is not compared."""
LUCK = 1.1
"""A pair of uniform bits is trained until it cannot beat 16 bits by this factor."""
KEYS = ("tp_comm_bits", "grad_comm_bits")
LEAST_SECONDS = 1e-12
"""Seconds that a step to fewer bits saves at least, so that a rate is finite."""
ROUNDING = 1e-9
"""Relative distance of seconds that is rounding."""


Candidates = list[tuple[BilevelPlan | None, int]]
"""Plans, each with the steps of training that finding it took."""


def baselines(trainings: Trainings, random_plans: int) -> dict[str, Maker]:
    """Return how all of them are made.

    Args:
        trainings: Runs and stores the trainings that select uniform bits, once for all seeds.
    """
    chosen: Candidates = []

    def best_uniform(seed: SeedPlan) -> Candidates:
        if not chosen:
            chosen.append(choose_uniform(seed.search, trainings))
        return chosen

    def fastest(seed: SeedPlan) -> Candidates:
        return [(time_only(seed.search), 0)]

    def random_equal_time(seed: SeedPlan) -> Candidates:
        plans = random_plans_of_equal_time(seed.search, seed.found.chosen, random_plans)
        return [(plan, seed.search.steps_spent) for plan in plans]

    def greedy(seed: SeedPlan) -> Candidates:
        plan = sensitivity_greedy(seed.search, seed.found.chosen)
        return [(plan, seed.search.steps_spent)]

    return {
        "best_uniform": best_uniform,
        "time_only": fastest,
        "random_equal_time": random_equal_time,
        "sensitivity_greedy": greedy,
    }


def time_only(search: BilevelSearch) -> BilevelPlan | None:
    """Return the best plan of a world in which nothing but the global batch size costs steps."""
    prices = search.log_slowdown
    free = replace(prices, forward=0.0 * prices.forward, gradient=0.0 * prices.gradient)
    plan = find_learned_optimum(search.space, free, search.settings.exact_seconds).plan
    return None if plan is None else BilevelPlan.of(search.space, plan)


def bits_of(space: JointSpace, key: str) -> list[int]:
    """Return the bits that the space allows for `key`, most first."""
    choices = [choice for table in space.tables for choice in table.choices]
    return sorted({getattr(choice, key) for choice in choices}, reverse=True)


def at_other_bits(
    space: JointSpace, plan: BilevelPlan, bits: Tensor
) -> tuple[list[BilevelPlan], Tensor]:
    """Return the plan at other bits of its blocks, and which of them fit the memory.

    Args:
        bits: Bits of sums and of gradients, shape `(B, blocks, 2)`.
    """
    tables = [space.whole[number] for number in space.of_batch(plan.global_batch_size)]
    place = (plan.plan.pp, plan.plan.node_order)
    table = next(table for table in tables if (table.pp, table.node_order) == place)
    index = {choice: c for c, choice in enumerate(table.choices)}
    plans = []
    rows = []
    for row in bits.tolist():
        layers = list(plan.plan.layers)
        for block, (sums, sent) in enumerate(row, FIRST_BLOCK):
            layers[block] = at_bits(layers[block], (sums, sent))
        plans.append(replace(plan.plan, layers=tuple(layers)))
        rows.append([index[layer] for layer in layers])
    outer = table.num_micro_batches.tolist().index(plan.plan.num_micro_batches)
    starts = torch.tensor([plan.plan.boundaries[:-1]]).expand(len(rows), -1)
    hard = HardPlans(torch.full((len(rows),), outer), torch.tensor(rows), starts)
    cost = evaluate_batch(table, hard)
    priced = []
    for other, seconds in zip(plans, cost.iteration_time.tolist(), strict=True):
        blocks = space.blocks_of(other)
        priced.append(BilevelPlan(other, blocks, plan.global_batch_size, seconds))
    return priced, cost.feasible


def random_plans_of_equal_time(
    search: BilevelSearch, plan: BilevelPlan, count: int
) -> list[BilevelPlan]:
    """Draw bits in the plan's own degrees and stages that are as fast as it, or as near as there are."""
    generator = torch.Generator().manual_seed(search.settings.seed + 4)
    columns = []
    for key in KEYS:
        allowed = torch.tensor(bits_of(search.space, key))
        drawn = torch.randint(len(allowed), (RANDOM_PLANS, len(plan.blocks)), generator=generator)
        columns.append(allowed[drawn])
    plans, feasible = at_other_bits(search.space, plan, torch.stack(columns, -1))
    distinct: dict[tuple[str, ...], BilevelPlan] = {}
    for own, fits in zip(plans, feasible.tolist(), strict=True):
        if fits and training_keys(own) != training_keys(plan):
            distinct.setdefault(training_keys(own), own)

    def distance(own: BilevelPlan) -> float:
        return abs(own.seconds / plan.seconds - 1.0)

    near = [own for own in distinct.values() if distance(own) <= NEAR]
    return (near or sorted(distinct.values(), key=distance))[:count]


def training_keys(plan: BilevelPlan) -> tuple[str, ...]:
    """Name the part of every block that affects the loss: plans of equal names train equally."""
    return tuple(block.training_key() for block in plan.blocks)


def sensitivity_greedy(search: BilevelSearch, plan: BilevelPlan) -> BilevelPlan | None:
    """Lower bits one block at a time, least price for a second first, until the plan is as fast.

    The greedy rule of mixed-precision quantization (HAWQ-V2, Dong et al. 2020, arXiv 1911.03852), with the
    learned prices as sensitivities and the plan's own degrees and stages.
    """
    space = search.space
    ladders = [bits_of(space, key) for key in KEYS]
    bits = torch.tensor([[ladder[0] for ladder in ladders]] * len(plan.blocks))
    while True:
        (now,), feasible = at_other_bits(space, plan, bits.unsqueeze(0))
        moves = _lower_bits(bits, ladders)
        if now.seconds <= plan.seconds * (1.0 + NEAR) or not moves:
            return now if bool(feasible[0]) else None
        known = search.log_slowdown.of_plan(now.blocks, plan.global_batch_size)
        rates = []
        for other in at_other_bits(space, plan, torch.stack(moves))[0]:
            price = search.log_slowdown.of_plan(other.blocks, plan.global_batch_size) - known
            rates.append(price / max(now.seconds - other.seconds, LEAST_SECONDS))
        bits = moves[rates.index(min(rates))]


def _lower_bits(bits: Tensor, ladders: list[list[int]]) -> list[Tensor]:
    """Return the bits with one entry of one block a step lower."""
    moves = []
    for block, column in product(range(len(bits)), range(len(KEYS))):
        step = ladders[column].index(int(bits[block, column])) + 1
        if step < len(ladders[column]):
            move = bits.clone()
            move[block, column] = ladders[column][step]
            moves.append(move)
    return moves


def uniform_plans(search: BilevelSearch) -> list[BilevelPlan]:
    """Return the fastest plan of every pair of bits, but for those that more bits are as fast as."""
    fastest: dict[tuple[int, int], BilevelPlan] = {}
    for sums, sent in product(*(bits_of(search.space, key) for key in KEYS)):
        plan = uniform_plan(search, sums, sent)
        if plan is None:
            continue
        more = [other for (a, b), other in fastest.items() if a >= sums and b >= sent]
        if all(other.seconds > plan.seconds * (1.0 + ROUNDING) for other in more):
            fastest[sums, sent] = plan
    return list(fastest.values())


def _longest(plan: BilevelPlan, plans: Sequence[BilevelPlan], limit: float) -> float:
    """Return how many times `retrain_steps` a plan may take before it has lost against 16 bits."""
    for other in plans:
        if all(block.lossless for block in other.blocks):
            return min(max(LUCK * other.seconds / plan.seconds, 1.0), limit)
    return limit


def choose_uniform(search: BilevelSearch, trainings: Trainings) -> tuple[BilevelPlan | None, int]:
    """Train with every pair of bits; return that of least mean time to target, and the steps spent."""
    settings = search.settings
    plans = uniform_plans(search)
    if not plans:
        return None, 0
    seeds = [FIRST_SELECTION_SEED + index for index in range(settings.retrain_seeds)]
    references = trainings.references(seeds, settings)
    wanted = []
    for plan in plans:
        factor = _longest(plan, plans, settings.retrain_factor)
        for seed, reference in zip(seeds, references, strict=True):
            loss = reference.final_loss
            wanted.append(Training(plan.blocks, plan.global_batch_size, seed, loss, factor))
    runs = trainings.run(wanted, settings)
    steps = []
    for run, training in zip(runs, wanted, strict=True):
        count = run.steps_to(training.target or 0.0)
        steps.append(float("inf") if count is None else count)
    times = []
    for index, plan in enumerate(plans):
        begin = index * len(seeds)
        times.append(plan.seconds * mean(steps[begin : begin + len(seeds)]))
    spent = sum(run.training[-1][0] for run in [*references, *runs])
    return plans[times.index(min(times))], spent
