"""Where every byte and second of a plan comes from: per stage and kind of layer, with formula and source.

The lines read the same table and formulas as `evaluate`; their sums are its totals.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from darts_parallel.cost import (
    BACKWARD_FACTOR,
    FUSED_BACKWARD_FACTOR,
    TERMS,
    TIME_TERMS,
    ShardGroup,
    StageContext,
    StateBytes,
    accumulation_seconds,
    evaluate,
    forward_kernels,
    hard_plan,
    held_at_most,
    neighbour_seconds,
    plan_contributions,
    shard_groups,
    static_bytes,
    terms_of,
)
from darts_parallel.cost import FORMULAS as TERM_FORMULAS
from darts_parallel.plans import LayerStrategy, OuterSpace, Plan
from darts_parallel.problem import GIB, Device, Problem, memory_unit
from darts_parallel.report.format import table_of

KORTHIKANTI = "Korthikanti et al. 2022, eq. 1-6"
ZERO = "Rajbhandari et al. 2020, section 3"
RING = "Thakur et al. 2005 (ring collectives)"
OVERLAP = "exposed part: Qiao et al. 2021, eq. 11"
ROOFLINE = "roofline, Williams et al. 2009"
FORMULAS: dict[str, tuple[str, str]] = {
    # bytes
    "parameters": ("state_factor x parameters x bytes each / shards (ZeRO-3)", ZERO),
    "gradients": ("state_factor x parameters x bytes each / shards (ZeRO-2, 3)", ZERO),
    "optimizer state": ("state_factor x parameters x bytes each / shards (ZeRO-1, 2, 3)", ZERO),
    "activations": ("kept per micro-batch x micro-batches in flight", KORTHIKANTI),
    "working": (
        "largest layer: recomputed activations, gathered weights",
        "memory.py, largest layer",
    ),
    "reserved": ("constant of the device", "cluster.devices.reserved_GiB"),
    # seconds of a micro-batch
    "matrix products": ("3 x 2 tokens x out x in / (peak x e x saturation)", ROOFLINE),
    "attention": ("scores and weighted sum x 3.5 if fused, x 3 if not", "Dao 2023, section 4.1"),
    "streaming kernels": ("3 x streaming_factor x bytes / memory bandwidth", ROOFLINE),
    "gradient accumulation": (
        "(2 x gradient + parameter) bytes / memory bandwidth",
        "stream model",
    ),
    "launch overhead": ("3 x overhead of a layer", "cluster.devices.layer_overhead_us"),
    "measured compute": ("forward + backward as measured", "cost.profile"),
    "recompute": ("forward again in backward", KORTHIKANTI),
    "tensor_parallel": ("all-reduces x 2 (n-1)/n bytes / bandwidth + latencies", RING),
    "context_parallel": (
        "keys and values gathered during attention",
        "Dubey et al. 2024, section 3.3.2",
    ),
    "sharding": ("ZeRO-2, 3 collectives during compute", OVERLAP),
    "resharding": ("missing bytes / link bandwidth + latencies", "resharding.py"),
    "p2p": ("2 x bytes / link bandwidth + 2 latencies", "alpha-beta model"),
    # seconds of an iteration
    "compute": ("micro-batches x the stage's compute", ROOFLINE),
    "p2p_and_resharding": ("micro-batches x the stage's messages", "alpha-beta model"),
    "pipeline_bubble": (
        "sum of the other stages' micro-batch",
        "1F1B, Narayanan et al. 2021, section 2.2",
    ),
    "gradient_sync": ("gradients reduced once, during backward", OVERLAP),
    "optimizer": ("(2 x (state + gradient) + parameter) bytes / bandwidth", "stream model"),
    "tied_embedding_sync": (
        "all-reduce of the tied table's gradient",
        "Megatron-LM's embedding group",
    ),
} | TERM_FORMULAS
"""Formula in words and its source, by term."""
PARTS = {
    "parameters": "state",
    "gradients": "state",
    "optimizer state": "state",
    "activations": "activations",
    "reserved": "reserve",
}
"""Terms of `memory_lines` by what they are; all others are workspace."""
SIGNS, BAR = {"state": "█", "activations": "▓", "workspace": "▒", "reserve": "░"}, 40
"""Signs of what fills the memory by its name, and their number in a bar."""
PIPED_WIDTH = 200
SIMULATED_BUBBLE = (
    "end of the schedule - micro-batches x stage",
    "longest path of the simulated schedule",
)


@dataclass(frozen=True)
class Line:
    """One term: bytes of a device, or seconds."""

    stage: int | None
    """None: of the whole iteration."""
    layers: str
    term: str
    formula: str
    source: str
    value: float


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


def explain(problem: Problem, plan: Plan) -> Explanation:
    """Return every term of a plan's predicted bytes and seconds.

    Errors:
        PlanError: the plan does not fit the problem.
    """
    table, _, _ = hard_plan(plan, problem)
    cost = evaluate(plan, problem)
    bubble = SIMULATED_BUBBLE if table.pipeline.simulated else FORMULAS["pipeline_bubble"]
    iteration = []
    for name, seconds in cost.breakdown_s.items():
        formula, source = bubble if name == "pipeline_bubble" else FORMULAS[name]
        iteration.append(Line(None, "all", name, formula, source, seconds))
    return Explanation(
        memory=list(memory_lines(problem, plan)),
        micro_batch=list(_micro_batch_lines(problem, plan)),
        iteration=iteration,
        num_parameters=problem.model.num_parameters,
    )


def _line(stage: int, layers: str, term: str, value: float) -> Line:
    return Line(stage, layers, term, *FORMULAS[term], value)


def _groups(problem: Problem, plan: Plan) -> Iterator[tuple[int, str, list[int]]]:
    """Return the layers of a stage that are of one kind and strategy: stage, words, positions."""
    found: dict[tuple[int, str, int, LayerStrategy], list[int]] = {}
    model = problem.model
    for index, (own, number, strategy) in enumerate(
        zip(model.layers, model.kinds[1], plan.layers, strict=True)
    ):
        found.setdefault((plan.stage_of_layer[index], own.kind, number, strategy), []).append(index)
    for (stage, kind, _, strategy), indices in sorted(
        found.items(), key=lambda item: (item[0][0], item[1][0])
    ):
        count = f"{len(indices)} x " if len(indices) > 1 else ""
        yield stage, f"{count}{kind} {strategy.label()}", indices


def memory_lines(problem: Problem, plan: Plan) -> Iterator[Line]:
    """Yield the bytes of a device by stage, layers and term."""
    table, hard, _ = hard_plan(plan, problem)
    stages = plan.stage_of_layer
    chosen, in_flight, between = hard.choices[0], table.in_flight[0], torch.zeros(table.num_stages)
    if table.moments is not None:
        in_flight, between = held_at_most(table, hard)
    state = _context(problem, plan, 0).state
    parts = {
        "parameters": StateBytes(state.parameter, 0.0, 0.0),
        "gradients": StateBytes(0.0, state.gradient, 0.0),
        "optimizer state": StateBytes(0.0, 0.0, state.optimizer),
    }
    working = [float(table.working[0, i, chosen[i]]) for i in range(len(chosen))]
    added = list(plan_contributions(table, hard))
    for stage, words, indices in _groups(problem, plan):
        zero = _context(problem, plan, indices[0]).choices.zero_stage
        groups = [group for i in indices for group in _shards(problem, plan, i)]
        for term, part in parts.items():
            total = sum(
                float(static_bytes(g.parameters, g.shards, zero, g.held(part))) for g in groups
            )
            yield _line(
                stage, words, term, float(_device(problem, plan, stage).state_factor) * total
            )
        chunks = plan.chunk_of_layer
        kept = sum(
            float(in_flight[chunks[i]] * table.activation[0, i, chosen[i]])
            + float(between[chunks[i]] * table.for_weights[0, i, chosen[i]])
            for i in indices
        )
        yield _line(stage, words, "activations", kept)
    for stage in range(plan.pp):
        mine = [i for i, own in enumerate(stages) if own == stage]
        largest = max(mine, key=lambda i: working[i])
        yield _line(stage, problem.model.layers[largest].name, "working", working[largest])
        yield from (
            _line(stage, "all", own.memory_name, float(own.memory[0, stage])) for own in added
        )
        yield _line(stage, "all", "reserved", _device(problem, plan, stage).reserved)


def memory_parts(problem: Problem, plan: Plan) -> list[dict[str, float]]:
    """Return the bytes of a device of every stage by the keys of `SIGNS`."""
    found = [dict.fromkeys(SIGNS, 0.0) for _ in range(plan.pp)]
    for line in memory_lines(problem, plan):
        found[line.stage or 0][PARTS.get(line.term, "workspace")] += line.value
    return found


def memory_table(problem: Problem, plan: Plan) -> Table:
    """Return a bar for every stage: what fills a device, as shares of its memory."""
    most = max(_device(problem, plan, stage).memory for stage in range(plan.pp))
    unit, size = memory_unit(most)
    columns = [(f"{sign} {part}", "right") for part, sign in SIGNS.items()]
    table = table_of(
        f"\nMemory of a device, {unit}", ("k", "right"), *columns, ("of", "right"), ("", "left")
    )
    for stage, parts in enumerate(memory_parts(problem, plan)):
        capacity, bar, filled = _device(problem, plan, stage).memory, "", 0.0
        for part, sign in SIGNS.items():
            filled += parts[part]
            bar += sign * (round(BAR * filled / capacity) - len(bar))
        numbers = (f"{value / size:.1f}" for value in (*parts.values(), capacity))
        table.add_row(str(stage), *numbers, bar.ljust(BAR, "·"))
    return table


def _device(problem: Problem, plan: Plan, stage: int) -> Device:
    return problem.cluster.arranged(plan.node_order).stage_group(stage, plan.pp).device


def _context(problem: Problem, plan: Plan, index: int) -> StageContext:
    """Return what prices the strategy of a layer on its stage."""
    strategies, counts = (plan.layers[index],), (plan.num_micro_batches,)
    topology = problem.cluster.arranged(plan.node_order).stage_topology(
        plan.stage_of_layer[index], plan.pp
    )
    return StageContext.build(problem, topology, OuterSpace(plan.pp, counts, strategies, plan.cp))


def _shards(problem: Problem, plan: Plan, index: int) -> list[ShardGroup]:
    """Return the parameters of a layer on a rank; a tied table that its stage holds already counts once."""
    layer = problem.model.layers[index]
    own = not (layer.tied and plan.pp == 1 and index > 0)
    return shard_groups(_context(problem, plan, index), layer, counts_table=own)


def _micro_batch_lines(problem: Problem, plan: Plan) -> Iterator[Line]:
    table, hard, _ = hard_plan(plan, problem)
    kinds, chosen = table.stage_kind, hard.choices[0]
    for stage, words, indices in _groups(problem, plan):
        index, kind = indices[0], int(kinds[stage])
        terms = {
            name: float(table.terms[name][0, kind, index, chosen[index]]) for name in table.terms
        }
        gradients = _accumulation(problem, plan, index)
        compute = terms["compute"] - gradients
        parts = _compute_parts(problem, plan, index) or {"measured compute": compute}
        if problem.model.half_blocks:  # a half has its share of the block's launch
            parts = {name: value * compute / sum(parts.values()) for name, value in parts.items()}
        terms |= parts | {"gradient accumulation": gradients}
        names = (
            "matrix products",
            "attention",
            "streaming kernels",
            "launch overhead",
            "measured compute",
            "gradient accumulation",
            *(term.name for term in TERMS),
            *TIME_TERMS[1:],
        )
        for name in names:
            if terms.get(name):
                yield _line(stage, words, name, len(indices) * terms[name])
    inside, across = neighbour_seconds(table, hard, hard.stages())
    for own in plan_contributions(table, hard):
        extra_seconds = table.by_device(own.forward + own.backward)[0].tolist()
        yield from (
            _line(stage, "all", own.name, seconds) for stage, seconds in enumerate(extra_seconds)
        )
    inside = table.by_device(inside)
    across = table.by_device(torch.nn.functional.pad(across, (1, 0)))
    for stage in range(plan.pp):
        if float(inside[0, stage]):
            yield _line(stage, "between layers", "resharding", float(inside[0, stage]))
        if float(across[0, stage]) and table.pipeline.blocking:
            yield _line(stage, "from the stage before", "p2p", float(across[0, stage]))


def _compute_parts(problem: Problem, plan: Plan, index: int) -> dict[str, float] | None:
    """Return the compute seconds of a layer by what its kernels do; None where they are measured."""
    layer, stage = problem.model.layers[index], _context(problem, plan, index)
    if stage.measured_figure(layer, "forward", unknown := torch.zeros(())) is not unknown:
        return None
    parts = {name: sum(map(float, alike)) for name, alike in forward_kernels(stage, layer).items()}
    seconds = {name: (1.0 + BACKWARD_FACTOR) * value for name, value in parts.items()}
    extra = FUSED_BACKWARD_FACTOR - BACKWARD_FACTOR if stage.training.fused_attention else 0.0
    seconds["attention"] += extra * parts["attention"]
    if layer.frozen:
        seconds["matrix products"] -= parts["matrix products"]
    for term in terms_of(layer):
        own = term.layer_cost(stage, layer)
        seconds[term.name] = float(own.forward + own.backward)
    return seconds


def _accumulation(problem: Problem, plan: Plan, index: int) -> float:
    """Return the seconds to add a layer's gradients of one micro-batch to those before it."""
    stage = _context(problem, plan, index)
    return sum(float(accumulation_seconds(stage, part)) for part in _shards(problem, plan, index))


def render_explanation(explanation: Explanation, console: Console) -> None:
    """Print all lines, a sum under each stage; where nobody's window sets the width, unbroken."""
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    console.print(f"\nThe model has {explanation.num_parameters:,} parameters.", highlight=False)
    sections = (
        ("Memory of a device, by stage", explanation.memory, "GiB", GIB, 4),
        ("Seconds of a micro-batch, by stage", explanation.micro_batch, "ms", 1e-3, 4),
        ("Seconds of an iteration", explanation.iteration, "s", 1.0, 6),
    )
    for title, lines, unit, scale, digits in sections:
        table = Table(
            title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        for header in ("stage", "layers", "term", unit, "formula", "source"):
            table.add_column(header, justify="right" if header == unit else "left", overflow="fold")
        for stage in dict.fromkeys(line.stage for line in lines):
            mine = [line for line in lines if line.stage == stage]
            name = "" if stage is None else str(stage)
            for line in mine:
                value = f"{line.value / scale:.{digits}f}"
                term = line.term.replace("_", " ")
                table.add_row(name, line.layers, term, value, line.formula, line.source)
            total = f"{sum(line.value for line in mine) / scale:.{digits}f}"
            table.add_row(name, "", "sum", total, "", "", style="bold")
        console.print(table)
