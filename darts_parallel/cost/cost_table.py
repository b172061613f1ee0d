"""The cost table: seconds and bytes of all layers and strategies, which every search and solver reads.

A `CostTable` is a record. `table.build_tables` makes it by torch operations only, so that costs
carry gradients to hardware parameters given as tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor

from darts_parallel.cost.choices import Tensors
from darts_parallel.cost.own_terms import OwnTerms, PlanView
from darts_parallel.cost.pipeline import PipelineModel, by_device
from darts_parallel.cost.schedule_memory import schedule_memory
from darts_parallel.plans import Strategies
from darts_parallel.problem import NodeOrder
from darts_parallel.schedules import USUAL, Schedule, find


@dataclass(frozen=True)
class HostMemory:
    """Costs of a table whose plans may keep tensors in host memory; axes as in `CostTable`."""

    kinds: tuple[str, ...]
    """Tensors of which a share may lie in host memory (`OFFLOADS`)."""
    transfer: Annotated[Tensor, "OQLC"]
    """Seconds of all activations of one micro-batch over the host link, one way."""
    state: Annotated[Tensor, "OLC"]
    """Bytes of optimizer state, part of the table's `static`."""
    state_transfer: Annotated[Tensor, "OQLC"]
    """Seconds of that state over the host link, in and out at once."""
    overlap: Annotated[Tensor, "Q"]
    """Exponent of the overlap of transfers and computation."""
    fractions: Tensor | None = None
    """Shares of activations and of optimizer state in host memory, `(pp, 2)`; None: the least
    that fit."""


