"""Measures the machine at hand: `darts-parallel profile`, alone or by torchrun on every device."""

from typing import TYPE_CHECKING

from darts_parallel.errors import lazy_names

if TYPE_CHECKING:
    from darts_parallel.machine._compute import MeasuredKernels as MeasuredKernels
    from darts_parallel.machine._compute import gemm_shapes as gemm_shapes
    from darts_parallel.machine._timing import MeasuredMachine as MeasuredMachine
    from darts_parallel.machine._timing import this_machine as this_machine
    from darts_parallel.machine.command import main as main

__getattr__, __dir__ = lazy_names(__name__)
