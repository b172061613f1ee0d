"""Dynamic programming against enumeration."""

from collections.abc import Sequence

import pytest

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.layerwise import find_layerwise_plan


def assert_same_optimum(tables: Sequence[CostTable], mode: str) -> float:
    """Hold the proven optimum of some tables against that of all their plans; returns its cost."""
    expected, found = brute_force(tables, mode), find_layerwise_plan(tables, mode)
    assert found.proven
    assert found.cost == pytest.approx(expected.cost, rel=1e-12)
    assert (found.best is None) == (expected.best is None)
    assert found.lower_bound == found.cost
    return found.cost
