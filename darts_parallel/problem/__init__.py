"""Model, cluster and job in SI units, immutable."""

from darts_parallel.problem.cluster import Cluster as Cluster
from darts_parallel.problem.cluster import Device as Device
from darts_parallel.problem.cluster import Link as Link
from darts_parallel.problem.cluster import NodeGroup as NodeGroup
from darts_parallel.problem.model import LayerSpec as LayerSpec
from darts_parallel.problem.model import Model as Model
from darts_parallel.problem.problem import Problem as Problem
from darts_parallel.problem.problem import load_problem as load_problem
