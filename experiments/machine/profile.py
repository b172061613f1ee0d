"""The machine that a profile runs on: ranks, device, clock, and a budget that all ranks share."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from experiments.machine.measured_speed import Case, interleaved_medians

MIN_ROUNDS = 3


@dataclass
class Machine:
    """One rank's view of the machine."""

    device: torch.device
    rank: int
    world: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return self.world // self.ranks_per_node

    def now(self) -> float:
        """Seconds, once the device has finished what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, work: Callable[[], object]) -> Case:
        """A case that runs `work` once."""

        def case() -> Sequence[float]:
            began = self.now()
            work()
            return (self.now() - began,)

        return case

    def together(self, work: Callable[[], object]) -> Case:
        """A case that all ranks begin at the same time."""
        case = self.timed(work)

        def begin() -> Sequence[float]:
            distributed.barrier()
            return case()

        return begin

    def agreed(self, values: Sequence[float]) -> list[float]:
        """Medians over all ranks of what each measured."""
        if self.world == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        distributed.all_gather(parts, mine)
        return torch.stack(parts).quantile(0.5, dim=0).tolist()

    def measure(self, name: str, cases: Sequence[Case], seconds: float) -> list[tuple[float, ...]]:
        """Medians of all cases over as many rounds as fit in `seconds`, at least three, and over the ranks.

        Args:
            name: For the line of progress.
            cases: The same on all ranks.
            seconds: Of wall-clock; rank 0 decides for all.
        """
        began = time.perf_counter()
        done = 0

        def go_on(rounds: int) -> bool:
            nonlocal done
            done = rounds
            spent = time.perf_counter() - began
            # another round takes about as long as those before
            more = rounds < MIN_ROUNDS or spent * (rounds + 1) / rounds < seconds
            if self.world > 1:
                flag = torch.tensor([float(more)], device=self.device)
                distributed.broadcast(flag, 0)
                more = bool(flag.item())
            return more

        result = interleaved_medians(cases, go_on)
        if self.rank == 0:
            spent = time.perf_counter() - began
            print(f"{name}: {len(cases)} cases, {done} rounds, {spent:.1f} s", flush=True)
        widths = [len(times) for times in result]
        flat = iter(self.agreed([seconds for times in result for seconds in times]))
        return [tuple(next(flat) for _ in range(width)) for width in widths]


@contextmanager
def this_machine(kind: str) -> Iterator[Machine]:
    """The machine, with the process group that `torchrun` asks for.

    Args:
        kind: `cpu` or `cuda`.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield Machine(device, rank, world, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    finally:
        if world > 1:
            distributed.destroy_process_group()
