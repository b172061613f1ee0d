"""Building cost tables (`cost_table.CostTable`) from a problem."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from darts_parallel.config import PIPELINES_INSIDE, Config, SpaceConfig
from darts_parallel.cost._transitions import (
    boundary_seconds,
    reshard_seconds,
    stored_bytes,
    tied_seconds,
)
from darts_parallel.cost.choices import ChoiceTensors, Tensors, element_bytes
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.layer_costs import LayerCosts, layer_costs
from darts_parallel.cost.memory import capacities
from darts_parallel.cost.own_terms import OwnTerms, load_terms
from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms import TERMS
from darts_parallel.errors import Entries
from darts_parallel.plans import (
    LayerStrategy,
    OuterSpace,
    divides_nodes,
    micro_batch_legal,
    outer_spaces,
)
from darts_parallel.problem import (
    BoundaryTopology,
    Cluster,
    Model,
    Problem,
    StageTopology,
    order_label,
)
from darts_parallel.schedules import find

PASSES = ("forward", "backward", "weight_gradient")
"""Fields of a table that are fields of `LayerCosts`, in seconds."""
BYTES = ("static", "activation", "for_weights", "working")
"""Fields of a table that are fields of `LayerCosts`, in bytes."""
PER_ITERATION = ("gradient_sync", "optimizer")
"""Fields of `LayerCosts` whose sum is `sync`."""
PLACED = ("stage_kind", "boundary_kind", "per_iteration", "capacity")
"""Fields of a table that depend on where its stages lie."""

Item = TypeVar("Item", bound=Hashable)
Costs = list[list[LayerCosts]]
"""Costs by kind of stage and distinct layer."""


@dataclass(frozen=True)
class PlacedSpace:
    """An outer space on a cluster: where its stages lie."""

    space: OuterSpace
    cluster: Cluster
    """The cluster in rank order."""
    arranged: Cluster
    """The cluster in the order of the space's nodes."""
    pipeline: PipelineModel
    devices: tuple[int, ...]
    """Device of every stage, K of them."""
    stages: tuple[StageTopology, ...]
    """Topology of every device of the pipeline."""

    @staticmethod
    def of(cluster: Cluster, space: OuterSpace, config: Config) -> "PlacedSpace":
        """Place the stages of a space."""
        arranged = cluster.arranged(space.node_order)
        named = config.space.schedules or () if space.pp > 1 else ()
        pipeline = PipelineModel.from_config(
            config.cost, space.virtual_stages, space.schedule, named
        )
        devices = find(pipeline.schedule).devices(space.pp, space.pp * space.virtual_stages)
        stages = tuple(arranged.stage_topology(k, space.pp) for k in range(space.pp))
        return PlacedSpace(space, cluster, arranged, pipeline, tuple(devices), stages)

    @property
    def pricing_key(self) -> tuple[int, bool, OuterSpace]:
        """Key of what layers cost: equal for spaces whose stages differ in number and place alone."""
        shared = replace(
            self.space,
            pp=1,
            node_order=(),
            virtual_stages=1,
            schedule=None,
            num_micro_batches=(),
            cuts=(),
        )
        pp = self.space.pp
        return self.cluster.num_devices // pp, pp == 1, shared

    @property
    def folds(self) -> bool:
        """Whether the stage after one of the last device lies there, too (a V)."""
        pp = self.space.pp
        return self.space.virtual_stages > 1 and self.devices[pp] == pp - 1

    @property
    def stage_node(self) -> Tensor:
        """Node of the first rank of every stage, `(K,)`."""
        width = self.cluster.num_devices // self.space.pp
        return torch.tensor([self.arranged.rank_nodes[k * width][0] for k in self.devices])

    def boundaries(self) -> list[BoundaryTopology | None]:
        """Return the link after every stage but the last; None: the next stage lies on the same device."""
        links: list[BoundaryTopology | None] = []
        for device, following in pairwise(self.devices):
            first = min(device, following) if self.folds else device
            link = self.arranged.boundary_topology(first, self.space.pp)
            links.append(None if self.folds and device == following else link)
        return links


