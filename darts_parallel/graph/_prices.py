"""Seconds of an operator on a rank's part of its tensors, and the tensors that its backward needs.

Elementwise operators, casts and reductions that follow each other are one kernel: it reads each of its
inputs once and writes what leaves it. Backward takes twice the forward pass, fused attention 2.5 times
(`cost/compute.py`); a product has one backward product for each input with a gradient.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from darts_parallel.cost import (
    BACKWARD_FACTOR,
    FUSED_BACKWARD_FACTOR,
    float_tensor,
    fused_attention_seconds,
    gemm_seconds,
    stream_seconds,
)
from darts_parallel.graph._rules import signature_of
from darts_parallel.graph._states import Shape
from darts_parallel.graph.operators import (
    ATTENTION,
    CONSTANT,
    GROUPED,
    OUTPUT,
    PARAMETER,
    RELAY,
    SOURCES,
    GraphOperator,
    ModuleGraph,
    kinds,
)
from darts_parallel.problem import AttentionCore, Device, Gemm

VIEWS = kinds("views")
FUSED = kinds("fused")
LINEAR = kinds("linear")
FREE = frozenset((*VIEWS, *SOURCES, OUTPUT, RELAY))
"""Operators that take no time."""
PRODUCTS = kinds("products")
PAIRS = kinds("pairs")
SOFTMAXES = kinds("softmaxes")
LOOKUPS = kinds("lookups")
ONE = float_tensor(1.0)
Shapes = Sequence[Shape]


@dataclass(frozen=True)
class KernelUse:
    """The inputs that an operator reads, the outputs that it writes, and those that backward needs."""

    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    """Indices of inputs, and behind them of outputs."""


class KernelGroups:
    """Which operators of a graph share a kernel."""

    def __init__(self, graph: ModuleGraph) -> None:
        from scipy.cluster.hierarchy import DisjointSet  # slow to import

        self.graph = graph
        self._users: dict[str, list[GraphOperator]] = defaultdict(list)
        self.base: dict[str, str] = {}
        """The value that every value is a view of, or itself."""
        for op in graph.operators:
            self._add_views(op)
        self._kernel = DisjointSet(op.name for op in graph.operators)
        """Operators of one kernel; operators join the makers of inputs that never reach memory."""
        for op in graph.operators:
            for name in op.inputs:
                if not self.materialized(name):
                    self._kernel.merge(op.name, graph.maker(self.base[name]).name)
        self._read: set[tuple[str, str]] = set()
        self.uses: dict[str, KernelUse] = {}
        for op in graph.operators:
            self.uses[op.name] = self._use(op)

    def _add_views(self, op: GraphOperator) -> None:
        """Note what an operator's outputs are views of, and which values it reads."""
        views = op.op in VIEWS or op.op == RELAY
        base = self.base[op.inputs[0]] if op.inputs else ""
        # fused attention writes the heads of a token next to each other: a copy of it is free
        free_copy = op.op == "clone" and self.graph.maker(base).op == ATTENTION
        for name in op.outputs:
            self.base[name] = base if base and (views or free_copy) else name
        if not views:
            for name in op.inputs:
                self._users[self.base[name]].append(op)

    def materialized(self, name: str) -> bool:
        """Return whether a value is written to memory: not where one kernel makes and uses it."""
        base = self.base[name]
        ends = [self.graph.maker(base), *self._users[base]]
        return len(ends) != 2 or not all(end.pointwise or end.op in FUSED for end in ends)

    def _use(self, op: GraphOperator) -> KernelUse:
        """Say what an operator reads, writes and keeps; a kernel reads a value once."""
        if op.op in FREE:
            return KernelUse(kept=(0,) if op.op == PARAMETER else ())
        kernel = self._kernel[op.name]
        reads = []
        for k, name in enumerate(op.inputs):
            read = kernel, self.base[name]
            if self.materialized(name) and read not in self._read:
                self._read.add(read)
                reads.append(k)
        writes = [k for k, name in enumerate(op.outputs) if self.materialized(name)]
        return KernelUse(tuple(reads), tuple(writes), tuple(self._kept(op)))

    def _kept(self, op: GraphOperator) -> Iterator[int]:
        """Yield the inputs and outputs that backward needs; parameters are there anyway."""
        behind = len(op.inputs)
        if op.op in LINEAR or not self.graph.gradients(op.outputs):
            return
        if op.op in SOFTMAXES:
            yield behind
            return
        paired = op.op in PAIRS and behind >= 2
        for k, name in enumerate(op.inputs[:2] if paired else op.inputs):
            if paired and not self.graph.values[op.inputs[1 - k]].needs_grad:
                continue
            base = self.base[name]
            stays = self.graph.maker(base).op in (PARAMETER, CONSTANT)
            trained = self.graph.values[base].needs_grad or op.op == "embedding"
            if trained and not stays and self.materialized(name):
                yield k
        if op.op == ATTENTION:
            yield behind


