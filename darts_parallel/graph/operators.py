"""Operators and values of a captured module, without torch's graph around them."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

PARAMETER, CONSTANT, INPUT, OUTPUT, RELAY = "parameter", "constant", "input", "output", "relay"
"""Operators that are none of torch's: where values come from and go to, and a copy that may change layout."""
SOURCES = (PARAMETER, CONSTANT, INPUT)


def kinds(names: str) -> frozenset[str]:
    """Return the kinds of operators that a text lists."""
    return frozenset(names.split())


@dataclass(frozen=True)
class GraphValue:
    """A tensor between operators."""

    name: str
    shape: tuple[int, ...]
    floating: bool
    itemsize: int
    """Bytes of an element where it is not floating; floating ones take the width of the job's precision."""
    needs_grad: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def bytes(self, width: int) -> float:
        """Return the bytes of the whole tensor, with `width` bytes a floating element."""
        return float(self.elements * (width if self.floating else self.itemsize))


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
    pointwise: bool = False
    arguments: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    """Tensors are nodes of torch's graph."""
    node: Any = field(default=None, hash=False, compare=False)
    """The call in torch's graph."""

    def argument(self, name: str, default: Any = None) -> Any:
        """Return a plain argument; a list without torch's own types."""
        value = self.arguments.get(name, default)
        return list(value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class ModuleGraph:
    """A captured module."""

    operators: tuple[GraphOperator, ...]
    values: dict[str, GraphValue]
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)
    """How modules get their first tensor, by path: its name, empty for a positional one, and the number of
    positional arguments."""
    seconds: float = 0.0
    """Seconds that the capture took."""

    @cached_property
    def producers(self) -> dict[str, tuple[GraphOperator, int]]:
        """Operator and output index of every value."""
        return {name: (op, k) for op in self.operators for k, name in enumerate(op.outputs)}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[GraphOperator, int]]]:
        """Operators and input indices of every value."""
        found: dict[str, list[tuple[GraphOperator, int]]] = defaultdict(list)
        for op in self.operators:
            for k, name in enumerate(op.inputs):
                found[name].append((op, k))
        return found

    def shapes(self, names: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of values."""
        return [self.values[name].shape for name in names]

    @property
    def computing(self) -> tuple[GraphOperator, ...]:
        """Operators of torch: neither sources nor outputs nor relays."""
        return tuple(op for op in self.operators if op.op not in (*SOURCES, OUTPUT, RELAY))
