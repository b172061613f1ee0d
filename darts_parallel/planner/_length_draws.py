"""Sequences drawn from a histogram of lengths, and what a packing makes of them on every rank."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from darts_parallel.config import require
from darts_parallel.cost import Array, Index
from darts_parallel.errors import remembered
from darts_parallel.planner.sequence_packing import Packing
from darts_parallel.problem import Problem, read_rows

DRAWS = 32
"""Steps that are drawn."""
LENGTHS = 4
"""Lengths that are priced; others are interpolated."""
MOST_COUNT = 1e15
"""Largest count of a length: sums of counts stay exact."""


def read_lengths(path: str, longest: int) -> tuple[Index, Array]:
    """Return the lengths, rising, of a CSV file with the columns `length` and `count`, and their shares.

    Errors:
        ConfigError: it cannot be read, or holds a length not in 1 to `longest`, or a count not
            above 0.
    """
    every = []
    counts = []
    for place, row in read_rows(path, ("length", "count"), key="training.lengths="):
        length = row["length"]
        count = row["count"]
        rule = f"be at most training.seq_len={longest}"
        require(length <= longest, f"{place}: length={length}", rule, longest)
        rule = f"be at most {MOST_COUNT:g}"
        require(count <= MOST_COUNT, f"{place}: count={count:g}", rule, 1)
        every.append(length)
        counts.append(count)
    lengths, places = np.unique(every, return_inverse=True)
    sums = np.bincount(places, counts)
    return lengths, sums / sums.sum()


def weights_between(values: Array | Index, marks: Array | Index) -> Array:
    """Return the weights of M marks that interpolate at values, extrapolating outside, `(values, M)`."""
    weights = np.zeros((len(values), len(marks)))
    if len(marks) == 1:
        return weights + 1.0
    below = np.clip(np.searchsorted(marks, values) - 1, 0, len(marks) - 2)
    place = (values - marks[below]) / (marks[below + 1] - marks[below])
    rows = np.arange(len(values))
    weights[rows, below] = 1.0 - place
    weights[rows, below + 1] = place
    return weights


class Load(NamedTuple):
    """Groups of ranks in all micro-batches of D draws: M groups in W micro-batches."""

    ranks: Index
    """Context-parallel degree of every group, `(M,)`."""
    tokens: Array
    """Tokens of a rank, `(M,)`."""
    mix: Array
    """Shares of the tokens by priced lengths, `(M, G)`."""
    waves: Index
    """First group of every micro-batch, `(W,)`."""
    counts: Index
    """Micro-batches of every draw, `(D,)`."""


@dataclass(frozen=True)
class Draws:
    """Sequences of `DRAWS` steps, of which G lengths are priced and mix to the others."""

    lengths: Index
    """Lengths of the histogram, rising."""
    picks: Index
    """Number of the length of every drawn sequence, `(DRAWS, batch)`."""
    grid: Index
    """The priced lengths, `(G,)`."""
    hat: Array
    """Weights of the priced lengths in every length, `(lengths, G)`."""

    @staticmethod
    def of(problem: Problem) -> "Draws":
        """Draw the steps of a job."""
        training = problem.training
        lengths, shares = read_lengths(str(training.lengths), training.seq_len)
        grid = lengths
        if len(lengths) > LENGTHS:
            # between two marks lie equal tokens
            tokens = (shares * lengths).cumsum()
            marks = np.linspace(0.0, tokens[-1], LENGTHS)
            marks = np.interp(marks, tokens, lengths).round()
            grid = np.unique(marks.astype(np.int64))
        source = np.random.default_rng(problem.config.search.seed)
        size = (DRAWS, training.global_batch_size)
        picks = source.choice(len(lengths), size, p=shares)
        return Draws(lengths, picks, grid, weights_between(lengths, grid))

    @cached_property
    def tokens(self) -> Array:
        """Tokens of every step by priced length, `(DRAWS, G)`."""
        tokens = self.hat * self.lengths[:, None]
        return tokens[self.picks].sum(1)

    @property
    def longest_length(self) -> int:
        """Tokens of the longest sequence of the histogram."""
        return int(self.lengths[-1])

    @property
    def longest(self) -> Index:
        """Number of the longest length of every step, `(DRAWS,)`."""
        return self.picks.max(1)

    @remembered
    def load(self, packing: Packing, ranks: int, draws: int) -> Load:
        """Pack the sequences of the first draws on some ranks."""
        pack = packing.function(ranks)
        steps = [pack(self.lengths[own].tolist()) for own in self.picks[:draws]]
        waves = list(chain.from_iterable(steps))
        groups = list(chain.from_iterable(waves))
        degrees = np.array([own.ranks for own in groups])
        sizes = np.array([len(own.sequences) for own in groups])
        widths = np.array([len(wave) for wave in waves])
        counts = np.array([len(step) for step in steps])
        # every draw has its own row of picks
        of_wave = np.repeat(np.arange(draws), counts)
        of_group = np.repeat(of_wave, widths)
        rows = np.repeat(of_group, sizes)
        numbers = [number for own in groups for number in own.sequences]
        places = self.picks[rows, numbers]
        starts = np.cumsum(sizes) - sizes
        lengths = self.lengths[places]
        tokens = np.add.reduceat(lengths, starts)
        weighted = self.hat[places] * lengths[:, None]
        mix = np.add.reduceat(weighted, starts) / tokens[:, None]
        first = np.cumsum(widths) - widths
        return Load(degrees, tokens / degrees, mix, first, counts)
