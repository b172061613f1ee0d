"""Iteration time of a synchronous pipeline from its stage times.

1F1B (PipeDream-Flush, Narayanan et al. 2021): with stage times t_k per micro-batch and m
micro-batches, the first crosses all stages and the others follow at the pace of the slowest:
`sum_k t_k + (m - 1) max_k t_k`. `simulation.py` is its referee.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from darts_parallel.config.bilevel import ASYNCHRONOUS
from darts_parallel.config.schema import ALIASES, V_SHAPED, CostConfig
from darts_parallel.cost.schedules import waiting
from darts_parallel.cost.v_schedules import v_passes
from darts_parallel.plan.space import OuterSpace

INTERLEAVED = "interleaved"
FILLS = 3
"""Micro-batches a device of a V behind which no device holds more; a simulation begins with as many."""
MICRO_BATCH_SECONDS = ("forward", "backward", "weight_gradient", "reshard", "p2p")
"""Fields of a cost table in seconds of one micro-batch."""
Moment = tuple[int, int]
"""Micro-batches before their backward pass, and between it and their weights' gradient."""


@dataclass(frozen=True)
class PipelineModel:
    """How the seconds of the stages make an iteration; the values of `CostConfig`."""

    simulated: bool = False
    schedule: str = "1f1b"
    blocking: bool = True
    """Messages between stages occupy the later stage."""
    together: bool = False
    """Gradients are synchronised once all devices have ended, as in the closed form; else each at its end."""

    @staticmethod
    def from_config(
        config: CostConfig, virtual_stages: int = 1, schedule: str | None = None
    ) -> "PipelineModel":
        """The model that the user chose.

        Args:
            config: Kind of cost model and of messages.
            virtual_stages: Stages of a device.
            schedule: Of the plan; None takes `config.schedule`, or `interleaved` for several stages a device.
        """
        usual = INTERLEAVED if virtual_stages > 1 else config.schedule
        name = waiting(ALIASES.get(schedule or usual, schedule or usual))
        closed = config.pipeline == "closed_form"
        simulated = not closed or name != "1f1b"
        # beside the closed form of 1F1B, so that plans differ by their passes alone
        together = closed and name == INTERLEAVED
        return PipelineModel(simulated, name, config.p2p == "blocking", together)


def pipeline_seconds(
    stage_seconds: Tensor, num_micro_batches: Tensor, slowest: Tensor | None = None
) -> Tensor:
    """Seconds of all micro-batches through the pipeline.

    Args:
        stage_seconds: Forward and backward seconds of one micro-batch, shape `(..., K)`.
        num_micro_batches: Shape broadcastable to `(...)`.
        slowest: Maximum over stages, shape `(...)`; given where a smooth maximum is wanted.

    Returns:
        Seconds, shape `(...)`.
    """
    bottleneck = stage_seconds.amax(-1) if slowest is None else slowest
    return stage_seconds.sum(-1) + (num_micro_batches - 1) * bottleneck


FLUSH_EVERY = 1000
"""Steps between flushes of an asynchronous pipeline, for evaluation and checkpoints."""


def weight_versions(schedule: str | None) -> int:
    """Versions of the weights that a device keeps."""
    return 2 if schedule in ASYNCHRONOUS else 1


def across_steps(table: Any, space: OuterSpace) -> dict[str, Any]:
    """The fields of a cost table that differ where steps do not wait for each other or share an average.

    `FLUSH_EVERY` steps of m micro-batches are one 1F1B pipeline of `FLUSH_EVERY * m` of them, whose seconds
    they share: of a step remain `m max_k t_k` and next to nothing of the bubble. An average of the replicas'
    weights moves as many bytes as a sum of their gradients, and each of `sync_every` steps pays its share.

    Args:
        table: Of 1F1B with a sum of the gradients in every step, with as many micro-batches as the plan says.
        space: Schedule and `sync_every`.
    """
    if space.sync_every > 1:
        every = table.terms["gradient_sync"]
        seldom = every / space.sync_every
        terms = table.terms | {"gradient_sync": seldom}
        return {"sync": table.sync - every + seldom, "terms": terms, "sync_every": space.sync_every}
    if space.schedule not in ASYNCHRONOUS:
        return {}
    per_step = ("gradient_sync", "optimizer")
    return {name: getattr(table, name) / FLUSH_EVERY for name in MICRO_BATCH_SECONDS} | {
        "terms": {k: v if k in per_step else v / FLUSH_EVERY for k, v in table.terms.items()},
        "num_micro_batches": table.num_micro_batches * FLUSH_EVERY,
        "asynchronous": space.schedule,
        "flush_every": FLUSH_EVERY,
    }


