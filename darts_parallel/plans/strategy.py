"""The strategy of a layer and the plan of a whole model; both frozen, both checked."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

from darts_parallel.config import (
    COMM_BITS,
    LOSSLESS,
    OFFLOADS,
    PIPELINES_INSIDE,
    RECOMPUTE,
    Shares,
    divisors,
)
from darts_parallel.errors import Entries, PlanError, require_listed
from darts_parallel.plans._fields import (
    Fields,
    node_order_of,
    offload_of,
    read_boundaries,
)
from darts_parallel.problem import NodeOrder, lies_inside_nodes
from darts_parallel.schedules import (
    NAMES,
    SEARCHED,
    USUAL,
    Schedule,
    Searched,
    find,
    order_code,
    usual_schedule,
)

SCHEMA = "darts-parallel/plan/1"
REQUIRED = ("tp", "dp", "zero_stage", "recompute", "sequence_parallel")
"""Fields of a strategy that every plan file has; older files lack the others."""
DEGREES = ("tp", "dp", "ep", "etp")
"""Fields of a strategy that are at least 1."""
LAYER_VALUES: dict[str, tuple[int | str, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "tp_comm_bits": COMM_BITS,
    "grad_comm_bits": COMM_BITS,
}
"""Values of fields that have few."""

PLAIN = (int, bool, str)
"""Types of Python that JSON takes as they are."""


class Layout(NamedTuple):
    """How the ranks of a layer hold what it passes on."""

    tp: int
    """Tensor-parallel degree."""
    sequence_parallel: bool = False
    """Whether these ranks divide the sequence."""


def _settle_integers(record: Any) -> None:
    """Give a frozen record integers of Python for those of other libraries, which JSON does not take."""
    for name, value in vars(record).items():
        settled = tuple(map(_settled, value)) if type(value) is tuple else _settled(value)
        object.__setattr__(record, name, settled)


def _settled(value: Any) -> Any:
    # an exact type takes a tenth of the time of a question to `Integral`
    if type(value) in PLAIN:
        return value
    return int(value) if isinstance(value, Integral) else value


@dataclass(frozen=True, order=True)
class LayerStrategy:
    """How one layer runs on the `tp * cp * dp` devices of its stage (`cp` is the plan's)."""

    tp: int
    dp: int
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    tp_comm_bits: int = 16
    """Bits per number of the tensor-parallel collectives of the forward pass; below 16 they are
    lossy."""
    grad_comm_bits: int = 16
    """Bits per number of gradient synchronisation; 16 sends gradients as they are."""
    shard_size: int = 0
    """Data-parallel ranks over which the ZeRO stage shards, a divisor of them (hybrid sharding); 0:
    all."""
    ep: int = 1
    """Expert-parallel degree: the layer's experts are dealt to this many groups of `etp` ranks. The
    same `tp * cp * dp` ranks are folded into `etp * ep * edp` for them (arXiv 2504.14960)."""
    etp: int = 1
    """Expert tensor-parallel degree: ranks that share every expert of theirs."""

    def __post_init__(self) -> None:
        _settle_integers(self)

    @property
    def layout(self) -> Layout:
        """How activations lie on the devices; neighbours of equal layout need no resharding."""
        return Layout(self.tp, self.sequence_parallel)

    def shard_ranks(self, cp: int = 1) -> int:
        """Return the ranks over which a ZeRO stage shards: all of the weights, or those of `shard_size`."""
        return (self.zero_stage and self.shard_size) or self.dp * cp

    def label(self) -> str:
        """Return short text for tables and pictures, e.g. `tp2+sp z1/8 full b8 g4`."""
        sequence = "+sp" if self.sequence_parallel else ""
        shards = f"/{self.shard_size}" if self.shard_size else ""
        parts = [f"tp{self.tp}{sequence}", f"z{self.zero_stage}{shards}"]
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"etp{self.etp}"] if self.etp > 1 else []
        parts += [self.recompute] if self.recompute != "none" else []
        for letter, bits in (("b", self.tp_comm_bits), ("g", self.grad_comm_bits)):
            if bits < LOSSLESS:
                parts.append(f"{letter}{bits}")
        return " ".join(parts)


Strategies = tuple[LayerStrategy, ...]
"""Strategies of layers, or those that a layer may have."""


def counted(layers: Iterable[LayerStrategy]) -> str:
    """Return how many layers have each strategy, e.g. `5 × tp1 z2, 2 × tp2 z2`, the most common first."""
    found = Counter(layer.label() for layer in layers)
    return ", ".join(f"{count} × {label}" for label, count in found.most_common())


