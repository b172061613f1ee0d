"""The cost table: everything that the surrogate, `evaluate` and the exact baselines read.

One table holds all outer choices that share their pipeline and context-parallel degree and the stages
of a device. It is built by torch operations only, so that costs carry gradients to hardware parameters
given as tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from darts_parallel.config import Config, SpaceConfig
from darts_parallel.cost._transitions import (
    boundary_seconds,
    reshard_seconds,
    stored_bytes,
    tied_seconds,
)
from darts_parallel.cost.choices import ChoiceTensors, element_bytes
from darts_parallel.cost.layer_costs import LayerCosts, layer_costs
from darts_parallel.cost.memory import capacities
from darts_parallel.cost.pipeline import PipelineModel, by_device, held_fields
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms import TERMS
from darts_parallel.cost.terms.offload import HostMemory
from darts_parallel.plans import LayerStrategy, OuterSpace, admits, micro_batch_legal, outer_spaces
from darts_parallel.problem import (
    BoundaryTopology,
    Cluster,
    Model,
    Problem,
    StageTopology,
    order_label,
)
from darts_parallel.schedules import USUAL, find


def all_layer_costs(
    model: Model, pp: int, stages: Sequence[StageContext]
) -> list[list[LayerCosts]]:
    """Price every distinct layer of a model, in their order, on every kind of stage."""
    # a tied table is the first layer's where both lie on one device
    return [
        [
            layer_costs(stage, spec, counts_table=pp > 1 or not spec.tied or number == 0)
            for number, spec in enumerate(model.kinds[0])
        ]
        for stage in stages
    ]


def stack(
    costs: list[list[LayerCosts]], kinds: Tensor, name: str, term: str | None = None
) -> Tensor:
    """Return a field of the costs of layers of `kinds`, or one of its terms, `(O, Q, L, C)`."""
    some = costs[0][0].forward
    fields_of = [[getattr(layer, name) for layer in kind] for kind in costs]
    rows = [[x if term is None else x[term] for x in kind] for kind in fields_of]
    distinct = torch.stack(
        [torch.stack([x.expand_as(some) for x in row], dim=1) for row in rows], dim=1
    )
    return distinct.index_select(2, kinds)


def layouts(choices: Sequence[LayerStrategy]) -> tuple[list[LayerStrategy], Tensor]:
    """Return one strategy for each distinct layout, and the layout of every strategy."""
    first: dict[tuple[int, bool], LayerStrategy] = {}
    for choice in choices:
        first.setdefault(choice.layout, choice)
    order = list(first)
    return list(first.values()), torch.tensor([order.index(choice.layout) for choice in choices])


@dataclass(frozen=True)
class CostTable:
    """Costs of all layers, strategies and stages for the outer choices of one `OuterSpace`.

    Axes: O outer choices (numbers of micro-batches), L layers, C strategies, Y activation layouts,
    K stages in the order of layers, Q kinds of stage, P kinds of stage boundary, D devices in a row. Stage s
    lies on device `s % pp`; without interleaving K = D. A field's axes stand next to it, once: what selects
    outer choices or strategies reads them. float64; seconds and bytes.
    """

    num_micro_batches: Tensor = field(metadata={"axes": "O"})
    """Micro-batches of an iteration, integer."""
    choices: tuple[LayerStrategy, ...]
    layout: Tensor = field(metadata={"axes": "C"})
    """Activation layout of every strategy, integer in [0, Y)."""
    allowed: Tensor = field(metadata={"axes": "OC"})
    """Legal strategies, bool."""
    stage_kind: Tensor = field(metadata={"axes": "K"})
    """Kind of every stage."""
    boundary_kind: Tensor = field(metadata={"axes": "K"})
    """Kind of the boundary before stage k + 1, shape `(K - 1,)`."""
    fused_to_previous: Tensor = field(metadata={"axes": "L"})
    """Layers that cannot begin a stage, bool."""
    forward: Tensor = field(metadata={"axes": "OQLC"})
    """Seconds of one micro-batch forward."""
    backward: Tensor = field(metadata={"axes": "OQLC"})
    """Seconds of one micro-batch backward."""
    weight_gradient: Tensor = field(metadata={"axes": "OQLC"})
    """Seconds of `backward` that only the optimizer waits for."""
    sync: Tensor = field(metadata={"axes": "OQLC"})
    """Seconds per iteration: exposed gradient synchronisation and optimizer."""
    per_iteration: Tensor = field(metadata={"axes": "OLC"})
    """Seconds per iteration that add to the total whatever the stage."""
    static: Tensor = field(metadata={"axes": "OLC"})
    """Bytes whatever is in flight."""
    activation: Tensor = field(metadata={"axes": "OLC"})
    """Bytes per micro-batch in flight."""
    for_weights: Tensor = field(metadata={"axes": "OLC"})
    """Bytes per micro-batch between the two passes of a split backward; `activation` counts them in."""
    working: Tensor = field(metadata={"axes": "OLC"})
    """Bytes while the layer is computed; a stage needs its largest."""
    reshard: Tensor = field(metadata={"axes": "OQLYY"})
    """Seconds per micro-batch between neighbours of one stage, `(O, Q, L - 1, Y, Y)`."""
    p2p: Tensor = field(metadata={"axes": "OPLYY"})
    """Seconds per micro-batch across a stage boundary, both ways, `(O, P, L - 1, Y, Y)`."""
    capacity: Tensor = field(metadata={"axes": "D"})
    """Bytes that each device of the pipeline can give."""
    in_flight: Tensor = field(metadata={"axes": "OK"})
    """Micro-batches whose activations stage k holds at once."""
    terms: dict[str, Tensor] = field(metadata={"axes": "OQLC"})
    """`forward + backward` and `sync` by name."""
    pipeline: PipelineModel = field(default_factory=PipelineModel)
    """How the seconds of the stages make an iteration."""
    before: Tensor | None = field(default=None, metadata={"axes": "OLC"})
    """Bytes per micro-batch before its backward; `activation` is that but for what a split backward adds."""
    moments: Tensor | None = None
    """Micro-batches of stages when a device may hold most, under a searched order, `(pp, M, 2 K)`."""
    cp: int = 1
    """Context-parallel degree."""
    kind_allowed: Tensor | None = field(default=None, metadata={"axes": "QC"})
    """Strategies that each kind of stage can run, bool; None: every kind runs all."""
    node_order: tuple[int, ...] = ()
    """Nodes along the pipeline; empty: in rank order."""
    order_name: str = ""
    """Label of the nodes' order; empty where all nodes are equal."""
    host: HostMemory | None = field(default=None, metadata={"axes": "OQLC"})
    """Shares of tensors that plans may keep in host memory; None where they may not."""

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

    @cached_property
    def stage_capacity(self) -> Tensor:
        """Bytes of every stage if those of a device may each fill an equal part of it, `(K,)`."""
        return self.capacity[self.stage_device] / self.virtual_stages

    @cached_property
    def stage_device(self) -> Tensor:
        """Device of every stage, `(K,)`."""
        return torch.tensor(find(self.pipeline.schedule).devices(self.pp, self.num_stages))

    def by_device(self, values: Tensor) -> Tensor:
        """Return the sums over the stages of every device: `(..., K)` to `(..., pp)`."""
        return by_device(values, self.stage_device, self.pp)

    @property
    def schedule_name(self) -> str:
        """The schedule where neither the number of chunks nor the usual 1F1B says it; else empty."""
        return "" if self.pipeline.schedule in USUAL else find(self.pipeline.schedule).name

    @property
    def label(self) -> str:
        """Name of its outer choices in sentences, e.g. `pp 4` or `pp 4, cp 2`."""
        parts = [f"pp {self.pp}"] + (
            [f"{self.virtual_stages} chunks"] if self.virtual_stages > 1 else []
        )
        parts += [f"schedule {self.schedule_name}"] if self.schedule_name else []
        return ", ".join(parts + ([f"cp {self.cp}"] if self.cp > 1 else []))

    @property
    def name(self) -> str:
        """Name of its outer choices in curves, e.g. pp4 or pp4 v2 cp2."""
        parts = (("pp", self.pp, 0), ("v", self.virtual_stages, 1), ("cp", self.cp, 1))
        name = " ".join(f"{word}{value}" for word, value, usual in parts if value > usual)
        name += f" {self.schedule_name}" if self.schedule_name else ""
        return f"{name} ({self.order_name})" if self.order_name else name

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
        """Lower bound of an outer choice by space, and the seconds up to which it is as good as it can be."""
        return {}

    @cached_property
    def time(self) -> Tensor:
        """Seconds of one micro-batch forward and backward, `(O, Q, L, C)`."""
        return self.forward + self.backward

    def select(self, outer: Sequence[int] | Tensor) -> "CostTable":
        """Return the table with only some outer choices."""
        return self._along("O", torch.as_tensor(outer))

    def with_order(self, outer: int, code: str) -> "CostTable":
        """Return the table of one outer choice under the order of passes of a code (`Searched`)."""
        one = self.select([outer])
        assert one.before is not None
        one = replace(
            one, pipeline=replace(self.pipeline, schedule=code, start=False), activation=one.before
        )
        return replace(one, **held_fields(one, self.virtual_stages))

    def keep_choices(self, index: Sequence[int] | Tensor) -> "CostTable":
        """Return the table with only some strategies."""
        kept = torch.as_tensor(index)
        return replace(
            self._along("C", kept), choices=tuple(self.choices[c] for c in kept.tolist())
        )

    def _along(self, axis: str, index: Tensor) -> "CostTable":
        """Return the table with only the members `index` of an axis."""
        taken: CostTable = _taken(self, "", axis, index)
        return taken

    @cached_property
    def runnable(self) -> Tensor:
        """Strategies that every stage can run, bool, `(K, C)`."""
        every = torch.arange(len(self.choices)).expand(self.num_stages, -1)
        return self.runs(self.stage_kind.unsqueeze(1), every)

    def runs(self, kinds: Tensor, choices: Tensor) -> Tensor:
        """Return whether stages of `kinds` can run `choices`, bool, of their common shape."""
        own = self.kind_allowed
        return torch.ones_like(choices, dtype=torch.bool) if own is None else own[kinds, choices]


