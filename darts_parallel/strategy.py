"""The strategy of a layer and the plan of a whole model; both frozen, both checked."""

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import pairwise
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
        ordered = all(a < b for a, b in pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not ordered:
            near = [0, *sorted({b for b in self.boundaries if b > 0} or {len(self.layers)})]
            raise PlanError(
                f"plan: stages begin and end at layers {list(self.boundaries)}, which must rise strictly "
                f"from 0; nearest legal: {near}."
            )
        if self.boundaries[-1] != len(self.layers):
            raise PlanError(
                f"plan: stages end at layer {self.boundaries[-1]}, which must be the number of layers; "
                f"nearest legal: {len(self.layers)}."
            )

    @property
    def pp(self) -> int:
        """Pipeline degree."""
        return len(self.boundaries) - 1

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Stage index of every layer."""
        widths = pairwise(self.boundaries)
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
            for k, (first, end) in enumerate(pairwise(self.boundaries))
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
            raise PlanError(
                f"plan: a {type(data).__name__} must be a JSON object; nearest legal: a plan.json as the "
                "command writes it."
            )
        if data.get("schema", SCHEMA) != SCHEMA:
            raise PlanError(f"plan: schema={data['schema']!r} must be {SCHEMA}; nearest legal: {SCHEMA}.")
        stages = [_stage(stage, k) for k, stage in enumerate(_field(data, "stages", list))]
        if not stages:
            raise PlanError("plan: stages=[] must list at least one stage; nearest legal: one of all layers.")
        for (_, end), (first, _) in pairwise(stages):
            if end != first:
                raise PlanError(
                    f"plan: a stage begins at layer {first}, which must be {end}; nearest legal: {end}."
                )
        pp = _field(data, "pp", int)
        if pp != len(stages):
            raise PlanError(f"plan: pp={pp} must be the number of stages; nearest legal: {len(stages)}.")
        layers = tuple(_layer(layer, i) for i, layer in enumerate(_field(data, "layers", list)))
        boundaries = (stages[0][0], *(end for _, end in stages))
        plan = Plan(_field(data, "num_micro_batches", int, minimum=1), boundaries, layers)
        for index, stage in enumerate(data["stages"]):
            _check_ranks(stage, index, layers[boundaries[index]])
        return plan


_KINDS: dict[type, tuple[str, str]] = {
    int: ("a whole number", "1"),
    str: ("text", '"none"'),
    bool: ("true or false", "false"),
    list: ("a list", "[...]"),
}
LARGEST = 2**31 - 1
"""Of any number in a plan: more devices or micro-batches than there can be."""


def _near_recompute(value: str) -> str:
    return get_close_matches(value, RECOMPUTE, n=1, cutoff=0.0)[0]


def _field(data: dict[str, Any], key: str, kind: type, minimum: int | None = None, place: str = "") -> Any:
    """Field `key` of `data`, which stands at `place` of the file, checked."""
    name = f"{place}{key}"
    if key not in data:
        raise PlanError(
            f"plan: the field {name} is missing; nearest legal: a plan.json as the command writes it."
        )
    value = data[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        text = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
        rule, near = _KINDS[kind]
        raise PlanError(f"plan: {name}={text} must be {rule}; nearest legal: {near}.")
    if type(value) is int and value > LARGEST:
        raise PlanError(f"plan: {name}={value} must be at most {LARGEST}; nearest legal: {LARGEST}.")
    if minimum is not None and type(value) is int and value < minimum:
        raise PlanError(f"plan: {name}={value} must be at least {minimum}; nearest legal: {minimum}.")
    return value


def _stage(stage: Any, index: int) -> tuple[int, int]:
    span = stage.get("layers") if isinstance(stage, dict) else None
    if not isinstance(span, list) or len(span) != 2 or not all(type(x) is int for x in span):
        raise PlanError(
            f"plan: stages[{index}].layers must be [first, end), got {span!r}; nearest legal: [0, 1]."
        )
    return span[0], span[1]


def _check_ranks(stage: dict[str, Any], index: int, strategy: LayerStrategy) -> None:
    """Refuse ranks other than the consecutive ones that the strategies of the stage imply."""
    if "ranks" not in stage:
        return
    size, ranks = strategy.tp * strategy.dp, stage["ranks"]
    first = index * size
    fits = isinstance(ranks, list) and len(ranks) == size
    if not fits or any(type(rank) is not int or rank != first + i for i, rank in enumerate(ranks)):
        given = f"{ranks[:4]!r} ({len(ranks)} of them)" if isinstance(ranks, list) else repr(ranks)
        raise PlanError(
            f"plan: stages[{index}].ranks={given} must be the tp({strategy.tp}) * dp({strategy.dp}) devices "
            f"of the stage in order; nearest legal: {first} to {first + size - 1}."
        )


def _layer(layer: Any, index: int) -> LayerStrategy:
    if not isinstance(layer, dict):
        raise PlanError(f"plan: layers[{index}] must be an object, got {layer!r}; nearest legal: {{...}}.")
    place = f"layers[{index}]."
    strategy = LayerStrategy(
        tp=_field(layer, "tp", int, minimum=1, place=place),
        dp=_field(layer, "dp", int, minimum=1, place=place),
        zero_stage=_field(layer, "zero_stage", int, minimum=0, place=place),
        recompute=_field(layer, "recompute", str, place=place),
        sequence_parallel=_field(layer, "sequence_parallel", bool, place=place),
    )
    if strategy.zero_stage > 3 or strategy.recompute not in RECOMPUTE:
        raise PlanError(
            f"plan: layers[{index}] has zero_stage={strategy.zero_stage} and "
            f"recompute={strategy.recompute}, which must be 0-3 and one of {', '.join(RECOMPUTE)}; "
            f"nearest legal: {min(strategy.zero_stage, 3)} and {_near_recompute(strategy.recompute)}."
        )
    return strategy
