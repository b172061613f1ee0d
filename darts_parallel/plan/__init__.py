"""Strategies and plans, which of them are legal, and the plan file."""

from darts_parallel.plan.file import read_plan as read_plan
from darts_parallel.plan.file import write_json as write_json
from darts_parallel.plan.space import OuterSpace as OuterSpace
from darts_parallel.plan.space import outer_spaces as outer_spaces
from darts_parallel.plan.strategy import LayerStrategy as LayerStrategy
from darts_parallel.plan.strategy import Plan as Plan
