"""An independent simulation of packed steps by a queue of events, written from the definition of 1F1B.

It shares no code with the package. A test gives it the groups and the seconds of each pass.
"""

import heapq
from collections.abc import Callable, Sequence

from darts_parallel.planner.sequence_packing import Wave

Seconds = Callable[[int, tuple[int, ...], str, int], float]
"""Seconds of a pass: ranks of the group, its sequences, "F" or "B", stage."""
Pass = tuple[str, int]
"""Kind and number of the micro-batch."""


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[Pass]:
    """The passes of a stage: as many forward as stages follow, then one forward and one backward by turns."""
    warm_up = min(stages - 1 - stage, count)
    passes = [("F", number) for number in range(warm_up)]
    for number in range(count - warm_up):
        passes += [("F", warm_up + number), ("B", number)]
    return passes + [("B", number) for number in range(count - warm_up, count)]


class _Simulation:
    """Ranks of all stages, each with its list of passes."""

    def __init__(
        self, waves: Sequence[Wave], stages: int, seconds: Seconds, *, waits: bool
    ) -> None:
        self.waves = waves
        self.stages = stages
        self.seconds = seconds
        self.waits = waits
        self.members: list[list[list[int]]] = []
        for wave in waves:
            starts = [sum(own.ranks for own in wave[:place]) for place in range(len(wave))]
            self.members.append(
                [list(range(s, s + own.ranks)) for s, own in zip(starts, wave, strict=True)]
            )
        self.ranks = sum(own.ranks for own in waves[0])
        self.todo = {}
        for stage in range(stages):
            for rank in range(self.ranks):
                self.todo[stage, rank] = one_forward_one_backward(stage, stages, len(waves))
        self.busy: set[tuple[int, int]] = set()
        self.known: dict[tuple[Pass, int], list[tuple[list[int], float]]] = {}
        self.arrived = {("F", w, 0, r) for w in range(len(waves)) for r in range(self.ranks)}
        self.events: list[tuple[float, int, Pass, list[int]]] = []

    def units(self, own: Pass, stage: int) -> list[tuple[list[int], float]]:
        """Ranks that run a pass together, and its seconds."""
        kind, number = own
        groups = []
        for members, group in zip(self.members[number], self.waves[number], strict=True):
            groups.append((members, self.seconds(group.ranks, group.sequences, kind, stage)))
        if self.waits:
            return [(list(range(self.ranks)), max(seconds for _, seconds in groups))]
        return groups

    def begin(self, now: float) -> None:
        """Start what can start."""
        for stage in range(self.stages):
            heads = [self.todo[stage, rank][:1] for rank in range(self.ranks)]
            for own in {head[0] for head in heads if head}:
                if (own, stage) not in self.known:
                    self.known[own, stage] = self.units(own, stage)
                for members, seconds in self.known[own, stage]:
                    if all(
                        heads[rank] == [own]
                        and (stage, rank) not in self.busy
                        and (*own, stage, rank) in self.arrived
                        for rank in members
                    ):
                        self.busy |= {(stage, rank) for rank in members}
                        heapq.heappush(self.events, (now + seconds, stage, own, members))

    def run(self) -> float:
        """Run all passes, and return when the last one ends."""
        now = 0.0
        self.begin(now)
        while self.events:
            now, stage, own, members = heapq.heappop(self.events)
            kind, number = own
            for rank in members:
                self.busy.remove((stage, rank))
                self.todo[stage, rank].pop(0)
                if kind == "F" and stage == self.stages - 1:
                    self.arrived.add(("B", number, stage, rank))
                else:
                    self.arrived.add((kind, number, stage + (1 if kind == "F" else -1), rank))
            if not self.events or self.events[0][0] > now:
                self.begin(now)
        assert not any(self.todo.values())
        return now


def simulated_step(waves: Sequence[Wave], stages: int, seconds: Seconds, *, waits: bool) -> float:
    """Return the end of the last pass.

    Args:
        waits: All ranks end a pass together; else only the ranks of a group do.
    """
    return _Simulation(waves, stages, seconds, waits=waits).run()
