"""The table of stages: ranks, layers, strategies, seconds and memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from darts_parallel.cost import CostBreakdown
from darts_parallel.plans import Plan, counted
from darts_parallel.problem import memory_unit
from darts_parallel.report.format import (
    kind_counts,
    layer_ranges,
    one_line,
    percent,
    rank_ranges,
    run_lengths,
    seconds,
    table_of,
)
from darts_parallel.report.outcome import Outcome

MOST_STAGES = 8
"""Different lines of stages up to which all are printed."""
MOST_PRICED = 4
"""Lines up to which `darts-parallel price`, which draws the memory, too, prints all."""
MORE = " more in report.html"
NOTABLE_RISK = 0.05
"""Chance of running out of memory from which on the table says it."""
MEMORY_WARNING = 0.95


class _StageLine(NamedTuple):
    """A line of the table of stages; stages that compute alike share it, whatever bytes they hold."""

    device: str
    counts: tuple[tuple[str, int], ...]
    """Layers of every kind."""
    strategies: str
    time: str


def stage_table(outcome: Outcome, *, every: bool = False) -> Table:
    """Return a line for all stages that compute alike, with the memory of the fullest of them.

    Of many lines the first, last, slowest and fullest are left.

    Args:
        every: Each stage has a line of its own.
    """
    cost = outcome.cost
    lines: dict[tuple[int, _StageLine], list[int]] = {}
    for stage in range(outcome.plan.pp):
        line = _stage_line(outcome, stage, every)
        lines.setdefault((stage * every, line), []).append(stage)
    rows = [(line, stages) for (_, line), stages in lines.items()]
    full = cost.fullness
    if len(rows) > (MOST_PRICED if outcome.problem.config.price else MOST_STAGES) and not every:
        shown = notable_stages(cost)
        rows = [row for row in rows if shown & set(row[1])]
    timed = ["micro-batch>"] * bool(cost.stage_times_s)
    columns = ["stage>", "ranks>", "layers", "strategies", *timed, "memory>"]
    risks = [] if outcome.sure is None else outcome.sure.out_of_memory
    risky = max(risks, default=0.0) >= NOTABLE_RISK
    table = table_of("\nStages" if every else None, *columns, *["risk>"] * risky)
    for line, stages in rows:
        fullest = max(stages, key=lambda stage: full[stage])
        cells = _stage_cells(outcome, line, stages)
        cells.append(_memory_cell(outcome, fullest, alone=len({full[k] for k in stages}) == 1))
        if risky:
            cells.append(percent(risks[fullest], 0))
        table.add_row(*cells)
    hidden = len(lines) - len(rows)
    if hidden:
        table.add_row("", "", one_line(f"{hidden}{MORE}"), style="dim")
    return table


def notable_stages(cost: CostBreakdown) -> set[int]:
    """Return the first, last, slowest and fullest stage."""
    full = cost.fullness
    times = cost.stage_times_s
    slowest = [times.index(max(times))] if times else []
    return {0, len(full) - 1, full.index(max(full)), *slowest}


def _stage_line(outcome: Outcome, stage: int, every: bool) -> _StageLine:
    """Return the words of the report for a stage."""
    plan = outcome.plan
    cost = outcome.cost
    layers = _layers_of(plan, [stage])
    kinds = Counter(outcome.problem.model.layers[i].kind for i in layers)
    time = seconds(cost.stage_times_s[stage]) if cost.stage_times_s else ""
    cluster = outcome.problem.cluster.arranged(plan.node_order)
    device = "" if cluster.homogeneous else f" {cluster.stage_group(stage, plan.pp).device.name}"
    words = run_lengths if every else counted
    strategies = words([plan.layers[i] for i in layers])
    return _StageLine(device, tuple(kinds.items()), strategies, time)


def _memory_cell(outcome: Outcome, stage: int, *, alone: bool) -> Text:
    """Return the memory of a stage; `≤` where stages with less share its line."""
    capacity = outcome.cost.capacity_bytes[stage]
    used = outcome.cost.memory_bytes[stage]
    unit, unit_bytes = memory_unit(capacity)
    most = "" if alone else "≤ "
    share = used / capacity
    words = f"{most}{used / unit_bytes:.1f} {unit} {percent(share, 0):>5}"
    return Text(words, "red" if share > 1 else "yellow" if share > MEMORY_WARNING else "")


def _stage_cells(outcome: Outcome, line: _StageLine, stages: Sequence[int]) -> list[str | Text]:
    """Return the cells of stages that share a line, up to their memory."""
    plan = outcome.plan
    cost = outcome.cost
    first = stages[0]
    cluster = outcome.problem.cluster.arranged(plan.node_order)
    size = cluster.num_devices // plan.pp
    ranks = [cluster.pipeline_ranks[k * size + i] for k in stages for i in range(size)]
    held = _layers_of(plan, stages)
    kinds = [outcome.problem.model.layers[i].kind for i in held]
    layers = one_line(_names(outcome, held) + kind_counts(kinds))
    cells: list[str | Text] = [
        rank_ranges(stages),
        rank_ranges(ranks) + line.device,
        layers,
        one_line(line.strategies),
    ]
    if cost.stage_times_s:
        slowest = cost.stage_times_s[first] == max(cost.stage_times_s)
        cells.append(Text(line.time, "bold" if slowest else ""))
    return cells


def _layers_of(plan: Plan, stages: Iterable[int]) -> list[int]:
    """Return the layers of some stages, in the order of the model."""
    return [layer for layer, stage in enumerate(plan.stage_of_layer) if stage in stages]


def _names(outcome: Outcome, layers: Sequence[int]) -> str:
    """Return the names of layers, a range for every run without a hole."""
    runs = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    every = outcome.problem.model.layer_names
    names = ([every[layer] for _, layer in run] for _, run in runs)
    return "; ".join(map(layer_ranges, names))
