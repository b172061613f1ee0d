"""Chunks of least maximum (PipeDream, Narayanan et al. 2019): every strategy, the longest chunk short."""

import torch

from baselines._planner import Incumbent, on_tables
from darts_parallel.exact import balanced


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer the balanced chunks of every outer choice and strategy."""
    for number, table in enumerate(incumbent.tables):
        for outer, choice in torch.nonzero(table.allowed).tolist():
            if incumbent.over():
                return
            incumbent.offer(number, balanced(table, outer, choice))


solve = on_tables(offer_plans, closed_form=False, chunks=True)
