"""FASOP (HPDC'24) as a baseline: its enumeration, placements, partition heuristic and cost model.

`program` answers as FASOP's published program does, over measured layer times; `improve` searches the same
space under the same costs; `find_plan` is its algorithm on the project's own problems and costs.
"""

from baselines.fasop.planner import find_plan as find_plan
from baselines.fasop.planner import solve as solve
