"""Seconds and bytes of plans: the table of costs and its hard readings.

Axes of tensors: O outer choices (numbers of micro-batches of one pipeline degree), R restarts, L layers,
C strategies, Y layouts (tp, dp, cp), K stages, Q stage kinds, P boundary kinds, B hard plans in a batch.
Seconds and bytes are float64.
"""

from darts_parallel.cost.evaluation import CostBreakdown as CostBreakdown
from darts_parallel.cost.evaluation import evaluate as evaluate
from darts_parallel.cost.evaluation import evaluate_batch as evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans as HardPlans
from darts_parallel.cost.table import CostTable as CostTable
from darts_parallel.cost.table import build_tables as build_tables
