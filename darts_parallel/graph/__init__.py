"""Plans of any PyTorch module, operator by operator: captured, searched, proven, run.

`capture_module` makes a `ModuleGraph`; `_rules` says which dimensions of an operator are one;
`_space` lists choices and prices; `_programme` proves the optimum and `descent` searches it by
gradients; `plan` joins them.
"""

from typing import TYPE_CHECKING

from darts_parallel.errors import lazy_names
from darts_parallel.graph.operators import ModuleGraph as ModuleGraph
from darts_parallel.problem import LAYER_SOURCES

if TYPE_CHECKING:
    from darts_parallel.graph._mesh import DeviceMeshSpec as DeviceMeshSpec
    from darts_parallel.graph._programme import GraphProgramme as GraphProgramme
    from darts_parallel.graph.capture import capture_module as capture_module
    from darts_parallel.graph.capture import load_module as load_module
    from darts_parallel.graph.command import main as main
    from darts_parallel.graph.descent import PairDescent as PairDescent
    from darts_parallel.graph.execute import plan_script as plan_script
    from darts_parallel.graph.layers import captured_block as captured_block
    from darts_parallel.graph.layers import derived_keys as derived_keys
    from darts_parallel.graph.plan import GraphPlan as GraphPlan
    from darts_parallel.graph.plan import PlannedGraph as PlannedGraph
    from darts_parallel.graph.plan import make_mesh as make_mesh
    from darts_parallel.graph.plan import plan_graph as plan_graph
    from darts_parallel.graph.plan import plan_module as plan_module

__getattr__, __dir__ = lazy_names(__name__)
LAYER_SOURCES["inputs"] = lambda config, cluster: __getattr__("captured_block")(config, cluster)
