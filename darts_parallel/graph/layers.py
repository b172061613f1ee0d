"""A captured block as a layer of the main problem: its operator plans are the layer's strategies.

For every tensor-parallel degree of a node, without and with sequence parallelism (ends replicated; ends split
along the tokens, gathered inputs kept as slices), the programme plans the block on one sequence. That plan is
priced on one and on two sequences; a micro-batch of more takes as much longer for each further one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import hypot
from typing import Any

from darts_parallel.config import Config
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.graph._mesh import DeviceMeshSpec
from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._space import STATE_BYTES, GraphSpace
from darts_parallel.graph.capture import capture_module, load_module, make_inputs
from darts_parallel.graph.operators import ATTENTION, INPUT, OUTPUT, PARAMETER, ModuleGraph
from darts_parallel.graph.plan import BACKWARD, FORWARD, WIDTHS, GraphPlan
from darts_parallel.plans import divisors
from darts_parallel.problem import AttentionCore, Cluster, Gemm, LayerSpec, Measured, MeasuredTimes

KIND = "module"
SPLITS = {"columns": "column", "inner": "row"}
"""Words of the cost model for what a linear layer splits."""
CANDIDATES = 8
"""Sizes of weights that are tried as the hidden size, the most frequent first."""
SHORT = 64
"""Tokens of the sequence on which a hidden size is tried."""
SIZES = tuple(2.0**k for k in range(13))
"""Sequences of the micro-batches that are priced."""


def captured_block(config: Config, cluster: Cluster) -> tuple[LayerSpec, MeasuredTimes]:
    """Return a module's block as a layer, and its seconds and bytes on every device of a cluster.

    Errors:
        ConfigError: the module cannot be made, or its first input is none of the job's.
        UnsupportedError: it does not export, or the precision is below 16 bits.
    """
    job = config.training
    model = config.model
    path = model.path or ""
    if job.precision not in WIDTHS:
        raise UnsupportedError(
            f"training.precision={job.precision} cannot price blocks of model.inputs; try bf16."
        )
    shapes = _listed(model.inputs)
    first = _listed(shapes[0]) if shapes else []
    wanted = [job.seq_len, model.hidden_size]
    if len(first) != 3 or first[1:] != wanted:
        raise ConfigError(
            f"model.inputs={model.inputs} must begin with [sequences, training.seq_len, model.hidden_size]; "
            f"try [{[1, *wanted]}]."
        )
    times = {}
    for group in reversed(cluster.groups):
        name = group.device.name
        node = Cluster(name, (replace(group, count=1),), cluster.inter_node)
        job_on_node = (json.dumps(shapes), job.precision, job.launches, node)
        layer, times[name] = _on_device(path, *job_on_node)
    return layer, MeasuredTimes(f"model.path={path}", times)


def block_keys(tokens: int | str, hidden: int) -> list[str]:
    """Return the keys of `model=module` for a block of a hidden size."""
    return [f"model.inputs=[[1,{tokens},{hidden}]]", f"model.hidden_size={hidden}"]


def command_lines(path: str, graph: ModuleGraph) -> list[str]:
    """Return the main command that plans a stack of the module, where it is a block of a Transformer."""
    inputs = graph.of_kind(INPUT)
    if len(inputs) != 1:
        return []
    first = graph.values[inputs[0].outputs[0]]
    last = graph.values[graph.of_kind(OUTPUT)[0].inputs[0]]
    block = len(first.shape) == 3 and first.floating
    if not block or first.shape != last.shape:
        return []
    _, tokens, hidden = first.shape
    keys = " ".join(block_keys(tokens, hidden))
    job = "model.num_layers=32 model.vocab_size=32000"
    return [
        f"a stack of it: darts-parallel model=module model.path={path} {keys} {job} "
        f"training.seq_len={tokens}"
    ]


def derived_keys(arguments: Sequence[str]) -> list[str]:
    """Return the keys of `model=module` that are not given, as the module itself says them.

    The hidden size is the size of a weight with which the module makes outputs like its input.

    Errors:
        UnsupportedError: no size does.
    """
    given = dict(one.partition("=")[::2] for one in arguments)
    path = given.get("model.path", "")
    if given.get("model") != "module" or not path or "model.inputs" in given:
        return []
    module = load_module(path, "model.path")
    sizes = Counter(size for weight in module.parameters() for size in weight.shape)
    for hidden, _ in sizes.most_common(CANDIDATES):
        try:
            graph = capture_module(module, make_inputs([[1, SHORT, hidden]]))
        except UnsupportedError:
            continue
        if graph.shapes(graph.of_kind(OUTPUT)[0].inputs) == [(1, SHORT, hidden)]:
            keys = block_keys("${training.seq_len}", hidden)
            return [key for key in keys if key.partition("=")[0] not in given]
    raise UnsupportedError(
        f"model.path={path}: no size of its weights is the hidden size of a block; "
        f"try {' '.join(block_keys('${training.seq_len}', 4096))} with its own size."
    )


def _listed(value: object) -> list[Any]:
    """Return a list's items; none of another type."""
    return list(value) if isinstance(value, (list, tuple)) else []


