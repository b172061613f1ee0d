"""The strategy of a layer and the plan of a whole model; both frozen, both checked."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from darts_parallel.config import COMM_BITS, OFFLOADS, RECOMPUTE
from darts_parallel.errors import PlanError, closest
from darts_parallel.plans._fields import comm_bits, field, node_order_of, offload_of, stage_span
from darts_parallel.schedules import (
    NAMES,
    PLACEMENTS,
    SEARCHED,
    USUAL,
    Schedule,
    Searched,
    find,
    order_code,
    usual_schedule,
)

SCHEMA = "darts-parallel/plan/1"


@dataclass(frozen=True, order=True)
class LayerStrategy:
    """How one layer runs on the `tp * cp * dp` devices of its stage (`cp` is the plan's)."""

    tp: int
    dp: int
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    tp_comm_bits: int = 16
    """Bits per number of the tensor-parallel collectives of the forward pass; below 16 they are lossy."""
    grad_comm_bits: int = 16
    """Bits per number of gradient synchronisation; 16 sends gradients as they are."""
    shard_size: int = 0
    """Data-parallel ranks over which the ZeRO stage shards, a divisor of them (hybrid sharding); 0: all."""
    ep: int = 1
    """Expert-parallel degree: the layer's experts are dealt to this many groups of `etp` ranks. The same
    `tp * cp * dp` ranks are folded into `etp * ep * edp` for them (arXiv 2504.14960)."""
    etp: int = 1
    """Expert tensor-parallel degree: ranks that share every expert of theirs."""

    @property
    def layout(self) -> tuple[int, bool]:
        """How activations lie on the devices; neighbours of equal layout need no resharding."""
        return self.tp, self.sequence_parallel

    def label(self) -> str:
        """Return short text for tables and pictures, e.g. `tp2+sp z1/8 full b8 g4`."""
        shards = f"/{self.shard_size}" if self.shard_size else ""
        parts = [
            f"tp{self.tp}{'+sp' if self.sequence_parallel else ''}",
            f"z{self.zero_stage}{shards}",
        ]
        parts += [
            f"{name}{degree}" for name, degree in (("ep", self.ep), ("etp", self.etp)) if degree > 1
        ]
        parts += [self.recompute] if self.recompute != "none" else []
        lossy = (("b", self.tp_comm_bits), ("g", self.grad_comm_bits))
        return " ".join(
            parts + [f"{letter}{bits}" for letter, bits in lossy if bits < max(COMM_BITS)]
        )


@dataclass(frozen=True)
class Plan:
    """A complete parallel plan.

    `boundaries` has `pp * virtual_stages + 1` entries: chunk c holds layers `boundaries[c]` to
    `boundaries[c+1] - 1` and runs on the device of the pipeline that the schedule gives it (`c % pp`, or a
    V). Without several chunks a device a chunk is a stage.
    """

    num_micro_batches: int
    boundaries: tuple[int, ...]
    layers: tuple[LayerStrategy, ...]
    cp: int = 1
    """Context-parallel degree: `tp * cp * dp` devices a stage."""
    virtual_stages: int = 1
    """Model chunks of a stage (interleaved schedule)."""
    node_order: tuple[int, ...] = ()
    """Nodes, numbered in rank order, as they follow each other along the pipeline; empty: in rank order."""
    schedule: str | None = None
    """Order of the passes (`schedules.NAMES`, or the code of a searched one); None: `cost.schedule`, or
    `interleaved` where `virtual_stages` is above 1."""
    offload: tuple[tuple[float, float], ...] = ()
    """Shares of activations and of optimizer state in host memory, of every device of the pipeline in order;
    empty: nothing."""

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not ordered:
            near = [0, *sorted({b for b in self.boundaries if b > 0} or {len(self.layers)})]
            raise PlanError(
                f"plan: stages begin and end at layers {list(self.boundaries)}, which must rise strictly "
                f"from 0; try {near}."
            )
        if self.boundaries[-1] != len(self.layers):
            raise PlanError(
                f"plan: stages end at layer {self.boundaries[-1]}, which must be the number of layers; "
                f"try {len(self.layers)}."
            )
        if self.virtual_stages < 1 or self.num_chunks % self.virtual_stages:
            near = [v for v in range(1, self.num_chunks + 1) if self.num_chunks % v == 0]
            raise PlanError(
                f"plan: virtual_stages={self.virtual_stages} must divide the {self.num_chunks} chunks that "
                f"stages lists; try {min(near, key=lambda v: abs(v - self.virtual_stages))}."
            )

        if self.offload and len(self.offload) != self.pp:
            raise PlanError(
                f"plan: it offloads on {len(self.offload)} devices of the pipeline, which must be all "
                f"pp={self.pp}; try {self.pp}."
            )
        if self.schedule is not None:
            _check_schedule(self.schedule, self)
        if self.schedule == usual_schedule(self.virtual_stages):
            object.__setattr__(self, "schedule", None)  # one spelling of one plan

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
        widths = pairwise(self.boundaries)
        return tuple(c for c, (first, end) in enumerate(widths) for _ in range(first, end))

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Stage index of every layer."""
        devices = self.chunk_devices
        return tuple(devices[chunk] for chunk in self.chunk_of_layer)

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
        """Return whether the plan lies in the space: `uniform`, `stagewise`, or any other, which is free."""
        chunks = self.chunk_of_layer if space_kind == "stagewise" else (0,) * len(self.layers)
        shared = len(set(zip(chunks, self.layers, strict=True))) == len(set(chunks))
        return shared or space_kind not in ("uniform", "stagewise")

    def describe(self, global_batch_size: int) -> str:
        """Return the plan in one line, e.g. `dp 4 · tp 2 · pp 4 · micro-batch 1 × 16 · ZeRO-1`."""

        def span(values: list[Any]) -> str:
            unique = sorted(set(values))
            return str(unique[0]) if len(unique) == 1 else f"{unique[0]}-{unique[-1]}"

        micro = [global_batch_size // (layer.dp * self.num_micro_batches) for layer in self.layers]
        parts = [
            f"dp {span([layer.dp for layer in self.layers])}",
            f"tp {span([layer.tp for layer in self.layers])}",
            *([f"cp {self.cp}"] if self.cp > 1 else []),
            *self._expert_degrees(span),
            f"pp {self.pp}"
            + (f" × {self.virtual_stages} chunks" if self.virtual_stages > 1 else ""),
            *([self.schedule_name] if self.schedule_name not in USUAL else []),
            f"micro-batch {span(micro)} × {self.num_micro_batches}",
            f"ZeRO-{span([layer.zero_stage for layer in self.layers])}",
        ]
        for kind in ("selective", "full"):
            count = sum(layer.recompute == kind for layer in self.layers)
            if count:
                everywhere = count == len(self.layers)
                parts.append(f"recompute {kind}" + ("" if everywhere else f" ({count} layers)"))
        if any(layer.sequence_parallel for layer in self.layers):
            parts.append("sequence parallel")
        return " · ".join(parts + self._refinements(span))

    def _expert_degrees(self, span: Callable[[list[Any]], str]) -> list[str]:
        """Return the degrees of the experts where they differ from 1."""
        degrees = {
            "ep": [layer.ep for layer in self.layers],
            "etp": [layer.etp for layer in self.layers],
        }
        return [f"{name} {span(values)}" for name, values in degrees.items() if max(values) > 1]

    def _refinements(self, span: Callable[[list[Any]], str]) -> list[str]:
        """Name what few plans have, for the one line."""
        sharded = [layer.shard_size for layer in self.layers if layer.shard_size]
        parts = [f"sharded over {span(sharded)}"] if sharded else []
        for name, bits in (
            ("tp", [layer.tp_comm_bits for layer in self.layers]),
            ("gradients", [layer.grad_comm_bits for layer in self.layers]),
        ):
            if min(bits) < max(COMM_BITS):
                parts.append(f"{name} at {span(bits)} bits")
        return parts

    def to_dict(
        self,
        names: Sequence[str],
        devices: int,
        ranks: Sequence[int] | None = None,
        *,
        experts: bool = False,
    ) -> dict[str, Any]:
        """Return the plan's part of `plan.json`: stages with their ranks, and a strategy per layer.

        Args:
            ranks: Ranks in the order of the pipeline; needed where the plan has a `node_order`.
            experts: The model has experts: every layer names its `ep` and `etp`.
        """
        size = devices // self.pp
        ranks = range(devices) if ranks is None else ranks
        stages = []
        for chunk, (first, end) in enumerate(pairwise(self.boundaries)):
            lap, stage = chunk // self.pp, self.chunk_devices[chunk]
            own = list(ranks[stage * size : (stage + 1) * size])
            numbered = {"chunk": lap} if self.virtual_stages > 1 else {}
            shares = dict(zip(OFFLOADS, self.offload[stage], strict=True)) if self.offload else {}
            away = {"offload": shares} if shares else {}
            stages.append({"layers": [first, end], "ranks": own} | numbered | away)
        left_out = () if experts else ("ep", "etp")
        strategies = [
            {k: value for k, value in asdict(s).items() if k not in left_out} for s in self.layers
        ]
        layers = [{"name": n, **strategy} for n, strategy in zip(names, strategies, strict=True)]
        rule, order = self.passes, dict[str, Any]()
        if isinstance(rule, Searched):
            order = {"placement": PLACEMENTS[rule.folded], "order": self.pass_names}
        return {
            "pp": self.pp,
            "cp": self.cp,
            "virtual_stages": self.virtual_stages,
            "schedule": self.schedule_name,
            "num_micro_batches": self.num_micro_batches,
            "stages": stages,
            "layers": layers,
            **order,
        }

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
        stages = [stage_span(stage, k) for k, stage in enumerate(field(data, "stages", list))]
        if not stages:
            raise PlanError("plan: stages=[] must list at least one stage; try one of all layers.")
        for (_, end), (first, _) in pairwise(stages):
            if end != first:
                raise PlanError(
                    f"plan: a stage begins at layer {first}, which must be {end}; try {end}."
                )
        layers = tuple(_layer(layer, i) for i, layer in enumerate(field(data, "layers", list)))
        boundaries = (stages[0][0], *(end for _, end in stages))
        plan = Plan(
            num_micro_batches=field(data, "num_micro_batches", int, minimum=1),
            boundaries=boundaries,
            layers=layers,
            cp=field(data, "cp", int, minimum=1, default=1),
            virtual_stages=field(data, "virtual_stages", int, minimum=1, default=1),
            node_order=node_order_of(data),
            schedule=_schedule(data),
        )
        plan = replace(plan, offload=offload_of(data["stages"], plan.chunk_devices))
        pp = field(data, "pp", int)
        if pp != plan.pp:
            share = "" if plan.virtual_stages == 1 else " divided by virtual_stages"
            raise PlanError(f"plan: pp={pp} must be the number of stages{share}; try {plan.pp}.")
        if not plan.node_order:
            for index, stage in enumerate(data["stages"]):
                _check_ranks(stage, index, plan)
        return plan


def _schedule(data: dict[str, Any]) -> str | None:
    """Read the schedule of a file; a searched one is the code of its order."""
    if data.get("schedule") != SEARCHED:
        return field(data, "schedule", str) if "schedule" in data else None
    placement, order = field(data, "placement", str), field(data, "order", list)
    if placement not in PLACEMENTS:
        raise PlanError(f"plan: placement={placement!r} must be loop or v; try {PLACEMENTS[0]}.")
    for device, row in enumerate(order):
        if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
            raise PlanError(
                f'plan: order[{device}] must be a list of passes as text; try ["0F0", "0B0"].'
            )
    return order_code(placement, order)


def _check_schedule(name: str, plan: Plan) -> None:
    known = name if name.startswith(f"{SEARCHED}:") else name in NAMES
    if not known:
        near = closest(name, NAMES)
        raise PlanError(f"plan: schedule={name!r} must be one of {', '.join(NAMES)}; try {near}.")
    rule = find(name)
    if isinstance(rule, Searched):
        if sentence := rule.refusal(plan.pp, plan.num_chunks, plan.num_micro_batches):
            raise PlanError(f"plan: {sentence}.")
    elif sentence := rule.chunk_refusal(plan.virtual_stages):
        raise PlanError(sentence)


def _check_ranks(stage: dict[str, Any], index: int, plan: Plan) -> None:
    """Refuse ranks other than the consecutive ones that the strategies of the stage imply."""
    if "ranks" not in stage:
        return
    strategy = plan.layers[plan.boundaries[index]]
    size, ranks = strategy.tp * plan.cp * strategy.dp, stage["ranks"]
    first = plan.chunk_devices[index] * size
    fits = isinstance(ranks, list) and len(ranks) == size
    if not fits or any(type(rank) is not int or rank != first + i for i, rank in enumerate(ranks)):
        given = f"{ranks[:4]!r} ({len(ranks)} of them)" if isinstance(ranks, list) else repr(ranks)
        raise PlanError(
            f"plan: stages[{index}].ranks={given} must be the {degrees(strategy, plan.cp)} devices "
            f"of the stage in order; try {first} to {first + size - 1}."
        )


def degrees(strategy: LayerStrategy, cp: int) -> str:
    """Return the product of the devices of a stage, for messages."""
    return " * ".join(
        [f"tp({strategy.tp})", *([f"cp({cp})"] if cp > 1 else []), f"dp({strategy.dp})"]
    )


def _layer(layer: Any, index: int) -> LayerStrategy:
    if not isinstance(layer, dict):
        raise PlanError(f"plan: layers[{index}] must be an object, got {layer!r}; try {{...}}.")
    place = f"layers[{index}]."
    strategy = LayerStrategy(
        tp=field(layer, "tp", int, minimum=1, place=place),
        dp=field(layer, "dp", int, minimum=1, place=place),
        zero_stage=field(layer, "zero_stage", int, minimum=0, place=place),
        recompute=field(layer, "recompute", str, place=place),
        sequence_parallel=field(layer, "sequence_parallel", bool, place=place),
        tp_comm_bits=comm_bits(layer, "tp_comm_bits", place),
        grad_comm_bits=comm_bits(layer, "grad_comm_bits", place),
        shard_size=field(layer, "shard_size", int, minimum=0, place=place, default=0),
        ep=field(layer, "ep", int, minimum=1, place=place, default=1),
        etp=field(layer, "etp", int, minimum=1, place=place, default=1),
    )
    if strategy.zero_stage > 3 or strategy.recompute not in RECOMPUTE:
        near = closest(strategy.recompute, RECOMPUTE)
        raise PlanError(
            f"plan: layers[{index}] has zero_stage={strategy.zero_stage} and "
            f"recompute={strategy.recompute}, which must be 0-3 and one of {', '.join(RECOMPUTE)}; "
            f"try {min(strategy.zero_stage, 3)} and {near}."
        )
    return strategy
