"""An independent simulation of packed steps: one process for every rank of every stage."""

from collections.abc import Callable, Sequence

from darts_parallel.planner.sequence_packing import Wave
from darts_parallel.schedules import find

Seconds = Callable[[int, tuple[int, ...], str, int], float]
"""Seconds of a pass: ranks of the group, its sequences, "F" or "B", stage."""


def simulated_step(waves: Sequence[Wave], stages: int, seconds: Seconds, *, waits: bool) -> float:
    """Return the end of the last pass.

    Args:
        waits: All ranks end a pass together; else only the ranks of a group do.
    """
    groups = [[own for own in wave for _ in range(own.ranks)] for wave in waves]
    ranks = range(len(groups[0]))
    todo = [list(order) for order in find("1f1b").orders(stages, len(waves), 1)]
    free = {(stage, rank): 0.0 for stage in range(stages) for rank in ranks}
    ends: dict[tuple[str, int, int, int], float] = {}
    while any(todo):
        for stage, row in enumerate(todo):
            if not row:
                continue
            kind, _, wave = row[0]
            source = {"F": ("F", wave, stage - 1), "B": ("B", wave, stage + 1)}[kind]
            if kind == "B" and stage == stages - 1:
                source = ("F", wave, stage)
            if source[2] >= 0 and (*source, 0) not in ends:
                continue
            row.pop(0)
            ready = {}
            for rank in ranks:
                ready[rank] = max(free[stage, rank], ends.get((*source, rank), 0.0))
            last = {}
            for rank in ranks:
                group = groups[wave][rank]
                peers = [other for other in ranks if groups[wave][other] is group]
                begin = max(ready[other] for other in peers)
                last[rank] = begin + seconds(group.ranks, group.sequences, kind, stage)
            for rank in ranks:
                end = max(last.values()) if waits else last[rank]
                free[stage, rank] = ends[kind, wave, stage, rank] = end
    return max(free.values())
