"""Compare the layers of an imported model with the model that `transformers` builds."""

from dataclasses import replace

from darts_parallel.config import OWN_FILE, Imported, ModelConfig
from darts_parallel.errors import UnsupportedError
from darts_parallel.problem.model import Model

FLOP_TOLERANCE = 2e-3
"""Relative difference of matrix-product FLOP: gates of one column, which no layer prices."""
TOLERANCE = 1e-3
"""Relative difference of parameters that is named and planned: scales and gates without a price."""


def check_import(imported: Imported) -> str:
    """Refuse a model whose parameters or matrix products differ from those of the priced layers.

    Returns:
        How many parameters have no price (or one too many, if negative), and the first part that
        differs; empty where none does.

    Errors:
        UnsupportedError: names the first part that differs.
    """
    config = ModelConfig(**imported.fields)
    model = Model(config, fused_attention=True)
    flop = forward_flop(config, imported.tokens)
    part = _first_difference(imported, model)
    missing = imported.parameters - model.num_parameters
    if abs(missing) > TOLERANCE * imported.parameters:
        what = f"{imported.parameters:,} parameters, the priced layers {model.num_parameters:,}"
    elif abs(flop - imported.flop) > FLOP_TOLERANCE * imported.flop:
        what = f"{imported.flop:.4g} matrix FLOP for {imported.tokens} tokens, the priced layers {flop:.4g}"
    else:
        return f"a difference of {missing:+,} parameters, the first in {part}" if missing else ""
    raise UnsupportedError(
        f"{imported.place}: {part} is not modelled: the model has {what}; {OWN_FILE}."
    )


def forward_flop(config: ModelConfig, tokens: int) -> float:
    """Return the FLOP of the matrix products of one sequence, all scores computed."""
    window = config.sliding_window and tokens
    model = Model(replace(config, sliding_window=window), fused_attention=True)
    scans = sum(layer.scan.flops for layer in model.layers if layer.scan is not None)
    return tokens * (model.flops_per_token(tokens) / 3.0 - scans)


def _first_difference(imported: Imported, model: Model) -> str:
    """Return the first block that differs, or the parts outside of them."""
    found = imported.blocks
    config = model.config
    blocks = [layer for layer in model.layers if layer.name.startswith("layers.")]
    if len(blocks) == len(found):
        for layer, (part, parameters) in zip(blocks, found, strict=True):
            if layer.parameters(config.vocab_size) != parameters:
                return part
        if model.num_parameters != imported.parameters:
            return "what stands outside of its blocks"
    return found[0][0] if found else config.name
