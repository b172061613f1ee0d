"""Sums and gradients at few bits: collectives of real ranks, and the same on one process."""

from darts_parallel.run.lossy.collectives import (
    ErrorFeedback,
    lossy_all_reduce,
    pack,
    padded,
    rounded,
    straight_through_sum,
    time_all_reduce,
    unpack,
)

__all__ = [
    "ErrorFeedback",
    "lossy_all_reduce",
    "pack",
    "padded",
    "rounded",
    "straight_through_sum",
    "time_all_reduce",
    "unpack",
]
