"""Plans for sequences of many lengths: seconds and memory of even uniform plans over common draws.

A step draws `global_batch_size` sequences from the histogram `training.lengths`, which every plan cuts into
micro-batches, rank after rank. One of several lengths costs, padded, what it would cost if all were as long
as the longest; packed (tokens one after the other, attention within a sequence), the mean of what it would
cost if all were as long as each: exact for what is linear in tokens, and for attention. A step is the longest
path through 1F1B with the seconds of its own micro-batches, on the slowest data-parallel rank (where ZeRO-2,
ZeRO-3 or experts communicate, ranks wait in every pass), and what the model adds to that path at the mean
length: gradients, optimizer. All micro-batches in flight fill as much memory as the longest of the step.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    CostTable,
    HardPlans,
    build_tables,
    compiled,
    evaluate_batch,
    even_uniform_plans,
    pass_ends,
    pass_seconds,
)
from darts_parallel.errors import ConfigError, InfeasibleError, read_text
from darts_parallel.planner.memory_chance import tightened
from darts_parallel.planner.uncertainty import out_of_memory
from darts_parallel.plans import Plan, outer_spaces
from darts_parallel.problem import Problem

Floats = NDArray[np.float64]
Priced = tuple[CostTable, HardPlans, Floats, Floats, Floats]

DRAWS, QUANTILE = 32, 0.95
"""Steps that are drawn, and the quantile over them that is told next to the mean."""
LENGTHS, LISTED, SLACK = 9, 8, 1.01
"""Lengths that are priced, others interpolated; plans returned; how far above those others are drawn."""


class LengthPlan(NamedTuple):
    """An even uniform plan over the draws.

    `seconds` of a step: mean and `QUANTILE`. `memory`, the share of the fullest device that is full in a
    step: mean, `QUANTILE` and largest. `chance` that the longest micro-batch drawn runs out of memory.
    """

    plan: Plan
    seconds: tuple[float, ...]
    memory: tuple[float, ...]
    chance: float | None


def read_lengths(path: str, longest: int) -> tuple[NDArray[np.int64], Floats]:
    """Return the lengths, rising, of a CSV file with the columns `length` and `count`, and their shares.

    Errors:
        ConfigError: it cannot be read, or holds a length not in 1 to `longest`, or a count not above 0.
    """
    why, rows = "has no rows", list[tuple[int, float]]()
    try:
        for row in csv.DictReader(read_text(path).removeprefix("\ufeff").splitlines()):
            why = f"has the row {','.join(str(value) for value in row.values())}"
            rows.append((int(row["length"]), float(row["count"])))
            if not (1 <= rows[-1][0] <= longest and 0.0 < rows[-1][1] < 1e15):
                raise ValueError
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        rows, why = [], f"cannot be read ({error.strerror})" if isinstance(error, OSError) else why
    if not rows:
        raise ConfigError(
            f"training.lengths={path} must be a CSV file with the columns length (1 to training.seq_len="
            f"{longest}) and count (above 0), and {why}; try rows such as {longest},100."
        )
    lengths, places = np.unique([length for length, _ in rows], return_inverse=True)
    counts = np.bincount(places, [count for _, count in rows])
    return lengths, counts / counts.sum()


def plan_lengths(problem: Problem) -> list[LengthPlan]:
    """Return the fastest expected even uniform plans that keep `space.out_of_memory`, as far as any does.

    Errors:
        ConfigError: the file is bad, or the closed form prices no plan of the space.
        InfeasibleError: no plan holds the longest micro-batch.
    """
    training, allowed = problem.training, problem.config.space.out_of_memory
    lengths, shares = read_lengths(str(training.lengths), training.seq_len)
    marks = np.interp(np.linspace(0.0, 1.0, LENGTHS), shares.cumsum(), lengths)
    grid = np.unique(marks.round().astype(np.int64)) if len(lengths) > LENGTHS else lengths
    hat = np.stack([np.interp(lengths, grid, row) for row in np.eye(len(grid))], 1)
    source = np.random.default_rng(problem.config.search.seed)
    picks = source.choice(len(lengths), (DRAWS, training.global_batch_size), p=shares)
    found = _drawn(tightened(problem), grid, hat, picks) or _drawn(problem, grid, hat, picks)
    if not found:
        why = f"no even uniform plan holds its longest micro-batch, up to {lengths[-1]:,} tokens a sequence"
        raise InfeasibleError(
            f"training.lengths={training.lengths}: {why}; try {lengths[-1] // 2:,}."
        )
    return sorted(found, key=lambda own: ((own.chance or 0.0) > allowed, own.seconds))[:LISTED]


def _drawn(problem: Problem, grid: Any, hat: Floats, picks: Any) -> list[LengthPlan]:
    """Return plans that fit; the mean micro-batch bounds the expected seconds of a plan from below.

    Of G lengths that are priced the weights `hat` make every one, `(lengths, G)`; `picks`: `(DRAWS, batch)`.
    """
    usual, found, mixes = hat[picks].mean((0, 1)), dict[Any, LengthPlan](), dict[Any, Floats]()
    priced = list(_priced(problem, grid.tolist()))
    queue = [(usual @ own[2], i) for i, own in enumerate(priced)]
    for bound, i, n in sorted(
        (float(s), i, n) for seconds, i in queue for n, s in enumerate(seconds)
    ):
        best = sorted(known.seconds[0] for known in found.values())[:LISTED]
        if len(best) == LISTED and bound > SLACK * best[-1]:
            break
        table, plans, total, passes, memory = priced[i]
        plan, limit = (
            plans.to_plan(n, table),
            table.capacity.numpy() * (1.0 + PLAN_MEMORY_TOLERANCE),
        )
        layer = plan.layers[0]
        key, shape = (
            (i, plan.num_micro_batches, layer.tp),
            (DRAWS, plan.num_micro_batches, layer.dp, -1),
        )
        if key in found or (usual @ memory[:, n] > limit).any():
            continue
        if shape not in mixes:
            cut = picks.reshape(shape)
            mixes[shape] = hat[cut].mean(-2) if problem.training.packed else hat[cut.max(-1)]
        peaks = ((mixed := mixes[shape]) @ memory[:, n]).max((1, 2))
        if (peaks > limit).any():
            continue
        own, same = (
            np.stack([made @ part[:, n] for part in passes]) for made in (mixed, usual[None, None])
        )
        seconds = _seconds(own, together=layer.zero_stage >= 2 or layer.ep > 1)
        seconds += usual @ total[:, n] - _seconds(same[:, None].repeat(plan.num_micro_batches, 2))
        cluster = problem.cluster.arranged(plan.node_order)
        devices = (cluster.stage_group(k, plan.pp).device for k in range(plan.pp))
        reserved, whole = np.array(
            [(device.reserved, float(device.memory)) for device in devices]
        ).T
        full = ((peaks + reserved) / whole).max(1)
        unit = 2 * plan.cp * layer.tp  # tokens that are divided among ranks
        longest = min(
            unit * ceil((mixed @ grid).max() * (1.0 - 1e-9) / unit), problem.training.seq_len
        )
        times, shares = (
            tuple(map(float, (v.mean(), np.quantile(v, QUANTILE)))) for v in (seconds, full)
        )
        chance = out_of_memory(plan, _at(problem, longest))
        found[key] = LengthPlan(plan, times, (*shares, float(full.max())), chance)
    return list(found.values())


def _at(problem: Problem, length: int) -> Problem:
    """Return the job for sequences of one length."""
    training = replace(problem.training, seq_len=length, lengths=None)
    own = Problem.from_config(replace(problem.config, training=training))
    return replace(own, headroom=problem.headroom)


def _priced(problem: Problem, grid: list[int]) -> Iterator[Priced]:
    """Yield a table, its N even uniform plans, and what they cost at every length.

    Seconds of an iteration `(G, N)`, of passes forward and backward `(2, G, N, stages)`; bytes likewise.
    """
    spaces = outer_spaces(problem)
    for same in zip(*(build_tables(_at(problem, length), spaces) for length in grid), strict=True):
        table = same[0]
        if table.pipeline.simulated or table.host is not None:
            rule = "must go with plans of 1F1B that the closed form prices, without offloading"
            way = "try cost.pipeline=closed_form space.virtual_stages=1"
            raise ConfigError(f"training.lengths={problem.training.lengths} {rule}; {way}.")
        plans = even_uniform_plans(table)
        endless = replace(table, capacity=torch.full_like(table.capacity, torch.inf))
        plans = plans[evaluate_batch(endless, plans).feasible]
        costs = [evaluate_batch(own, plans) for own in same]
        passes = [pass_seconds(own, plans).blocking() for own in same]
        both = torch.stack([torch.stack([own.forward, own.backward]) for own in passes], 1)
        total, memory = (
            torch.stack([c.iteration_time for c in costs]),
            torch.stack([c.memory for c in costs]),
        )
        yield table, plans, total.numpy(), both.numpy(), memory.numpy()


def _seconds(passes: Floats, *, together: bool = False) -> Floats:
    """Return the seconds of 1F1B of passes `(2, draws, micro-batches, ranks, stages)`."""
    passes = (
        passes.max(3, keepdims=True) if together else passes
    )  # else ranks wait at the end alone
    _, draws, count, ranks, stages = passes.shape
    graph = compiled("1f1b", stages, count, 1)
    kind, stage, batch = graph.operations.T
    durations = passes[kind, :, batch, :, stage].reshape(len(graph), draws * ranks)
    ends = pass_ends(graph, durations, np.zeros_like(durations))[0]
    return np.asarray(ends[graph.last].max(0).reshape(draws, ranks).max(1))
