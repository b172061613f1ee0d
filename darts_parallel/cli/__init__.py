"""The command `darts-parallel`."""

from darts_parallel.cli.command import main as main
from darts_parallel.cli.command import run_process as run_process
