"""The exact planners that check the loop, on cost tables: the only door of this package to them."""

from collections.abc import Sequence

from darts_parallel.cost.table import CostTable
from darts_parallel.exact.layerwise import solve
from darts_parallel.exact.result import DeadlineError as DEADLINE  # noqa: N812
from darts_parallel.exact.result import TableResult
from darts_parallel.exact.uniform import solve_uniform

__all__ = ["DEADLINE", "TableResult", "solve_layerwise", "solve_uniform"]


def solve_layerwise(tables: Sequence[CostTable], incumbent: float, deadline: float) -> TableResult:
    """The plan of least seconds over the layer-wise space by dynamic programming.

    Args:
        tables: One for each pipeline degree.
        incumbent: Seconds of a known plan; dearer ones are not looked for.
        deadline: `time.monotonic()` at which to stop without a proof.
    """
    return solve(tables, "layerwise", incumbent, deadline)
