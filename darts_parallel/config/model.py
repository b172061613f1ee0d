"""Schema of the model's YAML."""

from dataclasses import dataclass

from omegaconf import MISSING

from darts_parallel.config.checks import nearest_divisor, require_at_least, require_size
from darts_parallel.errors import ConfigError

MAX_LAYERS = 1024
"""More blocks than any published Transformer; the search is meant for no more."""
MAX_SIZE = 2**24
"""Largest width, vocabulary, sequence or batch: beyond, a slip of the pen is likelier than a model."""


@dataclass
class ModelConfig:
    """A Transformer: `num_layers` blocks between an embedding and a head."""

    name: str = MISSING
    path: str | None = None
    """A Hugging Face config.json to take the sizes from (`model=hf`); null once they are taken."""
    num_layers: int = MISSING
    """Transformer blocks; with `num_encoder_layers` the first of them form the encoder."""
    hidden_size: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int | None = None
    """Key/value heads of grouped-query attention; null: as `num_heads`."""
    head_dim: int | None = None
    """Size of one head; null: hidden_size / num_heads."""
    ffn_hidden_size: int | None = None
    """Inner size of the MLP; null: 4 * hidden_size."""
    gated_mlp: bool = False
    """Two input projections (SwiGLU, GeGLU) instead of one."""
    vocab_size: int = MISSING
    tie_embeddings: bool = True
    max_seq_len: int = MISSING
    num_encoder_layers: int = 0
    """Blocks of an encoder whose output every later (decoder) block attends to; 0: none."""
    causal: bool = True
    """False: every token attends to all (BERT)."""
    learned_positions: bool = True
    """A table of `max_seq_len` position embeddings (GPT-2, BERT); false: rotary, ALiBi, relative."""
    dropout: bool = True
    """Dropout masks are kept for backward (1 byte an element); Llama trains without."""
    linear_bias: bool = True
    qkv_bias: bool | None = None
    """Bias of the query, key and value products; null: as `linear_bias` (Qwen2 has only these)."""
    qk_norm: bool = False
    """A norm over each head of queries and keys (Qwen3)."""
    norm_bias: bool = True
    """LayerNorm has scale and shift; RMSNorm only a scale."""
    final_norm: bool = True
    """A norm after the last block; false where each block ends with its own (BERT)."""
    embedding_norm: bool = False
    """A normalisation right after the embedding (BLOOM, BERT)."""
    head_transform: bool = False
    """A dense layer and a norm before the output projection (BERT's masked-language head)."""
    output_bias: bool = False
    """The output projection has a bias of `vocab_size` (BERT)."""
    token_types: int = 0
    """Rows of a token-type embedding (BERT: 2); 0: none."""
    relative_position_buckets: int = 0
    """Rows of a table of `num_heads` attention biases by distance, one a stack (T5: 32); 0: none."""

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len"):
            require_size(f"model.{key}", getattr(self, key), MAX_LAYERS if key == "num_layers" else MAX_SIZE)
        for key in ("num_kv_heads", "head_dim", "ffn_hidden_size"):
            if getattr(self, key) is not None:
                require_size(f"model.{key}", getattr(self, key), MAX_SIZE)
        for key in ("num_encoder_layers", "token_types", "relative_position_buckets"):
            require_at_least(f"model.{key}", getattr(self, key), 0)
        if self.num_encoder_layers >= self.num_layers:
            raise ConfigError(
                f"model.num_encoder_layers={self.num_encoder_layers} must leave a decoder layer of "
                f"model.num_layers={self.num_layers}; nearest legal: {self.num_layers - 1}."
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            near = nearest_divisor(self.hidden_size, self.num_heads)
            raise ConfigError(
                f"model.num_heads={self.num_heads} must divide "
                f"model.hidden_size={self.hidden_size}; nearest legal: {near}."
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            near = nearest_divisor(self.num_heads, self.num_kv_heads)
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} must divide "
                f"model.num_heads={self.num_heads}; nearest legal: {near}."
            )