@dataclass(frozen=True)
class Prices:
    """Seconds of a graph's operators on one device, by the shapes of a rank's parts of their tensors."""

    kernels: KernelGroups
    device: Device
    width: int
    """Bytes of a floating element."""

    @property
    def graph(self) -> ModuleGraph:
        """The captured module."""
        return self.kernels.graph

    def seconds(
        self,
        op: GraphOperator,
        inputs: Shapes,
        outputs: Shapes,
        training: bool = True,
    ) -> float:
        """Return the seconds of an operator on a rank, forward and where it is `training` backward."""
        gradients = self.graph.gradients(op.inputs) if training else 0
        if op.op in PRODUCTS and len(inputs) >= 2:
            first = 1 if op.op in ("addmm", "baddbmm") else 0
            factors = op.inputs[first : first + 2]
            passes = 1 + self.graph.gradients(factors) * training
            shape = product_shape(op, inputs, outputs[0])
            weights = shape.weights
            whole = product_shape(
                op, self.graph.shapes(op.inputs), self.graph.shapes(op.outputs)[0]
            )
            if weights.in_features < whole.weights.in_features:
                weights = replace(weights, split="row")
            return passes * shape.count * self.product(shape.rows, weights)
        ranks = [len(shape) for shape in inputs]
        if op.op in GROUPED and ranks[1:2] == [3]:
            passes = 1 + min(gradients, 2)
            return passes * self._of_experts(op, inputs)
        if op.op == ATTENTION and ranks[0] >= 3:
            backward = FUSED_BACKWARD_FACTOR if gradients else 0.0
            return (1.0 + backward) * self._of_attention(op, inputs)
        backward = BACKWARD_FACTOR if gradients else 0.0
        moved = ONE * self._moved_bytes(op, inputs, outputs)
        moved = self.device.streaming_factor * moved
        return (1.0 + backward) * float(stream_seconds(moved, self.device))

    def product(
        self,
        rows: float,
        weights: Gemm,
    ) -> float:
        """Return the seconds of a product of `rows` rows with weights."""
        seconds = gemm_seconds(weights, ONE * rows, ONE, self.device, self.width)
        return float(seconds)

    def _of_experts(
        self,
        op: GraphOperator,
        inputs: Shapes,
    ) -> float:
        """Price equal products of the experts of a rank, each of an equal share of all rows."""
        experts, inner, columns = inputs[1]
        rows = inputs[0][0] / self.graph.values[op.inputs[1]].shape[0]
        seconds = experts * self.product(max(rows, 1.0), Gemm(columns, inner, "column"))
        return seconds / float(self.device.grouped_gemm_efficiency)

    def _of_attention(
        self,
        op: GraphOperator,
        inputs: Shapes,
    ) -> float:
        q, k = inputs[:2]
        causal = bool(op.argument("is_causal", False))
        core = AttentionCore(q[-3], k[-3], q[-1], causal)
        tokens = ONE * prod(q[:-1]) / q[-3]
        return float(
            fused_attention_seconds(core, tokens, k[-2], ONE, self.device, eight_bit=False)
        )

    def _moved_bytes(
        self,
        op: GraphOperator,
        inputs: Shapes,
        outputs: Shapes,
    ) -> float:
        """Return the bytes that an operator reads and writes."""
        use = self.kernels.uses[op.name]
        # of a table that is looked up, the rows that are read
        writes = [*use.writes, 0] if op.op == "embedding" else use.writes
        moved = [(op.outputs[k], outputs[k]) for k in writes]
        for k in use.reads:
            if k or op.op not in LOOKUPS:
                moved.append((op.inputs[k], inputs[k]))
        return sum(prod(shape) * self.graph.values[name].width(self.width) for name, shape in moved)


@dataclass(frozen=True)
class ProductShape:
    """Equal matrix products."""

    rows: float
    weights: Gemm
    count: int = 1


def product_shape(
    op: GraphOperator,
    inputs: Shapes,
    output: Shape,
) -> ProductShape:
    """Return the matrix products that an operator is, of local shapes."""
    if op.op.startswith("conv"):
        image, kernel = inputs[:2]
        if len(image) < len(kernel):  # no batch
            image, output = (1, *image), (1, *output)
        if "transpose" in op.op:  # the backward pass of a convolution
            weights = Gemm(prod(kernel[1:]), kernel[0], "column")
            return ProductShape(float(image[0] * prod(image[2:])), weights)
        groups = max(image[1] // kernel[1], 1)
        weights = Gemm(max(kernel[0] // groups, 1), prod(kernel[1:]), "column")
        return ProductShape(float(output[0] * prod(output[2:])), weights, groups)
    signature = signature_of(op, inputs, output)
    factors = [k for k, added in enumerate(signature.added) if not added]
    letters = [list(signature.inputs[k]) for k in factors]
    if op.op == "matmul" and len(letters[1]) == 1:
        letters[1] = ["k"]
    a, b, *_ = [*letters, []]
    sizes: dict[str, int] = {}
    for k, own in zip(factors, letters, strict=True):
        for letter, size in zip(own, inputs[k], strict=False):
            sizes[letter] = max(sizes.get(letter, 0), size)
    count = dict.fromkeys(("batch", "inner", "rows", "columns"), 1)
    for letter, size in sizes.items():
        part = "rows" if letter in a else "columns"
        if letter[0] == "B" and len(b) > 2:
            part = "batch"
        elif letter in a and letter in b:
            part = "batch" if letter in signature.output else "inner"
        count[part] *= size
    weights = Gemm(count["columns"], count["inner"], "column")
    return ProductShape(float(count["rows"]), weights, count["batch"])
