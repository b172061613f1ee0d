"""Which block is of which kind: hybrid patterns, sliding windows; and the checks of the keys that say so."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from darts_parallel.config.checks import MAX_SIZE, require_at_most, require_size
from darts_parallel.errors import ConfigError

if TYPE_CHECKING:
    from darts_parallel.config.model import ModelConfig

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
SYMBOLS = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", EXPERTS: "experts"}
"""Symbols of a hybrid pattern (Megatron-LM, `megatron/core/models/hybrid`), and the kinds they name."""


def symbol(config: "ModelConfig", index: int) -> str | None:
    """The symbol of block `index` in a hybrid pattern, or None where each block is attention and MLP."""
    pattern = config.hybrid_override_pattern
    return pattern[index] if pattern else None


def windowed(config: "ModelConfig", index: int) -> bool:
    """Whether block `index` attends to the last `sliding_window` tokens only.

    A pattern n leaves every n-th block global (Gemma 3: 6, five windows and one global block); a list
    says it block by block; null makes all of them windows. The blocks of an encoder-decoder have none.
    """
    if config.sliding_window is None or config.num_encoder_layers:
        return False
    pattern = config.sliding_window_pattern
    if pattern is None:
        return True
    return bool(pattern[index]) if isinstance(pattern, Sequence) else (index + 1) % pattern != 0


def check_layer_kinds(config: "ModelConfig") -> None:
    """Refuse patterns, windows and prediction layers that make no model.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    if config.hybrid_override_pattern is not None:
        _check_pattern(config)
    _check_window_pattern(config)
    require_at_most("model.mtp_num_layers", config.mtp_num_layers, config.num_layers)
    if config.mtp_num_layers and (config.num_encoder_layers or not config.causal):
        raise ConfigError(
            f"model.mtp_num_layers={config.mtp_num_layers} must be 0 where the model is no causal decoder; "
            "try 0."
        )


def _check_pattern(config: "ModelConfig") -> None:
    pattern = config.hybrid_override_pattern or ""
    unknown = next((char for char in pattern if char not in SYMBOLS), None)
    if unknown is not None or not pattern:
        raise ConfigError(
            f"model.hybrid_override_pattern={pattern!r} must consist of {', '.join(SYMBOLS)} (Mamba, "
            f"attention, MLP, experts); try {_legal_pattern(pattern, config.num_layers)}."
        )
    if len(pattern) != config.num_layers:
        raise ConfigError(
            f"model.hybrid_override_pattern has {len(pattern)} layers, which must be "
            f"model.num_layers={config.num_layers}; try model.num_layers={len(pattern)}."
        )
    if config.num_encoder_layers:
        raise ConfigError(
            f"model.hybrid_override_pattern must be null where model.num_encoder_layers="
            f"{config.num_encoder_layers}; try model.num_encoder_layers=0."
        )
    if EXPERTS in pattern and not getattr(config, "num_experts", None):
        raise ConfigError(
            f"model.hybrid_override_pattern={pattern} has expert layers, and model.num_experts must say how "
            f"many experts they have; try {pattern.replace(EXPERTS, MLP)}."
        )


def _legal_pattern(pattern: str, num_layers: int) -> str:
    """The pattern without what is no symbol, or attention and MLP by turns."""
    kept = "".join(char for char in pattern if char in SYMBOLS)
    return kept or (ATTENTION + MLP) * (num_layers // 2) or ATTENTION


def _check_window_pattern(config: "ModelConfig") -> None:
    pattern: Any = config.sliding_window_pattern
    if pattern is None:
        return
    if config.sliding_window is None:
        raise ConfigError(
            f"model.sliding_window_pattern={pattern} needs model.sliding_window, the tokens of a window; "
            "try null."
        )
    if isinstance(pattern, (list, tuple)):
        if len(pattern) != config.num_layers or any(value not in (0, 1) for value in pattern):
            near = [int(bool(pattern[i % len(pattern)])) if pattern else 1 for i in range(config.num_layers)]
            raise ConfigError(
                f"model.sliding_window_pattern={list(pattern)} must have a 0 (global) or 1 (window) for each "
                f"of the {config.num_layers} layers; try {near}."
            )
        return
    if isinstance(pattern, bool) or not isinstance(pattern, int):
        raise ConfigError(
            f"model.sliding_window_pattern={pattern!r} must be a whole number (every n-th layer is global) "
            "or a list of 0 and 1; try 6."
        )
    require_size("model.sliding_window_pattern", pattern, MAX_SIZE)