Figures = dict[tuple[str, int], Measured]
"""Figures of a block on a node, by kind and tensor-parallel degree."""


@lru_cache(maxsize=8)
def _graphs(path: str, shapes: str) -> tuple[ModuleGraph, ...]:
    """Capture the block on micro-batches of one and of two sequences.

    Errors:
        UnsupportedError: it does not export, or no second block takes what it returns.
    """
    module = load_module(path, "model.path")
    graphs = []
    for sequences in (1, 2):
        sized = [[sequences, *others] for _, *others in json.loads(shapes)]
        graph = capture_module(module, make_inputs(sized))
        made = graph.shapes(graph.of_kind(OUTPUT)[0].inputs)
        if made[:1] != [tuple(sized[0])]:
            raise UnsupportedError(
                f"model.path={path} returns {made} for the input {sized[0]}, and blocks are stacked: both "
                "must be equal; try darts-parallel graph, which plans any module."
            )
        graphs.append(graph)
    return tuple(graphs)


@lru_cache(maxsize=64)
def _on_device(
    path: str,
    shapes: str,
    precision: str,
    launches: float,
    cluster: Cluster,
) -> tuple[LayerSpec, Figures]:
    """Plan and price the block on one node: its sizes, and figures by kind and tensor-parallel degree."""
    graphs = _graphs(path, shapes)
    gpus = cluster.groups[0].gpus
    found: Figures = {}
    plans: list[GraphPlan] = []
    for tp in divisors(gpus):
        mesh = DeviceMeshSpec((tp,) if tp > 1 else (), cluster)
        plain = _plans(graphs, mesh, WIDTHS[precision], "replicated")
        found[KIND, tp] = _measured(plain, launches)
        plans.append(plain[0])
        if tp > 1:
            split = _plans(graphs, mesh, WIDTHS[precision], "d1")
            found[f"{KIND}+sp", tp] = _measured(split, launches)
    return _spec(plans[0], plans[-1]), found


def _plans(
    graphs: Sequence[ModuleGraph],
    mesh: DeviceMeshSpec,
    width: int,
    ends: str,
) -> tuple[GraphPlan, GraphPlan]:
    """Plan one sequence, and price that plan on one and on two."""
    sliced = ends == "d1"
    small, large = (
        GraphSpace(graph, mesh, width, ends=ends, sliced=sliced, bucketed=sliced)
        for graph in graphs
    )
    plan = GraphPlan(small, GraphProgramme(small).solve().assignment)
    # operators have the same names and states in both batches
    chosen = [plan.choice(group.operators[0]) for group in large.groups]
    pairs = zip(large.by_states, chosen, strict=True)
    same = tuple(known.get(choice.states, 0) for known, choice in pairs)
    return plan, GraphPlan(large, same)


