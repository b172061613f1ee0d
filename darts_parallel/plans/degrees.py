"""Degrees that a problem admits before any value is pinned."""

from collections.abc import Sequence
from typing import NamedTuple

from darts_parallel.config import MAMBA, SpaceConfig
from darts_parallel.config import divisors as divisors
from darts_parallel.errors import ConfigError, closest
from darts_parallel.problem import Cluster, MeasuredTimes, Model, tensor_divided

MOST_FREE_CHUNKS = 2
"""Stages per device that a search without a pin tries although they cannot be equal."""
USUAL_NODE = 8
"""GPUs of a usual node: smaller nodes try tensor parallelism up to this degree, too."""
MOST_LISTED = 12
"""Valid values that a message lists."""


class TensorDegrees(NamedTuple):
    """Valid tensor-parallel degrees."""

    tried: list[int]
    left_out: list[int]
    """Wider ones, which a search tries only with a pin."""


def legal_pipeline_degrees(model: Model, cluster: Cluster) -> list[int]:
    """Return the degrees whose stages hold a layer at least and one node type each."""
    units = pipeline_units(model)
    degrees = [pp for pp in divisors(cluster.num_devices) if pp <= units]
    return [pp for pp in degrees if node_orders_exist(cluster, pp)]


def node_orders_exist(cluster: Cluster, pp: int) -> bool:
    """Return whether some order of the nodes gives `pp` equal stages of one node type each."""
    size = cluster.num_devices // pp
    return cluster.homogeneous or all(total % size == 0 for total in cluster.type_devices.values())


def pipeline_units(model: Model) -> int:
    """Return the layers that can begin a stage; the loss stays with the head."""
    return sum(not layer.fused_to_previous for layer in model.layers)


def tensor_degrees(
    space: SpaceConfig, model: Model, cluster: Cluster, measured: MeasuredTimes | None
) -> TensorDegrees:
    """Return the tensor-parallel degrees to try, and wider ones that need a pin.

    Tried are degrees up to the largest node, or 8, and pinned ones. Groups that cross nodes pay off
    where nodes are small (one GPU a node), or where nothing else fits.
    """
    pinned = space.pinned("tp")
    legal = legal_tensor_degrees(model, cluster, measured)
    widest = widest_tensor_degree(cluster)
    tried = [tp for tp in legal if tp <= widest or tp in (pinned or ())]
    return TensorDegrees(tried, [] if pinned is not None else legal[len(tried) :])


def widest_tensor_degree(cluster: Cluster) -> int:
    """Return the largest tensor-parallel degree that is tried where none is pinned."""
    return max(*node_sizes(cluster), USUAL_NODE)


def legal_tensor_degrees(
    model: Model, cluster: Cluster, measured: MeasuredTimes | None
) -> list[int]:
    """Return tensor-parallel degrees that a plan may have.

    They divide the width of the MLP and the heads: of queries, of keys and values, and of state
    spaces; some trainers copy heads of keys and values. They divide the nodes of some type, or
    consist of them. With `cost=profiled` they were measured.

    Errors:
        ConfigError: `cost=profiled`, and none of them was measured.
    """
    sizes = node_sizes(cluster)
    sizes_of_layers = _divided_sizes(model)

    def possible(tp: int) -> bool:
        whole = any(divides_nodes(tp, size) for size in sizes)
        return whole and _divides_all(tp, sizes_of_layers) and _divides_key_values(tp, model)

    legal = list(filter(possible, divisors(cluster.num_devices)))
    if measured is None:
        return legal
    known = [tp for tp in legal if tp in measured.degrees]
    if not known:
        raise ConfigError(
            f"cost.profile={measured.path} must measure a legal tensor-parallel degree "
            f"({', '.join(map(str, legal))}), but holds "
            f"{', '.join(map(str, measured.degrees)) or 'none'}; try {legal[0]}."
        )
    return known


def divides_nodes(tp: int, gpus: int) -> bool:
    """Return whether tensor-parallel groups divide nodes of `gpus` GPUs, or consist of them."""
    return gpus % tp == 0 or tp % gpus == 0


