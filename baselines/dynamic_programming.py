"""Dynamic programming over layer-wise plans: a door to `darts_parallel.exact.layerwise`."""

from darts_parallel.exact.layerwise import find_plan as find_plan
from darts_parallel.exact.layerwise import solve as solve
