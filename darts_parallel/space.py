"""The search space: legal outer choices `(pp, num_micro_batches)` and legal strategies of a layer.

Illegal products never enter: `tp * dp * pp` is the number of devices by construction, and
`global_batch_size` is a multiple of `dp * num_micro_batches`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from darts_parallel.config import RECOMPUTE, ConfigError
from darts_parallel.errors import UnsupportedError
from darts_parallel.problem import Problem
from darts_parallel.strategy import LayerStrategy


@dataclass(frozen=True)
class OuterSpace:
    """All outer choices that share `pp`, and the strategies that a layer may take under them."""

    pp: int
    num_micro_batches: tuple[int, ...]
    choices: tuple[LayerStrategy, ...]


def divisors(number: int) -> list[int]:
    """Divisors of `number`, rising."""
    return [d for d in range(1, number + 1) if number % d == 0]


def outer_spaces(problem: Problem) -> list[OuterSpace]:
    """All legal outer choices, one entry for each pipeline degree.

    Errors:
        ConfigError: the pinned values leave no legal product; names the key and the nearest value.
        UnsupportedError: the cluster has more than one type of node.
    """
    if not problem.cluster.homogeneous:
        raise UnsupportedError(
            f"cluster={problem.cluster.name} mixes node types, and this version searches clusters "
            "of one device type; give one node group, or groups with equal gpus, device and link."
        )
    spaces = [space for pp in _pipeline_degrees(problem) if (space := _outer_space(problem, pp))]
    if not spaces:
        raise ConfigError(_no_product(problem))
    return spaces


def _pipeline_degrees(problem: Problem) -> Iterator[int]:
    space = problem.config.space
    devices = problem.cluster.num_devices
    units = sum(not layer.joined for layer in problem.model.layers)
    legal = [pp for pp in divisors(devices) if pp <= units]
    for value in space.pinned("pp") or ():
        if value not in legal:
            near = min(legal, key=lambda pp: abs(pp - value))
            raise ConfigError(
                f"space.pp={value} must divide the {devices} GPUs and leave every stage one of "
                f"{units} layers; nearest legal: {near}."
            )
    pinned = space.pinned("pp")
    return (pp for pp in legal if pinned is None or pp in pinned)


def _outer_space(problem: Problem, pp: int) -> OuterSpace | None:
    space, batch = problem.config.space, problem.training.global_batch_size
    choices = tuple(layer_choices(problem, problem.cluster.num_devices // pp))
    pinned = space.pinned("num_micro_batches")
    counts = tuple(
        m
        for m in divisors(batch)
        if (pinned is None or m in pinned) and any(micro_batch_legal(problem, m, c) for c in choices)
    )
    return OuterSpace(pp, counts, choices) if counts else None


def tensor_degrees(problem: Problem) -> list[int]:
    """Tensor-parallel degrees that divide the heads, the KV heads and every node."""
    config = problem.model.config
    heads = (config.num_heads, config.num_kv_heads or config.num_heads)
    sizes = [group.gpus for group in problem.cluster.groups]
    return [tp for tp in divisors(problem.cluster.tp_limit) if all(n % tp == 0 for n in (*heads, *sizes))]


def layer_choices(problem: Problem, stage_devices: int) -> Iterator[LayerStrategy]:
    """Strategies of a layer on `stage_devices` devices, without those that change nothing.

    A ZeRO stage above 0 needs `dp > 1` and sequence parallelism needs `tp > 1`: otherwise they are
    other names of the same strategy.
    """
    space = problem.config.space
    stages = space.pinned("zero_stage") or (0, 1, 2, 3)
    recompute = space.pinned("recompute") or RECOMPUTE
    parallel = space.pinned("sequence_parallel") or (False, True)
    for tp in tensor_degrees(problem):
        if stage_devices % tp or not _allowed(space.pinned("tp"), tp):
            continue
        dp = stage_devices // tp
        if not _allowed(space.pinned("dp"), dp):
            continue
        zero = [z for z in stages if dp > 1 or z == 0] or [0]
        sequence = [s for s in parallel if tp > 1 or not s] or [False]
        for z, r, s in product(zero, recompute, sequence):
            yield LayerStrategy(tp, dp, z, r, s)


def micro_batch_legal(problem: Problem, num_micro_batches: int, choice: LayerStrategy) -> bool:
    """Whether the global batch divides into whole micro-batches of an allowed size."""
    ranks = num_micro_batches * choice.dp
    if problem.training.global_batch_size % ranks:
        return False
    size = problem.training.global_batch_size // ranks
    return _allowed(problem.config.space.pinned("micro_batch_size"), size)


def _allowed(pinned: tuple[int, ...] | None, value: int) -> bool:
    return pinned is None or value in pinned


def _no_product(problem: Problem) -> str:
    space, devices = problem.config.space, problem.cluster.num_devices
    degrees = tensor_degrees(problem)
    for value in space.pinned("tp") or ():
        if value not in degrees:
            near = min(degrees, key=lambda tp: abs(tp - value))
            return (
                f"space.tp={value} must divide the heads, the KV heads and the GPUs of a node "
                f"(legal: {', '.join(map(str, degrees))}); nearest legal: {near}."
            )
    batch = problem.training.global_batch_size
    for value in space.pinned("num_micro_batches") or ():
        if batch % value:
            near = min(divisors(batch), key=lambda m: abs(m - value))
            return (
                f"space.num_micro_batches={value} must divide "
                f"training.global_batch_size={batch}; nearest legal: {near}."
            )
    smallest = min(
        devices // pp // tp
        for pp in _pipeline_degrees(problem)
        for tp in degrees
        if devices // pp % tp == 0
    )
    near_batch = max(round(batch / smallest), 1) * smallest
    pins = ", ".join(
        f"space.{key}={getattr(space, key)}"
        for key in ("pp", "tp", "dp", "num_micro_batches", "micro_batch_size")
        if getattr(space, key) is not None
    )
    return (
        f"training.global_batch_size={batch} on {devices} GPUs{' with ' + pins if pins else ''} admits no "
        "product dp * tp * pp = GPUs whose dp * num_micro_batches divides the global batch; "
        f"nearest legal global_batch_size: {near_batch}{', or free the pinned values' if pins else ''}."
    )
