"""Megatron-LM's flags for layers that differ: hybrids, sliding windows, token prediction.

A hybrid runs in `pretrain_hybrid.py`: `--hybrid-layer-pattern` names every layer by a symbol, `|`
ends a pipeline segment (one each virtual stage) and takes the place of every other flag of the
pipeline's layout, `/` begins the pattern of a prediction module
(`megatron/core/models/hybrid/hybrid_layer_allocation.py`).
"""

from dataclasses import replace

from darts_parallel.config import ATTENTION, EXPERTS, LAYER, MAMBA, MLP
from darts_parallel.export.common import Request

FIXED = {"mamba_conv_kernel": 4, "mamba_chunk_size": 128}
"""Sizes of its Mamba mixer that have no flag."""
WHOLE_BLOCKS = {
    "mtp_num_layers": 0,
    "sliding_window_pattern": None,
    "causal": True,
    "multi_latent_attention": False,
}
"""Fields of models, and the values that a model of half blocks may have."""
SYMBOLS = {"mlp": MLP, "experts": EXPERTS}
"""Symbols of half blocks by kind; all others are attention."""


def with_halves(job: Request) -> Request:
    """Return a job whose model is the hybrid that half blocks are: attention and MLP in turn.

    Errors:
        UnsupportedError: what numbers whole blocks, or no causal decoder of attention and MLP.
    """
    for key, near in WHOLE_BLOCKS.items():
        value = getattr(job.model, key)
        if value != near:
            job.refuse(
                f"model.{key}={value} with half blocks, which its hybrid models lack",
                "space.cut=layer",
            )
    _, *layers, _, _ = job.problem.model.layers  # without embedding, head and loss
    pattern = "".join(SYMBOLS.get(layer.kind, ATTENTION) for layer in layers)
    model = replace(job.model, num_layers=len(layers), hybrid_override_pattern=pattern)
    config = job.problem.config
    config = replace(config, model=model, space=replace(config.space, cut=LAYER))
    return replace(job, problem=replace(job.problem, config=config))


def check_stacks(job: Request) -> None:
    """Refuse sizes of its Mamba mixer that have no flag, and stacks of different numbers of layers.

    `examples/t5/pretrain_t5.py` gives encoder and decoder the number of `--encoder-num-layers`.
    """
    config = job.model
    for key, fixed in FIXED.items():
        value = getattr(config, key)
        if MAMBA in (config.hybrid_override_pattern or "") and value != fixed:
            raise job.refuse(
                f"model.{key}={value}, and its Mamba mixer has {fixed}", f"model.{key}={fixed}"
            )
    layers = config.num_encoder_layers
    if layers and config.num_layers != 2 * layers:
        job.refuse(
            f"model.num_layers={config.num_layers} with model.num_encoder_layers={layers}, and its T5 has "
            "as many decoder layers",
            f"model.num_layers={2 * layers}",
        )


def segments(job: Request) -> str:
    """Cut the hybrid pattern at the plan's stages, e.g. `M-M*|M-M-`."""
    pattern = job.model.hybrid_override_pattern or ""
    modules = job.model.mtp_num_layers
    parts = []
    for chunk in job.chunks:
        with_head = (chunk.mtp > 0) == (chunk.head and modules > 0)
        if chunk.num_blocks == 0 or not with_head:
            raise job.refuse(
                "a stage has no layer of the hybrid pattern, or its prediction modules without the head, and "
                "its segments name layers only",
                "space=uniform space.pp=1",
            )
        parts.append(pattern[chunk.first_block : chunk.first_block + chunk.num_blocks])
    return "|".join(parts) + f"/{pattern[-1:]}" * modules


def require_first_recomputed(job: Request) -> None:
    """Refuse full recomputation of layers that differ from the first layers of a stage.

    `--recompute-num-layers` takes the first layers of a stage, whatever they are.

    Errors:
        UnsupportedError: names the layer.
    """
    kinds = {layer.kind for layer in job.problem.model.layers if layer.recomputable}
    if len(kinds) < 2:
        return
    for chunk in job.chunks:
        full = [own.recompute == "full" for own in job.blocks_of(chunk)]
        if full != sorted(full, reverse=True):
            index = chunk.first_block + full.index(False)
            raise job.refuse(
                f"layers.{index} has recompute=none before a layer of its stage with full, and the layers of "
                f"model={job.model.name} differ, of which --recompute-num-layers takes the first"
            )
