"""The space: what every operator may choose on a mesh, and what every tensor pays between two choices.

Repeated blocks share their choices. A tensor with several consumers is a *fan*: forward it is brought to
each distinct placement once; backward the gradients of equal placement are summed before they are brought
to the producer's.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np

from darts_parallel.graph._choices import GraphJob, OperatorChoice, operator_choices
from darts_parallel.graph._repeats import repeated_keys
from darts_parallel.graph._states import SLICED, State, forward_state, gradient_state, local_share
from darts_parallel.graph.operators import GraphOperator, GraphValue

STATE_BYTES = 16.0
"""Bytes per trained parameter with Adam in mixed precision: 2 and 2 of weight and gradient, 12 in float32."""


@dataclass(frozen=True)
class ChoiceGroup:
    """Equal operators of repeated blocks, which choose together."""

    operators: tuple[GraphOperator, ...]
    choices: tuple[OperatorChoice, ...]


Key = TypeVar("Key")
Demand = tuple[State, bool]
"""State that a consumer wants, and whether a gradient comes back from it."""
Move = tuple[State, State]
"""Old and new placements."""


@dataclass(frozen=True)
class MoveTable:
    """Seconds of one kind of moves of a tensor; every layout is paid once."""

    seconds: np.ndarray
    """Between produced states and layouts, shape `(produced, layouts)`."""
    layout: np.ndarray
    """Layout of every demanded state."""


@dataclass(frozen=True)
class Fan:
    """A tensor between its producer and its consumers, or equal ones of repeated blocks."""

    count: int
    """Number of equal tensors."""
    producer: int
    """Group of the operator that makes it."""
    consumers: tuple[int, ...]
    """Groups."""
    made: np.ndarray
    """Index of the state that the producer makes, by choice."""
    wanted: tuple[np.ndarray, ...]
    """Index of the state that every consumer demands, by choice."""
    moves: tuple[MoveTable, ...]
    """Moves of the tensor, of its gradient, and of the tensor again where slices are kept."""


@dataclass(frozen=True)
class KeptTensor:
    """Bytes that lie on a rank until backward where one of `users` chooses so."""

    bytes: float
    users: tuple[tuple[int, tuple[int, ...]], ...]
    """Groups, each with its choices."""
    weight: bool
    """States of a parameter."""


@dataclass(frozen=True)
class _Reader:
    """A consumer of a tensor: its group, and the index of the input."""

    group: int
    trains: bool
    """A gradient comes back through it."""
    slot: int


Readers = tuple[_Reader, ...]


@dataclass(frozen=True)
class _KeptLayout:
    """A tensor in one layout, which is kept once, however many operators need it."""

    name: str
    share: float
    sliced: bool


@dataclass
class GraphSpace(GraphJob):
    """All choices of a graph on a mesh, with their seconds, and what every tensor's moves take."""

    @cached_property
    def groups(self) -> list[ChoiceGroup]:
        """Operators that choose together, with their choices."""
        keys = repeated_keys(self.graph)
        members = defaultdict[str, list[GraphOperator]](list)
        for op in self.graph.operators:
            value = self.graph.values[op.tensors[0]]
            shared = self.ends == "free" and op.is_end and value.floating
            members[f"ends {value.shape}" if shared else keys[op.name]].append(op)
        found = []
        for ops in members.values():
            choices = tuple(operator_choices(self, ops[0]))
            found.append(ChoiceGroup(tuple(ops), choices))
        return found

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Group of every operator by name."""
        groups = enumerate(self.groups)
        return {op.name: number for number, group in groups for op in group.operators}

    @cached_property
    def seconds(self) -> list[np.ndarray]:
        """Seconds of every group by choice, all its operators."""
        found = []
        for group in self.groups:
            each = [choice.seconds for choice in group.choices]
            found.append(np.array(each) * len(group.operators))
        return found

    @cached_property
    def fans(self) -> list[Fan]:
        """Every tensor that may cost something, equal ones of repeated blocks together."""
        found: dict[tuple[int, int, Readers], list[str]] = defaultdict(list)
        for name, users in self.graph.consumers.items():
            producer, index = self.graph.producers[name]
            readers = []
            for op, slot in users:
                trains = self.graph.passes_gradient(op)
                readers.append(_Reader(self.group_of[op.name], trains, slot))
            found[self.group_of[producer.name], index, tuple(readers)].append(name)
        fans = [self._fan(names, *key) for key, names in found.items()]
        return [fan for fan in fans if any(table.seconds.any() for table in fan.moves)]

    @cached_property
    def kept(self) -> list[KeptTensor]:
        """States of parameters and tensors of backward; one tensor in one layout is kept once."""
        users = defaultdict[_KeptLayout, dict[int, set[int]]](lambda: defaultdict(set))
        for op in self.graph.operators:
            group = self.group_of[op.name]
            for k, choice in enumerate(self.groups[group].choices):
                for slot in self.kernels.uses[op.name].kept:
                    state = choice.states[slot]
                    base = self.kernels.base[op.tensors[slot]]
                    share = local_share(state, self.mesh.ranks)
                    users[_KeptLayout(base, share, SLICED in state)][group].add(k)
        found = []
        for layout, choices in users.items():
            weight = self.graph.is_parameter(layout.name)
            value = self.graph.values[layout.name]
            trained = weight and value.needs_grad
            size = STATE_BYTES * value.elements if trained else value.bytes(self.width)
            own = tuple((group, tuple(sorted(known))) for group, known in choices.items())
            found.append(KeptTensor(size * layout.share, own, weight))
        return found

    @cached_property
    def by_states(self) -> list[dict[tuple[State, ...], int]]:
        """Choices of every group by their states."""
        found = []
        for group in self.groups:
            found.append({choice.states: k for k, choice in enumerate(group.choices)})
        return found

    def fan_seconds(
        self,
        fan: Fan,
        assignment: Sequence[int],
    ) -> float:
        """Return the seconds that a tensor's moves take, forward and backward."""
        made = fan.made[assignment[fan.producer]]
        pairs = zip(fan.wanted, fan.consumers, strict=True)
        wanted = [states[assignment[group]] for states, group in pairs]
        paid = 0.0
        for table in fan.moves:
            for layout in {table.layout[state] for state in wanted}:
                paid += float(table.seconds[made, layout])
        return fan.count * paid

    def total_seconds(self, assignment: Sequence[int]) -> float:
        """Return the seconds of a step under a choice for every group."""
        pairs = zip(self.seconds, assignment, strict=True)
        total = sum(float(seconds[choice]) for seconds, choice in pairs)
        return total + sum(self.fan_seconds(fan, assignment) for fan in self.fans)

    def memory_bytes(
        self,
        assignment: Sequence[int],
        *,
        weights: bool = True,
    ) -> float:
        """Return the bytes of tensors kept for backward on a rank, and of parameters' states."""
        total = 0.0
        for item in self.kept:
            used = any(assignment[group] in choices for group, choices in item.users)
            if used and (weights or not item.weight):
                total += item.bytes
        return total

    def excess_bytes(self, assignment: Sequence[int]) -> float:
        """Return the bytes by which a choice for every group passes the memory."""
        if self.memory is None:
            return 0.0
        return max(self.memory_bytes(assignment) - self.memory, 0.0)

    def _fan(
        self,
        names: list[str],
        producer: int,
        index: int,
        readers: Readers,
    ) -> Fan:
        """Price the moves of equal tensors from a producer to its consumers."""
        made = [choice.outputs[index] for choice in self.groups[producer].choices]
        wanted = []
        for reader in readers:
            states = [choice.inputs[reader.slot] for choice in self.groups[reader.group].choices]
            wanted.append([(state, reader.trains) for state in states])
        produced = list(dict.fromkeys(made))
        demanded = list(dict.fromkeys(chain(*wanted)))
        messages = float(not (self.bucketed and self.graph.is_parameter(names[0])))
        value = self.graph.values[names[0]]
        moves = tuple(self._move_tables(value, produced, demanded, messages))
        consumers = tuple(reader.group for reader in readers)
        of_consumers = tuple(_index(states, demanded) for states in wanted)
        return Fan(len(names), producer, consumers, _index(made, produced), of_consumers, moves)

    def _move_tables(
        self,
        value: GraphValue,
        produced: list[State],
        demanded: list[Demand],
        messages: float,
    ) -> Iterator[MoveTable]:
        """Yield the moves of a tensor, of its gradient, and of the slices of it that are kept.

        Args:
            messages: Share of the latencies that the gradient pays.
        """
        size = value.bytes(self.width)
        kinds = 2 + any(SLICED in state for state, _ in demanded)
        latencies = (1.0, messages, 1.0)[:kinds]
        for kind, share in enumerate(latencies):
            rows = []
            for made in produced:
                rows.append([moves(value, made, demand)[kind] for demand in demanded])
            # from one produced state, equal moves go to equal layouts
            first, *_ = rows
            known = list(dict.fromkeys(first))
            places = [first.index(move) for move in known]
            seconds = []
            for row in rows:
                paid = [self.mesh.move_seconds(*row[place], size, share) for place in places]
                seconds.append(paid)
            yield MoveTable(np.array(seconds), _index(first, known))


def moves(value: GraphValue, made: State, demand: Demand) -> tuple[Move, Move, Move]:
    """Return how a tensor, its gradient, and a slice of it that was kept move between two operators.

    Moves that do not exist are between empty states.
    """
    wanted, trains = demand
    ahead = forward_state(wanted)
    gradient = gradient_state(wanted) if trains else ()
    origin = gradient_state(made) if trains and value.needs_grad else gradient
    again = (wanted, ahead) if SLICED in wanted else ((), ())
    return (forward_state(made), ahead), (gradient, origin), again


def _index(
    states: Iterable[Key],
    known: list[Key],
) -> np.ndarray:
    """Return the place of every state among the known ones."""
    return np.array([known.index(state) for state in states])
