"""Activation memory of a schedule: how many micro-batches a stage holds, and how much of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.rows import flatnonzero
from darts_parallel.schedules import Searched, find

Moments = Sequence[Sequence[tuple[float, float]]]
"""Micro-batches before their backward, and between its two parts, by outer choice and moment."""


@dataclass(frozen=True)
class ScheduleMemory:
    """The activation-memory fields of a cost table; see `CostTable`."""

    in_flight: Tensor
    """Micro-batches, `(O, K)`."""
    activation: Tensor
    """Bytes per micro-batch in flight, `(O, L, C)`."""
    before: Tensor
    """Bytes per micro-batch before its backward, `(O, L, C)`."""
    moments: Tensor | None = None
    """Micro-batches at the critical moments of a searched order, `(pp, M, 2 K)`."""


def schedule_memory(
    name: str,
    pp: int,
    chunks: int,
    num_micro_batches: Tensor,
    before: Tensor,
    for_weights: Tensor,
) -> ScheduleMemory:
    """Return the activation-memory fields of a cost table.

    A split backward keeps `for_weights` between the gradient of the input and the gradient of the
    weights: inputs of the matrix products and gradients of their outputs. A block's bytes are about
    equal before and after (`34 s b h` and `32 s b h`, Qi et al. 2023, arXiv 2401.10241, table 1),
    so it counts in full. A recomputed block holds less before. It then counts in flight as on the
    fullest device, which is too much on the other devices. The loss, on the last stage, holds less
    after.

    Args:
        name: Full name of the schedule.
        pp, chunks: Devices in a row, and stages of a device.
        num_micro_batches: Shape `(O,)`.
        before: Bytes of a micro-batch before its backward, `(O, L, C)`.
        for_weights: Bytes of a micro-batch between the parts of its backward, `(O, L, C)`.
    """
    schedule = find(name)
    counts = num_micro_batches.tolist()
    flying = float_tensor([schedule.in_flight(pp, count, chunks) for count in counts])
    if isinstance(schedule, Searched):
        rows = [torch.from_numpy(device).double() for device in schedule.moments()]
        return ScheduleMemory(flying, before, before, pad_sequence(rows, batch_first=True))
    if not schedule.split:
        return ScheduleMemory(flying, before, before)
    activation = before.clone()
    lighter = _layers_where(before > for_weights)
    if len(lighter):
        last_stage = [schedule.last_stage_moments(pp, count, chunks) for count in counts]
        largest = _largest_bytes(last_stage, before[:, lighter], for_weights[:, lighter])
        per_micro_batch = largest / flying[:, -1:, None]
        activation[:, lighter] = per_micro_batch.minimum(before[:, lighter])
    heavier = _layers_where(for_weights > before)
    if len(heavier):
        fullest = [schedule.fullest_moments(pp, count, chunks) for count in counts]
        early = before[:, heavier]
        late = for_weights[:, heavier]
        largest = _largest_bytes(fullest, early, late)
        activation[:, heavier] = torch.where(late > early, largest, early)
    return ScheduleMemory(flying, activation, before)


def _layers_where(holds: Tensor) -> Tensor:
    """Return the layers for which a condition `(O, L, C)` holds in any outer choice and strategy."""
    return flatnonzero(holds.any(2).any(0))


def _largest_bytes(moments: Moments, before: Tensor, after: Tensor) -> Tensor:
    """Return the bytes at the worst moment of each outer choice, `(O, L, C)`."""
    largest = []
    for own, bytes_before, bytes_after in zip(moments, before, after, strict=True):
        sums = [early * bytes_before + late * bytes_after for early, late in own]
        largest.append(torch.stack(sums).amax(0))
    return torch.stack(largest)
