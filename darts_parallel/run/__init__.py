"""Runs a plan on torch.distributed: `torchrun --nproc-per-node N -m darts_parallel.run plan=plan.json`."""

from typing import TYPE_CHECKING

from darts_parallel.errors import lazy_names
from darts_parallel.run.launch import joined as joined
from darts_parallel.run.launch import launched as launched
from darts_parallel.run.launch import leave as leave
from darts_parallel.run.launch import require_torch as require_torch

if TYPE_CHECKING:
    from darts_parallel.run._transformer import Block as Block
    from darts_parallel.run._transformer import build_layer as build_layer
    from darts_parallel.run._transformer import empty_layer as empty_layer
    from darts_parallel.run.engine import Engine as Engine
    from darts_parallel.run.measure import timed_step as timed_step
    from darts_parallel.run.workers import Workers as Workers
    from darts_parallel.run.workers import choose_device as choose_device

__getattr__, __dir__ = lazy_names(__name__)
