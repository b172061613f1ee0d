"""The strategy of a layer and the plan of a whole model; both frozen, both checked."""

from dataclasses import asdict, dataclass
from typing import Any

from darts_parallel.config import RECOMPUTE
from darts_parallel.errors import PlanError

SCHEMA = "darts-parallel/plan/1"


@dataclass(frozen=True, order=True)
class LayerStrategy:
    """How one layer runs on the `tp * dp` devices of its stage."""

    tp: int
    dp: int
    zero_stage: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False

    @property
    def layout(self) -> tuple[int, bool]:
        """How activations lie on the devices; neighbours of equal layout need no resharding."""
        return self.tp, self.sequence_parallel

    def label(self) -> str:
        """Short text for tables and pictures, e.g. `tp2+sp z1 full`."""
        parts = [f"tp{self.tp}{'+sp' if self.sequence_parallel else ''}", f"z{self.zero_stage}"]
        return " ".join(parts + ([self.recompute] if self.recompute != "none" else []))


@dataclass(frozen=True)
class Plan:
    """A complete parallel plan.

    `boundaries` has `pp + 1` entries: stage k holds layers `boundaries[k]` to `boundaries[k+1] - 1`.
    """

    num_micro_batches: int
    boundaries: tuple[int, ...]
    layers: tuple[LayerStrategy, ...]

    def __post_init__(self) -> None:
        ordered = all(a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not ordered:
            raise PlanError(f"stages: boundaries {list(self.boundaries)} must rise strictly from 0.")
        if self.boundaries[-1] != len(self.layers):
            raise PlanError(
                f"stages: the last stage ends at layer {self.boundaries[-1]}, but the plan has "
                f"{len(self.layers)} layers."
            )

    @property
    def pp(self) -> int:
        """Pipeline degree."""
        return len(self.boundaries) - 1

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Stage index of every layer."""
        widths = zip(self.boundaries, self.boundaries[1:], strict=False)
        return tuple(k for k, (first, end) in enumerate(widths) for _ in range(first, end))

    def describe(self, global_batch_size: int) -> str:
        """The plan in one line, e.g. `dp 4 · tp 2 · pp 4 · micro-batch 1 × 16 · ZeRO-1`."""

        def span(values: list[Any]) -> str:
            unique = sorted(set(values))
            return str(unique[0]) if len(unique) == 1 else f"{unique[0]}-{unique[-1]}"

        micro = [global_batch_size // (layer.dp * self.num_micro_batches) for layer in self.layers]
        parts = [
            f"dp {span([layer.dp for layer in self.layers])}",
            f"tp {span([layer.tp for layer in self.layers])}",
            f"pp {self.pp}",
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
        return " · ".join(parts)

    def to_dict(self, names: tuple[str, ...], num_devices: int) -> dict[str, Any]:
        """The plan's part of `plan.json`: stages with their ranks, and a strategy per layer."""
        size = num_devices // self.pp
        stages = [
            {"layers": [first, end], "ranks": list(range(k * size, (k + 1) * size))}
            for k, (first, end) in enumerate(zip(self.boundaries, self.boundaries[1:], strict=False))
        ]
        layers = [{"name": n, **asdict(s)} for n, s in zip(names, self.layers, strict=True)]
        return {
            "pp": self.pp,
            "num_micro_batches": self.num_micro_batches,
            "stages": stages,
            "layers": layers,
        }

    @staticmethod
    def from_dict(data: Any) -> "Plan":
        """Read the plan of a `plan.json` dictionary.

        Errors:
            PlanError: a field is missing, of the wrong type, or illegal in itself.
        """
        if not isinstance(data, dict):
            raise PlanError(f"plan: expected a JSON object, got {type(data).__name__}.")
        if data.get("schema", SCHEMA) != SCHEMA:
            raise PlanError(f"plan: schema={data['schema']} is unknown; expected {SCHEMA}.")
        stages = [_stage(stage, k) for k, stage in enumerate(_field(data, "stages", list))]
        if not stages:
            raise PlanError("plan: stages=[] must list at least one stage.")
        for (_, end), (first, _) in zip(stages, stages[1:], strict=False):
            if end != first:
                raise PlanError(f"stages: a stage ends at layer {end} but the next begins at {first}.")
        pp = _field(data, "pp", int)
        if pp != len(stages):
            raise PlanError(f"plan: pp={pp} must be the number of stages; nearest legal: {len(stages)}.")
        layers = tuple(_layer(layer, i) for i, layer in enumerate(_field(data, "layers", list)))
        boundaries = (stages[0][0], *(end for _, end in stages))
        return Plan(_field(data, "num_micro_batches", int, minimum=1), boundaries, layers)


def _field(data: dict[str, Any], key: str, kind: type, minimum: int | None = None) -> Any:
    if key not in data:
        raise PlanError(f"plan: the field {key} is missing.")
    value = data[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PlanError(f"plan: {key}={value!r} must be of type {kind.__name__}.")
    if minimum is not None and value < minimum:
        raise PlanError(f"plan: {key}={value} must be at least {minimum}; nearest legal: {minimum}.")
    return value


def _stage(stage: Any, index: int) -> tuple[int, int]:
    span = stage.get("layers") if isinstance(stage, dict) else None
    if not isinstance(span, list) or len(span) != 2 or not all(type(x) is int for x in span):
        raise PlanError(f"plan: stages[{index}].layers must be [first, end), got {span!r}.")
    return span[0], span[1]


def _layer(layer: Any, index: int) -> LayerStrategy:
    if not isinstance(layer, dict):
        raise PlanError(f"plan: layers[{index}] must be an object, got {layer!r}.")
    strategy = LayerStrategy(
        tp=_field(layer, "tp", int, minimum=1),
        dp=_field(layer, "dp", int, minimum=1),
        zero_stage=_field(layer, "zero_stage", int, minimum=0),
        recompute=_field(layer, "recompute", str),
        sequence_parallel=_field(layer, "sequence_parallel", bool),
    )
    if strategy.zero_stage > 3 or strategy.recompute not in RECOMPUTE:
        raise PlanError(
            f"plan: layers[{index}] has zero_stage={strategy.zero_stage} and "
            f"recompute={strategy.recompute}; legal are 0-3 and {', '.join(RECOMPUTE)}."
        )
    return strategy
