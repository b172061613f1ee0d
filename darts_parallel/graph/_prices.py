"""Seconds of an operator on a rank's part of its tensors, and what backward needs of them.

Elementwise operators, casts and reductions that follow each other are one kernel: it reads each of its inputs
once and writes what leaves it. Backward takes twice the forward pass, fused attention 2.5 times
(`cost/compute.py`); a product has one backward product for each input with a gradient.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from darts_parallel.cost import (
    BACKWARD_FACTOR,
    FUSED_BACKWARD_FACTOR,
    fused_attention_seconds,
    gemm_seconds,
    stream_seconds,
)
from darts_parallel.graph._rules import Shape, spelled
from darts_parallel.graph.operators import (
    CONSTANT,
    OUTPUT,
    PARAMETER,
    RELAY,
    SOURCES,
    GraphOperator,
    GraphValue,
    ModuleGraph,
    kinds,
)
from darts_parallel.problem import AttentionCore, Device, Gemm

VIEWS = kinds(
    "view _unsafe_view unsqueeze squeeze permute transpose t expand slice select split split_with_sizes "
    "chunk unbind alias detach flatten unflatten"
)
"""Operators that move nothing."""
FUSED = kinds(
    "mean sum amax amin max min var all any _to_copy clone cat stack pad constant_pad_nd reshape"
)
"""Operators, besides the pointwise ones, that join a neighbour's kernel."""
LINEAR = kinds(
    "add sub neg _to_copy clone cat stack mean sum pad constant_pad_nd index index_select reshape"
)
"""Operators whose backward needs none of their tensors (whole numbers aside)."""
FREE = frozenset((*VIEWS, *SOURCES, OUTPUT, RELAY))
"""Operators that take no time."""
PRODUCTS = (
    "linear",
    "mm",
    "bmm",
    "matmul",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
)
GROUPED = ("grouped_mm_fallback", "_grouped_mm", "grouped_mm")
SOFTMAXES = ("softmax", "_softmax", "log_softmax", "_log_softmax")
ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class KernelUse:
    """The inputs that an operator reads, the outputs that it writes, and those that backward needs."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kept: tuple[int, ...]
    """Indices of inputs, and behind them of outputs."""


class Kernels:
    """Which operators of a graph share a kernel."""

    def __init__(self, graph: ModuleGraph) -> None:
        self.graph = graph
        self._users: dict[str, list[GraphOperator]] = defaultdict(list)
        self.base: dict[str, str] = {}
        """The value that every value is a view of, or itself."""
        for op in graph.operators:
            base = self.base[op.inputs[0]] if op.inputs else ""
            # fused attention writes the heads of a token next to each other
            written = op.op == "clone" and graph.producers[base][0].op == ATTENTION
            viewed = base and (op.op in VIEWS or op.op == RELAY or written)
            self.base |= {name: base if viewed else name for name in op.outputs}
            if op.op not in VIEWS and op.op != RELAY:
                for name in op.inputs:
                    self._users[self.base[name]].append(op)
        self._kernel: dict[str, str] = {}
        self._read: set[tuple[str, str]] = set()
        for op in graph.operators:
            self._kernel.setdefault(op.name, op.name)
            for name in op.inputs:
                if not self.materialized(name):
                    maker = self.graph.producers[self.base[name]][0].name
                    self._kernel[self._find(op.name)] = self._find(maker)
        self.uses = {op.name: self._use(op) for op in graph.operators}

    def materialized(self, name: str) -> bool:
        """Return whether a value is written to memory: not where one kernel makes and uses it."""
        base = self.base[name]
        users = self._users[base]
        return not (
            _fusible(self.graph.producers[base][0]) and len(users) == 1 and _fusible(users[0])
        )

    def seconds(
        self,
        op: GraphOperator,
        shapes: tuple[Sequence[Shape], Sequence[Shape]],
        device: Device,
        width: int,
        training: bool,
    ) -> float:
        """Return the seconds of an operator on a rank, forward and where it is `training` backward."""
        (inputs, outputs), use, values = shapes, self.uses[op.name], self.graph.values
        grads = sum(values[name].needs_grad for name in op.inputs) if training else 0
        one = torch.ones((), dtype=torch.float64)
        if op.op in FREE:
            return 0.0
        if op.op in PRODUCTS and len(op.inputs) >= 2:
            rows, gemm, count = product_shape(op, inputs, outputs[0])
            factors = op.inputs[1:3] if op.op in ("addmm", "baddbmm") else op.inputs[:2]
            passes = 1 + sum(values[name].needs_grad for name in factors) * training
            return passes * count * product_seconds(rows, gemm, device, width)
        if op.op in GROUPED and len(inputs) >= 2 and len(inputs[1]) == 3:
            experts, inner, columns = inputs[1]
            rows = max(inputs[0][0] / values[op.inputs[1]].shape[0], 1.0)
            seconds = product_seconds(rows, Gemm(columns, inner, "column"), device, width)
            return (1 + min(grads, 2)) * experts * seconds / float(device.grouped_gemm_efficiency)
        if op.op == ATTENTION and len(inputs[0]) >= 3:
            q, k = inputs[:2]
            core = AttentionCore(q[-3], k[-3], q[-1], bool(op.argument("is_causal", False)))
            tokens = one * (prod(q[:-1]) / q[-3])
            seconds = float(
                fused_attention_seconds(core, tokens, k[-2], one, device, eight_bit=False)
            )
            return seconds * (1.0 + (FUSED_BACKWARD_FACTOR if grads else 0.0))
        few = op.op in ("embedding", "index", "index_select", "gather")  # rows of the first input
        moved = sum(
            _bytes(values, op.inputs[k], inputs[k], width) for k in use.reads if k or not few
        )
        moved += sum(_bytes(values, op.outputs[k], outputs[k], width) for k in use.writes)
        if op.op == "embedding":
            moved += _bytes(values, op.outputs[0], outputs[0], width)  # the rows that are read
        seconds = float(stream_seconds(device.streaming_factor * one * moved, device))
        return seconds * (1.0 + (BACKWARD_FACTOR if grads else 0.0))

    def _find(self, name: str) -> str:
        while self._kernel[name] != name:
            name = self._kernel[name]
        return name

    def _use(self, op: GraphOperator) -> KernelUse:
        """Say what an operator reads, writes and keeps; a kernel reads a value once."""
        if op.op in FREE:
            return KernelUse((), (), (0,) * (op.op == PARAMETER))
        kernel, reads = self._find(op.name), []
        for k, name in enumerate(op.inputs):
            mark = kernel, self.base[name]
            if self.materialized(name) and mark not in self._read:
                self._read.add(mark)
                reads.append(k)
        writes = [k for k, name in enumerate(op.outputs) if self.materialized(name)]
        return KernelUse(tuple(reads), tuple(writes), tuple(self._kept(op)))

    def _kept(self, op: GraphOperator) -> list[int]:
        """Return the inputs and outputs that backward needs; parameters are there anyway."""
        values, slots = self.graph.values, list(range(len(op.inputs)))
        if op.op in LINEAR or not any(values[name].needs_grad for name in op.outputs):
            return []
        if op.op in SOFTMAXES:
            return [len(slots)]
        if op.op in ("linear", "mul", "mm", "bmm", "matmul") and len(op.inputs) >= 2:
            # an input is needed for the gradient of the other one
            slots = [k for k in (0, 1) if values[op.inputs[1 - k]].needs_grad]
        kept = [k for k in slots if self._keeps(op, op.inputs[k])]
        return kept + [len(op.inputs)] * (op.op == ATTENTION)

    def _keeps(self, op: GraphOperator, name: str) -> bool:
        base, there = self.base[name], (PARAMETER, CONSTANT)
        read = self.materialized(name) and self.graph.producers[base][0].op not in there
        return read and (self.graph.values[base].needs_grad or op.op == "embedding")


def _fusible(op: GraphOperator) -> bool:
    return op.pointwise or op.op in FUSED


def product_shape(
    op: GraphOperator, inputs: Sequence[Shape], output: Shape
) -> tuple[float, Gemm, int]:
    """Return the rows, weights and number of equal matrix products that an operator is, of local shapes."""
    if op.op.startswith("conv"):
        groups = max(inputs[0][1] // inputs[1][1], 1)
        weights = Gemm(max(inputs[1][0] // groups, 1), prod(inputs[1][1:]), "column")
        return float(output[0] * prod(output[2:])), weights, groups
    terms, names, out = spelled(op, inputs, output)
    factors = [k for k, term in enumerate(terms) if not term.startswith("+")]
    a, b = ([*(names[k] for k in factors), []])[:2]
    b = ["k"] if op.op == "matmul" and len(b) == 1 else b
    sizes: dict[str, int] = defaultdict(int)
    for k in factors:
        for letter, size in zip(names[k], inputs[k], strict=False):
            sizes[letter] = max(sizes[letter], size)
    batch = [c for c in out if (c in a and c in b) or (c[0] == "B" and len(b) > 2)]
    inner = [c for c in a if c in b and c not in out]
    rows, columns = (
        [c for c in own if c not in (*other, *batch)] for own, other in ((a, b), (b, a))
    )
    count = {
        name: prod(sizes[c] for c in own)
        for name, own in (("batch", batch), ("inner", inner), ("rows", rows), ("columns", columns))
    }
    return float(count["rows"]), Gemm(count["columns"], count["inner"], "column"), count["batch"]


def product_seconds(rows: float, weights: Gemm, device: Device, width: int) -> float:
    """Return the seconds of a product of `rows` rows with weights."""
    one = torch.ones((), dtype=torch.float64)
    return float(gemm_seconds(weights, one * rows, one, device, width))


def _bytes(values: Mapping[str, GraphValue], name: str, shape: Shape, width: int) -> float:
    value = values[name]
    return float(prod(shape) * (width if value.floating else value.itemsize))
