"""Runs of equal or consecutive things in words, for tables."""

from collections.abc import Sequence
from itertools import groupby

from darts_parallel.strategy import LayerStrategy


def run_lengths(strategies: Sequence[LayerStrategy]) -> str:
    """Strategies of neighbouring layers, equal ones counted, e.g. `5 × tp1 z1, 2 × tp2 z1`."""
    return ", ".join(f"{len(list(run))} × {label}" for label, run in groupby(s.label() for s in strategies))


def layer_ranges(names: Sequence[str]) -> str:
    """Layer names with consecutive numbers joined, e.g. `embedding, layers 0-4`."""
    parts: list[str] = []
    numbered = [name.rpartition(".") for name in names]
    for kind, run in groupby(numbered, key=lambda part: part[0]):
        items = [last for _, _, last in run]
        if not kind:
            parts.extend(items)
        elif len(items) == 1:
            parts.append(f"{kind.removesuffix('s')} {items[0]}")
        else:
            parts.append(f"{kind} {items[0]}-{items[-1]}")
    return ", ".join(parts)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks with consecutive ones joined, e.g. `0-3` or `4-7,0-3`."""
    starts = [i for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1] + 1]
    runs = [ranks[a:b] for a, b in zip(starts, [*starts[1:], len(ranks)], strict=True)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
