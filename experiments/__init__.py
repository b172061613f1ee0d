"""Experiments: one question each; `experiments/README.md` holds the results and the commands."""
