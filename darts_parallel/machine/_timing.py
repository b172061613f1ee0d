"""The machine that a profile runs on: ranks, device, and seconds of work."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import distributed
from torch.utils.benchmark import Timer

from darts_parallel.run import choose_device, joined

TIMEOUT_S = 600.0
"""Longest wait for another process."""
BLOCKS = 3
"""Number of times that a case is timed; the median of their means counts."""


@dataclass
class MeasuredMachine:
    """One rank's view of the machine."""

    device: torch.device
    rank: int
    world: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the group."""
        return self.world // self.ranks_per_node

    @property
    def has_gpu(self) -> bool:
        """Whether the device is a GPU, which talks by nccl; CPUs talk by gloo."""
        return self.device.type == "cuda"

    def measure(
        self, name: str, works: Sequence[Callable[[], object]], seconds: float
    ) -> list[float]:
        """Time works on all ranks at once; return the median seconds of each over the ranks.

        Args:
            seconds: Wall-clock of all of them; rank 0 says how often each is repeated.
        """
        began = time.perf_counter()
        result = []
        for work in works:
            # `timeit` warms up and waits for the device
            timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
            runs = seconds / len(works) / BLOCKS / timer.timeit(1).mean
            number = torch.tensor(max(int(runs), 1), device=self.device)
            if self.world > 1:
                distributed.broadcast(number, 0)
            spent = median(timer.timeit(int(number)).mean for _ in range(BLOCKS))
            every = [spent] * self.world
            if self.world > 1:
                distributed.all_gather_object(every, spent)
            result.append(median(every))
        if self.rank == 0:
            print(f"{name}: {len(works)} cases, {time.perf_counter() - began:.1f} s", flush=True)
        return result


def _variable(name: str, default: int) -> int:
    """Read a whole number that `torchrun` sets."""
    return int(os.environ.get(name, default))


@contextmanager
def this_machine(kind: str) -> Iterator[MeasuredMachine]:
    """Yield the machine, with the process group that `torchrun` asks for."""
    world = _variable("WORLD_SIZE", 1)
    per_node = _variable("LOCAL_WORLD_SIZE", world)
    alone = nullcontext(choose_device(kind, 0))
    with joined(kind, TIMEOUT_S) if world > 1 else alone as device:
        yield MeasuredMachine(device, _variable("RANK", 0), world, per_node)