@dataclass(frozen=True)
class CostTable:
    """Costs of all layers, strategies and stages for the outer choices of one `OuterSpace`.

    A table holds all outer choices that share their pipeline degree, context-parallel degree and
    number of stages a device.

    Axes: O outer choices (numbers of micro-batches), L layers, C strategies, Y activation layouts,
    K stages in the order of layers, Q kinds of stage, P kinds of stage boundary, D devices in a
    row. Stage s lies on device `stage_device[s]`; without several stages a device K = D.
    The axes of a field stand next to its type: selections of outer choices or strategies read them.
    Seconds and bytes are float64.
    """

    num_micro_batches: Annotated[Tensor, "O"]
    """Micro-batches of an iteration, integer."""
    choices: Strategies
    layout: Annotated[Tensor, "C"]
    """Activation layout of every strategy, integer in [0, Y)."""
    allowed: Annotated[Tensor, "OC"]
    """Legal strategies, bool."""
    stage_kind: Annotated[Tensor, "K"]
    """Kind of every stage, integer in [0, Q)."""
    boundary_kind: Tensor
    """Kind of the boundary between stages k and k + 1, integer in [0, P), shape `(K - 1,)`."""
    fused_to_previous: Annotated[Tensor, "L"]
    """Layers that cannot begin a stage, bool."""
    forward: Annotated[Tensor, "OQLC"]
    """Seconds of one micro-batch forward."""
    backward: Annotated[Tensor, "OQLC"]
    """Seconds of one micro-batch backward."""
    weight_gradient: Annotated[Tensor, "OQLC"]
    """Seconds of `backward` that only the optimizer waits for."""
    sync: Annotated[Tensor, "OQLC"]
    """Seconds per iteration: exposed gradient synchronisation and optimizer."""
    per_iteration: Annotated[Tensor, "OLC"]
    """Seconds per iteration that add to the total whatever the stage."""
    static: Annotated[Tensor, "OLC"]
    """Bytes whatever is in flight."""
    activation: Annotated[Tensor, "OLC"]
    """Bytes per micro-batch in flight."""
    for_weights: Annotated[Tensor, "OLC"]
    """Bytes per micro-batch between the two passes of a split backward; part of `activation`."""
    working: Annotated[Tensor, "OLC"]
    """Bytes while the layer is computed; a device needs its largest."""
    reshard: Annotated[Tensor, "OQLYY"]
    """Seconds per micro-batch between neighbours of one stage, `(O, Q, L - 1, Y, Y)`."""
    p2p: Annotated[Tensor, "OPLYY"]
    """Seconds per micro-batch across a stage boundary, both ways, `(O, P, L - 1, Y, Y)`."""
    capacity: Annotated[Tensor, "D"]
    """Bytes that each device of the pipeline can give."""
    in_flight: Annotated[Tensor, "OK"]
    """Micro-batches whose activations stage k holds at once."""
    causes: Annotated[Tensors, "OQUC"]
    """`forward + backward` and `sync` by cause, of the U distinct layers: whole tables of many layers
    would take as much memory as everything else."""
    distinct: Annotated[Tensor, "L"]
    """Distinct layer of every layer, integer in [0, U)."""
    pipeline: PipelineModel = field(default_factory=PipelineModel)
    """How the seconds of the stages make an iteration."""
    before: Annotated[Tensor | None, "OLC"] = None
    """Bytes per micro-batch before its backward: `activation` without the share of a split
    backward."""
    moments: Tensor | None = None
    """Micro-batches of stages when a device may hold most, under a searched order, `(pp, M, 2
    K)`."""
    cp: int = 1
    """Context-parallel degree."""
    kind_allowed: Annotated[Tensor | None, "QC"] = None
    """Strategies that each kind of stage can run, bool; None: every kind runs all."""
    node_order: NodeOrder = ()
    """Nodes along the pipeline; empty: in rank order."""
    order_name: str = ""
    """Label of the nodes' order; empty where all nodes are equal."""
    host: Annotated[HostMemory | None, "OQLC"] = None
    """Shares of tensors that plans may keep in host memory; None where plans may not."""
    own: OwnTerms | None = None
    """Cost terms of the user's own; None: there are none."""

    @cached_property
    def pp(self) -> int:
        """Pipeline degree: devices in a row."""
        return len(self.capacity)

    @cached_property
    def num_stages(self) -> int:
        """Stages in the order of layers, K."""
        return len(self.stage_kind)

    @property
    def virtual_stages(self) -> int:
        """Stages of a device."""
        return self.num_stages // self.pp

    @property
    def has_plain_stages(self) -> bool:
        """Whether a device has one stage and nothing lies in host memory, as segment programs need it."""
        return self.virtual_stages == 1 and self.host is None

    @cached_property
    def stage_capacity(self) -> Tensor:
        """Bytes of every stage if the stages of a device share it equally, `(K,)`."""
        return self.capacity[self.stage_device] / self.virtual_stages

    @cached_property
    def stage_device(self) -> Tensor:
        """Device of every stage, `(K,)`."""
        return torch.tensor(self.rule.devices(self.pp, self.num_stages))

    @property
    def rule(self) -> Schedule:
        """The schedule itself, which knows the order of its passes."""
        return find(self.pipeline.schedule)

    @property
    def simulated(self) -> bool:
        """Whether the schedule's passes price plans, and no closed form."""
        return self.pipeline.simulated

    def own_seconds(self, **by_plan: Tensor) -> Tensors:
        """Return the seconds of the user's own terms by name, `(B, K)` or `(B,)`.

        Args:
            by_plan: Fields of a `PlanView` whose first axis is B.
        """
        if self.own is None:
            return {}
        view = PlanView(
            **by_plan,
            stage_device=self.stage_device,
            stage_node=self.own.stage_node,
            strategies=tuple(choice.label() for choice in self.choices),
        )
        return self.own.seconds(view)

    def by_device(self, values: Tensor) -> Tensor:
        """Return the sums over the stages of every device: `(..., K)` to `(..., pp)`."""
        return by_device(values, self.stage_device, self.pp)

    @property
    def schedule_name(self) -> str:
        """The schedule; empty where the number of chunks or plain 1F1B implies it."""
        schedule = self.pipeline.schedule
        return "" if schedule in USUAL else self.rule.name

    @property
    def name(self) -> str:
        """Name of its outer choices, e.g. pp4 or pp4 v2 cp2."""
        parts = [f"pp{self.pp}"]
        if self.virtual_stages > 1:
            parts.append(f"v{self.virtual_stages}")
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if self.schedule_name:
            parts.append(self.schedule_name)
        if self.order_name:
            parts.append(f"({self.order_name})")
        return " ".join(parts)

    @cached_property
    def num_outer(self) -> int:
        """Outer choices, O."""
        return len(self.num_micro_batches)

    @property
    def num_layers(self) -> int:
        """Layers, L."""
        return self.forward.shape[2]

    @property
    def num_layouts(self) -> int:
        """Activation layouts, Y."""
        return self.p2p.shape[-1]

    @cached_property
    def proven(self) -> dict[tuple[int, str], tuple[float, float]]:
        """Lower bound of an outer choice by space, and the known seconds for which it was computed."""
        return {}

    @cached_property
    def time(self) -> Tensor:
        """Seconds of one micro-batch forward and backward, `(O, Q, L, C)`."""
        return self.forward + self.backward

    @cached_property
    def terms(self) -> Tensors:
        """`forward + backward` and `sync` by cause, `(O, Q, L, C)`."""
        return {name: own.index_select(2, self.distinct) for name, own in self.causes.items()}

    @cached_property
    def runnable(self) -> Tensor:
        """Strategies that every stage can run, bool, `(K, C)`."""
        every = torch.arange(len(self.choices)).expand(self.num_stages, -1)
        return self.runs(self.stage_kind.unsqueeze(1), every)

    def runs(self, kinds: Tensor, choices: Tensor) -> Tensor:
        """Return whether stages of `kinds` can run `choices`, bool, of their common shape."""
        if self.kind_allowed is None:
            return torch.ones_like(choices, dtype=torch.bool)
        return self.kind_allowed[kinds, choices]

    def select(self, outer: Sequence[int] | Tensor) -> "CostTable":
        """Return the table with only some outer choices."""
        return self._along("O", torch.as_tensor(outer))

    def keep_choices(self, index: Sequence[int] | Tensor) -> "CostTable":
        """Return the table with only some strategies."""
        kept = torch.as_tensor(index)
        choices = tuple(self.choices[c] for c in kept.tolist())
        return replace(self._along("C", kept), choices=choices)

    def with_schedule_memory(self) -> "CostTable":
        """Return the table with the activation memory of its schedule.

        Its `activation` must hold the bytes before the backward pass.
        """
        memory = schedule_memory(
            self.pipeline.schedule,
            self.pp,
            self.virtual_stages,
            self.num_micro_batches,
            self.activation,
            self.for_weights,
        )
        return replace(self, **vars(memory))

    def with_order(self, outer: int, code: str) -> "CostTable":
        """Return the table of one outer choice under the order of passes of a code (`Searched`)."""
        one = self.select([outer])
        pipeline = replace(self.pipeline, schedule=code, start=False)
        before = one.activation if one.before is None else one.before
        return replace(one, pipeline=pipeline, activation=before).with_schedule_memory()

    def _along(self, axis: str, index: Tensor) -> "CostTable":
        rows = index.tolist()
        run = range(rows[0], rows[0] + len(rows)) if rows else index
        return _index_axis(self, "", axis, run if rows == list(run) else index)


def _index_axis(
    value: Any,
    axes: str,
    axis: str,
    index: Tensor | range,
) -> Any:
    """Index one axis of a tensor, or of every tensor in a dict or dataclass; None stays None.

    Args:
        index: A range without steps shares the memory of the tensors.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        place = axes.index(axis)
        if isinstance(index, range):
            return value.narrow(place, index.start, len(index))
        return value.index_select(place, index)
    if isinstance(value, dict):
        return {name: _index_axis(part, axes, axis, index) for name, part in value.items()}
    changed = {}
    for item in fields(value):
        own_axes, *_ = getattr(item.type, "__metadata__", ("",))
        if axis in own_axes:
            changed[item.name] = _index_axis(getattr(value, item.name), own_axes, axis, index)
    return replace(value, **changed)


Tables = Sequence[CostTable]
"""Tables of one job: each holds some of its pipeline configurations."""
