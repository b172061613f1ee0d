"""A pipeline by a queue of events, written apart from the package's simulation as its reference."""

import heapq
from collections import defaultdict

from darts_parallel.schedules import Operation


def event_queue_ends(
    orders: tuple[tuple[Operation, ...], ...], seconds: dict[str, list[float]], message: list[float]
) -> tuple[list[float], dict[Operation, tuple[float, float]]]:
    """When every device has ended its order, and start and end of every pass.

    Args:
        orders: Passes of every device.
        seconds: By kind of pass and stage.
        message: From stage s to s + 1, or back.
    """
    stages = len(message) + 1
    arrived: set[tuple[str, int, int]] = {
        ("F", 0, o.micro_batch) for order in orders for o in order
    }
    queue: list[tuple[float, int, str, tuple[int, ...]]] = []
    position, busy = [0] * len(orders), [False] * len(orders)
    spans: dict[Operation, tuple[float, float]] = {}
    ends = defaultdict(float)
    device_of = {
        operation.stage: device for device, order in enumerate(orders) for operation in order
    }

    def begin(device: int, now: float) -> None:
        if busy[device] or position[device] == len(orders[device]):
            return
        operation = orders[device][position[device]]
        if operation.kind != "W" and tuple(operation) not in arrived:
            return
        busy[device] = True
        position[device] += 1
        end = now + seconds[operation.kind][operation.stage]
        spans[operation] = (now, end)
        heapq.heappush(queue, (end, device, "end", operation))  # type: ignore[misc]

    for device in range(len(orders)):
        begin(device, 0.0)
    while queue:
        now, device, what, payload = heapq.heappop(queue)
        kind, stage, batch = payload
        if what == "arrival":
            arrived.add((kind, stage, batch))  # type: ignore[arg-type]
        else:
            busy[device] = False
            ends[device] = now
            goal = _sent(str(kind), stage, stages)
            if goal is not None:
                boundary = min(stage, goal[1]) if goal[1] != stage else None
                delay = 0.0 if boundary is None else message[boundary]
                heapq.heappush(queue, (now + delay, device_of[goal[1]], "arrival", (*goal, batch)))  # type: ignore[misc]
        begin(device, now)
    return [ends[device] for device in range(len(orders))], spans


def _sent(kind: str, stage: int, stages: int) -> tuple[str, int] | None:
    """Pass whose input a finished pass gives."""
    if kind == "F":
        return ("F", stage + 1) if stage + 1 < stages else ("B", stage)
    return ("B", stage - 1) if kind == "B" and stage else None
