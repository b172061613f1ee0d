"""Pipeline schedules: the order in which every device runs its passes.

- `gpipe` (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards.
- `1f1b` (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1): as many forwards as
  there are later devices, then one forward and one backward in turn, then the backwards that are left.
- `interleaved` (the same paper, section 2.2.2; order of Megatron-LM): device k holds the stages
  k, k + pp, k + 2 pp, ..., and goes through them by groups of pp micro-batches.
- `zero_bubble_h1`, in short `zero_bubble` (ZB-H1 of Qi et al. 2023, arXiv 2401.10241): 1F1B whose backward
  is split into the gradient of the input (B), which the device before waits for, and that of the weights
  (W), for which nobody waits: device k runs the W of a micro-batch k backwards late, and so fills the
  bubble at the end.
- `zero_bubble_v`, `v_half`, `v_min`, `dualpipe`: two stages a device, see `v_schedules.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from darts_parallel.config.bilevel import ASYNCHRONOUS
from darts_parallel.config.schema import ALIASES, SCHEDULES, V_SHAPED
from darts_parallel.cost.v_schedules import v_passes
from darts_parallel.errors import UnsupportedError
from darts_parallel.plan.chunk_placement import stages_a_device

SPLIT_BACKWARD = ("zero_bubble", "zero_bubble_h1", *V_SHAPED)
"""Schedules whose backward passes leave the gradient of the weights to a pass of its own."""


class Operation(NamedTuple):
    """One pass of one micro-batch through one stage; `chunk_placement.stage_devices` names its device."""

    kind: str
    """`F` forward, `B` backward (of the input alone in a split schedule), `W` gradient of the weights."""
    stage: int
    """In the order of layers, from 0 to `pp * virtual_stages - 1`."""
    micro_batch: int


def device_orders(
    schedule: str, pp: int, num_micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[Operation, ...], ...]:
    """The passes of every device in the order in which it runs them.

    Args:
        schedule: One of `SCHEDULES`.
        pp: Devices in the pipeline.
        num_micro_batches: At least 1.
        virtual_stages: Stages of each device; above 1 with `interleaved`, 2 with those of `V_SHAPED`.

    Errors:
        UnsupportedError: the schedule does not exist for these numbers.
    """
    schedule = waiting(schedule)
    require_schedule(schedule, pp, num_micro_batches, virtual_stages)
    if schedule == "interleaved":
        return tuple(
            tuple(_interleaved(device, pp, num_micro_batches, virtual_stages)) for device in range(pp)
        )
    if schedule in V_SHAPED:
        orders = v_passes(schedule, pp, num_micro_batches)
        return tuple(tuple(Operation._make(entry) for entry in order) for order in orders)
    order = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}.get(schedule, _zero_bubble)
    return tuple(tuple(order(device, pp, num_micro_batches)) for device in range(pp))


def waiting(schedule: str) -> str:
    """The schedule in whose order the passes of one step run: an asynchronous 1F1B runs those of 1F1B."""
    return "1f1b" if schedule in ASYNCHRONOUS else schedule


def require_schedule(schedule: str, pp: int, num_micro_batches: int, virtual_stages: int) -> None:
    """Refuse numbers for which a schedule is not defined.

    Errors:
        UnsupportedError: one sentence with the nearest legal value.
    """
    if ALIASES.get(schedule, schedule) not in SCHEDULES:
        raise UnsupportedError(
            f"plan: schedule={schedule} must be one of {', '.join(SCHEDULES)}; nearest legal: 1f1b."
        )
    held = stages_a_device(schedule)
    if held is not None and virtual_stages != held:
        raise UnsupportedError(
            f"plan: virtual_stages={virtual_stages} must be {held} with the schedule {schedule}; "
            f"nearest legal: {held}."
        )
    if schedule == "dualpipe" and num_micro_batches < 2 * pp:
        raise UnsupportedError(
            f"plan: num_micro_batches={num_micro_batches} must be at least 2 * pp = {2 * pp} with the "
            f"schedule dualpipe; nearest legal: {2 * pp}."
        )
    if schedule == "interleaved" and num_micro_batches % pp:
        near = max(round(num_micro_batches / pp), 1) * pp
        raise UnsupportedError(
            f"plan: num_micro_batches={num_micro_batches} must be a multiple of pp={pp} when stages are "
            f"interleaved; nearest legal: {near}."
        )


def warm_up_passes(schedule: str, device: int, pp: int, num_micro_batches: int, virtual_stages: int) -> int:
    """Forwards of a device before its first backward, the one right before it excluded."""
    total = num_micro_batches * virtual_stages
    if schedule == "gpipe":
        return total - 1
    if schedule == "interleaved":
        return min(2 * (pp - device - 1) + (virtual_stages - 1) * pp, total)
    return min(pp - device - 1, total)


def _gpipe(device: int, pp: int, count: int) -> Iterator[Operation]:
    for batch in range(count):
        yield Operation("F", device, batch)
    for batch in range(count):
        yield Operation("B", device, batch)


def _one_forward_one_backward(device: int, pp: int, count: int) -> Iterator[Operation]:
    ahead = warm_up_passes("1f1b", device, pp, count, 1)
    for batch in range(ahead):
        yield Operation("F", device, batch)
    for batch in range(count):
        if ahead + batch < count:
            yield Operation("F", device, ahead + batch)
        yield Operation("B", device, batch)


def _zero_bubble(device: int, pp: int, count: int) -> Iterator[Operation]:
    for operation in _one_forward_one_backward(device, pp, count):
        yield operation
        if operation.kind == "B" and operation.micro_batch >= device:
            yield Operation("W", device, operation.micro_batch - device)
    for batch in range(max(count - device, 0), count):
        yield Operation("W", device, batch)


def _interleaved(device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
    total = count * chunks
    ahead = warm_up_passes("interleaved", device, pp, count, chunks)

    def forward(step: int) -> Operation:
        group, place = divmod(step, pp * chunks)
        return Operation("F", place // pp * pp + device, group * pp + step % pp)

    def backward(step: int) -> Operation:
        group, place = divmod(step, pp * chunks)
        return Operation("B", (chunks - 1 - place // pp) * pp + device, group * pp + step % pp)

    for step in range(ahead):
        yield forward(step)
    for step in range(total):
        if ahead + step < total:
            yield forward(ahead + step)
        yield backward(step)
