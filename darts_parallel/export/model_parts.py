"""Parts of a model that few trainers have: hybrid layers, windows, prediction modules, unusual norms."""

from collections.abc import Callable

from darts_parallel.config import MAMBA, ModelConfig, read_trainer
from darts_parallel.export.common import Request

PARTS: dict[str, tuple[Callable[[ModelConfig], bool], str]] = {
    "hybrid_override_pattern": (
        lambda c: c.hybrid_override_pattern is not None,
        "layers of different kinds",
    ),
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
    "attention_output_bias": (
        lambda c: c.attention_output_bias not in (None, c.linear_bias),
        "a bias after attention that differs from the others",
    ),
}
"""Key of the model, whether a model has the part, and the part in words."""


def refuse_model_parts(job: Request) -> None:
    """Refuse a model with a part that the target's models lack.

    Errors:
        UnsupportedError: names the key, its value, and what it stands for.
    """
    config = job.model
    if not job.trainer.own_model:
        return
    wrapper = "accelerate" if config.num_experts is None else "deepspeed"
    for key, (has, words) in PARTS.items():
        if has(config) and key not in job.trainer.model_parts:
            raise job.refuse(
                f"model={config.name} has {words} (model.{key}={getattr(config, key)}), and its models have "
                "none",
                f"export={'megatron' if key in read_trainer('megatron').model_parts else wrapper}",
            )
