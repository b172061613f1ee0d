"""The plans that a bilevel plan is compared with."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.upper.found import BilevelFound, BilevelPlan, fixed_bits_optimum
from darts_parallel.bilevel.upper.joint_space import FIRST_BLOCK, JointSpace, at_bits
from darts_parallel.bilevel.upper.learned_optimum import learned_optimum
from darts_parallel.bilevel.upper.log_steps import LogSteps
from darts_parallel.cost.collectives import LOSSLESS
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.plan.strategy import Plan

RANDOM_PLANS = 4000
NEAR = 0.01
"""Random plans whose seconds differ by no more than this share count as equally fast."""


def arm_plans(arm: str, search: BilevelSearch, found: BilevelFound) -> list[BilevelPlan]:
    """The plans of one arm: one, several random ones, or none where its plan fits no memory.

    Args:
        arm: One of `ARMS`, but not `best_uniform`, which is chosen by training (`uniform_bits`).
        search: At its end.
        found: What it concluded.
    """
    space, settings = search.space, search.settings
    batch, budget = settings.batches[0], settings.exact_seconds
    if settings.global_batch_size in settings.batches:
        batch = settings.global_batch_size

    def uniform(sums: int, sent: int) -> BilevelPlan | None:
        blocks = (Candidate(1, 1, sums, sent),) * settings.num_blocks
        return fixed_bits_optimum(space, blocks, batch, budget)

    makers: dict[str, Callable[[], list[BilevelPlan | None]]] = {
        "bilevel": lambda: [found.chosen],
        "logits_own": lambda: [found.own],
        "learned_optimum": lambda: [_optimum(space, found.log_steps, budget)],
        "trials_only": lambda: [_optimum(space, trials_alone(search), budget)],
        "time_only": lambda: [_optimum(space, _free(found.log_steps), budget)],
        "all_16_bit": lambda: [uniform(LOSSLESS, LOSSLESS)],
        "all_4_bit": lambda: [uniform(4, 4)],
        "random_equal_time": lambda: list(random_plans_of_equal_time(search, found.chosen)),
        "sensitivity_greedy": lambda: [sensitivity_greedy(search, found.chosen)],
    }
    return [plan for plan in makers[arm]() if plan is not None]


def _optimum(space: JointSpace, log_steps: LogSteps, budget: float) -> BilevelPlan | None:
    plan = learned_optimum(space, log_steps, budget).plan
    return None if plan is None else BilevelPlan.of(space, plan)


def _free(known: LogSteps) -> LogSteps:
    """Prices of a world in which nothing but the global batch size costs steps."""
    forward, gradient = torch.zeros_like(known.forward), torch.zeros_like(known.gradient)
    return replace(known, forward=forward, gradient=gradient, by_way={})


def trials_alone(search: BilevelSearch) -> LogSteps:
    """Trials' prices with equal shares of all blocks: what is known without the loop."""
    known, trials = search.log_steps, search.trials
    if trials is None:
        return known
    blocks = search.settings.num_blocks
    sums = [trials.forward_log_steps.get(pair, 0.0) / blocks for pair in known.forward_pairs]
    sent = [trials.gradient_log_steps.get(pair, 0.0) / blocks for pair in known.gradient_pairs]
    return replace(
        known,
        forward=torch.tensor([sums] * blocks, dtype=torch.float64),
        gradient=torch.tensor([sent] * blocks, dtype=torch.float64),
    )


def bits_of(space: JointSpace, key: str, way: str | None = None) -> list[int]:
    """Bits that the space allows for `key`, most first; given a way of training, those of its tables."""
    tables = [t for t, own in zip(space.tables, space.way_of, strict=True) if way in (None, own)]
    found = {getattr(choice, key) for table in tables for choice in table.choices}
    return sorted(found, reverse=True)


def _at_bits(space: JointSpace, plan: BilevelPlan, bits: Tensor) -> tuple[list[Plan], Tensor, Tensor]:
    """The plan at other bits of its blocks: plans, seconds, and which of them fit.

    Args:
        space: Priced plans.
        plan: Whose degrees, stages and ZeRO stages stay.
        bits: Of sums and of gradients, shape `(B, blocks, 2)`.
    """
    numbers = space.of_batch(plan.global_batch_size, plan.way)
    number = next(n for n in numbers if _holds(space, n, plan.plan))
    table = space.whole[number]
    index = {choice: c for c, choice in enumerate(table.choices)}
    plans, rows = [], []
    for row in bits.tolist():
        layers = list(plan.plan.layers)
        for place, own in enumerate(row, FIRST_BLOCK):
            layers[place] = at_bits(layers[place], (own[0], own[1]))
        plans.append(replace(plan.plan, layers=tuple(layers)))
        rows.append([index[layer] for layer in layers])
    outer = table.num_micro_batches.tolist().index(plan.plan.num_micro_batches * table.flush_every)
    starts = torch.tensor([plan.plan.boundaries[:-1]]).expand(len(rows), -1)
    hard = HardPlans(torch.full((len(rows),), outer), torch.tensor(rows), starts)
    cost = evaluate_batch(table, hard)
    return plans, cost.iteration_time, cost.feasible


