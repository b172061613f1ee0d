"""Processes of this machine that run jobs together, in one process group and a pool for each rank."""

import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from darts_parallel.config import begin_worker, children_without_interrupts
from darts_parallel.errors import STARTER, DartsParallelError, UnsupportedError

GRACE_S = 1.0
"""After a first failure the other ranks get this long to say what they know."""
LOST = re.compile(
    "closed by peer|reset by peer|broken pipe|connection refused|timed out|timeout|monitoredbarrier|"
    "recvbytes failed|sendbytes failed|failed to recv|shutting down"
)
"""Words of torch's errors where another process of the group is gone."""
Job = Callable[..., Any]


class GroupError(UnsupportedError):
    """Processes that should work together do not."""


def choose_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this rank, and make it the current one.

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
    device: torch.device,
    rank: int,
    world: int,
    timeout_s: float,
    store: Any = None,
) -> Iterator[None]:
    """Join the group of all processes; the body runs once every process is there.

    Args:
        device: `cpu` uses gloo; `cuda` nccl, with gloo for tensors of the CPU.
        timeout_s: Longest wait for another process, here and in every collective.
        store: Where the processes meet; None: the address in the environment, as torchrun sets it.

    Errors:
        GroupError: a process is missing or was lost, or the port is taken.
    """
    try:
        with group_errors(rank, timeout_s):
            join_group(device, rank, world, timeout_s, store)
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_group(
    device: torch.device,
    rank: int,
    world: int,
    timeout_s: float,
    store: Any,
) -> None:
    """Wait for all processes of a new group; arguments as `process_group`."""
    # warnings of torch that say nothing here: whole gradients are gathered in two steps, gloo has no
    # all-to-all, and a head's logits are a view of a tensor-parallel result
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    dist.monitored_barrier(timeout=timeout)


@contextmanager
def group_errors(rank: int, timeout_s: float) -> Iterator[None]:
    """Say in one sentence what is wrong with the process group, in the place of torch's own errors.

    Errors:
        GroupError: a process is missing or was lost, or the port is taken.
    """
    try:
        yield
    except Exception as error:
        sentence = group_sentence(error, rank, timeout_s)
        if sentence is None:
            raise
        raise GroupError(sentence) from error


def group_sentence(error: BaseException, rank: int, timeout_s: float) -> str | None:
    """Return one sentence for an error of the process group; None where it is another error."""
    chain: BaseException | None = error
    while chain is not None:
        text = " ".join(str(chain).split())
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            address = (
                f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '?')}"
            )
            return (
                f"the port {address} is taken; try another MASTER_PORT, or torchrun --standalone."
            )
        lost = LOST.search(text.lower())
        if lost and isinstance(chain, (RuntimeError, dist.DistError)):
            return (
                f"rank {rank} lost another process within timeout_s={timeout_s:g} ({text[:160]}); try "
                "all processes of the plan alive, or a longer timeout_s if they only are slow."
            )
        chain = chain.__cause__ or chain.__context__
    return None


def preloaded() -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["darts_parallel.run.measure"])
    os.environ[STARTER] = str(
        os.getpid()
    )  # killed during its imports, the server would finish them
    with children_without_interrupts():
        forkserver.ensure_running()
    del os.environ[STARTER]
    return context


class Workers(AbstractContextManager["Workers"]):
    """A fixed number of processes in one process group, which run one job after the other.

    Starting them costs no import (see `preloaded`). The group stays for all jobs: DTensor remembers meshes
    from one job to the next.

    Args:
        timeout_s: Longest wait for another process, seconds.
        device: `cpu`, or `cuda` for one GPU each.
    """

    def __init__(self, count: int, timeout_s: float = 25.0, device: str = "cpu") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="darts-parallel-")
        self._group = (count, str(Path(self._folder.name) / "store"), timeout_s, device)
        self._pools: list[ProcessPoolExecutor] = []
        self._processes: list[BaseProcess] = []
        context = preloaded()
        try:
            with (
                children_without_interrupts()
            ):  # a process that no list holds would outlive its semaphores
                for _ in range(count):
                    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin)
                    others = set(multiprocessing.active_children())
                    pool.submit(os.getpid)
                    self._pools.append(pool)
                    self._processes += set(multiprocessing.active_children()) - others
        except KeyboardInterrupt:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, job: Job, *arguments: Any) -> list[Any]:
        """Call `job(*arguments)` on every rank; return the results by rank.

        After an error all processes are stopped.

        Args:
            job: A function of a module.
            arguments: For every rank alike.

        Errors:
            DartsParallelError: what a rank raised as such, or that a process died or did not answer.
            GroupError: the processes were stopped before.
        """
        if not self._pools:
            raise GroupError("the processes of this job were stopped; try new ones.")
        try:
            group = (*self._group, job, *arguments)
            answers = [_submitted(pool, rank, *group) for rank, pool in enumerate(self._pools)]
            done, running = wait(answers, return_when=FIRST_EXCEPTION)
            if any(answer.exception() for answer in done):
                done |= wait(running, GRACE_S).done
                errors = []
                # a death explains the rest; then what a rank did wrong; then lost connections
                for answer in sorted(done, key=answers.index):
                    error = answer.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise self._death(answers.index(answer))
                    if error is not None:
                        errors.append(error)
                raise min(errors, key=lambda error: isinstance(error, GroupError))
            return [answer.result() for answer in answers]
        except BaseException:
            self.close()
            raise

    def _death(self, rank: int) -> GroupError:
        self._pools[
            rank
        ].shutdown()  # its own thread asks for the exit status, which can be read once
        code = self._processes[rank].exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return GroupError(
            f"rank {rank} died ({how}); the other ranks were stopped. Try again, with a smaller model or "
            "batch if memory ran out."
        )

    def close(self) -> None:
        """Stop all processes; none is left when this returns."""
        for process in self._processes:
            process.kill()  # threads of a broken group would keep them alive
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()
        self._processes = []
        self._pools = []
        self._folder.cleanup()


def _submitted(pool: ProcessPoolExecutor, *arguments: Any) -> Future[Any]:
    """Submit a job; a process that is gone already breaks its future alone."""
    try:
        return pool.submit(_serve, *arguments)
    except BrokenProcessPool as error:
        broken: Future[Any] = Future()
        broken.set_exception(error)
        return broken


def _begin() -> None:
    """Share the cores with the other workers."""
    begin_worker()
    torch.set_num_threads(1)


def _serve(
    rank: int, world: int, file: str, timeout_s: float, kind: str, job: Job, *arguments: Any
) -> Any:
    """Run a job in a worker, which joins the group before its first; arguments as `process_group`."""
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        with group_errors(rank, timeout_s):
            if not dist.is_initialized():
                store = dist.FileStore(file, world)  # type: ignore[attr-defined]
                join_group(choose_device(kind, rank), rank, world, timeout_s, store)
            return job(*arguments)
    except DartsParallelError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise RuntimeError(f"rank {rank}: {type(error).__name__}: {error}") from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
