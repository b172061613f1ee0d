"""Pipeline schedules: the order in which every device runs its passes. One schedule is one file.

A file states its name, its placement and its abilities, and yields the passes of every device. It
ends with `SCHEDULE`, by which the registry finds it. What a device holds is counted from the order
of its passes unless the file has a closed form. Nothing here knows seconds or bytes: `cost` prices
the passes.
"""

from darts_parallel.schedules._registry import CLOSED_FORM as CLOSED_FORM
from darts_parallel.schedules._registry import NAMES as NAMES
from darts_parallel.schedules._registry import USUAL as USUAL
from darts_parallel.schedules._registry import find as find
from darts_parallel.schedules._registry import full_name as full_name
from darts_parallel.schedules._registry import names_with_chunks as names_with_chunks
from darts_parallel.schedules._registry import search_start as search_start
from darts_parallel.schedules._registry import usual_schedule as usual_schedule
from darts_parallel.schedules._schedule import PLACEMENTS as PLACEMENTS
from darts_parallel.schedules._schedule import SEARCHED as SEARCHED
from darts_parallel.schedules._schedule import Operation as Operation
from darts_parallel.schedules._schedule import Schedule as Schedule
from darts_parallel.schedules._schedule import order_code as order_code
from darts_parallel.schedules._searched import Searched as Searched
