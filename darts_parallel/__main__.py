"""`python -m darts_parallel`: the command `darts-parallel`."""

from darts_parallel.cli import run_process

if __name__ == "__main__":
    run_process()
