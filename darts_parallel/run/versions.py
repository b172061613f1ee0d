"""Which torch a run needs: the search and the exports work with older ones too."""

import re

import torch

from darts_parallel.errors import UnsupportedError

NEEDED_TORCH = (2, 13)
"""Oldest release that plans have run with; DTensor and fully_shard still change from one to the next."""


def require_torch(installed: str | None = None) -> None:
    """Refuse a torch too old to run plans.

    Args:
        installed: Its version; None: that of this process.

    Errors:
        UnsupportedError: it is older than `NEEDED_TORCH`.
    """
    installed = torch.__version__ if installed is None else installed
    found = re.match(r"(\d+)\.(\d+)", installed)
    if found and (int(found[1]), int(found[2])) < NEEDED_TORCH:
        needed = ".".join(map(str, NEEDED_TORCH))
        raise UnsupportedError(
            f"torch {installed} is installed, and to run a plan takes torch {needed} or newer; nearest "
            f'legal: pip install "torch>={needed}".'
        )
