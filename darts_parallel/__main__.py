"""`python -m darts_parallel`: the command `darts-parallel`."""

from darts_parallel.cli import main

if __name__ == "__main__":
    main()
