"""Processes of this machine that run jobs together, watched so that none is left behind."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from darts_parallel.config.interrupts import children_without_interrupts, end_with_parent
from darts_parallel.errors import DartsParallelError, UnsupportedError

_LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "timed out", "timeout",
         "monitoredbarrier", "recvbytes failed", "sendbytes failed", "failed to recv",
         "shutting down")  # fmt: skip


class GroupError(UnsupportedError):
    """Processes that should work together do not."""


def choose_device(kind: str, local_rank: int) -> torch.device:
    """The device of this rank; the current one from now on.

    Errors:
        GroupError: this machine has fewer GPUs.
    """
    if kind != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise GroupError(
            f"device=cuda needs a GPU for each process of this machine, which has {count}; try "
            f"--nproc-per-node {count}, or device=cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(
    device: torch.device, rank: int, world: int, timeout_s: float, store: Any = None
) -> Iterator[None]:
    """Membership in the group of all processes; returns once every process is there.

    Args:
        device: `cpu` uses gloo; `cuda` nccl, with gloo for tensors of the CPU.
        rank, world: This process and the number of all.
        timeout_s: Longest wait for another process, here and in every collective.
        store: Where the processes meet; None: the address in the environment, as torchrun sets it.

    Errors:
        GroupError: a process is missing or was lost, or the port is taken.
    """
    quiet_torch()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        dist.monitored_barrier(timeout=timeout)
        yield
    except Exception as error:
        sentence = group_sentence(error, rank, timeout_s)
        if sentence is None:
            raise
        raise GroupError(sentence) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def group_sentence(error: BaseException, rank: int, timeout_s: float) -> str | None:
    """One sentence for an error of the process group; None where it is another error."""
    chain: BaseException | None = error
    while chain is not None:
        text = " ".join(str(chain).split())
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            address = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '?')}"
            return f"the port {address} is taken; try another MASTER_PORT, or torchrun --standalone."
        lost = any(word in text.lower() for word in _LOST)
        if lost and isinstance(chain, (RuntimeError, dist.DistError)):
            return (
                f"rank {rank} lost another process within timeout_s={timeout_s:g} ({text[:160]}); try "
                "all processes of the plan alive, or a longer timeout_s if they only are slow."
            )
        chain = chain.__cause__ or chain.__context__
    return None


def quiet_torch() -> None:
    """Silence known warnings of torch that say nothing about the run."""
    # whole gradients are gathered in two steps, and only for the comparison
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # a head's logits are a view of a tensor-parallel result; nothing here changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


Job = Callable[..., Any]


def preloaded() -> ForkServerContext:
    """A context whose processes are forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["darts_parallel.run.measure"])
    return context


class Workers:
    """A fixed number of processes in one process group, which run one job after the other.

    Starting them costs no import (see `preloaded`). The group stays for all jobs: DTensor remembers meshes
    from one job to the next.

    Args:
        count: Processes.
        timeout_s: Longest wait for another process.
        device: `cpu`, or `cuda` for one GPU each.
    """

    def __init__(self, count: int, timeout_s: float = 25.0, device: str = "cpu") -> None:
        self.timeout_s = timeout_s
        context = preloaded()
        self._folder = tempfile.TemporaryDirectory(prefix="darts-parallel-")
        store = str(Path(self._folder.name) / "store")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, count, store, timeout_s, device), daemon=True
            )
            with children_without_interrupts():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid or -1 for process in self._processes]

    def run(self, job: Job, *arguments: Any) -> list[Any]:
        """Call `job(*arguments)` on every rank; the results by rank.

        After an error all processes are stopped.

        Args:
            job: A function of a module.
            arguments: For every rank alike.

        Errors:
            DartsParallelError: what a rank raised as such, or that a process died or did not answer.
        """
        try:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # the process is dead, which `_answers` tells
                    pipe.send((job, arguments))
            return self._answers(len(self._pipes))
        except BaseException:
            self.close()
            raise

    def _answers(self, world: int) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        deadline: float | None = None
        while len(answers) < world and not (errors and len(answers) + len(errors) == world):
            open_ranks = [r for r in range(world) if r not in answers and r not in errors]
            waiting: list[Any] = [self._pipes[r] for r in open_ranks]
            waiting += [self._processes[r].sentinel for r in open_ranks]
            # after a first failure the others get a moment to say what they know
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not wait(waiting, left) and deadline is not None:
                break
            for rank in open_ranks:
                if self._pipes[rank].poll():
                    self._receive(rank, answers, errors)
                elif not self._processes[rank].is_alive() and not self._pipes[rank].poll():
                    errors[rank] = _death(rank, self._processes[rank])
            if errors and deadline is None:
                deadline = time.monotonic() + 1.0
        if errors:
            raise _most_telling(errors)
        return [answers[rank] for rank in range(world)]

    def _receive(self, rank: int, answers: dict[int, Any], errors: dict[int, BaseException]) -> None:
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(1.0)
            errors[rank] = _death(rank, self._processes[rank])
            return
        if kind == "answer":
            answers[rank] = value
        else:
            errors[rank] = value

    def close(self) -> None:
        """Stop all processes; none is left when this returns."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5 if process.exitcode is None else 0.0)
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


class WorkerDied(GroupError):  # noqa: N818
    """A process ended without an answer."""


def _death(rank: int, process: BaseProcess) -> WorkerDied:
    code = process.exitcode
    how = f"exit status {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    return WorkerDied(
        f"rank {rank} died ({how}), and the others were stopped; try start again, with a smaller "
        "model or batch if memory ran out."
    )


def _most_telling(errors: dict[int, BaseException]) -> BaseException:
    """A death explains the rest; then what a rank itself did wrong; then lost connections."""

    def order(item: tuple[int, BaseException]) -> tuple[int, int]:
        rank, error = item
        if isinstance(error, WorkerDied):
            return 0, rank
        return (2 if isinstance(error, GroupError) else 1), rank

    return min(errors.items(), key=order)[1]


def _serve(pipe: Connection, rank: int, world: int, store: str, timeout_s: float, device: str) -> None:
    """A worker's life: jobs until the parent closes the pipe, or until one fails."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    end_with_parent()
    torch.set_num_threads(1)  # processes share the cores
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        with process_group(choose_device(device, rank), rank, world, timeout_s, FileStore(store, world)):
            while True:
                job, arguments = pipe.recv()
                pipe.send(("answer", job(*arguments)))
    except (EOFError, OSError):
        pass  # the parent is done, or gone
    except DartsParallelError as error:
        _tell(pipe, error)
    except Exception as error:
        traceback.print_exc()
        _tell(pipe, RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a broken group would keep the process alive


def _tell(pipe: Connection, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        pipe.send(("error", error))
