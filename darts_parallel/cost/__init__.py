"""Seconds and bytes of plans: the table of costs and its hard readings.

Axes of tensors: O outer choices (numbers of micro-batches of one pipeline degree), R restarts, L layers,
C strategies, Y layouts (tp, dp, cp), K stages, Q stage kinds, P boundary kinds, B hard plans in a batch.
Seconds and bytes are float64.
"""

from darts_parallel.cost.collectives import BLOCK as BLOCK
from darts_parallel.cost.collectives import LOSSLESS as LOSSLESS
from darts_parallel.cost.collectives import RingGroup as RingGroup
from darts_parallel.cost.collectives import all_reduce as all_reduce
from darts_parallel.cost.collectives import reduce_scatter as reduce_scatter
from darts_parallel.cost.compute import ATTENTION_HALF_SIZE as ATTENTION_HALF_SIZE
from darts_parallel.cost.compute import BACKWARD_FACTOR as BACKWARD_FACTOR
from darts_parallel.cost.compute import FUSED_BACKWARD_FACTOR as FUSED_BACKWARD_FACTOR
from darts_parallel.cost.compute import attention_seconds as attention_seconds
from darts_parallel.cost.compute import forward_kernels as forward_kernels
from darts_parallel.cost.compute import gemm_seconds as gemm_seconds
from darts_parallel.cost.compute import stream_seconds as stream_seconds
from darts_parallel.cost.evaluation import BatchCost as BatchCost
from darts_parallel.cost.evaluation import CostBreakdown as CostBreakdown
from darts_parallel.cost.evaluation import TableReading as TableReading
from darts_parallel.cost.evaluation import evaluate as evaluate
from darts_parallel.cost.evaluation import evaluate_batch as evaluate_batch
from darts_parallel.cost.evaluation import hard_plan as hard_plan
from darts_parallel.cost.evaluation import held_at_most as held_at_most
from darts_parallel.cost.evaluation import neighbour_seconds as neighbour_seconds
from darts_parallel.cost.evaluation import pass_seconds as pass_seconds
from darts_parallel.cost.evaluation import table_reading as table_reading
from darts_parallel.cost.hard_plans import HardPlans as HardPlans
from darts_parallel.cost.hard_plans import PricedPlan as PricedPlan
from darts_parallel.cost.hard_plans import even_uniform_plans as even_uniform_plans
from darts_parallel.cost.hard_plans import round_edges as round_edges
from darts_parallel.cost.hard_plans import unit_starts as unit_starts
from darts_parallel.cost.layer_costs import TIME_TERMS as TIME_TERMS
from darts_parallel.cost.layer_costs import shard_groups as shard_groups
from darts_parallel.cost.lightest import lightest_plans as lightest_plans
from darts_parallel.cost.memory import ROUNDING as ROUNDING
from darts_parallel.cost.memory import StateBytes as StateBytes
from darts_parallel.cost.memory import padded_vocabulary as padded_vocabulary
from darts_parallel.cost.memory import parameters_per_rank as parameters_per_rank
from darts_parallel.cost.memory import state_bytes as state_bytes
from darts_parallel.cost.memory import static_bytes as static_bytes
from darts_parallel.cost.pipeline import PipelineModel as PipelineModel
from darts_parallel.cost.pipeline import pipeline_seconds as pipeline_seconds
from darts_parallel.cost.pruning import canonical as canonical
from darts_parallel.cost.pruning import without_dominated as without_dominated
from darts_parallel.cost.pruning import without_needless_simulation as without_needless_simulation
from darts_parallel.cost.schedule_graph import Graph as Graph
from darts_parallel.cost.schedule_graph import compiled as compiled
from darts_parallel.cost.searcher import CONSTANTS as CONSTANTS
from darts_parallel.cost.searcher import Product as Product
from darts_parallel.cost.searcher import SearcherModel as SearcherModel
from darts_parallel.cost.searcher import products as products
from darts_parallel.cost.sharding import ShardGroup as ShardGroup
from darts_parallel.cost.sharding import accumulation_seconds as accumulation_seconds
from darts_parallel.cost.simulation import Criticalities as Criticalities
from darts_parallel.cost.simulation import Event as Event
from darts_parallel.cost.simulation import PassSeconds as PassSeconds
from darts_parallel.cost.simulation import PathMemory as PathMemory
from darts_parallel.cost.simulation import critical_operations as critical_operations
from darts_parallel.cost.simulation import pass_ends as pass_ends
from darts_parallel.cost.simulation import simulated_seconds as simulated_seconds
from darts_parallel.cost.simulation import timeline as timeline
from darts_parallel.cost.stage_context import StageContext as StageContext
from darts_parallel.cost.table import CostTable as CostTable
from darts_parallel.cost.table import build_tables as build_tables
from darts_parallel.cost.table import with_memory as with_memory
from darts_parallel.cost.terms import FORMULAS as FORMULAS
from darts_parallel.cost.terms import TERMS as TERMS
from darts_parallel.cost.terms import plan_contributions as plan_contributions
from darts_parallel.cost.terms import terms_of as terms_of
from darts_parallel.cost.terms.offload import ACTIVATION as ACTIVATION
from darts_parallel.cost.terms.offload import OPTIMIZER as OPTIMIZER
from darts_parallel.cost.terms.offload import lengthening as lengthening
from darts_parallel.cost.terms.offload import (
    without_offloadable_memory as without_offloadable_memory,
)
