"""Bytes of training state that change their place between two plans.

State is what a checkpoint holds: parameters and the optimizer's states (with their float32 copy), not
gradients. A GPU holds a contiguous share of each layer: the slice of its tensor-parallel rank, cut further by
its data-parallel rank for what the ZeRO stage shards. It needs what its new share has beyond its old one:
`need = |new - old|` by layer, times the bytes of the layer. What no surviving GPU held is restored from a
checkpoint, the rest moves between GPUs.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from darts_parallel.cost import state_bytes
from darts_parallel.plan import LayerStrategy, Plan
from darts_parallel.problem import Problem

Share = tuple[float, float]
"""First and last position of a share of a layer, in [0, 1]."""
Gpu = tuple[str, int, int, int]
"""Device, GPUs of its node, number of the node among those, place in the node."""


@dataclass(frozen=True)
class StateTransfer:
    """Bytes, summed over all GPUs of the new plan."""

    kept_bytes: float
    """Needed, and already in place."""
    moved_bytes: float
    """Needed, and on another surviving GPU."""
    restored_bytes: float
    """Needed, and on no surviving GPU: from a checkpoint."""


def moved_state(old_plan: Plan, old: Problem, new_plan: Plan, new: Problem) -> StateTransfer:
    """Return the bytes that a change of plan moves.

    Nodes of a device keep their order: those beyond a smaller count are lost, those beyond a larger one
    are empty.

    Args:
        old_plan: The plan that runs, on `old`.
        new_plan: The next one, on `new`; of the same model.
    """
    before, after = _holders(old_plan, old), _holders(new_plan, new)
    survivors = set(_gpus(new))
    bytes_of = state_bytes(new.training.precision, new.training.optimizer)
    kept = moved = restored = 0.0
    stages = new_plan.stage_of_layer
    tied = {stages[i]: i for i in reversed(range(len(stages))) if new.model.layers[i].tied}
    for index, layer in enumerate(new.model.layers):
        # tied tables of one stage are one table
        again = layer.tied and tied[stages[index]] != index
        vocabulary = 0.0 if again else layer.vocabulary_parameters * new.model.config.vocab_size
        experts = 0.0 if layer.experts is None else float(layer.experts.parameters)
        base = 0.0 if layer.frozen else bytes_of.optimizer
        for numbers, split, state in (
            (layer.sharded_parameters + vocabulary, "tp", base),
            (layer.replicated_parameters, "none", base),
            (experts, "experts", base),
            (layer.adapter_parameters, "tp", bytes_of.optimizer),
            (layer.replicated_adapter_parameters, "none", bytes_of.optimizer),
        ):
            for sharded_from, width in ((3, bytes_of.parameter), (1, state)):
                was = _shares(before[index], sharded_from, split)
                needs = _shares(after[index], sharded_from, split)
                there = _union([share for gpu, share in was.items() if gpu in survivors])
                for gpu, share in needs.items():
                    own = _overlap(share, was.get(gpu, (0.0, 0.0)))
                    anywhere = sum(_overlap(share, part) for part in there)
                    kept += own * numbers * width
                    moved += (anywhere - own) * numbers * width
                    restored += (share[1] - share[0] - anywhere) * numbers * width
    return StateTransfer(kept, moved, restored)


@dataclass(frozen=True)
class _Holder:
    """The GPUs of a layer's stage in rank order, and the layer's strategy."""

    gpus: tuple[Gpu, ...]
    strategy: LayerStrategy


def _gpus(problem: Problem) -> list[Gpu]:
    """Return every GPU, in rank order."""
    seen: Counter[tuple[str, int]] = Counter()
    result: list[Gpu] = []
    for group in problem.cluster.groups:
        kind = (group.device.name, group.gpus)
        for _ in range(group.count):
            result += [(*kind, seen[kind], place) for place in range(group.gpus)]
            seen[kind] += 1
    return result


def _holders(plan: Plan, problem: Problem) -> list[_Holder]:
    gpus, ranks = _gpus(problem), problem.cluster.arranged(plan.node_order).pipeline_ranks
    size = len(ranks) // plan.pp
    stages = [tuple(gpus[rank] for rank in ranks[k * size : (k + 1) * size]) for k in range(plan.pp)]
    return [_Holder(stages[k], s) for k, s in zip(plan.stage_of_layer, plan.layers, strict=True)]


def _shares(holder: _Holder, sharded_from: int, split: str) -> dict[Gpu, Share]:
    """Return share of every GPU; `split` says what divides it: `tp`, the `experts` degrees, or `none`."""
    strategy = holder.strategy
    together = strategy.ep * strategy.etp if split == "experts" else strategy.tp
    parts = 1 if split == "none" else together
    replicas = len(holder.gpus) // together
    shards = (strategy.shard_size or replicas) if strategy.zero_stage >= sharded_from else 1
    result = {}
    for rank, gpu in enumerate(holder.gpus):
        part = rank % together if parts > 1 else 0
        first = part / parts + (rank // together % shards) / (parts * shards)
        result[gpu] = (first, first + 1.0 / (parts * shards))
    return result


def _union(shares: list[Share]) -> list[Share]:
    """Cut shares that overlap into disjoint ones, in order."""
    edges = sorted({edge for share in shares for edge in share})
    middles = [((a + b) / 2, (a, b)) for a, b in pairwise(edges)]
    return [part for middle, part in middles if any(a <= middle <= b for a, b in shares)]


def _overlap(a: Share, b: Share) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
