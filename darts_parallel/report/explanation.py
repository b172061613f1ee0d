"""Where every byte and second of a plan comes from: per stage and kind of layer, with formula and source.

The lines read the same table and formulas as `evaluate`; their sums are its totals.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from darts_parallel.config import module_data
from darts_parallel.cost import (
    BACKWARD_FACTOR,
    FUSED_BACKWARD_FACTOR,
    TERMS,
    TIME_TERMS,
    StageContext,
    accumulation_seconds,
    evaluate,
    forward_kernels,
    hard_plan,
    held_at_most,
    neighbour_seconds,
    plan_contributions,
    shard_groups,
    state_by_kind,
    table_reading,
    terms_of,
)
from darts_parallel.cost import FORMULAS as TERM_FORMULAS
from darts_parallel.errors import Amounts
from darts_parallel.plans import LayerStrategy, OuterSpace, Plan
from darts_parallel.problem import GIB, LayerSpec, Problem, memory_unit
from darts_parallel.report.format import table_of
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.stages import MORE, MOST_PRICED, notable_stages

FORMULAS: dict[str, Sequence[str]] = TERM_FORMULAS | module_data(__file__)
"""Formula in words and its source, by term."""
PARTS = {
    "parameters": "state",
    "gradients": "state",
    "optimizer state": "state",
    "copies and buffers": "state",
    "activations": "activations",
    "reserved": "reserve",
}
"""Kind of each term of `_PlanTerms.memory`; a term without an entry is workspace."""
OFFLOADED = "offloaded "
"""Before the name of what a device keeps in host memory."""
SIGNS = {"state": "█", "activations": "▓", "workspace": "▒", "reserve": "░"}
"""Character of each part of the memory in a bar."""
BAR = 40
"""Characters of a bar that is full."""
PIPED_WIDTH = 200
"""Columns of a table that goes to a pipe or a file."""


@dataclass(frozen=True)
class Line:
    """One term: bytes of a device, or seconds."""

    stage: int | None
    """None: of the whole iteration."""
    layers: str
    term: str
    value: float
    simulated: bool = False
    """Whether a simulated schedule gave the value."""

    @property
    def described(self) -> Sequence[str]:
        """The formula in words, and its source."""
        key = f"simulated_{self.term}" if self.simulated else self.term
        # terms of the user's own stand in `cost.term`
        return FORMULAS.get(key, ("the user's function of that name", "cost.term"))


@dataclass(frozen=True)
class Explanation:
    """All lines of a plan; by stage they sum to `memory_bytes`, `stage_times_s` and `iteration_time_s`."""

    memory: list[Line]
    """Bytes."""
    micro_batch: list[Line]
    """Seconds of one micro-batch, forward and backward."""
    iteration: list[Line]
    """Seconds of an iteration."""
    num_parameters: int
    """Parameters of the whole model, tied tables counted once."""


MICRO_BATCH_TERMS = (
    "matrix products",
    "attention",
    "streaming kernels",
    "launch overhead",
    "measured compute",
    "gradient accumulation",
    *(term.name for term in TERMS),
    *TIME_TERMS[1:],
)
"""Terms of a micro-batch in the order in which they are printed."""


def explain(problem: Problem, plan: Plan) -> Explanation:
    """Return every term of a plan's predicted bytes and seconds.

    Errors:
        PlanError: the plan does not fit the problem.
    """
    terms = _PlanTerms(problem, plan)
    cost = evaluate(plan, problem)
    iteration = []
    for name, seconds in cost.breakdown_s.items():
        simulated = name == "pipeline_bubble" and terms.table.simulated
        iteration.append(Line(None, "all", name, seconds, simulated))
    return Explanation(
        memory=list(terms.memory()),
        micro_batch=list(terms.micro_batch()),
        iteration=iteration,
        num_parameters=problem.model.num_parameters,
    )


class _Group(NamedTuple):
    """Layers of one stage that are of one kind and strategy."""

    stage: int
    words: str
    layers: list[int]


class _PlanTerms:
    """Reads the terms of one plan."""

    def __init__(self, problem: Problem, plan: Plan):
        self.problem = problem
        self.plan = plan
        self.layers = problem.model.layers
        self.cluster = problem.cluster.arranged(plan.node_order)
        self.devices = self.cluster.stage_devices(plan.pp)
        self.table, self.hard, _ = hard_plan(plan, problem)
        self.choices = self.hard.choices[0]

    def memory(self) -> Iterator[Line]:
        """Yield the bytes of a device by stage, layers and term."""
        plan = self.plan
        kept = self._kept_bytes()
        layers = torch.arange(len(self.choices))
        working = self.table.working[0, layers, self.choices].tolist()
        static = self.table.static[0, layers, self.choices].tolist()
        for group in self._groups():
            state = list(self._state_lines(group))
            yield from state
            rest = sum(static[i] for i in group.layers) - sum(line.value for line in state)
            if rest > 1.0:
                yield Line(group.stage, group.words, "copies and buffers", rest)
            activations = sum(kept[i] for i in group.layers)
            yield Line(group.stage, group.words, "activations", activations)
        added = list(plan_contributions(self.table, self.hard))
        for stage in range(plan.pp):
            mine = [i for i, own in enumerate(plan.stage_of_layer) if own == stage]
            largest = max(mine, key=lambda i: working[i])
            yield Line(stage, self.layers[largest].name, "working", working[largest])
            for own in added:
                for kind, moved in own.memory.items():
                    value = float(moved[0, stage])
                    if abs(value) > 1.0:
                        yield Line(stage, "all", OFFLOADED + kind, value)
            yield Line(stage, "all", "reserved", self.devices[stage].reserved)

    def micro_batch(self) -> Iterator[Line]:
        """Yield the seconds of a micro-batch by stage, layers and term."""
        hard = self.hard
        table = self.table
        for group in self._groups():
            terms = self._layer_seconds(group.layers[0])
            for name in MICRO_BATCH_TERMS:
                if terms.get(name):
                    yield Line(group.stage, group.words, name, len(group.layers) * terms[name])
        added = {own.name: own.forward + own.backward for own in plan_contributions(table, hard)}
        for name, seconds in table_reading(table, hard).own.items():
            if seconds.dim() == 2:
                added[name] = seconds
        for name, by_stage in added.items():
            for stage, value in enumerate(table.by_device(by_stage)[0].tolist()):
                yield Line(stage, "all", name, value)
        inside, across = neighbour_seconds(table, hard, hard.stages())
        inside = table.by_device(inside)
        across = table.by_device(torch.nn.functional.pad(across, (1, 0)))
        for stage in range(self.plan.pp):
            if float(inside[0, stage]):
                yield Line(stage, "between layers", "resharding", float(inside[0, stage]))
            if float(across[0, stage]) and table.pipeline.blocking:
                yield Line(stage, "from the stage before", "p2p", float(across[0, stage]))

    def _groups(self) -> list[_Group]:
        """Return the groups of all stages, by stage and kind."""
        found: dict[tuple[int, str, int, LayerStrategy], list[int]] = {}
        for index, layer in enumerate(self.layers):
            number = self.problem.model.kinds[1][index]
            stage = self.plan.stage_of_layer[index]
            key = (stage, layer.kind, number, self.plan.layers[index])
            found.setdefault(key, []).append(index)
        groups = []
        for key in sorted(found, key=lambda key: key[:2]):
            stage, kind, _, strategy = key
            count = f"{len(found[key])} x " if len(found[key]) > 1 else ""
            groups.append(_Group(stage, f"{count}{kind} {strategy.label()}", found[key]))
        return groups

    def _kept_bytes(self) -> list[float]:
        """Return the activations of every layer that a device keeps for all its micro-batches, bytes."""
        table = self.table
        in_flight = table.in_flight[0]
        between = torch.zeros(table.num_stages)
        if table.moments is not None:
            in_flight, between = held_at_most(table, self.hard)
        kept = []
        for index, choice in enumerate(self.choices):
            chunk = self.plan.chunk_of_layer[index]
            before = in_flight[chunk] * table.activation[0, index, choice]
            after = between[chunk] * table.for_weights[0, index, choice]
            kept.append(float(before) + float(after))
        return kept

    def _state_lines(self, group: _Group) -> Iterator[Line]:
        """Yield the parameters, gradients and optimizer state of a group of layers."""
        rows = []
        for index in group.layers:
            stage = self._context(index)
            own = self._counts_table(index)
            rows.append(state_by_kind(stage, self.layers[index], stage.state, counts_table=own))
        factor = float(self.devices[group.stage].state_factor)
        for term in rows[0]:
            size = sum(held[term] for held in rows)
            yield Line(group.stage, group.words, term, factor * size)

    def _context(self, index: int) -> StageContext:
        """Return the context that prices the strategy of a layer on its stage."""
        plan = self.plan
        topology = self.cluster.stage_topology(plan.stage_of_layer[index], plan.pp)
        strategies = (plan.layers[index],)
        space = OuterSpace(plan.pp, (plan.num_micro_batches,), strategies, plan.cp)
        return StageContext.build(self.problem, topology, space)

    def _counts_table(self, index: int) -> bool:
        """Return whether a layer counts its table; a tied one that its stage holds counts once."""
        return not (self.layers[index].tied and self.plan.pp == 1 and index > 0)

    def _layer_seconds(self, index: int) -> Amounts:
        """Return the seconds of one layer and micro-batch by term, its compute split by kernel."""
        table = self.table
        place = (0, int(table.stage_kind[self.plan.stage_of_layer[index]]), index)
        choice = self.choices[index]
        terms = {name: float(values[place][choice]) for name, values in table.terms.items()}
        stage = self._context(index)
        own = self._counts_table(index)
        shards = shard_groups(stage, self.layers[index], counts_table=own)
        gradients = sum(float(accumulation_seconds(stage, one)) for one in shards)
        compute = terms["compute"] - gradients
        parts = _compute_parts(stage, self.layers[index]) or {"measured compute": compute}
        if self.problem.model.half_blocks:  # a half has its share of the block's launch
            scale = compute / sum(parts.values())
            parts = {name: value * scale for name, value in parts.items()}
        return terms | parts | {"gradient accumulation": gradients}


def _compute_parts(stage: StageContext, layer: LayerSpec) -> Amounts | None:
    """Return the compute seconds of a layer by what its kernels do; None where they are measured."""
    unknown = torch.zeros(())
    if stage.measured_figure(layer, "forward", unknown) is not unknown:
        return None
    by_name = forward_kernels(stage, layer).items()
    parts = {name: sum(map(float, kernels)) for name, kernels in by_name}
    seconds = {name: (1.0 + BACKWARD_FACTOR) * value for name, value in parts.items()}
    extra = FUSED_BACKWARD_FACTOR - BACKWARD_FACTOR if stage.training.fused_attention else 0.0
    seconds["attention"] += extra * parts["attention"]
    if layer.frozen:
        seconds["matrix products"] -= parts["matrix products"]
    for term in terms_of(layer):
        own = term.layer_cost(stage, layer)
        seconds[term.name] = float(own.forward + own.backward)
    return seconds


def memory_parts(problem: Problem, plan: Plan) -> list[Amounts]:
    """Return the bytes of a device of every stage by the keys of `SIGNS`."""
    found = [dict.fromkeys(SIGNS, 0.0) for _ in range(plan.pp)]
    for line in _PlanTerms(problem, plan).memory():
        part = PARTS.get(line.term.removeprefix(OFFLOADED), "workspace")
        found[line.stage or 0][part] += line.value
    return found


def memory_table(outcome: Outcome) -> Table:
    """Return a bar for every stage: what fills a device, as shares of its memory.

    Of many stages the first, last, slowest and fullest have one.
    """
    problem = outcome.problem
    plan = outcome.plan
    cluster = problem.cluster.arranged(plan.node_order)
    memories = [device.memory for device in cluster.stage_devices(plan.pp)]
    unit, size = memory_unit(max(memories))
    shown = {*range(plan.pp)} if plan.pp <= MOST_PRICED else notable_stages(outcome.cost)
    columns = [f"{sign} {part}>" for part, sign in SIGNS.items()]
    hidden = plan.pp - len(shown)
    table = table_of(None, "k>", *columns, f"{unit}>", f"{hidden}{MORE}" if hidden else "")
    for stage, parts in enumerate(memory_parts(problem, plan)):
        capacity = memories[stage]
        numbers = [f"{value / size:.1f}" for value in (*parts.values(), capacity)]
        if stage in shown:
            table.add_row(str(stage), *numbers, _bar(parts, capacity))
    return table


def _bar(parts: Amounts, capacity: float) -> str:
    """Draw the parts of a device's memory, each by its character; the bar is full where they exceed it."""
    capacity = max(capacity, sum(parts.values()))
    bar = ""
    filled = 0.0
    for part, sign in SIGNS.items():
        filled += parts[part]
        bar += sign * (round(BAR * filled / capacity) - len(bar))
    return bar.ljust(BAR, "·")