def _measured(plans: Sequence[GraphPlan], launches: float) -> Measured:
    """Return the figures of micro-batches: the kernels of one and two sequences give those of more.

    Launches and gaps take the same time for any size, so they join the kernels of every size.
    """
    one, two = map(plan_figures, plans)
    device = plans[0].space.mesh.device
    launch = launches * float(device.layer_overhead)
    gap = float(device.kernel_gap)
    rows = []
    for size in SIZES:
        pairs = zip(one, two, strict=True)
        forward, backward, *others = (a + (b - a) * (size - 1.0) for a, b in pairs)
        passes = hypot(forward, launch) + gap, hypot(backward, 2.0 * launch) + 2.0 * gap
        rows.append((*passes, *others))
    return Measured(SIZES, *zip(*rows, strict=True))


def plan_figures(plan: GraphPlan) -> list[float]:
    """Return kernels' seconds forward and backward, kept bytes, collectives' seconds of both passes."""
    space = plan.space
    whole = forward = 0.0
    for op in space.graph.computing:
        choice = plan.choice(op)
        whole += choice.seconds - sum(map(space.mesh.seconds, choice.inner))
        forward += space.operator_seconds(op, choice.inputs, choice.outputs, training=False)
    sent = {FORWARD: 0.0, BACKWARD: 0.0}
    for one in plan.collectives:
        # gradients of weights that all ranks have are summed once an iteration, with those of data
        # parallelism; slices are gathered next to products, in the share of collectives that is
        # calibrated on Megatron-LM's runs
        if (one.of, one.when) != (PARAMETER, BACKWARD) and not one.again:
            sent[one.when] += one.seconds
    kept = space.memory_bytes(plan.assignment, weights=False)
    return [forward, whole - forward, kept, *sent.values()]


def _parts(
    ranks: int,
    alone: float,
    shared: float,
) -> tuple[float, float]:
    """Return the part of a figure that ranks divide, and the part that each rank has whole.

    Args:
        alone: The figure on one rank.
        shared: On each of `ranks`.
    """
    divided = alone
    if ranks > 1:
        divided = (alone - shared) / (1.0 - 1.0 / ranks)
    return divided, alone - divided


def _spec(alone: GraphPlan, shared: GraphPlan) -> LayerSpec:
    """Read the layer off its plans on one rank and on most ranks: what is divided, and what is not.

    Of its products FLOP and the weights' share of backward are counted.
    """
    ranks = max(shared.space.mesh.ranks, default=1)
    graph = alone.space.graph
    count, hidden = graph.shapes(graph.of_kind(INPUT)[0].outputs)[0][-2:]
    kept = []
    elements = []
    for plan in (alone, shared):
        kept.append(plan.space.memory_bytes(plan.assignment, weights=False))
        states = plan.space.memory_bytes(plan.assignment) - kept[-1]
        elements.append(states / STATE_BYTES)
    divided, own = _parts(ranks, *elements)
    inside, outside = _parts(ranks, *kept)
    per_token = 2.0 / alone.space.width / count
    layer = LayerSpec("", KIND, tuple(_weight_products(shared)), tuple(_attention_cores(graph)))
    layer = replace(layer, sharded_parameters=round(divided), replicated_parameters=round(own))
    return replace(
        layer,
        replicated_activation_bytes=per_token * outside,
        sharded_activation_bytes=per_token * inside,
        output_elements=hidden,
        recomputable=True,
        captured=True,
    )


def _weight_products(plan: GraphPlan) -> Iterator[Gemm]:
    graph = plan.space.graph
    for op in graph.computing:
        if op.op == "linear" and graph.is_parameter(op.inputs[1]):
            labels = plan.choice(op).labels
            split = SPLITS.get(labels[0], "replicated") if labels else "replicated"
            rows, columns = graph.values[op.inputs[1]].shape
            yield Gemm(rows, columns, split)


def _attention_cores(graph: ModuleGraph) -> Iterator[AttentionCore]:
    for op in graph.of_kind(ATTENTION):
        q, k = graph.shapes(op.inputs[:2])
        causal = bool(op.argument("is_causal", False))
        yield AttentionCore(q[-3], k[-3], q[-1], causal)
