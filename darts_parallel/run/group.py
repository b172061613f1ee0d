"""Joining and leaving the process group, and one sentence for what goes wrong in it."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from darts_parallel.errors import UnsupportedError

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
            f"device=cuda needs a GPU for each process of this machine, which has {count}; nearest legal: "
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
            return (
                f"the port {address} is taken; nearest legal: another MASTER_PORT, or torchrun --standalone."
            )
        lost = any(word in text.lower() for word in _LOST)
        if lost and isinstance(chain, (RuntimeError, dist.DistError)):
            return (
                f"rank {rank} lost another process within timeout_s={timeout_s:g} ({text[:160]}); nearest "
                "legal: all processes of the plan alive, or a longer timeout_s if they only are slow."
            )
        chain = chain.__cause__ or chain.__context__
    return None


def quiet_torch() -> None:
    """Silence known warnings of torch that say nothing about the run."""
    # whole gradients are gathered in two steps, and only for the comparison
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # a head's logits are a view of a tensor-parallel result; nothing here changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
