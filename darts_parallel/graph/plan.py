"""A plan of a graph: a choice for every operator, the collectives that follow, and where they come from."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, nn

from darts_parallel.config import require_member
from darts_parallel.errors import ConfigError, Entries
from darts_parallel.graph._choices import OperatorChoice
from darts_parallel.graph._mesh import DeviceMeshSpec, Step
from darts_parallel.graph._programme import GIB, Assignment, GraphProgramme, ProgrammeAnswer
from darts_parallel.graph._space import Demand, GraphSpace, moves
from darts_parallel.graph._states import SLICED, Ranks, State
from darts_parallel.graph.capture import capture_module
from darts_parallel.graph.descent import DescentAnswer, descend
from darts_parallel.graph.operators import PARAMETER, GraphOperator, ModuleGraph
from darts_parallel.problem import Cluster

FORWARD, BACKWARD = "forward", "backward"
PASSES = (FORWARD, BACKWARD, BACKWARD)
"""Pass of every move of a tensor."""
ENDS = ("replicated", "free")
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a floating element by precision."""


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a step."""

    name: str
    """The tensor that is moved, or the operator that communicates inside."""
    step: Step
    of: str
    """`activation`, or `parameter` where a weight or its gradient is moved."""
    when: str
    """`forward` or `backward`."""
    seconds: float
    again: bool = False
    """An input is gathered again, of which a slice was kept."""

    def entry(self) -> Entries:
        """Return the collective as `graph.json` lists it."""
        found = {
            "name": self.name,
            "kind": self.step.kind,
            "bytes": self.step.bytes,
            "of": self.of,
            "pass": self.when,
            "axis": self.step.axis,
            "seconds": self.seconds,
        }
        return found | {"again": True} if self.again else found


@dataclass(frozen=True)
class GraphPlan:
    """Choices for a space."""

    space: GraphSpace
    assignment: Assignment

    def choice(self, op: GraphOperator) -> OperatorChoice:
        """Return the choice of an operator."""
        group = self.space.group_of[op.name]
        return self.space.groups[group].choices[self.assignment[group]]

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, forward and backward."""
        return self.space.total_seconds(self.assignment)

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """All collectives of a step in the order of their tensors."""
        return tuple(self._moves())

    def demands(self, name: str) -> list[Demand]:
        """Return the distinct states that the consumers of a value want, and which of them train."""
        graph = self.space.graph
        found: dict[Demand, None] = {}
        for op, slot in graph.consumers[name]:
            found[self.choice(op).inputs[slot], graph.passes_gradient(op)] = None
        return list(found)

    def produced(self, name: str) -> State:
        """Return the state that a value's producer makes."""
        op, index = self.space.graph.producers[name]
        return self.choice(op).outputs[index]

    def readers(self, op: GraphOperator) -> list[GraphOperator]:
        """Return the linear operators that gather one input again with this one, in order; may be none."""
        (given, *_) = self.choice(op).inputs or ((),)
        users = self.space.graph.consumers
        if SLICED not in given:
            return []
        reads = users[op.inputs[0]]
        return [one for one, k in reads if k == 0 and self.choice(one).inputs[0] == given]

    def _moves(self) -> Iterator[PlannedCollective]:
        """Yield the collectives between operators, then those inside them."""
        graph = self.space.graph
        mesh = self.space.mesh
        for name in graph.consumers:
            value = graph.values[name]
            size = value.bytes(self.space.width)
            of = PARAMETER if graph.is_parameter(name) else "activation"
            made = self.produced(name)
            every = [moves(value, made, demand) for demand in self.demands(name)]
            by_kind = zip(*every, strict=True)
            for when, own in zip(PASSES, by_kind, strict=True):
                for source, target in dict.fromkeys(own):
                    again = SLICED in source
                    for step in mesh.steps(source, target, size):
                        yield PlannedCollective(name, step, of, when, mesh.seconds(step), again)
        for op in graph.operators:
            for step in self.choice(op).inner:
                yield PlannedCollective(op.name, step, "activation", FORWARD, mesh.seconds(step))


@dataclass(frozen=True)
class PlannedGraph:
    """A plan with its proof and its search."""

    plan: GraphPlan
    programme: ProgrammeAnswer
    descent: DescentAnswer | None
    seconds: float
    """Seconds from capture to plan."""

    @property
    def graph(self) -> ModuleGraph:
        """The captured module."""
        return self.plan.space.graph


def make_mesh(cluster: Cluster, ranks: Ranks | None = None) -> DeviceMeshSpec:
    """Return a mesh on a cluster: the GPUs of a node unless `ranks` says otherwise.

    Errors:
        ConfigError: more than two axes, an axis of one rank, or more ranks than GPUs.
    """
    chosen = ranks or (cluster.groups[0].gpus,)
    given = f"mesh={list(chosen)}"
    for size in chosen:
        if isinstance(size, bool) or not isinstance(size, int) or size < 2:
            raise ConfigError(f"{given}: the axis {size} must have two ranks or more; try [2].")
    if len(chosen) > 2:
        raise ConfigError(f"{given} must have one or two axes; try {list(chosen[:2])}.")
    gpus = cluster.num_devices
    if prod(chosen) > gpus:
        raise ConfigError(
            f"{given} has {prod(chosen)} ranks and cluster={cluster.name} has {gpus} GPUs; try [{gpus}]."
        )
    return DeviceMeshSpec(tuple(chosen), cluster)


def plan_module(
    module: nn.Module,
    inputs: list[Tensor],
    mesh: DeviceMeshSpec,
    **options: Any,
) -> PlannedGraph:
    """Plan a module operator by operator.

    Args:
        module: Any module that `torch.export` captures; on the meta device nothing is computed.
        mesh: One or two axes of ranks, and their links (`make_mesh`).
        options: Arguments of `plan_graph`.

    Errors:
        UnsupportedError: the module does not export.
        InfeasibleError: no plan fits into the memory.
    """
    return plan_graph(capture_module(module, inputs), mesh, **options)


def plan_graph(
    graph: ModuleGraph,
    mesh: DeviceMeshSpec,
    *,
    time_limit: float = 60.0,
    descent: int | None = None,
    **freedom: Any,
) -> PlannedGraph:
    """Plan a captured module.

    Args:
        time_limit: Seconds for each of the two programmes.
        descent: Seed of a search by gradient descent, too; None leaves it out.
        freedom: `precision` (`bf16`, `fp16` or `fp32`: bytes and speed of all floating tensors), `memory`
            (GiB of a rank for parameters, their optimizer states and kept activations; None: any), and
            `ends`, `bits` and `sliced` of a `GraphJob`.
    """
    began = time.perf_counter() - graph.seconds
    precision = freedom.pop("precision", "bf16")
    memory = freedom.pop("memory", None)
    require_member("precision", precision, tuple(WIDTHS))
    require_member("ends", freedom.get("ends", ENDS[0]), ENDS)
    size = None if memory is None else memory * GIB
    space = GraphSpace(graph, mesh, WIDTHS[precision], size, **freedom)
    answer = GraphProgramme(space).solve(time_limit)
    searched = None if descent is None else descend(space, descent)
    plan = GraphPlan(space, answer.assignment)
    return PlannedGraph(plan, answer, searched, time.perf_counter() - began)
