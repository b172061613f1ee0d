"""Find the best plan of a tiny problem by pricing every plan, without any code of `exact`.

The enumeration knows the problem alone: degrees by division, strategies by their rules, stages by their cuts.
Every plan is priced by `evaluate_batch` on the table of its own outer choice, so that only prices are shared.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from math import comb

import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import build_tables
from darts_parallel.export import refusals
from darts_parallel.plans.space import OuterSpace
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.schedules import find


class TooManyError(Exception):
    """Say that a problem has more plans than it may."""


def cheapest(problem: Problem, limit: int) -> tuple[float, int]:
    """Return the seconds of the best plan (infinite where none fits), and how many plans were priced.

    Errors:
        TooManyError: the problem, with nothing in host memory, has more than `limit`.
    """
    best = float("inf")
    count = 0
    spaces = list(_spaces(problem))
    if _number(problem, spaces) > limit:
        raise TooManyError
    for space in spaces:
        table = build_tables(problem, [space])[0]
        number = {choice: index for index, choice in enumerate(table.choices)}
        for outer, micro_batches in enumerate(space.num_micro_batches):
            batch = problem.training.global_batch_size
            fitting = tuple(c for c in space.choices if batch % (c.dp * micro_batches) == 0)
            found = list(_plans(problem, table.num_stages, fitting))
            if not found:
                continue
            count += len(found)
            choices = torch.tensor([[number[strategy] for strategy in row] for row, _ in found])
            starts = torch.tensor([first for _, first in found])
            cost = evaluate_batch(
                table, HardPlans(torch.full((len(found),), outer), choices, starts)
            )
            best = min([best, *cost.iteration_time[cost.feasible].tolist()])
    return best, count


def _number(problem: Problem, spaces: Sequence[OuterSpace]) -> int:
    """Count the plans from the numbers of strategies and cuts alone."""
    batch = problem.training.global_batch_size
    layers = problem.model.layers
    total = 0
    places = sum(not layer.fused_to_previous for layer in layers[1:])
    for space in spaces:
        stages = space.pp * space.virtual_stages
        free = {"uniform": 1, "stagewise": stages, "layerwise": len(layers)}[
            problem.config.space.kind
        ]
        for count in space.num_micro_batches:
            fitting = sum(batch % (choice.dp * count) == 0 for choice in space.choices)
            total += comb(places, stages - 1) * fitting**free
    return total


def _spaces(problem: Problem) -> Iterator[OuterSpace]:
    """Yield every outer choice apart: pipeline and context degree, micro-batches, order of the nodes."""
    space = problem.config.space
    batch = problem.training.global_batch_size
    devices = problem.cluster.num_devices
    for pp, cp in product(_divisors(devices), _divisors(devices)):
        pinned = not (_allows(space.pp, pp) and _allows(space.cp, cp))
        if pinned or devices % (pp * cp) or not _cp_legal(problem, cp):
            continue
        choices = tuple(_strategies(problem, devices // (pp * cp), cp))
        for order, (name, chunks) in product(_orders(problem, pp), _schedules(problem, pp)):
            schedule = find(name or ("interleaved" if chunks > 1 else "1f1b"))
            counts = tuple(
                m
                for m in _divisors(batch)
                if _allows(space.num_micro_batches, m)
                and schedule.count_refusal(pp, m) is None
                and any(batch % (c.dp * m) == 0 for c in choices)
            )
            if counts and (
                own := tuple(c for c in choices if _taken(problem, pp, cp, counts, name, chunks, c))
            ):
                yield OuterSpace(pp, counts, own, cp, chunks, order, name)


def _schedules(problem: Problem, pp: int) -> Iterator[tuple[str | None, int]]:
    """Yield the schedules with the stages that a device holds, several in a pipeline alone."""
    space = problem.config.space
    blocks = problem.config.model.num_layers
    for name, chunks in product(space.schedules or [None], range(1, len(problem.model.layers))):
        fixed = find(name).chunks if name else None
        free = _allows(space.virtual_stages, chunks) or (
            chunks > 1 and name and space.virtual_stages == 1
        )
        even = blocks % (pp * chunks) == 0 or chunks <= (1 if space.virtual_stages is None else 2)
        even |= space.virtual_stages not in (
            None,
            1,
        )  # as `space.virtual_stages` says of its default
        if (pp == 1 and chunks > 1) or (fixed != chunks if fixed else not free or not even):
            continue
        if name != "interleaved" or chunks > 1:
            yield name, chunks


def _taken(
    problem: Problem,
    pp: int,
    cp: int,
    counts: Sequence[int],
    name: str | None,
    chunks: int,
    own: LayerStrategy,
) -> bool:
    """Return whether the trainer's exporter writes a plan of one strategy; true without a trainer."""
    trainer = problem.config.space.trainer
    layers = problem.num_layers
    fitting = [m for m in counts if problem.training.global_batch_size % (own.dp * m) == 0]
    row, first = next(_plans(problem, pp * chunks, (own,)), ([], []))
    if trainer is None or not fitting or not row:
        return trainer is None
    plan = Plan(
        fitting[0], (*first, layers), tuple(row), cp=cp, virtual_stages=chunks, schedule=name
    )
    return not refusals(problem, plan, trainer)


