"""Plans for sequences of many lengths: seconds and memory of even uniform plans over common draws.

A step draws `global_batch_size` sequences from the histogram `training.lengths`, which every plan
cuts into micro-batches, rank after rank. A padded micro-batch costs what it would cost if all its
sequences were as long as the longest. A packed one (tokens one after the other, attention within a
sequence) costs the mean of what it would cost if all were as long as each: exact for what is linear
in tokens, and for attention.

A step is the longest path through 1F1B with the seconds of its own micro-batches, on the slowest
data-parallel rank (where ZeRO-2, ZeRO-3 or experts communicate, ranks wait in every pass), and what
the model adds to that path at the mean length: gradients, optimizer. All micro-batches in flight
fill as much memory as the longest of the step.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

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
from darts_parallel.planner.prediction_intervals import out_of_memory, stage_devices
from darts_parallel.plans import Plan, outer_spaces
from darts_parallel.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DRAWS = 32
"""Steps that are drawn."""
QUANTILE = 0.95
"""Quantile over the draws that is told next to the mean."""
LENGTHS = 9
"""Lengths that are priced; others are interpolated."""
LISTED = 8
"""Plans that are returned."""
SLACK = 1.01
"""How far above the slowest listed plan the bounds of others are drawn: draws are not their mean."""
BELOW = 1.0 - 1e-9
"""Factor of a length that undoes rounding before it is rounded up."""
MOST_COUNT = 1e15
"""Largest count of a length: sums of counts stay exact."""


class LengthPlan(NamedTuple):
    """An even uniform plan over the draws."""

    plan: Plan
    seconds: tuple[float, ...]
    """Seconds of a step: mean and `QUANTILE`."""
    memory: tuple[float, ...]
    """Share of the fullest device that is full in a step: mean, `QUANTILE` and largest."""
    chance: float | None
    """Probability that the longest micro-batch drawn runs out of memory."""


def read_lengths(path: str, longest: int) -> tuple[Integers, Floats]:
    """Return the lengths, rising, of a CSV file with the columns `length` and `count`, and their shares.

    Errors:
        ConfigError: it cannot be read, or holds a length not in 1 to `longest`, or a count not
            above 0.
    """
    rows: list[tuple[int, float]] = []
    why = "has no rows"
    try:
        lines = read_text(path).removeprefix("\ufeff").splitlines()
        for row in csv.DictReader(lines):
            why = f"has the row {','.join(str(value) for value in row.values())}"
            length, count = int(row["length"]), float(row["count"])
            if not (1 <= length <= longest and 0.0 < count < MOST_COUNT):
                raise ValueError
            rows.append((length, count))
    except (KeyError, TypeError, ValueError, csv.Error):
        rows = []
    except OSError as error:
        rows = []
        why = f"cannot be read ({error.strerror})"
    if not rows:
        raise ConfigError(
            f"training.lengths={path} must be a CSV file with the columns length (1 to training.seq_len="
            f"{longest}) and count (above 0), and {why}; try rows such as {longest},100."
        )
    every, counts = zip(*rows, strict=True)
    lengths, places = np.unique(every, return_inverse=True)
    sums = np.bincount(places, counts)
    return lengths, sums / sums.sum()


@dataclass(frozen=True)
class _Draws:
    """Sequences of `DRAWS` steps, of which G lengths are priced and mix to the others."""

    grid: Integers
    """The priced lengths, `(G,)`."""
    hat: Floats
    """Weights of the priced lengths in every length of the histogram, `(lengths, G)`."""
    picks: Integers
    """Number of the length of every drawn sequence, rising with the length, `(DRAWS, batch)`."""
    packed: bool
    known: dict[tuple[int, int], Floats] = field(default_factory=dict)
    """Mixes by number of micro-batches and data-parallel ranks."""

    @staticmethod
    def of(problem: Problem) -> "_Draws":
        """Draw the steps of a job."""
        training = problem.training
        lengths, shares = read_lengths(str(training.lengths), training.seq_len)
        grid = lengths
        if len(lengths) > LENGTHS:
            quantiles = np.linspace(0.0, 1.0, LENGTHS)
            marks = np.interp(quantiles, shares.cumsum(), lengths)
            grid = np.unique(marks.round().astype(np.int64))
        columns = [np.interp(lengths, grid, row) for row in np.eye(len(grid))]
        source = np.random.default_rng(problem.config.search.seed)
        size = (DRAWS, training.global_batch_size)
        picks = source.choice(len(lengths), size, p=shares)
        return _Draws(grid, np.stack(columns, 1), picks, training.packed)

    @property
    def mean(self) -> Floats:
        """Weights of the priced lengths in the mean sequence, `(G,)`."""
        weights = self.hat[self.picks]
        return np.asarray(weights.mean((0, 1)))

    def micro_batches(self, count: int, ranks: int) -> Floats:
        """Return the weights of the priced lengths in every micro-batch, `(DRAWS, count, ranks, G)`."""
        if (count, ranks) not in self.known:
            cut = self.picks.reshape(DRAWS, count, ranks, -1)
            if self.packed:
                self.known[count, ranks] = self.hat[cut].mean(-2)
            else:
                self.known[count, ranks] = self.hat[cut.max(-1)]
        return self.known[count, ranks]


class _Costs(NamedTuple):
    """Costs of N even uniform plans of a table at G lengths."""

    table: CostTable
    plans: HardPlans
    seconds: Floats
    """Seconds of an iteration, `(G, N)`."""
    passes: Floats
    """Seconds of passes forward and backward, `(2, G, N, stages)`."""
    memory: Floats
    """Bytes, `(G, N, stages)`."""

    def one(self, number: int) -> "_PlanCost":
        """Return one plan and its costs."""
        limit = self.table.capacity.numpy() * (1.0 + PLAN_MEMORY_TOLERANCE)
        plan = self.plans.to_plan(number, self.table)
        seconds = self.seconds[:, number]
        passes = self.passes[:, :, number]
        memory = self.memory[:, number]
        return _PlanCost(plan, limit, seconds, passes, memory)


class _PlanCost(NamedTuple):
    """Costs of a plan at G lengths."""

    plan: Plan
    limit: Floats
    """Bytes of a device, `(stages,)`."""
    seconds: Floats
    """Shape `(G,)`."""
    passes: Floats
    """Shape `(2, G, stages)`."""
    memory: Floats
    """Shape `(G, stages)`."""


def plan_lengths(problem: Problem) -> list[LengthPlan]:
    """Return the fastest expected even uniform plans.

    They keep `space.out_of_memory`, or are the least risky where none does.

    Errors:
        ConfigError: the file is bad, or the closed form prices no plan of the space.
        InfeasibleError: no plan holds the longest micro-batch.
    """
    draws, allowed = _Draws.of(problem), problem.config.space.out_of_memory
    found = _drawn(tightened(problem), draws) or _drawn(problem, draws)
    if not found:
        longest = int(draws.grid[-1])
        why = f"no even uniform plan holds its longest micro-batch, up to {longest:,} tokens a sequence"
        raise InfeasibleError(
            f"training.lengths={problem.training.lengths}: {why}; try {longest // 2:,}."
        )

    def order(own: LengthPlan) -> tuple[bool, tuple[float, ...]]:
        return (own.chance or 0.0) > allowed, own.seconds

    return sorted(found, key=order)[:LISTED]


def _drawn(problem: Problem, draws: _Draws) -> list[LengthPlan]:
    """Return plans that fit; the mean micro-batch bounds the expected seconds of a plan from below."""
    priced = list(_priced(problem, draws.grid.tolist()))
    queue = [
        (float(seconds), index, number)
        for index, own in enumerate(priced)
        for number, seconds in enumerate(draws.mean @ own.seconds)
    ]
    found: dict[tuple[int, int, int], LengthPlan] = {}
    for bound, index, number in sorted(queue):
        best = sorted(known.seconds[0] for known in found.values())[:LISTED]
        if len(best) == LISTED and bound > SLACK * best[-1]:
            break
        cost = priced[index].one(number)
        first = cost.plan.layers[0]
        key = (index, cost.plan.num_micro_batches, first.tp)
        if key not in found:
            own = _over_draws(problem, draws, cost)
            if own is not None:
                found[key] = own
    return list(found.values())


def _over_draws(problem: Problem, draws: _Draws, cost: _PlanCost) -> LengthPlan | None:
    """Return a plan over the draws; None where some micro-batch does not fit."""
    plan, layer = cost.plan, cost.plan.layers[0]
    if (draws.mean @ cost.memory > cost.limit).any():
        return None
    mixed = draws.micro_batches(plan.num_micro_batches, layer.dp)
    peaks = (mixed @ cost.memory).max((1, 2))
    if (peaks > cost.limit).any():
        return None
    mean = draws.mean
    usual = mean[None, None, None].repeat(plan.num_micro_batches, 1)
    together = layer.zero_stage >= 2 or layer.ep > 1
    path = _path_seconds(mixed, cost.passes, together=together)
    usual_path = _path_seconds(usual, cost.passes)
    seconds = path + mean @ cost.seconds - usual_path
    full = _fullest(problem, plan, peaks)
    unit = 2 * plan.cp * layer.tp  # tokens that are divided among ranks
    longest = (mixed @ draws.grid).max() * BELOW
    length = min(unit * ceil(longest / unit), problem.training.seq_len)
    chance = out_of_memory(plan, _at(problem, length))
    memory = (*_mean_and_quantile(full), float(full.max()))
    return LengthPlan(plan, _mean_and_quantile(seconds), memory, chance)


def _fullest(problem: Problem, plan: Plan, peaks: Floats) -> Floats:
    """Return the share of the fullest device that peaks `(DRAWS, stages)` fill, `(DRAWS,)`."""
    devices = stage_devices(plan, problem.cluster)
    reserved = np.array([device.reserved for device in devices])
    whole = np.array([float(device.memory) for device in devices])
    shares = (peaks + reserved) / whole
    return np.asarray(shares.max(1))


def _mean_and_quantile(values: Floats) -> tuple[float, float]:
    quantile = np.quantile(values, QUANTILE)
    return float(values.mean()), float(quantile)


def _at(problem: Problem, length: int) -> Problem:
    """Return the job for sequences of one length."""
    training = replace(problem.training, seq_len=length, lengths=None)
    own = Problem.from_config(replace(problem.config, training=training))
    return replace(own, headroom=problem.headroom)


def _priced(problem: Problem, grid: list[int]) -> Iterator[_Costs]:
    """Yield what the even uniform plans of every table cost at every length."""
    spaces = outer_spaces(problem)
    tables = [build_tables(_at(problem, length), spaces) for length in grid]
    for same in zip(*tables, strict=True):
        table = same[0]
        if table.pipeline.simulated or table.host is not None:
            rule = "must go with plans of 1F1B that the closed form prices, without offloading"
            way = "try cost.pipeline=closed_form space.virtual_stages=1"
            raise ConfigError(f"training.lengths={problem.training.lengths} {rule}; {way}.")
        plans = even_uniform_plans(table)
        endless = torch.full_like(table.capacity, torch.inf)
        roomy = replace(table, capacity=endless)
        plans = plans[evaluate_batch(roomy, plans).feasible]
        costs = [evaluate_batch(own, plans) for own in same]
        passes = [pass_seconds(own, plans).blocking() for own in same]
        forward = torch.stack([own.forward for own in passes])
        backward = torch.stack([own.backward for own in passes])
        both = torch.stack([forward, backward]).numpy()
        seconds = torch.stack([own.iteration_time for own in costs]).numpy()
        memory = torch.stack([own.memory for own in costs]).numpy()
        yield _Costs(table, plans, seconds, both, memory)


def _path_seconds(mixed: Floats, cost: Floats, *, together: bool = False) -> Floats:
    """Return the seconds of 1F1B of micro-batches, `(draws,)`.

    Args:
        mixed: Weights of the priced lengths, `(draws, micro-batches, ranks, G)`.
        cost: Seconds of passes forward and backward, `(2, G, stages)`.
        together: Whether ranks wait in every pass, and not at the end alone.
    """
    passes = np.stack([mixed @ part for part in cost])
    if together:
        passes = passes.max(3, keepdims=True)
    _, draws, count, ranks, stages = passes.shape
    graph = compiled("1f1b", stages, count, 1)
    kind, stage, batch = graph.operations.T
    durations = passes[kind, :, batch, :, stage]
    durations = durations.reshape(len(graph), draws * ranks)
    ends = pass_ends(graph, durations, np.zeros_like(durations))[0]
    last = ends[graph.last].max(0).reshape(draws, ranks)
    return np.asarray(last.max(1))