def build_tables(
    problem: Problem, spaces: Sequence[OuterSpace] | None = None, clusters: Sequence[Cluster] = ()
) -> list[CostTable]:
    """Build one table for each space; spaces with equal stages share the pricing of layers.

    Args:
        spaces: None: all that the problem allows.
        clusters: Of the spaces, where they differ from the problem's cluster: in the counts of node
            groups at most.
    """
    whole = spaces is None
    spaces = outer_spaces(problem) if spaces is None else spaces
    clusters = clusters or [problem.cluster] * len(spaces)
    placed = [
        PlacedSpace.of(cluster, space, problem.config)
        for cluster, space in zip(clusters, spaces, strict=True)
    ]
    groups: dict[tuple[int, bool, OuterSpace], list[int]] = {}
    for index, own in enumerate(placed):
        groups.setdefault(own.pricing_key, []).append(index)
    tables: dict[int, CostTable] = {}
    for members in groups.values():
        group = [placed[index] for index in members]
        stage = partial(StageContext.build, replace(problem, cluster=group[0].cluster))
        made = _tables_of_equal_stages(group, stage, problem.config.space, problem.margin)
        tables |= zip(members, made, strict=True)
    built = [tables[index] for index in range(len(placed))]
    if problem.config.cost.term is not None:
        terms = load_terms(tuple(problem.config.cost.term))
        built = [
            replace(table, own=OwnTerms(terms, own.stage_node))
            for table, own in zip(built, placed, strict=True)
        ]
    if whole:
        problem.tables[:] = built
    return built


def with_memory(table: CostTable, cluster: Cluster, margin: float) -> CostTable:
    """Return the table with the memory of a cluster that differs in nothing else, `margin` of it free."""
    cluster = cluster.arranged(table.node_order)
    stages = [cluster.stage_topology(k, table.pp) for k in range(table.pp)]
    return replace(table, capacity=capacities(cluster, stages, margin))


def _tables_of_equal_stages(
    placed: Sequence[PlacedSpace],
    stage: Callable[[StageTopology, OuterSpace], StageContext],
    pins: SpaceConfig,
    margin: float,
) -> list[CostTable]:
    """Build tables of spaces that differ in number, places and order of stages and in micro-batches."""
    counts = sorted({count for own in placed for count in own.space.num_micro_batches})
    whole = replace(placed[0].space, num_micro_batches=tuple(counts))
    kinds = _distinct(topology for own in placed for topology in own.stages)
    links = _distinct(link for own in placed for link in own.boundaries() if link is not None)
    priced = [stage(kind, whole) for kind in kinds]
    unplaced = _price_layers(pins, whole, priced, links)
    tables = []
    for own in placed:
        table = _place(unplaced, own, kinds, links)
        table = replace(
            table,
            per_iteration=tied_seconds(priced[0], own.arranged, own.stages),
            capacity=capacities(own.arranged, own.stages, margin),
        )
        if own.space.cuts:
            fused = torch.ones(table.num_layers, dtype=torch.bool)
            fused[[0, *own.space.cuts]] = False
            table = replace(table, fused_to_previous=fused)
        rows = [counts.index(count) for count in own.space.num_micro_batches]
        tables.append(table.select(rows).with_schedule_memory())
    return tables


def _distinct(items: Iterable[Item]) -> list[Item]:
    return list(dict.fromkeys(items))


def _place(
    table: CostTable,
    placed: PlacedSpace,
    kinds: Sequence[StageTopology],
    links: Sequence[BoundaryTopology],
) -> CostTable:
    """Return the table with the stages and boundaries of a placed space.

    Every order of the nodes numbers the boundaries alike, so that a search may weigh the orders.
    """
    boundaries = placed.boundaries()
    turn = table.p2p.shape[1]  # kind of the boundary at which a V turns
    boundary_kind = [turn if link is None else links.index(link) for link in boundaries]
    p2p = table.p2p
    if None in boundaries:
        last_kind = kinds.index(placed.stages[-1])
        p2p = torch.cat([p2p, table.reshard[:, last_kind].unsqueeze(1)], 1)
    stage_kind = [kinds.index(placed.stages[device]) for device in placed.devices]
    arranged = placed.arranged
    name = PIPELINES_INSIDE if arranged.visits > 1 else order_label(arranged)
    table = replace(table, node_order=arranged.node_order, order_name=name)
    return replace(
        table,
        pipeline=placed.pipeline,
        stage_kind=torch.tensor(stage_kind),
        boundary_kind=torch.tensor(boundary_kind, dtype=torch.long),
        p2p=p2p,
    )


