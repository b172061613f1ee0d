"""Splits of layers into stages placed as a V: the two runs of a device lie outside those of the next one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.exact.segments import Array, Index, prefix_sums


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of a device of a V under several paths and prices, P, by the layers that its runs hold."""

    first: Array
    """Sums over the first layers, of the run on the way down, `(P, L + 1)`."""
    second: Array
    """Seconds of the run on the way up, `(P, L + 1)`."""
    ways: Array
    """Seconds added, by the layers before the first run, `(P, L + 1)`."""


@dataclass(frozen=True)
class _Step:
    """Runs of some lengths, in some places, that one device can hold."""

    before: int
    """Layers of the run on the way down."""
    behind: int
    rows: slice
    """Layers outside on the way down."""
    columns: slice
    """First layer outside on the way up."""
    allowed: NDArray[np.bool_]

    @property
    def behind_it(self) -> tuple[slice, slice]:
        """Return the states that it leads to."""
        return (
            slice(self.rows.start + self.before, self.rows.stop + self.before),
            slice(self.columns.start - self.behind, self.columns.stop - self.behind),
        )


@dataclass(frozen=True)
class FoldedSplits:
    """Splits none of whose devices takes more than a limit; a state is the layers outside on both sides."""

    begins: NDArray[np.bool_]
    """Layers that can begin a stage, and the end, `(L + 1,)`."""
    steps: list[list[_Step]]
    """Costs of every device."""
    slowest: float
    """Seconds of the slowest device where it is the fastest; infinite where no split is left."""

    @staticmethod
    def below(limit: float, begins: NDArray[np.bool_], devices: list[DeviceCosts]) -> "FoldedSplits":
        """Return those whose devices all take at most `limit` seconds."""
        best, steps = np.full((len(begins), len(begins)), np.inf), list[list[_Step]]()
        best[0, -1] = 0.0
        for costs in devices:
            new, mine = np.full_like(best, np.inf), list[_Step]()
            top, low = _span(np.isfinite(best).any(1)), _span(np.isfinite(best).any(0))
            for before in range(1, len(begins)):
                rows = slice(top.start, min(top.stop, len(begins) - before))
                first = _runs(costs.first, before)[:, rows] + costs.ways[:, rows]
                if not first.size or first.min(-1).max() > limit:
                    break
                for behind in range(1, len(begins)):
                    columns = slice(max(low.start, behind), low.stop)
                    second = _runs(costs.second, behind)[:, columns.start - behind : columns.stop - behind]
                    if not second.size or (first.min(-1) + second.min(-1)).max() > limit:
                        break
                    value = (first[:, :, None] + second[:, None, :]).max(0)
                    step = _Step(before, behind, rows, columns, value <= limit)
                    value = np.where(step.allowed, np.maximum(best[rows, columns], value), np.inf)
                    np.minimum(new[step.behind_it], value, out=new[step.behind_it])
                    mine.append(step)
            new[~begins], new[:, ~begins] = np.inf, np.inf
            best = new
            steps.append(mine)
            if np.isinf(best).all():
                break
        return FoldedSplits(begins, steps, float(best.diagonal().min()))

    def cheapest(self, seconds: Array, entering: Array) -> tuple[float, list[int]]:
        """Return the least sum of the stages of a split, and its first layers; no split is left: infinite.

        Args:
            seconds: Of every layer on every stage, `(S, L)`.
            entering: Added where a stage but the first begins with layer l + 1, `(S - 1, L - 1)`.
        """
        if np.isinf(self.slowest):
            return np.inf, []
        sums = prefix_sums(np.minimum(seconds, LARGE_SECONDS))
        best, taken = np.full((len(self.begins), len(self.begins)), np.inf), list[Index]()
        best[0, -1], stages = 0.0, len(seconds)
        for device, steps in enumerate(self.steps):
            new, which = np.full_like(best, np.inf), np.zeros(best.shape, dtype=np.int64)
            ways = np.zeros((2, len(self.begins)))
            for way, stage in zip(ways, (device, stages - 1 - device), strict=True):
                way[1:-1] = entering[stage - 1] if stage else 0.0
            for number, step in enumerate(steps):
                first = _runs(sums[device], step.before)[step.rows] + ways[0][step.rows]
                places = slice(step.columns.start - step.behind, step.columns.stop - step.behind)
                second = _runs(sums[stages - 1 - device], step.behind)[places] + ways[1][places]
                value = best[step.rows, step.columns] + first[:, None] + second
                better = step.allowed & (value < new[step.behind_it])
                new[step.behind_it][better] = value[better]
                which[step.behind_it][better] = number
            new[~self.begins], new[:, ~self.begins] = np.inf, np.inf
            best = new
            taken.append(which)
        least = best.diagonal()
        row = column = int(least.argmin())
        starts = [0] * stages
        for device in reversed(range(len(self.steps))):
            step = self.steps[device][taken[device][row, column]]
            starts[stages - 1 - device] = column
            row, column = row - step.before, column + step.behind
            starts[device] = row
        return float(least.min()), starts


LARGE_SECONDS = 1e12
"""Seconds of a layer that no strategy can run on a stage."""


def _runs(sums: Array, length: int) -> Array:
    """Return sums over as many layers from each one on, `(..., L + 1 - length)`."""
    return np.asarray(sums[..., length:] - sums[..., :-length])


def _span(some: NDArray[np.bool_]) -> slice:
    """Return a slice from the first to the last that is true."""
    found = np.flatnonzero(some)
    return slice(int(found[0]), int(found[-1]) + 1)
