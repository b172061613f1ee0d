"""Measures the machine at hand: `darts-parallel profile`, alone or by torchrun on every device."""

from typing import TYPE_CHECKING

from darts_parallel.errors import lazy_names

if TYPE_CHECKING:
    from darts_parallel.machine.command import main as main

__getattr__ = lazy_names(__name__, {"command": ("main",)})
