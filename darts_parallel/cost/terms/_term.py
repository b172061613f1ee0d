"""The interface of a term: what it adds to a layer's costs, to a table and to hard plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from darts_parallel.cost.choices import BothPasses, float_tensor
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.sharding import ShardGroup
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.errors import Entries
from darts_parallel.plans import OuterSpace
from darts_parallel.problem import LayerSpec

NOTHING = float_tensor(0.0)


@dataclass(frozen=True)
class Contribution:
    """Seconds and bytes of one micro-batch that a term adds to a layer, each broadcast to `(O, C)`."""

    forward: Tensor = NOTHING
    """Seconds of kernels in forward."""
    backward: Tensor = NOTHING
    """Seconds of kernels in backward; what frozen weights save may make it less than 0."""
    weight_gradient: Tensor = NOTHING
    """Seconds of the part of `backward` that only the optimizer waits for."""
    recomputed: Tensor = NOTHING
    """Seconds by which selective recomputation of the job's modules lengthens backward."""
    kept: Tensor = NOTHING
    """Bytes kept for backward, in flight."""
    dropped: Tensor = NOTHING
    """Bytes of `kept` that selective recomputation does not keep."""
    working: Tensor = NOTHING
    """Bytes that exist only while the layer is computed."""


@dataclass(frozen=True)
class PlanContribution:
    """Seconds and bytes that a term adds to B hard plans of K stages on `pp` devices."""

    name: str
    """Name of the seconds in breakdown and explanation."""
    forward: Tensor
    """Seconds of every stage's forward pass, `(B, K)`."""
    backward: Tensor
    """Seconds of every stage's backward pass, `(B, K)`."""
    per_iteration: Tensor
    """Seconds of every device's optimizer step, `(B, pp)`."""
    memory: Mapping[str, Tensor]
    """Peak bytes of every device by kind, `(B, pp)`; below 0 where the term relieves it."""


class CostTerm:
    """One term; the defaults contribute nothing."""

    name: ClassVar[str]
    """Name of the kernels' seconds in the explanation."""
    message: ClassVar[str] = ""
    """Name under which messages are charged (`TIME_TERMS`); empty: the term sends none."""
    repeated_with: ClassVar[str] = ""
    """Module whose selective recomputation repeats the messages of forward."""
    formulas: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Formula in words and its source, by the names of what the term contributes."""

    def present(self, layer: LayerSpec) -> bool:
        """Return whether the layer has this term."""
        return False

    def layer_cost(self, stage: StageContext, layer: LayerSpec) -> Contribution:
        """Price the kernels and tensors of a layer that has the term."""
        return Contribution()

    def message_seconds(
        self, stage: StageContext, layer: LayerSpec, compute: BothPasses
    ) -> BothPasses:
        """Return the seconds by which messages lengthen forward and backward, each `(O, C)`.

        Args:
            compute: Seconds of all kernels of the layer in forward and in backward.
        """
        return NOTHING, NOTHING

    def shard_groups(self, stage: StageContext, layer: LayerSpec) -> list[ShardGroup]:
        """Return the parameters that have replicas or states of their own."""
        return []

    def table_fields(
        self, space: OuterSpace, stages: Sequence[StageContext], costs: Callable[[str], Tensor]
    ) -> Entries:
        """Return fields of a `CostTable` that the term's plans need.

        Args:
            stages: Kinds of stage, Q.
            costs: Gives a field of all `LayerCosts`, `(O, Q, L, C)`.
        """
        return {}

    def plan_cost(self, table: CostTable, plans: HardPlans) -> PlanContribution | None:
        """Price what hard plans of a table add; None where the table's plans do not use the term."""
        return None
