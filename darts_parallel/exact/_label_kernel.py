"""Compiled dominance between many labels; `_pareto` compares few of them, without compiled code."""

import numpy as np
from numba import njit


@njit(cache=True)
def undominated(points, slack, states, offsets, paid):
    """Return the rows of the labels that no label before them dominates.

    Args:
        points: Labels of D columns, `(n, D)`, in order of their sums.
        slack: Largest difference of two equal values, `(D,)`.
        states: State of every label, `(n,)`.
        offsets: As in `_pareto.pareto`.
        paid: Leading columns to which the offset is added.
    """
    kept = np.empty(len(points), np.int64)
    count = 0
    for row in range(len(points)):
        limit = points[row] + slack
        place = dominating(points, states, offsets[:, states[row]], paid, kept[:count], limit)
        if place < 0:
            kept[count] = row
            count += 1
        else:  # what dominates one label often dominates the next ones, and is met sooner there
            nearer = place // 2
            kept[place], kept[nearer] = kept[nearer], kept[place]
    return np.sort(kept[:count])


@njit(cache=True)
def dominating(points, states, offsets, paid, kept, limit):
    """Return the place in `kept` of a label within `limit`, `(D,)`; -1 if there is none."""
    for place, row in enumerate(kept):
        for column in range(len(limit)):
            value = points[row, column]
            if column < paid:
                value += offsets[states[row]]
            if value > limit[column]:
                break
        else:
            return place
    return -1