def _orders(problem: Problem, pp: int) -> list[tuple[int, ...]]:
    """Return distinct orders of the nodes whose stages are each of one node type; empty: in rank order."""
    cluster = problem.cluster
    if cluster.homogeneous:
        return [()]
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    nodes = range(len(cluster.node_types))
    for order in (
        [tuple(nodes)] if problem.config.space.node_orders == "given" else permutations(nodes)
    ):
        seen.setdefault(tuple(cluster.node_types[node] for node in order), order)
    pure = [order for order in seen.values() if cluster.arranged(order).stages_are_pure(pp)]
    return [() if order == tuple(nodes) else order for order in pure]


def _strategies(problem: Problem, ranks: int, cp: int) -> Iterator[LayerStrategy]:
    """Yield the strategies of a layer on `ranks * cp` devices, each under one name."""
    space = problem.config.space
    model = problem.config.model
    heads = (model.num_heads, model.num_kv_heads or model.num_heads)
    sizes = {group.gpus for group in problem.cluster.groups}
    for tp in _divisors(ranks):
        wide = max(*sizes, 8)
        inside = all(size % tp == 0 or tp % size == 0 for size in sizes)
        if any(n % tp for n in heads) or not _allows(space.tp, tp) or not inside or tp > wide:
            continue
        dp = ranks // tp
        if not _allows(space.dp, dp):
            continue
        copies = dp * cp > 1 or (tp > 1 and problem.model.has_experts)
        zeros = [z for z in range(4) if _allows(space.zero_stage, z) and (z == 0 or copies)] or [0]
        sequence = [
            s for s in (False, True) if _allows(space.sequence_parallel, s) and (tp > 1 or not s)
        ]
        if problem.model.has_experts:
            sequence = [s for s in sequence or [False] if s == (tp > 1)]
            if not sequence:
                continue
        count = problem.config.model.num_experts or 1
        experts = [ep for ep in _divisors(ranks * cp) if count % ep == 0]
        again = [r for r in ("none", "selective", "full") if _allows(space.recompute, r)]
        for zero, recompute, parallel, ep in product(zeros, again, sequence or [False], experts):
            yield LayerStrategy(tp, dp, zero, recompute, parallel, ep=ep)


def _plans(
    problem: Problem, stages: int, legal: tuple[LayerStrategy, ...]
) -> Iterator[tuple[list[LayerStrategy], list[int]]]:
    """Yield every plan: the strategy of every layer, and the first layers of the stages."""
    layers = problem.model.layers
    kind = problem.config.space.kind
    places = [i for i, layer in enumerate(layers) if i and not layer.fused_to_previous]
    for cut in combinations(places, stages - 1):
        sizes = [end - begin for begin, end in zip((0, *cut), (*cut, len(layers)), strict=True)]
        # layers that share one strategy
        groups = {"uniform": [len(layers)], "stagewise": sizes, "layerwise": [1] * len(layers)}[
            kind
        ]
        for chosen in product(legal, repeat=len(groups)):
            yield (
                [s for s, size in zip(chosen, groups, strict=True) for _ in range(size)],
                [0, *cut],
            )


def _cp_legal(problem: Problem, cp: int) -> bool:
    parts = 2 if problem.config.model.causal else 1
    return cp == 1 or problem.training.seq_len % (parts * cp) == 0


def _allows(pin: object, value: object) -> bool:
    return pin is None or (value in pin if isinstance(pin, (list, tuple)) else value == pin)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
