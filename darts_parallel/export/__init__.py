"""Plans in the words of the trainers that people use.

`export_plan` is the one door; each target is a module of its name, with one function `export`.
"""

from darts_parallel.export.common import Exported as Exported
from darts_parallel.export.common import Request as Request
from darts_parallel.export.megatron import packing_flags as packing_flags
from darts_parallel.export.targets import TARGETS as TARGETS
from darts_parallel.export.targets import export_lines as export_lines
from darts_parallel.export.targets import export_plan as export_plan
from darts_parallel.export.targets import model_refusals as model_refusals
from darts_parallel.export.targets import refusals as refusals
from darts_parallel.export.targets import require_trainers as require_trainers
from darts_parallel.export.targets import taken_by as taken_by
from darts_parallel.export.targets import write_export as write_export
