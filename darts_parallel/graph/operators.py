"""Operators and values of a captured module, without torch's graph around them."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from darts_parallel.config import read_yaml
from darts_parallel.errors import Entries
from darts_parallel.graph._states import Shape

PARAMETER, CONSTANT, INPUT, OUTPUT, RELAY = "parameter", "constant", "input", "output", "relay"
"""Operators that are none of torch's: where values come from and go to, and a copy that may change layout."""
SOURCES = (PARAMETER, CONSTANT, INPUT)
BUFFER = "buffer"
"""Argument of outputs that are new values of a buffer."""
GROUPED = ("grouped_mm_fallback", "_grouped_mm", "grouped_mm")
"""Products of sorted rows with the weights of their own experts."""
ATTENTION = "scaled_dot_product_attention"


OPERATORS: Entries = read_yaml(Path(__file__).with_name("operators.yaml"))
"""Operators of torch by name."""


def kinds(table: str) -> frozenset[str]:
    """Return the kinds of operators that a table lists."""
    return frozenset(OPERATORS[table].split())


@dataclass(frozen=True)
class GraphValue:
    """A tensor between operators."""

    name: str
    shape: Shape
    floating: bool
    itemsize: int
    """Bytes of an element where it is not floating; floating ones take the width of the job's precision."""
    needs_grad: bool
    truth: bool = False
    """Its elements are true or false: there are no sums of them."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def width(self, width: int) -> int:
        """Return the bytes of an element, where a floating one has `width`."""
        return width if self.floating else self.itemsize

    def bytes(self, width: int) -> float:
        """Return the bytes of the whole tensor, with `width` bytes a floating element."""
        return float(self.elements * self.width(width))


@dataclass(frozen=True)
class GraphOperator:
    """One operator: its tensors by name, and its arguments by the names of torch's schema."""

    name: str
    op: str
    """Kind: torch's name without namespace and overload, or one of `SOURCES`, `OUTPUT`, `RELAY`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str = ""
    """Path of the module that called it, joined by points."""
    target: str = ""
    """Name of a parameter, buffer or input as the module spells it."""
    overload: str = ""
    """Torch's name with the overload, without namespace."""
    pointwise: bool = False
    arguments: Entries = field(default_factory=dict, hash=False, compare=False)
    """Tensors are nodes of torch's graph."""
    node: Any = field(default=None, hash=False, compare=False)
    """The call in torch's graph."""

    @property
    def buffer(self) -> str:
        """Name of the buffer that an output of the graph becomes, empty for outputs of the module."""
        return str(self.arguments.get(BUFFER, ""))

    @property
    def is_end(self) -> bool:
        """Whether it is an input or an output of the module."""
        return self.op in (INPUT, OUTPUT) and not self.buffer

    @property
    def owner(self) -> str:
        """Path of the module that called an operator, or that has a parameter."""
        return self.target.rpartition(".")[0] if self.op == PARAMETER else self.module

    @property
    def tensors(self) -> tuple[str, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    def argument(self, name: str, default: Any = None) -> Any:
        """Return a plain argument; a list without torch's own types."""
        value = self.arguments.get(name, default)
        return list(value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class ModuleGraph:
    """A captured module."""

    operators: tuple[GraphOperator, ...]
    values: dict[str, GraphValue]
    underivable: int = 0
    """Tensors of which torch has no gradient, though their operators have inputs with one."""
    seconds: float = 0.0
    """Seconds that the capture took."""

    @cached_property
    def producers(self) -> dict[str, tuple[GraphOperator, int]]:
        """Operator and output index of every value."""
        operators = self.operators
        return {name: (op, k) for op in operators for k, name in enumerate(op.outputs)}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[GraphOperator, int]]]:
        """Operators and input indices of every value."""
        found: dict[str, list[tuple[GraphOperator, int]]] = defaultdict(list)
        for op in self.operators:
            for k, name in enumerate(op.inputs):
                found[name].append((op, k))
        return found

    def of_kind(self, kind: str) -> list[GraphOperator]:
        """Return the operators of one kind."""
        return [op for op in self.operators if op.op == kind]

    def maker(self, name: str) -> GraphOperator:
        """Return the operator that makes a value."""
        return self.producers[name][0]

    def is_parameter(self, name: str) -> bool:
        """Return whether a value is a parameter of the module."""
        return self.maker(name).op == PARAMETER

    def elements(self, trained: bool = False) -> int:
        """Return the number of parameters; of `trained` ones alone."""
        values = [self.values[op.outputs[0]] for op in self.of_kind(PARAMETER)]
        return sum(value.elements for value in values if value.needs_grad or not trained)

    def gradients(self, names: Iterable[str]) -> int:
        """Return how many of some values have a gradient."""
        return sum(self.values[name].needs_grad for name in names)

    def passes_gradient(self, op: GraphOperator) -> bool:
        """Return whether a gradient comes back through an operator."""
        return not op.buffer if op.op == OUTPUT else self.gradients(op.outputs) > 0

    def shapes(self, names: Iterable[str]) -> list[Shape]:
        """Return the shapes of values."""
        return [self.values[name].shape for name in names]

    @property
    def computing(self) -> tuple[GraphOperator, ...]:
        """Operators of torch: neither sources nor outputs nor relays."""
        others = (*SOURCES, OUTPUT, RELAY)
        return tuple(op for op in self.operators if op.op not in others)
