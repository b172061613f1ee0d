"""Degrees that a problem admits before any value is pinned."""

from math import isqrt

from darts_parallel.errors import ConfigError
from darts_parallel.problem import Problem


def divisors(number: int) -> list[int]:
    """Divisors of `number`, rising."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def legal_pipeline_degrees(problem: Problem) -> list[int]:
    """Degrees that divide the devices and leave every stage a layer, pinned or not."""
    units = pipeline_units(problem)
    return [pp for pp in divisors(problem.cluster.num_devices) if pp <= units]


def pipeline_units(problem: Problem) -> int:
    """Layers that can begin a stage; the loss stays with the head."""
    return sum(not layer.joined for layer in problem.model.layers)


def tensor_degrees(problem: Problem) -> list[int]:
    """Tensor-parallel degrees that the search tries: inside a node, and wider ones that are pinned."""
    limit, pinned = problem.cluster.tp_limit, problem.config.space.pinned("tp") or ()
    return [tp for tp in legal_tensor_degrees(problem) if tp <= limit or tp in pinned]


def legal_tensor_degrees(problem: Problem) -> list[int]:
    """Tensor-parallel degrees that a plan may have.

    They divide the heads and the KV heads, divide every node or consist of whole nodes, and, with
    `cost=profiled`, were measured.

    Errors:
        ConfigError: `cost=profiled`, and none of them was measured.
    """
    config = problem.model.config
    heads = (config.num_heads, config.num_kv_heads or config.num_heads)
    sizes = [group.gpus for group in problem.cluster.groups]
    legal = [
        tp
        for tp in divisors(problem.cluster.num_devices)
        if all(n % tp == 0 for n in heads)
        and (all(n % tp == 0 for n in sizes) or all(tp % n == 0 for n in sizes))
    ]
    if problem.measured is None:
        return legal
    known = problem.measured.degrees
    if not set(legal) & set(known):
        raise ConfigError(
            f"cost.profile={problem.measured.path} must measure a legal tensor-parallel degree "
            f"({', '.join(map(str, legal))}), but holds {', '.join(map(str, known)) or 'none'}; "
            f"nearest legal: {legal[0]}."
        )
    return [tp for tp in legal if tp in known]


def context_degrees(problem: Problem) -> list[int]:
    """Context-parallel degrees, pinned or not: sequences divide into equal, equally dear parts.

    Under a causal mask every rank takes one chunk from the front and one from the back, so that all
    have the same attention to compute (Megatron-LM; Llama 3, arXiv 2407.21783, section 3.3.2): twice
    the degree must divide the sequence. Groups may cross nodes.
    """
    parts = 2 if problem.model.config.causal else 1
    length = problem.training.seq_len
    return [cp for cp in divisors(problem.cluster.num_devices) if cp == 1 or length % (parts * cp) == 0]
