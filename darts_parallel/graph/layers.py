"""A captured block as a layer of the main problem: its operator plans are the layer's strategies.

For every tensor-parallel degree of a node, without and with sequence parallelism (ends replicated; ends split
along the tokens, gathered inputs kept as slices), the programme plans the block on one sequence. That plan is
priced on one and on two sequences; a micro-batch of more takes as much longer for each further one.
"""

import json
from dataclasses import replace
from functools import lru_cache

from darts_parallel.config import Config
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.graph._layouts import DeviceMeshSpec
from darts_parallel.graph._programme import GraphProgramme
from darts_parallel.graph._space import STATE_BYTES, GraphSpace
from darts_parallel.graph.capture import capture_module, load_module, make_inputs
from darts_parallel.graph.operators import PARAMETER, ModuleGraph
from darts_parallel.graph.plan import WIDTHS, GraphPlan
from darts_parallel.problem import AttentionCore, Cluster, Gemm, LayerSpec, Measured, MeasuredTimes

KIND = "module"
SPLITS = {"columns": "column", "inner": "row"}
"""Words of the cost model for what a linear layer splits."""
FAR = 4096.0
"""Sequences of a micro-batch up to which its seconds and bytes follow one line."""


def captured_block(config: Config, cluster: Cluster) -> tuple[LayerSpec, MeasuredTimes]:
    """Return a module's block as a layer, and its seconds and bytes on every device of a cluster.

    Errors:
        ConfigError: the module cannot be made, or its first input is none of the job's.
        UnsupportedError: it does not export, or the precision is below 16 bits.
    """
    job, model, path = config.training, config.model, config.model.path or ""
    if job.precision not in WIDTHS:
        raise UnsupportedError(
            f"training.precision={job.precision} cannot price blocks of model.inputs; try bf16."
        )
    shapes = list(model.inputs) if isinstance(model.inputs, (list, tuple)) else []
    first = list(shapes[0]) if shapes and isinstance(shapes[0], (list, tuple)) else []
    wanted = [job.seq_len, model.hidden_size]
    if len(first) != 3 or first[1:] != wanted:
        raise ConfigError(
            f"model.inputs={model.inputs} must begin with [sequences, training.seq_len, model.hidden_size]; "
            f"try [{[1, *wanted]}]."
        )
    times, spec, given = {}, None, json.dumps(shapes)
    for group in reversed(cluster.groups):
        own = Cluster(group.device.name, (replace(group, count=1),), cluster.inter_node)
        spec, times[group.device.name] = _on_device(path, given, job.precision, job.launches, own)
    assert spec is not None
    return spec, MeasuredTimes(f"model.path={path}", times)


@lru_cache(maxsize=8)
def _graphs(path: str, shapes: str) -> tuple[ModuleGraph, ...]:
    """Capture the block on micro-batches of one and of two sequences."""
    module, own = load_module(path, "model.path"), json.loads(shapes)
    sized = [[[b, *shape[1:]] for shape in own] for b in (1, 2)]
    return tuple(capture_module(module, make_inputs(inputs)) for inputs in sized)


@lru_cache(maxsize=64)
def _on_device(
    path: str, shapes: str, precision: str, launches: float, cluster: Cluster
) -> tuple[LayerSpec, dict[tuple[str, int], Measured]]:
    """Return the layer, and its figures on one node by kind and tensor-parallel degree."""
    graphs, gpus = _graphs(path, shapes), cluster.groups[0].gpus
    found: dict[tuple[str, int], Measured] = {}
    plans: list[GraphPlan] = []
    for tp in (n for n in range(1, gpus + 1) if gpus % n == 0):
        for kind, ends in ((KIND, "replicated"), (f"{KIND}+sp", "d1"))[: 1 + (tp > 1)]:
            mesh = DeviceMeshSpec((tp,) * (tp > 1), cluster)
            small, large = (
                GraphSpace(graph, mesh, WIDTHS[precision], ends=ends, sliced=ends == "d1")
                for graph in graphs
            )
            plan = GraphPlan(small, GraphProgramme(small).solve().assignment)
            # operators have the same names and states in both batches
            same = (
                large.twin(g, plan.choice(own.operators[0]), ())
                for g, own in enumerate(large.groups)
            )
            rows = [_figures(one, launches) for one in (plan, GraphPlan(large, tuple(same)))]
            rows.append([b + (b - a) * (FAR - 2.0) for a, b in zip(*rows, strict=True)])
            found[kind, tp] = Measured((1.0, 2.0, FAR), *zip(*rows, strict=True))
            plans += [plan] if kind == KIND else []
    return _spec(plans[0], plans[-1]), found


def _figures(plan: GraphPlan, launches: float) -> list[float]:
    """Return seconds forward and backward, kept bytes, seconds of collectives forward and backward."""
    space, whole, forward = plan.space, 0.0, 0.0
    for op in space.graph.computing:
        choice = plan.choice(op)
        whole += choice.seconds - sum(space.mesh.seconds(step) for _, step in choice.inner)
        forward += space.operator_seconds(op, choice.inputs, choice.outputs, training=False)
    kept = space.memory_bytes(plan.assignment, weights=False)
    # gradients of weights that all ranks have are summed once an iteration, with those of data parallelism;
    # slices are gathered next to products, in the share of collectives that is fitted to Megatron-LM's runs
    sent = [
        c for c in plan.collectives if (c.of, c.when) != (PARAMETER, "backward") and not c.again
    ]
    moved = [sum(c.seconds for c in sent if c.when == when) for when in ("forward", "backward")]
    launch = launches * float(space.mesh.device.layer_overhead)
    return [forward + launch, whole - forward + 2.0 * launch, kept, *moved]


def _spec(alone: GraphPlan, shared: GraphPlan) -> LayerSpec:
    """Read the layer off its plans on one rank and on most ranks: what is divided, and what is not.

    Of its products FLOP and the weights' share of backward are counted.
    """
    ranks, width = max(shared.space.mesh.ranks, default=1), alone.space.width
    graph = alone.space.graph
    values, tokens = graph.values, next(op for op in graph.operators if op.op == "input").outputs[0]
    count, hidden = values[tokens].shape[-2:]

    def parted(one: float, part: float) -> tuple[float, float]:
        """Split a figure into what `ranks` ranks divide and what each of them has."""
        divided = (one - part) / (1.0 - 1.0 / ranks) if ranks > 1 else one
        return divided, one - divided

    products, cores = [], []
    for op in graph.computing:
        if op.op == "linear" and graph.producers[op.inputs[1]][0].op == PARAMETER:
            split = SPLITS.get((*shared.choice(op).labels, "")[0], "replicated")
            rows, columns = values[op.inputs[1]].shape
            products.append(Gemm(rows, columns, split))
        elif op.op == "scaled_dot_product_attention":
            q, k = (values[name].shape for name in op.inputs[:2])
            cores.append(AttentionCore(q[-3], k[-3], q[-1], bool(op.argument("is_causal", False))))
    kept, whole = (
        [plan.space.memory_bytes(plan.assignment, weights=weights) for plan in (alone, shared)]
        for weights in (False, True)
    )
    divided, own = parted(*((b - a) / STATE_BYTES for a, b in zip(kept, whole, strict=True)))
    inside, outside = (2.0 / width / count * size for size in parted(*kept))
    return LayerSpec(
        name="",
        kind=KIND,
        gemms=tuple(products),
        cores=tuple(cores),
        sharded_parameters=round(divided),
        replicated_parameters=round(own),
        replicated_activation_bytes=outside,
        sharded_activation_bytes=inside,
        output_elements=hidden,
        recomputable=True,
        captured=True,
    )