def _price_layers(
    pins: SpaceConfig,
    space: OuterSpace,
    stages: list[StageContext],
    links: list[BoundaryTopology],
) -> CostTable:
    """Price all kinds of stages and boundaries; which stage is of which kind is still open."""
    model = stages[0].model
    costs = all_layer_costs(model, space.pp, stages)
    kinds_of = torch.tensor(model.kinds[1])

    def stacked(name: str) -> Tensor:
        return stack(costs, attrgetter(name)).index_select(2, kinds_of)

    def largest(name: str) -> Tensor:
        return stack(costs, attrgetter(name)).amax(1).index_select(1, kinds_of)

    fields: Entries = dict.fromkeys(PLACED, torch.zeros(0, dtype=torch.long))
    fields |= _between_layers(space, stages, links)
    fields |= {name: stacked(name) for name in PASSES}
    # calibrated devices may differ in their memory factors: the largest counts on every stage
    fields |= {name: largest(name) for name in BYTES}
    fields["sync"] = sum(stacked(name) for name in PER_ITERATION)
    causes = {name: stack(costs, attrgetter(name)) for name in PER_ITERATION}
    causes |= {name: stack(costs, partial(_term, name)) for name in costs[0][0].terms}
    fields |= {"causes": causes, "distinct": kinds_of}
    fields["allowed"] = _allowed(pins, stages[0], space)
    fields["kind_allowed"] = _kind_allowed(stages, space.choices)
    fused = [layer.fused_to_previous for layer in model.layers]
    fields["fused_to_previous"] = torch.tensor(fused)
    counts = torch.tensor(space.num_micro_batches)
    fields["in_flight"] = torch.zeros(len(counts), 1)
    for term in TERMS:
        fields |= term.table_fields(space, stages, stacked)
    return CostTable(num_micro_batches=counts, choices=space.choices, cp=space.cp, **fields)


def _between_layers(
    space: OuterSpace, stages: list[StageContext], links: list[BoundaryTopology]
) -> Tensors:
    """Return the table's layouts, and the seconds between neighbours in a stage and across links."""
    training = stages[0].training
    cluster = stages[0].cluster
    distinct, layout = layouts(space.choices)
    choices = ChoiceTensors.build(training, space.num_micro_batches, tuple(distinct), space.cp)
    width = element_bytes(training)
    stored = stored_bytes(stages[0].model.layers, distinct, choices.tokens, width)
    places = [(stage.topology.group, max(stage.topology.counts)) for stage in stages]
    return {
        "layout": layout,
        "reshard": reshard_seconds(cluster, places, stored, distinct),
        "p2p": boundary_seconds(cluster, links, stored, distinct),
    }


def _allowed(pins: SpaceConfig, stage: StageContext, space: OuterSpace) -> Tensor:
    """Return the strategies that every number of micro-batches admits, bool, `(O, C)`."""
    batch = stage.training.global_batch_size
    rows = []
    for count in space.num_micro_batches:
        rows.append([micro_batch_legal(pins, batch, count, choice) for choice in space.choices])
    return torch.tensor(rows)


def _kind_allowed(
    stages: Sequence[StageContext], choices: Sequence[LayerStrategy]
) -> Tensor | None:
    """Return the strategies that each kind of stage can run, bool, `(Q, C)`; None: all of them."""
    rows = [[divides_nodes(choice.tp, stage.group.gpus) for choice in choices] for stage in stages]
    admitted = torch.tensor(rows)
    return None if bool(admitted.all()) else admitted


def all_layer_costs(model: Model, pp: int, stages: Sequence[StageContext]) -> Costs:
    """Price every distinct layer of a model, in their order, on every kind of stage."""

    def counts_table(number: int, tied: bool) -> bool:
        # a tied table is the first layer's where both lie on one device
        return pp > 1 or not tied or number == 0

    def priced(stage: StageContext, number: int) -> LayerCosts:
        layer = model.kinds[0][number]
        counted = counts_table(number, layer.tied)
        found = layer_costs(stage, layer, counts_table=counted)
        tensor = stage.choices.tp
        for tp in sorted(set(tensor.int().tolist())):
            own = model.on_ranks(tp)
            if own is not model:
                other = layer_costs(stage, own.kinds[0][number], counts_table=counted)
                found = found.where(tensor != tp, other)
        return found

    return [[priced(stage, number) for number in range(len(model.kinds[0]))] for stage in stages]


def stack(costs: Costs, read: Callable[[LayerCosts], Tensor]) -> Tensor:
    """Return one figure of the distinct layers on all kinds of stage, `(O, Q, U, C)`.

    Args:
        read: Returns the figure of a layer, broadcastable to `(O, C)`.
    """
    shape = costs[0][0].forward.shape
    rows = []
    for kind in costs:
        values = [read(layer).expand(shape) for layer in kind]
        rows.append(torch.stack(values, dim=1))
    return torch.stack(rows, dim=1)


def _term(name: str, layer: LayerCosts) -> Tensor:
    return layer.terms[name]


def layouts(choices: Sequence[LayerStrategy]) -> tuple[list[LayerStrategy], Tensor]:
    """Return one strategy for each distinct layout, and the layout of every strategy."""
    first: dict[tuple[int, bool], LayerStrategy] = {}
    for choice in choices:
        first.setdefault(choice.layout, choice)
    order = list(first)
    return list(first.values()), torch.tensor([order.index(choice.layout) for choice in choices])
