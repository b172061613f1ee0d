"""Dynamic programming against enumeration."""

from collections.abc import Sequence

import pytest

from darts_parallel.cost.table import CostTable
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.layerwise import solve


def assert_same_optimum(tables: Sequence[CostTable], mode: str) -> float:
    """Hold the proven optimum of some tables against that of all their plans; returns its cost."""
    expected, found = brute_force(tables, mode), solve(tables, mode)
    assert found.proven
    assert found.cost == pytest.approx(expected.cost, rel=1e-12)
    assert (found.best is None) == (expected.best is None)
    assert found.lower_bound == found.cost
    return found.cost
