"""Parts of a model that few trainers have: hybrid layers, windows, prediction modules, unusual norms."""

from collections.abc import Callable, Collection, Iterator

from darts_parallel.config import MAMBA, ModelConfig

PARTS: dict[str, tuple[Callable[[ModelConfig], bool], str]] = {
    "inputs": (lambda c: c.inputs is not None, "blocks of your own"),
    "hybrid_override_pattern": (lambda c: c.hybrid_override_pattern is not None, "layers of different kinds"),
    "mamba_dt_rank": (
        lambda c: c.mamba_dt_rank is not None and MAMBA in (c.hybrid_override_pattern or ""),
        "Mamba-1 layers",
    ),
    "sliding_window": (lambda c: c.sliding_window is not None, "windowed attention"),
    "mtp_num_layers": (lambda c: c.mtp_num_layers > 0, "multi-token prediction"),
    "block_norms": (lambda c: c.block_norms not in (None, 2), "another number of norms in a block"),
    "norm_scale": (lambda c: not c.norm_scale, "norms without weights"),
    "qk_norm_whole": (lambda c: c.qk_norm and c.qk_norm_whole, "norms over all heads of queries and keys"),
    "attention_gate_size": (lambda c: c.attention_gate_size is not None, "a gate on attention's output"),
    "activation_parameters": (lambda c: c.activation_parameters > 0, "trained activation functions"),
    "embedding_norm": (lambda c: c.embedding_norm, "a norm behind the embedding"),
    "attention_sinks": (lambda c: c.attention_sinks, "a learned logit in every head's softmax"),
    "indexer_num_heads": (lambda c: c.indexer_num_heads is not None, "sparse attention with an indexer"),
    "mlp_bias": (
        lambda c: c.mlp_bias not in (None, c.linear_bias),
        "biases in the MLP that differ from attention's",
    ),
    "position_offset": (lambda c: c.position_offset > 0, "positions that do not begin at 0"),
    "attention_output_bias": (
        lambda c: c.attention_output_bias not in (None, c.linear_bias),
        "a bias after attention that differs from the others",
    ),
}
"""Key of the model, whether a model has the part, and the part in words."""


def parts_beyond(config: ModelConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a model's parts that are not `known`, and each part in words."""
    for key, (has, words) in PARTS.items():
        if key not in known and has(config):
            yield key, words