def _taken(value: Any, axes: str, axis: str, index: Tensor) -> Any:
    """Return the members `index` of an axis of a tensor, of all in a dict or a record, or None of None."""
    if isinstance(value, (CostTable, HostMemory)):
        axes_of = {item.name: item.metadata.get("axes", "") for item in fields(value)}
        own = {name: axes for name, axes in axes_of.items() if axis in axes}
        return replace(
            value, **{n: _taken(getattr(value, n), a, axis, index) for n, a in own.items()}
        )
    if isinstance(value, dict):
        return {name: _taken(part, axes, axis, index) for name, part in value.items()}
    return None if value is None else value.index_select(axes.index(axis), index)


def build_tables(
    problem: Problem, spaces: Sequence[OuterSpace] | None = None, clusters: Sequence[Cluster] = ()
) -> list[CostTable]:
    """Build one table for each space; those with equal stages, wherever these lie, share their costs.

    Args:
        spaces: None: all that the problem allows.
        clusters: Of the spaces, where they differ from the problem's, in the counts of node groups at most.
    """
    spaces = outer_spaces(problem) if spaces is None else spaces
    placed = list(zip(clusters or [problem.cluster] * len(spaces), spaces, strict=True))
    equal: dict[tuple[int, bool, OuterSpace], list[int]] = {}
    for index, (cluster, space) in enumerate(placed):
        shared = replace(
            space, pp=1, node_order=(), virtual_stages=1, schedule=None, num_micro_batches=()
        )
        equal.setdefault((cluster.num_devices // space.pp, space.pp == 1, shared), []).append(index)
    tables: dict[int, CostTable] = {}
    for members in equal.values():
        mine = [placed[index] for index in members]
        stage = partial(StageContext.build, replace(problem, cluster=mine[0][0]))
        made = _tables_of_equal_stages(mine, stage, problem.config, problem.margin)
        tables |= zip(members, made, strict=True)
    return [tables[index] for index in range(len(placed))]


def with_memory(table: CostTable, cluster: Cluster, margin: float) -> CostTable:
    """Return the table with the memory of a cluster that differs in nothing else, `margin` of it free."""
    cluster = cluster.arranged(table.node_order)
    stages = [cluster.stage_topology(k, table.pp) for k in range(table.pp)]
    return replace(table, capacity=capacities(cluster, stages, margin))


def _tables_of_equal_stages(
    placed: Sequence[tuple[Cluster, OuterSpace]],
    stage: Callable[[StageTopology, OuterSpace], StageContext],
    config: Config,
    margin: float,
) -> list[CostTable]:
    """Build tables of entries that differ in number, places and order of stages and in micro-batches."""
    spaces = [space for _, space in placed]
    counts = tuple(sorted({count for space in spaces for count in space.num_micro_batches}))
    clusters = [cluster.arranged(space.node_order) for cluster, space in placed]
    stages = [
        [c.stage_topology(k, s.pp) for k in range(s.pp)]
        for c, s in zip(clusters, spaces, strict=True)
    ]
    kinds = list(dict.fromkeys(k for own in stages for k in own))
    read, named = PipelineModel.from_config, config.space.schedules or ()
    models = [read(config.cost, s.virtual_stages, s.schedule, named * (s.pp > 1)) for s in spaces]
    placed_models = zip(clusters, models, spaces, strict=True)
    edges = [
        _boundaries(c, model.schedule, s.pp, s.virtual_stages) for c, model, s in placed_models
    ]
    boundaries = list(
        dict.fromkeys(boundary for own in edges for boundary in own if boundary is not None)
    )
    whole = replace(spaces[0], num_micro_batches=counts)
    priced = [stage(kind, whole) for kind in kinds]
    first = _table(config.space, whole, priced, boundaries)
    tables = []
    for cluster, space, own, model, cut in zip(
        clusters, spaces, stages, models, edges, strict=True
    ):
        # every order of the nodes numbers the boundaries alike: a search may weigh the orders
        p2p, inner = first.p2p, first.p2p.shape[1]
        numbers = [inner if boundary is None else boundaries.index(boundary) for boundary in cut]
        if None in cut:  # where a V turns, the next stage lies on the last device, too
            p2p = torch.cat([p2p, first.reshard[:, kinds.index(own[-1])].unsqueeze(1)], 1)
        devices = find(model.schedule).devices(space.pp, space.pp * space.virtual_stages)
        table = replace(
            first,
            pipeline=model,
            stage_kind=torch.tensor([kinds.index(own[device]) for device in devices]),
            boundary_kind=torch.tensor(numbers, dtype=torch.long),
            p2p=p2p,
            per_iteration=tied_seconds(priced[0], cluster, own),
            capacity=capacities(cluster, own, margin),
            node_order=cluster.node_order,
            order_name=order_label(cluster),
        )
        if space.num_micro_batches != counts:
            table = table.select([counts.index(count) for count in space.num_micro_batches])
        tables.append(replace(table, **held_fields(table, space.virtual_stages)))
    return tables


def _boundaries(
    cluster: Cluster, schedule: str, pp: int, virtual_stage: int
) -> list[BoundaryTopology | None]:
    """Return the link after every stage but the last; None where the next stage lies on the same device."""
    devices = find(schedule).devices(pp, pp * virtual_stage)
    if virtual_stage > 1 and devices[pp] == pp - 1:
        ends = [(a, b) for a, b in pairwise(devices)]
        return [None if a == b else cluster.boundary_topology(min(a, b), pp) for a, b in ends]
    return [cluster.boundary_topology(device, pp) for device in devices[:-1]]


def _table(
    pins: SpaceConfig,
    space: OuterSpace,
    stages: list[StageContext],
    boundaries: list[BoundaryTopology],
) -> CostTable:
    """Price all kinds of stages and boundaries; which stage is of which kind is still open."""
    counts = torch.tensor(space.num_micro_batches)
    model, cluster, training = stages[0].model, stages[0].cluster, stages[0].training
    costs, kinds_of = all_layer_costs(model, space.pp, stages), torch.tensor(model.kinds[1])
    distinct, layout = layouts(space.choices)
    tokens = ChoiceTensors.build(
        training, space.num_micro_batches, tuple(distinct), space.cp
    ).tokens
    batch = training.global_batch_size
    allowed = [
        [micro_batch_legal(pins, batch, m, c) for c in space.choices]
        for m in space.num_micro_batches
    ]
    once = {name: stack(costs, kinds_of, name) for name in ("gradient_sync", "optimizer")}
    admitted = torch.tensor(
        [[admits(stage.group.gpus, c) for c in space.choices] for stage in stages]
    )
    places = [(stage.topology.group, max(stage.topology.counts)) for stage in stages]
    empty, extra = torch.zeros(0, dtype=torch.long), dict[str, Any]()
    for term in TERMS:
        extra |= term.table_fields(space, stages, lambda name: stack(costs, kinds_of, name))
    stored = stored_bytes(model.layers, distinct, tokens, element_bytes(training))
    return CostTable(
        num_micro_batches=counts,
        choices=space.choices,
        layout=layout,
        allowed=torch.tensor(allowed),
        stage_kind=empty,
        boundary_kind=empty,
        fused_to_previous=torch.tensor([layer.fused_to_previous for layer in model.layers]),
        forward=stack(costs, kinds_of, "forward"),
        backward=stack(costs, kinds_of, "backward"),
        weight_gradient=stack(costs, kinds_of, "weight_gradient"),
        sync=once["gradient_sync"] + once["optimizer"],
        per_iteration=empty,
        # calibrated devices may differ in their memory factors: the largest counts on every stage
        static=stack(costs, kinds_of, "static").amax(1),
        activation=stack(costs, kinds_of, "activation").amax(1),
        for_weights=stack(costs, kinds_of, "for_weights").amax(1),
        working=stack(costs, kinds_of, "working").amax(1),
        reshard=reshard_seconds(cluster, places, stored, distinct),
        p2p=boundary_seconds(cluster, boundaries, stored, distinct),
        capacity=empty,
        in_flight=torch.zeros(len(counts), 1),
        terms={name: stack(costs, kinds_of, "terms", name) for name in costs[0][0].terms} | once,
        kind_allowed=None if bool(admitted.all()) else admitted,
        cp=space.cp,
        **extra,
    )
