"""A plan of a graph: a choice for every operator, the collectives that follow, and where they come from."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, nn

from darts_parallel.config import require_member
from darts_parallel.cost import LOSSLESS
from darts_parallel.errors import ConfigError
from darts_parallel.graph._layouts import DeviceMeshSpec, State, Step, forward_state, gradient_state
from darts_parallel.graph._programme import GIB, GraphProgramme, ProgrammeAnswer
from darts_parallel.graph._rules import SLICED, is_known
from darts_parallel.graph._space import GraphSpace, OperatorChoice
from darts_parallel.graph.capture import capture_module
from darts_parallel.graph.descent import DescentAnswer, DescentOptions, descend
from darts_parallel.graph.operators import PARAMETER, GraphOperator, ModuleGraph
from darts_parallel.problem import Cluster

FORWARD, BACKWARD = "forward", "backward"
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

    def entry(self) -> dict[str, Any]:
        """Return the collective as `graph.json` lists it."""
        about = {"of": self.of, "pass": self.when, "axis": self.step.axis, "seconds": self.seconds}
        about |= {"again": True} if self.again else {}
        return {"name": self.name, "kind": self.step.kind, "bytes": self.step.bytes, **about}


@dataclass(frozen=True)
class GraphPlan:
    """Choices for a space."""

    space: GraphSpace
    assignment: tuple[int, ...]

    def choice(self, op: GraphOperator) -> OperatorChoice:
        """Return what an operator chooses."""
        group = self.space.group_of[op.name]
        return self.space.groups[group].choices[self.assignment[group]]

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, forward and backward."""
        return self.space.total_seconds(self.assignment)

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """All collectives of a step in the order of their tensors."""
        return tuple(self._moves()) + tuple(self._inner())

    def demands(self, name: str) -> list[State]:
        """Return the distinct states that the consumers of a value want."""
        users = self.space.graph.consumers[name]
        return list(dict.fromkeys(self.choice(op).inputs[slot] for op, slot in users))

    def produced(self, name: str) -> State:
        """Return the state that a value's producer makes."""
        op, index = self.space.graph.producers[name]
        return self.choice(op).outputs[index]

    def merged(self, op: GraphOperator) -> list[GraphOperator]:
        """Return the linear operators that are one product with this one, in order; it may be apart."""
        space, groups = self.space, self.choice(op).merged
        if self.choice(op).chained:
            first = (
                op
                if space.group_of[op.name] == groups[0]
                else space.graph.producers[op.inputs[0]][0]
            )
            return [first, space.graph.consumers[first.outputs[0]][0][0]]
        readers = [one for one, _ in space.graph.consumers[op.inputs[0]]] if groups else []
        return [one for one in readers if space.group_of[one.name] in groups]

    def readers(self, op: GraphOperator) -> list[GraphOperator]:
        """Return the linear operators that gather one input again with this one, in order; may be none."""
        state = (self.choice(op).inputs or ((),))[0]
        users = self.space.graph.consumers[op.inputs[0]] if SLICED in state else []
        return [one for one, slot in users if slot == 0 and self.choice(one).inputs[0] == state]

    def _moves(self) -> Iterator[PlannedCollective]:
        graph, mesh = self.space.graph, self.space.mesh
        for name in graph.consumers:
            value, made = graph.values[name], self.produced(name)
            size, wanted = value.bytes(self.space.width), self.demands(name)
            of = PARAMETER if graph.producers[name][0].op == PARAMETER else "activation"
            moves = [
                (FORWARD, forward_state(made), f) for f in dict.fromkeys(map(forward_state, wanted))
            ]
            if value.needs_grad:
                gradients = dict.fromkeys(map(gradient_state, wanted))
                moves += [(BACKWARD, g, gradient_state(made)) for g in gradients]
            moves += [
                (BACKWARD, state, forward_state(state)) for state in wanted if SLICED in state
            ]
            for when, source, target in moves:
                for step in mesh.steps(source, target, size):
                    yield PlannedCollective(
                        name, step, of, when, mesh.seconds(step), SLICED in source
                    )

    def _inner(self) -> Iterator[PlannedCollective]:
        for op in self.space.graph.operators:
            for when, step in self.choice(op).inner:
                yield PlannedCollective(
                    op.name, step, "activation", when, self.space.mesh.seconds(step)
                )


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

    @property
    def unknown(self) -> list[GraphOperator]:
        """Operators without a rule, which are replicated."""
        return [op for op in self.graph.computing if not is_known(op)]


def make_mesh(cluster: Cluster, ranks: tuple[int, ...] | None = None) -> DeviceMeshSpec:
    """Return a mesh on a cluster: the GPUs of a node unless `ranks` says otherwise.

    Errors:
        ConfigError: more than two axes, an axis of one rank, or more ranks than GPUs.
    """
    chosen = ranks or (cluster.groups[0].gpus,)
    for size in chosen:
        if isinstance(size, bool) or not isinstance(size, int) or size < 2:
            raise ConfigError(
                f"mesh={list(chosen)}: the axis {size} must have two ranks or more; try [2]."
            )
    if len(chosen) > 2:
        raise ConfigError(f"mesh={list(chosen)} must have one or two axes; try {list(chosen[:2])}.")
    if prod(chosen) > cluster.num_devices:
        raise ConfigError(
            f"mesh={list(chosen)} has {prod(chosen)} ranks and cluster={cluster.name} has "
            f"{cluster.num_devices} GPUs; try [{cluster.num_devices}]."
        )
    return DeviceMeshSpec(tuple(chosen), cluster)


def plan_module(
    module: nn.Module,
    inputs: list[Tensor],
    mesh: DeviceMeshSpec,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> PlannedGraph:
    """Plan a module operator by operator.

    Args:
        module: Any module that `torch.export` captures; nothing is computed where it is on the meta device.
        mesh: One or two axes of ranks, and their links (`make_mesh`).

    Errors:
        UnsupportedError: the module does not export.
        InfeasibleError: no plan fits into the memory.
    """
    return plan_graph(capture_module(module, inputs, kwargs), mesh, **options)


def plan_graph(
    graph: ModuleGraph,
    mesh: DeviceMeshSpec,
    *,
    precision: str = "bf16",
    memory: float | None = None,
    ends: str = "replicated",
    time_limit: float = 60.0,
    descent: DescentOptions | None = None,
    bits: tuple[int, ...] = (LOSSLESS,),
    merge: bool = False,
    sliced: bool | None = None,
) -> PlannedGraph:
    """Plan a captured module.

    Args:
        precision: `bf16`, `fp16` or `fp32`: bytes and speed of all floating tensors.
        memory: GiB of a rank for parameters, their optimizer states and kept activations; None: any.
        ends: `replicated`, or `free`: inputs and outputs of one shape share a placement, maybe a split.
        time_limit: Seconds for each of the two programmes.
        descent: How to search by gradient descent; None leaves it out.
        bits: Bits that sums may be reduced with, forward.
        merge: Linear operators of one input, or two that follow each other, may be one product.
        sliced: Backward keeps slices of gathered inputs and gathers them again; None: with `memory` it may.
    """
    began = time.perf_counter()
    require_member("precision", precision, tuple(WIDTHS))
    require_member("ends", ends, ENDS)
    most = None if memory is None else memory * GIB
    space = GraphSpace(graph, mesh, WIDTHS[precision], most, ends, bits, merge, sliced)
    answer = GraphProgramme(space).solve(time_limit)
    searched = None if descent is None else descend(space, descent)
    plan = GraphPlan(space, answer.assignment)
    return PlannedGraph(plan, answer, searched, time.perf_counter() - began + graph.seconds)