def render_explanation(explanation: Explanation, console: Console) -> None:
    """Print all lines with a sum under each stage; a pipe gets lines without breaks."""
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    console.print(f"\nThe model has {explanation.num_parameters:,} parameters.", highlight=False)
    memory = _lines_table("Memory of a device, by stage", explanation.memory, "GiB", GIB)
    micro_batch = explanation.micro_batch
    console.print(memory)
    console.print(_lines_table("Seconds of a micro-batch, by stage", micro_batch, "ms", 1e-3))
    console.print(_lines_table("Seconds of an iteration", explanation.iteration, "s", 1.0))


def _lines_table(title: str, lines: list[Line], unit: str, size: float) -> Table:
    """Return a table of terms, with a sum under each stage; of whole seconds with six decimals."""
    digits = 6 if size == 1.0 else 4
    words = ["stage", "layers", "term", f"{unit}>"]
    table = table_of(f"\n{title}", *words, "formula", "source")
    for stage in dict.fromkeys(line.stage for line in lines):
        mine = [line for line in lines if line.stage == stage]
        name = "" if stage is None else str(stage)
        for line in mine:
            term = line.term.replace("_", " ")
            value = f"{line.value / size:.{digits}f}"
            table.add_row(name, line.layers, term, value, *line.described)
        total = f"{sum(line.value for line in mine) / size:.{digits}f}"
        table.add_row(name, "", "sum", total, "", "", style="bold")
    return table
