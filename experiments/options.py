"""Command lines of the experiments: those of the package."""

from darts_parallel.config.options import describe as describe
from darts_parallel.config.options import parse as parse
from darts_parallel.config.options import run_main as run_main
