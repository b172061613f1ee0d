"""Building cost tables (`cost_table.CostTable`) from a problem."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.layer_costs import LayerCosts, layer_costs
from darts_parallel.cost.memory import capacities
from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms import TERMS
from darts_parallel.plans import LayerStrategy, OuterSpace, admits, micro_batch_legal, outer_spaces
from darts_parallel.problem import (
    BoundaryTopology,
    Cluster,
    Model,
    Problem,
    StageTopology,
    order_label,
)
from darts_parallel.schedules import find


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
        tables.append(table.with_schedule_memory())
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
