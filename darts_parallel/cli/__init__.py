"""The command `darts-parallel`."""

from darts_parallel.cli.command import main as main