@dataclass(frozen=True)
class Plan:
    """A complete parallel plan.

    `boundaries` has `pp * virtual_stages + 1` entries: chunk c holds layers `boundaries[c]` to
    `boundaries[c+1] - 1` and runs on the device of the pipeline that the schedule gives it (`c %
    pp`, or a V). Without several chunks a device a chunk is a stage.
    """

    num_micro_batches: int
    boundaries: tuple[int, ...]
    layers: Strategies
    cp: int = 1
    """Context-parallel degree: `tp * cp * dp` devices a stage."""
    virtual_stages: int = 1
    """Model chunks of a stage (interleaved schedule)."""
    node_order: NodeOrder = ()
    """Nodes, numbered in rank order, as they follow each other along the pipeline; empty: in rank
    order."""
    schedule: str | None = None
    """Order of the passes (`schedules.NAMES`, or the code of a searched one); None:
    `cost.schedule`, or `interleaved` where `virtual_stages` is above 1."""
    offload: Shares = ()
    """Shares of activations and of optimizer state in host memory, of every device of the pipeline
    in order;
    empty: nothing."""

    def __post_init__(self) -> None:
        for name in ("boundaries", "layers", "node_order"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # lists have no hash
        _settle_integers(self)
        self._check_boundaries()
        rule = (
            f"plan: virtual_stages={self.virtual_stages} must divide the {self.num_chunks} "
            "chunks that stages lists"
        )
        require_listed(self.virtual_stages, divisors(self.num_chunks), rule, PlanError)
        if self.offload and len(self.offload) != self.pp:
            raise PlanError(
                f"plan: it offloads on {len(self.offload)} devices of the pipeline, which must be all "
                f"pp={self.pp}; try {self.pp}."
            )
        if self.schedule is not None:
            _check_schedule(self.schedule, self)
        if self.schedule == usual_schedule(self.virtual_stages):
            object.__setattr__(self, "schedule", None)  # one spelling of one plan

    def _check_boundaries(self) -> None:
        """Refuse stages that are empty, or that are not all layers."""
        bounds = self.boundaries
        ordered = all(a < b for a, b in pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or not ordered:
            near = sorted({b for b in bounds if b > 0} or {len(self.layers)})
            raise PlanError(
                f"plan: stages begin and end at layers {list(bounds)}, which must rise strictly "
                f"from 0; try {[0, *near]}."
            )
        if bounds[-1] != len(self.layers):
            raise PlanError(
                f"plan: stages end at layer {bounds[-1]}, and layers lists {len(self.layers)}, which must "
                f"be as many; try stages up to {len(self.layers)}, or {bounds[-1]} layers."
            )

    @property
    def num_chunks(self) -> int:
        """Contiguous runs of layers, `pp * virtual_stages`."""
        return len(self.boundaries) - 1

    @property
    def pp(self) -> int:
        """Pipeline degree."""
        return self.num_chunks // self.virtual_stages

    @property
    def chunk_of_layer(self) -> tuple[int, ...]:
        """Chunk index of every layer."""
        spans = enumerate(pairwise(self.boundaries))
        return tuple(chunk for chunk, (first, end) in spans for _ in range(first, end))

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Stage index of every layer."""
        devices = self.chunk_devices
        return tuple(devices[chunk] for chunk in self.chunk_of_layer)

    @property
    def offloaded_optimizer(self) -> float:
        """Largest share of a device's optimizer state that lies in host memory."""
        return max((optimizer for _, optimizer in self.offload), default=0.0)

    @property
    def schedule_name(self) -> str:
        """The schedule; where the plan names none, the usual one of its chunks."""
        return self.passes.name

    @property
    def passes(self) -> Schedule:
        """The schedule itself, which knows the order of its passes."""
        return find(self.schedule or usual_schedule(self.virtual_stages))

    @property
    def pass_names(self) -> list[list[str]]:
        """The passes of every device in order, as PyTorch's CSV spells them."""
        code = self.passes.code(self.pp, self.num_micro_batches, self.virtual_stages)
        return [row.split() for row in code.split(";")[1:]]

    @property
    def chunk_devices(self) -> tuple[int, ...]:
        """Device of the pipeline of every chunk."""
        return self.passes.devices(self.pp, self.num_chunks)

    def within(self, space_kind: str) -> bool:
        """Return whether the plan lies in a space: `uniform`, `stagewise`, or any other, which is free."""
        if space_kind == "uniform":
            return len(set(self.layers)) == 1
        if space_kind != "stagewise":
            return True
        chunks = self.chunk_of_layer
        return len(set(zip(chunks, self.layers, strict=True))) == len(set(chunks))

    def describe(self, global_batch_size: int) -> str:
        """Return the plan in one line, e.g. `dp 4 · tp 2 · pp 4 · micro-batch 1 × 16 · ZeRO-1`."""
        sizes = [global_batch_size // (layer.dp * self.num_micro_batches) for layer in self.layers]
        parts = [f"dp {self._span('dp')}", f"tp {self._span('tp')}"]
        if self.cp > 1:
            parts.append(f"cp {self.cp}")
        parts += self._expert_degrees()
        chunks = f" × {self.virtual_stages} chunks" if self.virtual_stages > 1 else ""
        parts.append(f"pp {self.pp}{chunks}")
        if self.inside_nodes:
            parts.append(PIPELINES_INSIDE)
        if self.schedule_name not in USUAL:
            parts.append(self.schedule_name)
        parts.append(f"micro-batch {span(sizes)} × {self.num_micro_batches}")
        parts.append(f"ZeRO-{self._span('zero_stage')}")
        parts += self._recomputation()
        if count := sum(layer.sequence_parallel for layer in self.layers):
            whole = count == len(self.layers)
            parts.append("sequence parallel" if whole else f"sp {_layers(count)}")
        return " · ".join(parts + self._refinements())

    @property
    def inside_nodes(self) -> bool:
        """Whether every node holds part of all stages (`space.axis_order=tp-pp-dp`)."""
        return lies_inside_nodes(self.node_order)

    def _span(self, key: str) -> str:
        """Return the smallest and largest value that layers have of a field."""
        return span([getattr(layer, key) for layer in self.layers])

    def _expert_degrees(self) -> list[str]:
        """Return the degrees of the experts where they differ from 1."""
        keys = ("ep", "etp")
        used = [key for key in keys if any(getattr(layer, key) > 1 for layer in self.layers)]
        return [f"{key} {self._span(key)}" for key in used]

    def _recomputation(self) -> list[str]:
        """Say which layers recompute."""
        parts = []
        for kind in ("selective", "full"):
            count = sum(layer.recompute == kind for layer in self.layers)
            some = "" if count == len(self.layers) else f" {_layers(count)}"
            if count:
                parts.append(f"recompute {kind}{some}")
        return parts

    def _refinements(self) -> list[str]:
        """Name the rare features of the plan, for its one line."""
        sharded = [layer.shard_size for layer in self.layers if layer.shard_size]
        parts = [f"sharded over {span(sharded)}"] if sharded else []
        for name, key in (("tp", "tp_comm_bits"), ("gradients", "grad_comm_bits")):
            if any(getattr(layer, key) < LOSSLESS for layer in self.layers):
                parts.append(f"{name} at {self._span(key)} bits")
        return parts

    def to_dict(
        self,
        names: Sequence[str],
        ranks: Sequence[int],
        experts: bool = False,
    ) -> Entries:
        """Return the plan's part of `plan.json`: stages with their ranks, and a strategy per layer.

        Args:
            names: Names of the layers.
            ranks: Ranks of all devices in the order of the pipeline (`Cluster.pipeline_ranks`).
            experts: The model has experts: every layer names its `ep` and `etp`.
        """
        layers = [
            {"name": name, **asdict(strategy)}
            for name, strategy in zip(names, self.layers, strict=True)
        ]
        if not experts:
            for layer in layers:
                del layer["ep"], layer["etp"]
        keys = ("pp", "cp", "virtual_stages")
        result: Entries = {key: getattr(self, key) for key in keys}
        result["schedule"] = self.schedule_name
        result["num_micro_batches"] = self.num_micro_batches
        result["stages"] = self._stages(ranks)
        result["layers"] = layers
        if isinstance(self.passes, Searched):
            result["placement"] = self.passes.placement
            result["order"] = self.pass_names
        return result

    def _stages(self, ranks: Sequence[int]) -> list[Entries]:
        """Return the entry of `plan.json` for every stage, or chunk of a stage."""
        size = len(ranks) // self.pp
        stages = []
        for chunk, (first, end) in enumerate(pairwise(self.boundaries)):
            device = self.chunk_devices[chunk]
            own = list(ranks[device * size : (device + 1) * size])
            stage: Entries = {"layers": [first, end], "ranks": own}
            if self.virtual_stages > 1:
                stage["chunk"] = chunk // self.pp
            if self.offload:
                stage["offload"] = dict(zip(OFFLOADS, self.offload[device], strict=True))
            stages.append(stage)
        return stages

    @staticmethod
    def from_dict(data: Any) -> "Plan":
        """Read the plan of a `plan.json` dictionary.

        Errors:
            PlanError: a field is missing, of the wrong type, or illegal in itself.
        """
        if not isinstance(data, dict):
            raise PlanError(
                f"plan: a {type(data).__name__} must be a JSON object; try a plan.json as the "
                "command writes it."
            )
        if data.get("schema", SCHEMA) != SCHEMA:
            raise PlanError(f"plan: schema={data['schema']!r} must be {SCHEMA}; try {SCHEMA}.")
        if data.get("asynchronous"):
            raise PlanError(
                f"plan: asynchronous={data['asynchronous']} must be null, as no trainer runs it; try a "
                "plan of this version."
            )
        fields = Fields(data)
        boundaries = read_boundaries(data)
        layers = [_layer(layer, index) for index, layer in enumerate(fields.read("layers", list))]
        count = fields.read("num_micro_batches", int, 1)
        cp = fields.read("cp", int, 1, default=1)
        virtual_stages = fields.read("virtual_stages", int, 1, default=1)
        order = node_order_of(data)
        schedule = _schedule(fields)
        plan = Plan(count, boundaries, tuple(layers), cp, virtual_stages, order, schedule)
        plan = replace(plan, offload=offload_of(data["stages"], plan.chunk_devices))
        pp = fields.read("pp", int)
        if pp != plan.pp:
            share = "" if plan.virtual_stages == 1 else " divided by virtual_stages"
            raise PlanError(f"plan: pp={pp} must be the number of stages{share}; try {plan.pp}.")
        if not plan.node_order:
            for index, stage in enumerate(data["stages"]):
                _check_ranks(stage, index, plan)
        return plan


def span(values: Sequence[int]) -> str:
    """Return the smallest and the largest value, or the only one."""
    first = min(values)
    last = max(values)
    return str(first) if first == last else f"{first}-{last}"


def _layers(count: int) -> str:
    return "(1 layer)" if count == 1 else f"({count} layers)"


def _schedule(fields: Fields) -> str | None:
    """Read the schedule of a file; a searched one is the code of its order."""
    if "schedule" not in fields.data:
        return None
    name = str(fields.read("schedule", str))
    if name != SEARCHED:
        return name
    placement = fields.read("placement", str)
    order = fields.read("order", list)
    for device, row in enumerate(order):
        if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
            raise PlanError(
                f'plan: order[{device}] must be a list of passes as text; try ["0F0", "0B0"].'
            )
    return order_code(placement, order)


def _check_schedule(name: str, plan: Plan) -> None:
    if not name.startswith(f"{SEARCHED}:"):
        listed = f"plan: schedule={name!r} must be one of {', '.join(NAMES)}"
        require_listed(name, NAMES, listed, PlanError)
    rule = find(name)
    if isinstance(rule, Searched):
        if sentence := rule.refusal(plan.pp, plan.num_chunks, plan.num_micro_batches):
            raise PlanError(f"plan: {sentence}.")
    elif sentence := rule.chunk_refusal(plan.virtual_stages):
        raise PlanError(sentence)


def _check_ranks(stage: Entries, index: int, plan: Plan) -> None:
    """Refuse ranks other than the consecutive ones that the strategies of the stage imply."""
    if "ranks" not in stage:
        return
    ranks = stage["ranks"]
    strategy = plan.layers[plan.boundaries[index]]
    size = strategy.tp * plan.cp * strategy.dp
    first = plan.chunk_devices[index] * size
    whole = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    if not whole or ranks != list(range(first, first + size)):
        given = f"{ranks[:4]!r} ({len(ranks)} of them)" if isinstance(ranks, list) else repr(ranks)
        raise PlanError(
            f"plan: stages[{index}].ranks={given} must be the {degrees(strategy, plan.cp)} devices "
            f"of the stage in order; try {first} to {first + size - 1}."
        )


def degrees(strategy: LayerStrategy, cp: int) -> str:
    """Return the product of the devices of a stage, for messages."""
    context = [f"cp({cp})"] if cp > 1 else []
    return " * ".join([f"tp({strategy.tp})", *context, f"dp({strategy.dp})"])


def _layer(layer: Any, index: int) -> LayerStrategy:
    """Read the strategy of a layer of a file."""
    if not isinstance(layer, dict):
        raise PlanError(f"plan: layers[{index}] must be an object, got {layer!r}; try {{...}}.")
    return read_strategy(layer, f"layers[{index}].")


def read_strategy(layer: Entries, place: str) -> LayerStrategy:
    """Read a strategy, checked; older files lack the fields that have a default.

    Args:
        place: Where it stands, for messages.

    Errors:
        PlanError: a field is missing, of the wrong type, or illegal in itself.
    """
    fields = Fields(layer, place)
    values = {}
    for key, own in LayerStrategy.__dataclass_fields__.items():
        least = None if key in LAYER_VALUES else int(key in DEGREES)
        default = None if key in REQUIRED else own.default
        values[key] = fields.read(key, own.type, least, default)
    for key, legal in LAYER_VALUES.items():
        value = values[key]
        listed = ", ".join(map(str, legal))
        require_listed(
            value, legal, f"plan: {place}{key}={value} must be one of {listed}", PlanError
        )
    return LayerStrategy(**values)
