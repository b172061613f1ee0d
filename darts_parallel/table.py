"""The cost table: everything that the surrogate, `evaluate` and the exact baselines read.

One table holds all outer choices that share a pipeline and a context-parallel degree. It is built by
torch operations only, so that costs carry gradients to hardware parameters given as tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.cluster import StageTopology
from darts_parallel.comm import p2p
from darts_parallel.compute import padded_vocabulary
from darts_parallel.layer_costs import ChoiceTensors, LayerCosts, layer_costs
from darts_parallel.memory import state_bytes
from darts_parallel.model import LayerSpec
from darts_parallel.pipeline import PipelineModel, in_flight
from darts_parallel.problem import Problem
from darts_parallel.resharding import boundary_seconds, reshard_seconds
from darts_parallel.space import OuterSpace, micro_batch_legal
from darts_parallel.strategy import LayerStrategy, Plan


@dataclass(frozen=True)
class CostTable:
    """Costs of all layers, strategies and stages for the outer choices of one `OuterSpace`.

    Axes: O outer choices (numbers of micro-batches), L layers, C strategies, Y activation layouts,
    K = pp stages, Q kinds of stage, P kinds of stage boundary. float64; seconds and bytes.
    """

    num_micro_batches: Tensor
    """Shape `(O,)`, integer."""
    choices: tuple[LayerStrategy, ...]
    layout: Tensor
    """Activation layout of every strategy, shape `(C,)`, integer in [0, Y)."""
    allowed: Tensor
    """Legal strategies, shape `(O, C)`, bool."""
    stage_kind: Tensor
    """Kind of every stage, shape `(K,)`."""
    boundary_kind: Tensor
    """Kind of the boundary before stage k + 1, shape `(K - 1,)`."""
    joined: Tensor
    """Layers that cannot begin a stage, shape `(L,)`, bool."""
    forward: Tensor
    """Seconds of one micro-batch, shape `(O, Q, L, C)`."""
    backward: Tensor
    """The same."""
    weight_gradient: Tensor
    """The part of `backward` that only the optimizer waits for, the same shape."""
    sync: Tensor
    """Seconds per iteration: exposed gradient synchronisation and optimizer, `(O, Q, L, C)`."""
    once: Tensor
    """Seconds per iteration that add to the total whatever the stage, `(O, L, C)`."""
    static: Tensor
    """Bytes whatever is in flight, `(O, L, C)`."""
    activation: Tensor
    """Bytes per micro-batch in flight, `(O, L, C)`."""
    working: Tensor
    """Bytes while the layer is computed; a stage needs its largest, `(O, L, C)`."""
    reshard: Tensor
    """Seconds per micro-batch between neighbours of one stage, `(O, Q, L - 1, Y, Y)`."""
    p2p: Tensor
    """Seconds per micro-batch across a stage boundary, both ways, `(O, P, L - 1, Y, Y)`."""
    capacity: Tensor
    """Bytes that a device of stage k can give, `(K,)`."""
    in_flight: Tensor
    """Micro-batches whose activations stage k holds at once, `(O, K)`."""
    terms: dict[str, Tensor]
    """`forward + backward` and `sync` by name, each `(O, Q, L, C)`."""
    pipeline: PipelineModel = field(default_factory=PipelineModel)
    """How the seconds of the stages make an iteration."""
    cp: int = 1
    """Context-parallel degree."""

    @property
    def pp(self) -> int:
        """Pipeline degree, K."""
        return len(self.stage_kind)

    @property
    def name(self) -> str:
        """What its outer choices share, for curves, e.g. `pp4` or `pp4 cp2`."""
        return f"pp{self.pp}" + (f" cp{self.cp}" if self.cp > 1 else "")

    @property
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
    def time(self) -> Tensor:
        """Seconds of one micro-batch forward and backward, `(O, Q, L, C)`."""
        return self.forward + self.backward

    def select(self, outer: Sequence[int] | Tensor) -> "CostTable":
        """The same table with only some outer choices."""
        index = torch.as_tensor(outer)
        names = ("num_micro_batches", "allowed", "forward", "backward", "weight_gradient", "sync", "once",
                 "static", "activation", "working", "reshard", "p2p", "in_flight")  # fmt: skip
        parts = {name: getattr(self, name)[index] for name in names}
        return replace(self, **parts, terms={name: term[index] for name, term in self.terms.items()})

    def keep_choices(self, index: Sequence[int] | Tensor) -> "CostTable":
        """The same table with only some strategies."""
        kept = torch.as_tensor(index)
        names = ("forward", "backward", "weight_gradient", "sync", "once", "static", "activation", "working")
        parts = {name: getattr(self, name)[..., kept] for name in names}
        return replace(
            self,
            **parts,
            choices=tuple(self.choices[c] for c in kept.tolist()),
            layout=self.layout[kept],
            allowed=self.allowed[:, kept],
            terms={name: term[..., kept] for name, term in self.terms.items()},
        )


def without_dominated(table: CostTable) -> CostTable:
    """The table without strategies that another one beats or equals in everything.

    A strategy is dominated where one of the same layout needs no more seconds and no more bytes, for
    every layer, stage and outer choice; of equal ones the first is kept. No optimum is lost: the
    other can take its place in any plan of any space. Synchronisation may be longer by what the
    micro-batch is shorter (a shorter backward hides less of it): the sum over stages loses the one,
    the largest synchronisation gains at most the other.
    """
    if table.pipeline.simulated:
        # a longest path falls with each pass by itself
        seconds = [table.forward, table.backward - table.weight_gradient, table.weight_gradient, table.sync]
    else:
        seconds = [table.time, table.time + table.sync]
    figures = [*seconds, table.once, table.static, table.activation, table.working]
    rows = torch.cat([values.flatten(0, -2) for values in figures])
    no_worse = (rows.unsqueeze(1) <= rows.unsqueeze(2)).all(0)  # [a, b]: b is no worse than a
    legal = (table.allowed.unsqueeze(2) <= table.allowed.unsqueeze(1)).all(0)
    same = table.layout.unsqueeze(0) == table.layout.unsqueeze(1)
    beats = no_worse & legal & same
    first = torch.arange(len(rows[0]))
    earlier = first.unsqueeze(0) < first.unsqueeze(1)
    dominated = (beats & (~beats.T | earlier)).any(1)
    return table.keep_choices(torch.nonzero(~dominated).squeeze(1))


def build_tables(problem: Problem, spaces: Sequence[OuterSpace]) -> list[CostTable]:
    """One table for each entry of the space."""
    return [build_table(problem, space) for space in spaces]


def build_table(problem: Problem, space: OuterSpace) -> CostTable:
    """The cost table of one entry of the space.

    Args:
        space: Pipeline and context-parallel degree, numbers of micro-batches and strategies.
    """
    cluster, pp = problem.cluster, space.pp
    counts = torch.tensor(space.num_micro_batches)
    choices = ChoiceTensors.build(problem, space.num_micro_batches, space.choices, space.cp)
    stages = [cluster.stage_topology(k, pp) for k in range(pp)]
    boundaries = [cluster.boundary_topology(k, pp) for k in range(pp - 1)]
    kinds, borders = list(dict.fromkeys(stages)), list(dict.fromkeys(boundaries))
    costs = _all_layer_costs(problem, pp, kinds, choices)
    layouts, layout = _layouts(space.choices)
    devices = [cluster.groups[stage.group].device for stage in stages]
    allowed = [[micro_batch_legal(problem, m, c) for c in space.choices] for m in space.num_micro_batches]
    stacked = {
        name: _stack(costs, name)
        for name in ("forward", "backward", "weight_gradient", "gradient_sync", "optimizer")
    }
    return CostTable(
        pipeline=PipelineModel.from_config(problem.config.cost),
        num_micro_batches=counts,
        choices=space.choices,
        layout=layout,
        allowed=torch.tensor(allowed),
        stage_kind=torch.tensor([kinds.index(stage) for stage in stages]),
        boundary_kind=torch.tensor([borders.index(b) for b in boundaries], dtype=torch.long),
        joined=torch.tensor([layer.joined for layer in problem.model.layers]),
        forward=stacked["forward"],
        backward=stacked["backward"],
        weight_gradient=stacked["weight_gradient"],
        sync=stacked["gradient_sync"] + stacked["optimizer"],
        once=_tied_seconds(problem, pp, stages[0], choices),
        static=_stack(costs[:1], "static")[:, 0],
        activation=_stack(costs[:1], "activation")[:, 0],
        working=_stack(costs[:1], "working")[:, 0],
        reshard=reshard_seconds(problem, kinds, space, layouts),
        p2p=boundary_seconds(problem, borders, kinds[0], space, layouts),
        capacity=torch.tensor([d.memory - d.reserved for d in devices], dtype=torch.float64),
        in_flight=in_flight(pp, counts, problem.config.cost.schedule),
        terms=_terms(costs) | {k: stacked[k] for k in ("gradient_sync", "optimizer")},
        cp=space.cp,
    )


def plan_space(plan: Plan) -> OuterSpace:
    """The smallest space that holds a plan: its own strategies."""
    return OuterSpace(plan.pp, (plan.num_micro_batches,), tuple(dict.fromkeys(plan.layers)), plan.cp)


def _all_layer_costs(
    problem: Problem, pp: int, kinds: list[StageTopology], choices: ChoiceTensors
) -> list[list[LayerCosts]]:
    """Costs by stage kind and layer; equal layers are computed once."""
    layers = problem.model.layers
    result = []
    for kind in kinds:
        known: dict[LayerSpec, LayerCosts] = {}
        for layer in layers:
            spec = replace(layer, name=layer.kind)
            if spec not in known:
                shared = layer.tied and pp == 1 and layer is not layers[0]
                known[spec] = layer_costs(problem, spec, kind, choices, counts_table=not shared)
        result.append([known[replace(layer, name=layer.kind)] for layer in layers])
    return result


def _stack(costs: list[list[LayerCosts]], name: str) -> Tensor:
    """Shape `(O, Q, L, C)`."""
    some = costs[0][0].forward
    rows = [torch.stack([getattr(c, name).expand_as(some) for c in kind], dim=1) for kind in costs]
    return torch.stack(rows, dim=1)


def _terms(costs: list[list[LayerCosts]]) -> dict[str, Tensor]:
    names = costs[0][0].terms
    return {
        name: torch.stack([torch.stack([c.terms[name] for c in kind], dim=1) for kind in costs], dim=1)
        for name in names
    }


def _layouts(choices: Sequence[LayerStrategy]) -> tuple[list[LayerStrategy], Tensor]:
    """One strategy for each distinct layout, and the layout of every strategy."""
    first: dict[tuple[int, bool], LayerStrategy] = {}
    for choice in choices:
        first.setdefault(choice.layout, choice)
    order = list(first)
    return list(first.values()), torch.tensor([order.index(choice.layout) for choice in choices])


def _tied_seconds(problem: Problem, pp: int, stage: StageTopology, choices: ChoiceTensors) -> Tensor:
    """Seconds to all-reduce the gradient of tied embedding tables between their stages, `(O, L, C)`.

    A ring over the stages that hold a copy (Megatron-LM's embedding group), charged to the first
    layer; at most one copy a stage.
    """
    layers, state = problem.model.layers, state_bytes(problem.training.precision, problem.training.optimizer)
    result = torch.zeros(len(choices.tokens), len(layers), len(choices.tp), dtype=torch.float64)
    copies = min(sum(layer.tied for layer in layers), pp)
    if copies < 2:
        return result
    cluster = problem.cluster
    inside = len({node for node, _ in cluster.rank_nodes}) == 1
    link = cluster.groups[stage.group].intra_node if inside else cluster.inter_node
    rows = padded_vocabulary(problem.model.config.vocab_size, choices.tp)
    size = rows * problem.model.config.hidden_size * state.gradient
    senders = max(stage.counts)
    seconds = 2 * (copies - 1) * p2p(size / copies, senders, link, inside_node=inside)
    embedding = torch.zeros(len(layers), 1, dtype=torch.float64)
    embedding[0] = 1.0
    return result + embedding * seconds
