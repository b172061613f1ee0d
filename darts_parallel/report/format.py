"""Labels of runs of equal or consecutive things, for tables."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import floor, isfinite, log10

from rich.console import Console
from rich.table import Table
from rich.text import Text

from darts_parallel.plans import LayerStrategy


def run_lengths(strategies: Sequence[LayerStrategy]) -> str:
    """Return the strategies of neighbouring layers, equal ones counted, e.g. `5 × tp1 z1, 2 × tp2 z1`."""
    parts = []
    for _, run in groupby(strategies, key=lambda own: replace(own, recompute="none")):
        labels = [own.label() for own in run]
        # longest first: `tp1 z1 full` before `tp1 z1`
        counts = [f"{len(list(same))} × {label}" for label, same in groupby(labels)]
        recomputed = [label.endswith(" full") for label in labels]
        if len(counts) == 2 and recomputed[0] and not recomputed[-1]:
            counts = [f"{len(labels)} layers {labels[-1]}, {sum(recomputed)} recomputed"]
        parts += counts
    return ", ".join(parts)


def layer_ranges(names: Sequence[str]) -> str:
    """Return layer names with consecutive numbers joined, e.g. `embedding, layers 0-4`."""
    parts = []
    both_halves = re.compile(r"(layers\.\d+)\.attention \1\.mlp\b")
    numbered = [name.rpartition(".") for name in both_halves.sub(r"\1", " ".join(names)).split()]
    for kind, run in groupby(numbered, key=lambda part: part[0]):
        items = [last for _, _, last in run]
        if not kind:
            parts.extend(items)
        elif len(items) == 1:
            parts.append(f"{kind.removesuffix('s')} {items[0]}")
        else:
            parts.append(f"{kind} {items[0]}-{items[-1]}")
    return ", ".join(parts)


def kind_counts(kinds: Sequence[str]) -> str:
    """Return how many layers there are of each kind, where blocks differ.

    E.g. ` (6 mamba, 6 mlp, 1 attention)`; empty where all blocks are of one kind.
    """
    whole = ("embedding", "decoder_embedding", "head", "loss", "mtp", "mtp_again")
    found = Counter(kind for kind in kinds if kind not in whole)
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in found.most_common())
    return f" ({counts})" if len(found) > 1 else ""


WIDEST_RANGES = 12
"""Characters of ranges up to which all are named: more would leave no room for other columns."""


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks with consecutive ones joined, e.g. `0-3`, `4-7,0-3` or `1,…,31`."""
    labels = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        labels.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    if len(labels) > 2 and len(",".join(labels)) > WIDEST_RANGES:
        labels[1:-1] = "…"
    return ",".join(labels)


TERM_WORDS = {
    "recompute": "recomputation",
    "tensor_parallel": "tensor-parallel",
    "context_parallel": "context-parallel",
    "sharding": "sharding (ZeRO-2/3)",
    "expert_parallel": "expert dispatch",
    "p2p_and_resharding": "p2p, resharding",
    "pipeline_bubble": "bubble",
    "gradient_sync": "gradient sync",
    "tied_embedding_sync": "tied-embedding sync",
}


def seconds(value: float) -> str:
    """Format seconds with three significant places below one, e.g. `0.112 s`, `12.3 ms`."""
    if abs(value) >= 10:
        return f"{value:.2f} s"
    return f"{value:.3f} s" if abs(value) >= 0.1 else f"{1e3 * value:.3g} ms"


def percent(share: float, digits: int = 1) -> str:
    """Format a share in percent, e.g. `12.3 %`."""
    return f"{100 * share:.{digits}f} %"


def fits_label(chance: float | None) -> str:
    """Format the probability that a job fits its memory, of that it runs out; `-` where none is known."""
    return "-" if chance is None else percent(1.0 - chance, 0)


def number(value: float, scale: float | None = None) -> str:
    """Format a number with at least four decimals, and four significant digits of `scale` (or of itself)."""
    scale = value if scale is None else scale
    if not isfinite(value):
        return "-"
    return f"{value:.{max(4, 3 - floor(log10(scale))) if scale > 0 else 4}f}"


def term_words(name: str) -> str:
    """Return the usual name of a breakdown term."""
    return TERM_WORDS.get(name, name.replace("_", " "))


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: a terminal wraps it, and nothing in it is markup."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def one_line(words: str) -> Text:
    """Return text for a cell that is cut where its column is too narrow."""
    return Text(words, no_wrap=True, overflow="ellipsis")


def table_of(title: str | None, *headers: str) -> Table:
    """Return an empty table in the style of the report; a header that ends in `>` is set to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.header_style = "dim"
    for header in headers:
        right = header.endswith(">")
        name = header.removesuffix(">")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
