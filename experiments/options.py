"""Command lines of the experiments: those of the package."""

from darts_parallel.options import describe as describe
from darts_parallel.options import parse as parse
from darts_parallel.options import run_main as run_main
