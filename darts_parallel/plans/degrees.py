"""Degrees that a problem admits before any value is pinned."""

from collections.abc import Sequence
from math import isqrt

from darts_parallel.config import MAMBA, SpaceConfig
from darts_parallel.errors import ConfigError, closest
from darts_parallel.problem import Cluster, MeasuredTimes, Model, tensor_divided

MOST_FREE_CHUNKS = 2
"""Chunks a device that a free choice tries although they cannot be equal."""
USUAL_NODE = 8
"""GPUs of the nodes that most clusters have: tensor parallelism up to this is tried on smaller nodes too."""


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, rising."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def legal_pipeline_degrees(model: Model, cluster: Cluster) -> list[int]:
    """Return the degrees whose stages are of one node type each and hold a layer at least, pinned or not."""
    units = pipeline_units(model)
    return [
        pp for pp in divisors(cluster.num_devices) if pp <= units and node_orders_exist(cluster, pp)
    ]


def node_orders_exist(cluster: Cluster, pp: int) -> bool:
    """Return whether the nodes can be ordered so that none of `pp` equal stages mixes node types."""
    size = cluster.num_devices // pp
    return cluster.homogeneous or all(total % size == 0 for total in cluster.type_devices.values())


def pipeline_units(model: Model) -> int:
    """Return the layers that can begin a stage; the loss stays with the head."""
    return sum(not layer.fused_to_previous for layer in model.layers)


def tensor_degrees(
    space: SpaceConfig, model: Model, cluster: Cluster, measured: MeasuredTimes | None
) -> tuple[list[int], list[int]]:
    """Return the tensor-parallel degrees to try, and legal ones that a search without a pin leaves out.

    Tried are those up to the largest node, or 8, and wider pinned ones: groups that cross nodes pay off where
    nodes are small (one GPU a node), or where nothing else fits.
    """
    pinned, legal = space.pinned("tp"), legal_tensor_degrees(model, cluster, measured)
    usual = [tp for tp in legal if tp <= widest_tensor_degree(cluster) or tp in (pinned or ())]
    return usual, [] if pinned is not None else legal[len(usual) :]


def widest_tensor_degree(cluster: Cluster) -> int:
    """Return the largest tensor-parallel degree that is tried where none is pinned."""
    return max(*node_sizes(cluster), USUAL_NODE)


def legal_tensor_degrees(
    model: Model, cluster: Cluster, measured: MeasuredTimes | None
) -> list[int]:
    """Return tensor-parallel degrees that a plan may have.

    They divide the heads, the KV heads and those of state spaces, divide the nodes of some type or consist
    of them, and, with `cost=profiled`, were measured.

    Errors:
        ConfigError: `cost=profiled`, and none of them was measured.
    """
    config, sizes = model.config, node_sizes(cluster)
    heads: tuple[int, ...] = (config.num_heads, config.num_kv_heads or config.num_heads)
    heads = () if model.block else (*heads, *_state_space_heads(model))
    legal = [
        tp
        for tp in divisors(cluster.num_devices)
        if all(n % tp == 0 for n in heads)
        and any(size % tp == 0 or tp % size == 0 for size in sizes)
    ]
    if measured is None:
        return legal
    known = measured.degrees
    if not set(legal) & set(known):
        raise ConfigError(
            f"cost.profile={measured.path} must measure a legal tensor-parallel degree "
            f"({', '.join(map(str, legal))}), but holds {', '.join(map(str, known)) or 'none'}; "
            f"try {legal[0]}."
        )
    return [tp for tp in legal if tp in known]


def refused_pin(key: str, value: int, rule: str, members: Sequence[int]) -> ConfigError:
    """Return the error for a pinned value that is none of `members`."""
    names = ", ".join(map(str, members[:12])) + (", ..." if len(members) > 12 else "")
    near = closest(value, members)
    return ConfigError(f"space.{key}={value} must {rule} (legal: {names}); try {near}.")


def batch_note(devices: int, batch: int) -> str:
    """Say how far a global batch that divides badly over the GPUs bounds data parallelism; else empty.

    Replicas are never idle: what the batch cannot use goes to the other degrees.
    """
    most = max(dp for dp in divisors(devices) if batch % dp == 0)
    if 2 * most > min(devices, batch):
        return ""
    near = min(
        (b for b in range(batch - devices, batch + devices + 1) if b > 0 and not b % (2 * most)),
        key=lambda b: (abs(b - batch), b),
    )
    return (
        f"training.global_batch_size={batch} divides over dp {most} at most of {devices} GPUs: tp, cp "
        f"and pp take the rest, and {near} would divide over dp {2 * most}"
    )


def virtual_stage_counts(space: SpaceConfig, model: Model, pp: int) -> list[int]:
    """Return stages that a device may hold: 1, and without a pin only numbers that divide the blocks evenly.

    More than one need a pipeline (pp > 1) and a layer for every stage. Trainers cut the blocks evenly
    (Megatron-LM), so a free choice tries those numbers only.
    """
    pinned, blocks = space.pinned("virtual_stages"), model.config.num_layers
    most = pipeline_units(model) // pp if pp > 1 else 1
    if space.schedules is not None and pinned == (1,):
        # chunks of any number of layers, as many a device as its share of the layers fills well
        return [
            v
            for v in range(1, most + 1)
            if v == 1 or v <= MOST_FREE_CHUNKS or blocks % (pp * v) == 0
        ]
    return [v for v in range(1, most + 1) if v == 1 or pinned is not None or blocks % (pp * v) == 0]


def context_degrees(model: Model, devices: int, seq_len: int) -> list[int]:
    """Return context-parallel degrees, pinned or not: sequences divide into equal, equally expensive parts.

    Under a causal mask every rank takes one chunk from the front and one from the back, so that all
    have the same attention to compute (Megatron-LM; Llama 3, arXiv 2407.21783, section 3.3.2): twice
    the degree must divide the sequence. Groups may cross nodes.
    """
    parts, heads = 2 if model.config.causal else 1, _state_space_heads(model)[:1]
    if model.block is not None:  # operator plans have whole sequences
        return [1]
    whole = (cp for cp in divisors(devices) if cp == 1 or seq_len % (parts * cp) == 0)
    return [cp for cp in whole if all(n % cp == 0 for n in heads)]


def _state_space_heads(model: Model) -> tuple[int, ...]:
    """Return the heads, and groups of them, of the model's state-space layers; none without such layers."""
    return (
        tensor_divided(model.config)
        if MAMBA in (model.config.hybrid_override_pattern or "")
        else ()
    )


def node_sizes(cluster: Cluster) -> list[int]:
    """Return the GPUs of a node of every type."""
    return [cluster.groups[kind].gpus for kind in cluster.types]
