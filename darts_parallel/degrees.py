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
    """Tensor-parallel degrees that divide the heads, the KV heads and every node, and were measured.

    Errors:
        ConfigError: `cost=profiled`, and none of them was measured.
    """
    config = problem.model.config
    heads = (config.num_heads, config.num_kv_heads or config.num_heads)
    sizes = [group.gpus for group in problem.cluster.groups]
    legal = [tp for tp in divisors(problem.cluster.tp_limit) if all(n % tp == 0 for n in (*heads, *sizes))]
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