def by_device(values: Tensor, pp: int, schedule: str = "1f1b") -> Tensor:
    """Sums over the stages of every device from values of stages: `(..., K)` to `(..., pp)`.

    Stages are numbered in the order of layers; `chunk_placement.stage_devices` names their devices.
    """
    if values.shape[-1] == pp:
        return values
    if schedule in V_SHAPED:
        return values[..., :pp] + values[..., pp:].flip(-1)
    return torch.unflatten(values, -1, (-1, pp)).sum(-2)


def in_flight(pp: int, num_micro_batches: Tensor, schedule: str = "1f1b", virtual_stages: int = 1) -> Tensor:
    """Micro-batches whose activations every stage holds, shape `(O, K)`.

    `min(pp - k, m)` under 1F1B, all under GPipe, `min(pp, m)` under ZB-H1 (Qi et al. 2023; `held_fields`
    says what a micro-batch keeps between its two backward passes). Interleaved, device k of v stages holds
    `2 (pp - k - 1) + (v - 1) pp + 1` passes (Megatron-LM's warm-up and one more); they are
    counted where the warm-up puts them, pp micro-batches a stage in turn. Later the earlier stages may
    hold one more and the later ones one less: with equal stages the sum is exact. Of a schedule placed
    as a V the passes of each stage are counted at the moment when its device holds most of them.
    """
    if schedule in V_SHAPED:
        # more micro-batches repeat the steady part, in which a device holds most
        few = num_micro_batches.clamp(max=FILLS * pp).tolist()
        rows = [_counted_in_flight(schedule, pp, count)[0] for count in few]
        return torch.tensor(rows, dtype=torch.float64)
    if virtual_stages > 1:
        return _interleaved_in_flight(pp, num_micro_batches, virtual_stages)
    name = ALIASES.get(schedule, schedule)
    depth = {"1f1b": pp - torch.arange(pp), "zero_bubble_h1": torch.full((pp,), pp)}.get(name)
    counts = num_micro_batches.unsqueeze(1)
    held = counts.expand(-1, pp) if depth is None else torch.minimum(depth, counts)
    return held.to(torch.float64)


def held_fields(table: Any, virtual_stages: int) -> dict[str, Any]:
    """The fields of a cost table that say what its schedule holds.

    Between the gradient of the input and that of the weights a split backward keeps `for_weights`: what
    products of weights need, their inputs and the gradients of their outputs. Of a block that is about what
    it had before (`32 s b h` of `34 s b h` bytes, Qi et al. 2023, arXiv 2401.10241, table 1: masks and the
    inside of attention are gone, gradients have come), and it counts in full. A block that is computed again
    had less before; in flight it then counts as on the device that holds most, too much on the others.
    Of the loss, which the last stage holds, only a part is left.

    Args:
        table: Costs, but for what is held.
        virtual_stages: Stages of a device.
    """
    schedule, pp, counts = table.pipeline.schedule, table.pp, table.num_micro_batches
    flying = in_flight(pp, counts, schedule, virtual_stages)
    split = _split_in_flight(schedule, pp, counts)
    if split is None:
        return {"in_flight": flying}
    before, after = table.activation, table.for_weights
    activation = before.clone()
    lighter, heavier = ((x > y).any(2).any(0).nonzero()[:, 0] for x, y in ((before, after), (after, before)))
    if len(lighter):
        most = _most(split, before[:, lighter], after[:, lighter]) / flying[:, -1:, None]
        activation[:, lighter] = most.minimum(before[:, lighter])
    if len(heavier):
        usual, whole = before[:, heavier], after[:, heavier]
        most = _most(_fullest_moments(schedule, pp, counts), usual, whole)
        activation[:, heavier] = torch.where(whole > usual, most, usual)
    return {"in_flight": flying, "activation": activation}