def _divides_all(number: int, multiples: Sequence[int]) -> bool:
    return all(multiple % number == 0 for multiple in multiples)


def _divided_sizes(model: Model) -> list[int]:
    """Return the heads and the MLP width that a degree divides; none for a custom block."""
    if model.block:
        return []
    config = model.config
    return [config.num_heads, config.mlp_width, *_state_space_heads(model)]


def _divides_key_values(tp: int, model: Model) -> bool:
    """Return whether ranks share the key-value heads evenly, or have copies of them."""
    heads = model.config.num_kv_heads
    if heads is None or model.block:
        return True
    return heads % tp == 0 or (model.replicated_key_values and tp % heads == 0)


def refused_pin(
    key: str, value: int, rule: str, members: Sequence[int], other: str = ""
) -> ConfigError:
    """Return the error for a pinned value that is none of `members`; `other` is a second way out."""
    names = ", ".join(map(str, members[:MOST_LISTED]))
    more = ", ..." if len(members) > MOST_LISTED else ""
    near = closest(value, members)
    return ConfigError(
        f"space.{key}={value} must {rule} (legal: {names}{more}); try {near}{other}."
    )


def batch_note(devices: int, batch: int) -> str:
    """Say how a global batch that divides badly over the GPUs bounds data parallelism; or nothing.

    Replicas are never idle: the other degrees use the GPUs that data parallelism cannot use.
    """
    most = max(dp for dp in divisors(devices) if batch % dp == 0)
    if 2 * most > min(devices, batch):
        return ""
    near, degree = wider_batch(devices, batch)
    return (
        f"training.global_batch_size={batch} divides over dp {most} at most of {devices} GPUs: tp, cp "
        f"and pp take the rest, and {near} would divide over dp {degree}"
    )


def wider_batch(devices: int, batch: int) -> tuple[int, int]:
    """Return the closest batch that divides over the most GPUs that it has sequences for, and these GPUs."""
    degree = max(dp for dp in divisors(devices) if dp <= batch)
    below = batch // degree * degree
    return closest(batch, [below, below + degree]), degree


def virtual_stage_counts(space: SpaceConfig, model: Model, pp: int) -> list[int]:
    """Return stages per device: 1, and without a pin only numbers that divide the blocks evenly.

    More than one need a pipeline (pp > 1) and a layer for every stage. Trainers cut the blocks
    evenly (Megatron-LM), so a search without a pin tries those numbers only.
    """
    if pp == 1:
        return [1]
    pinned = space.pinned("virtual_stages")
    most = pipeline_units(model) // pp
    uneven = 1 if pinned is None else most
    if space.schedules is not None and pinned == (1,):
        # named schedules decide the number of stages, which need not be equal up to here
        uneven = MOST_FREE_CHUNKS
    blocks = model.config.num_layers
    return [v for v in range(1, most + 1) if v <= uneven or blocks % (pp * v) == 0]


def context_degrees(model: Model, devices: int, seq_len: int) -> list[int]:
    """Return context-parallel degrees: sequences divide into equal, equally expensive parts.

    Under a causal mask every rank takes one chunk from the front and one from the back, so that all
    have the same attention to compute (Megatron-LM; Llama 3, arXiv 2407.21783, section 3.3.2):
    twice the degree must divide the sequence. Groups may cross nodes.
    """
    if model.block is not None:  # operator plans have whole sequences
        return [1]
    parts = 2 if model.config.causal else 1
    heads = _state_space_heads(model)[:1]
    whole = [cp for cp in divisors(devices) if cp == 1 or seq_len % (parts * cp) == 0]
    return [cp for cp in whole if _divides_all(cp, heads)]


def _state_space_heads(model: Model) -> tuple[int, ...]:
    """Return the heads, and groups of heads, of the model's state-space layers."""
    if MAMBA not in (model.config.hybrid_override_pattern or ""):
        return ()
    return tensor_divided(model.config)


def node_sizes(cluster: Cluster) -> list[int]:
    """Return the GPUs of a node of every type."""
    return [cluster.groups[kind].gpus for kind in cluster.types]