def _holds(space: JointSpace, number: int, plan: Plan) -> bool:
    table = space.whole[number]
    if not set(plan.layers) <= set(table.choices):
        return False
    return (table.pp, table.cp, table.virtual_stages, table.node_order or plan.node_order) == (
        plan.pp, plan.cp, plan.virtual_stages, plan.node_order or table.node_order
    )  # fmt: skip


def random_plans_of_equal_time(search: BilevelSearch, plan: BilevelPlan) -> list[BilevelPlan]:
    """Random bits in the plan's own degrees and stages that are as fast as it, or as near as there are.

    Args:
        search: Its settings say how many.
        plan: What they are compared with.
    """
    space = search.space
    generator = torch.Generator().manual_seed(search.settings.seed + 4)
    shape = (RANDOM_PLANS, search.settings.num_blocks)
    columns = []
    for key in ("tp_comm_bits", "grad_comm_bits"):
        known = torch.tensor(bits_of(space, key, plan.way))
        columns.append(known[torch.randint(len(known), shape, generator=generator)])
    plans, seconds, feasible = _at_bits(space, plan, torch.stack(columns, -1))
    away = (seconds / plan.seconds).log().abs()
    distinct: dict[tuple[str, ...], int] = {}
    for index in range(len(plans)):
        words = tuple(candidate.felt() for candidate in space.blocks_of(plans[index]))
        if bool(feasible[index]) and words != tuple(candidate.felt() for candidate in plan.blocks):
            distinct.setdefault(words, index)
    near = [index for index in distinct.values() if float(away[index]) <= NEAR]
    chosen = near or sorted(distinct.values(), key=lambda index: float(away[index]))
    return [
        BilevelPlan(
            plans[i], space.blocks_of(plans[i]), plan.global_batch_size, float(seconds[i]), float("nan")
        )
        for i in chosen[: search.settings.random_plans]
    ]


def sensitivity_greedy(search: BilevelSearch, plan: BilevelPlan) -> BilevelPlan | None:
    """Bits lowered one block at a time, least price for a second first, until the plan is as fast.

    The greedy rule of mixed-precision quantization (HAWQ-V2, Dong et al. 2020, arXiv 1911.03852), with the
    learned prices as sensitivities and the plan's own degrees and stages.

    Args:
        search: At its end.
        plan: Its seconds are the budget.
    """
    space, known = search.space, search.log_steps
    keys = ("tp_comm_bits", "grad_comm_bits")
    ladders = [bits_of(space, key, plan.way) for key in keys]
    bits = torch.tensor([[ladder[0] for ladder in ladders]] * len(plan.blocks))
    while True:
        _, now, _ = _at_bits(space, plan, bits.unsqueeze(0))
        if float(now[0]) <= plan.seconds * (1.0 + NEAR):
            break
        moves = []
        for block, column in product(range(len(bits)), range(len(keys))):
            step = ladders[column].index(int(bits[block, column])) + 1
            if step < len(ladders[column]):
                moved = bits.clone()
                moved[block, column] = ladders[column][step]
                moves.append(moved)
        if not moves:
            break
        _, seconds, _ = _at_bits(space, plan, torch.stack(moves))
        prices = [
            _steps_at(known, plan.blocks, moved) - _steps_at(known, plan.blocks, bits) for moved in moves
        ]
        saved = (now[0] - seconds).clamp(min=1e-12)
        bits = moves[int((torch.tensor(prices, dtype=torch.float64) / saved).argmin())]
    plans, seconds, feasible = _at_bits(space, plan, bits.unsqueeze(0))
    if not bool(feasible[0]):
        return None
    return BilevelPlan(
        plans[0], space.blocks_of(plans[0]), plan.global_batch_size, float(seconds[0]), float("nan")
    )


def _steps_at(known: LogSteps, blocks: Sequence[Candidate], bits: Tensor) -> float:
    """Log steps of blocks at other bits."""
    moved = [
        Candidate(own.tp, own.dp, row[0] if own.tp > 1 else LOSSLESS, row[1] if own.dp > 1 else LOSSLESS)
        for own, row in zip(blocks, bits.tolist(), strict=True)
    ]
    return known.of_plan(moved, next(iter(known.by_batch)))
