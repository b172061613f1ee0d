"""The differentiable search: relaxation, descent, rounding, polishing."""

from darts_parallel.gradient.descent import GradientSearch as GradientSearch
from darts_parallel.gradient.descent import search as search
from darts_parallel.gradient.descent import search_tables as search_tables
from darts_parallel.gradient.relaxed_cost import RelaxedPlans as RelaxedPlans
from darts_parallel.gradient.relaxed_cost import surrogate as surrogate
from darts_parallel.gradient.result import SearchResult as SearchResult
from darts_parallel.gradient.step_record import StepRecord as StepRecord
