"""Experiments: one question each; `experiments/README.md` holds the results and the commands."""

from darts_parallel import errors as errors  # looks after Ctrl-C while an experiment imports