def _most(moments: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Bytes at the worst of the moments `(O, moments, 2)`, shape `(O, L, C)` of the bytes of both kinds."""
    shares = moments[..., None, None].unbind(1)
    return torch.stack([one[:, 0] * before + one[:, 1] * after for one in shares]).amax(0)


def _fullest_moments(schedule: str, pp: int, num_micro_batches: Tensor) -> Tensor:
    """What a device holds before its backward passes, and between them and their weights' gradients.

    Of every moment at which some device may hold most, if a micro-batch is no smaller between its two passes
    than before; over the passes in flight that the device is said to hold, `(O, moments, 2)`.
    """
    if schedule not in V_SHAPED:  # the last device of ZB-H1 holds most before its first weights' gradient
        return torch.tensor([[[0.0, 1.0]]], dtype=torch.float64).expand(len(num_micro_batches), -1, -1)
    few = num_micro_batches.clamp(max=FILLS * pp).tolist()
    return _padded([_counted_shares(schedule, pp, count) for count in few])


def _padded(rows: list[tuple[tuple[float, float], ...]]) -> Tensor:
    """Moments of several outer choices, `(O, moments, 2)`; the last of each is repeated."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], dtype=torch.float64)


@lru_cache(maxsize=256)
def _counted_shares(schedule: str, pp: int, num_micro_batches: int) -> tuple[tuple[float, float], ...]:
    """The moments of `_fullest_moments` that no other one exceeds in all and between the two passes."""
    seen: set[tuple[float, float]] = set()
    for order in v_passes(schedule, pp, num_micro_batches):
        kinds = np.array([kind for kind, _, _ in order])
        forward, backward, weights = (np.cumsum(kinds == kind) for kind in "FBW")
        held, late = forward - weights, backward - weights
        seen.update(zip((held / held.max()).tolist(), (late / held.max()).tolist(), strict=True))
    kept: list[tuple[float, float]] = []
    for held, late in sorted(seen, reverse=True):
        if not kept or late > kept[-1][1]:
            kept.append((held - late, late))
    return tuple(kept)


def _split_in_flight(schedule: str, pp: int, num_micro_batches: Tensor) -> Tensor | None:
    """Micro-batches on the last stage before their backward pass, and between it and their weights' gradient.

    Of every moment at which it may hold most, `(O, moments, 2)`; None where backward passes are whole.
    """
    if schedule in V_SHAPED:
        # more micro-batches repeat the steady part, in which a device holds most
        few = num_micro_batches.clamp(max=FILLS * pp).tolist()
        return _padded([_counted_in_flight(schedule, pp, count)[1] for count in few])
    if ALIASES.get(schedule, schedule) != "zero_bubble_h1":
        return None
    late = num_micro_batches.clamp(max=pp) - 1
    return torch.stack([torch.ones_like(late), late], dim=1).unsqueeze(1).to(torch.float64)


@lru_cache(maxsize=256)
def _counted_in_flight(
    schedule: str, pp: int, num_micro_batches: int
) -> tuple[tuple[int, ...], tuple[Moment, ...]]:
    """Micro-batches that each stage of a V holds, from its forward pass to its weights' gradient.

    Also the moments of `_split_in_flight` on the first device, which holds the last stage.
    """
    result, orders = [0] * (2 * pp), v_passes(schedule, pp, num_micro_batches)
    for device, order in enumerate(orders):
        held, early, most = 0, 0, (0, 0)
        for kind, stage, _ in order:
            if kind == "B":
                continue
            step = 1 if kind == "F" else -1
            held += step
            early += step if stage == device else 0
            # ties go to the moment with more of the earlier stage, which holds them longer
            most = max(most, (held, early))
        result[device], result[-1 - device] = most[1], most[0] - most[1]
    before, between, moments = 0, 0, {(0, 0)}
    for kind, stage, _ in orders[0]:
        if stage == 2 * pp - 1:
            before += {"F": 1, "B": -1, "W": 0}[kind]
            between += {"F": 0, "B": 1, "W": -1}[kind]
            moments.add((before, between))
    return tuple(result), tuple(sorted(moments))


def _interleaved_in_flight(pp: int, num_micro_batches: Tensor, virtual_stages: int) -> Tensor:
    device = torch.arange(pp)
    most = 2 * (pp - device - 1) + (virtual_stages - 1) * pp + 1
    held = torch.minimum(most, virtual_stages * num_micro_batches.unsqueeze(1))
    turn = virtual_stages * pp
    lap = torch.arange(virtual_stages).unsqueeze(1)
    # whole turns through all laps, and what the last turn has begun
    whole, rest = (held // turn).unsqueeze(1), (held % turn).unsqueeze(1)
    counts = whole * pp + (rest - lap * pp).clamp(min=0, max=pp)
    return counts.flatten(1).to(torch.float64)
