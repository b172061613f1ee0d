"""A Transformer as an ordered chain of layers: parameters, FLOP and activation bytes of each.

Activation bytes follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, term by term, so that
grouped-query attention, gated MLPs and fused attention change only the terms that they touch.
All per-token figures are for one token of one sequence; "sharded" parts divide by `tp`.
"""

from dataclasses import dataclass
from functools import cached_property

from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import TrainingConfig

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times `tp`."""


@dataclass(frozen=True)
class Gemm:
    """A weight matrix product with `out_features x in_features` weights, split over `tp` ranks."""

    out_features: int
    in_features: int
    split: str
    """`column` divides `out_features`, `row` divides `in_features`, `vocabulary` pads and divides."""


@dataclass(frozen=True)
class AttentionCore:
    """Scores, softmax and weighted sum of one attention (no weights)."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


@dataclass(frozen=True)
class LayerSpec:
    """What the cost model must know of one layer; equal kinds share one specification but the name."""

    name: str
    kind: str
    gemms: tuple[Gemm, ...] = ()
    cores: tuple[AttentionCore, ...] = ()
    lookup: bool = False
    """The layer reads rows of a vocabulary table (an embedding)."""
    sharded_parameters: int = 0
    """Weights divided by `tp`, vocabulary tables excluded."""
    replicated_parameters: int = 0
    """Norms and the biases of row-parallel products: on every tp rank."""
    vocabulary_parameters: int = 0
    """hidden_size per row of a vocabulary table, 0 without one."""
    replicated_elements: float = 0.0
    """Elements per token that streaming kernels move outside the tp region (sharded by SP)."""
    sharded_elements: float = 0.0
    """The same inside the tp region: activation function, float32 softmax of the loss."""
    replicated_activation_bytes: float = 0.0
    """Kept for backward per token, outside the tp region, in 16-bit training (sharded by SP)."""
    sharded_activation_bytes: float = 0.0
    """Kept for backward per token, divided by `tp`."""
    score_bytes: float = 0.0
    """Kept per token and key position by unfused attention, divided by `tp` (the 5as term)."""
    tp_collectives: int = 0
    """All-reduces (or reduce-scatter + all-gather pairs) of the hidden state in the forward pass."""
    tp_collectives_backward: int = 0
    output_elements: int = 0
    """Elements per token that go to the next layer."""
    recomputable: bool = False
    joined: bool = False
    """Must stay on the stage of its predecessor: no trainer computes the loss on another rank."""
    tied: bool = False
    """Holds the embedding weights, and another layer holds them too."""

    def parameters(self, vocab_size: int) -> int:
        """Number of parameters with `vocab_size` rows in its vocabulary table."""
        rows = self.vocabulary_parameters * vocab_size
        return self.sharded_parameters + self.replicated_parameters + rows


@dataclass(frozen=True)
class Model:
    """The chain of layers: embedding, blocks, head, loss (and a decoder embedding for T5)."""

    config: ModelConfig
    fused_attention: bool

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers in order."""
        config = self.config
        chain = [_embedding(config, "embedding")]
        for index in range(config.num_layers):
            if config.num_encoder_layers and index == config.num_encoder_layers:
                chain.append(_embedding(config, "decoder_embedding"))
            chain.append(_block(config, index, self.fused_attention))
        return (*chain, _head(config), _loss(config))

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied tables counted once, vocabulary not padded."""
        config = self.config
        total = sum(layer.parameters(config.vocab_size) for layer in self.layers)
        copies = sum(layer.tied for layer in self.layers)
        return total - max(copies - 1, 0) * config.hidden_size * config.vocab_size

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOP (forward and backward, no recomputation) per token, Narayanan et al. 2021."""
        matmul = sum(
            gemm.in_features * (self.config.vocab_size if gemm.split == "vocabulary" else gemm.out_features)
            for layer in self.layers
            for gemm in layer.gemms
        )
        scores = sum(
            2 * core.heads * core.head_dim * seq_len for layer in self.layers for core in layer.cores
        )
        return 6.0 * matmul + 6.0 * scores


def build_model(config: ModelConfig, training: TrainingConfig) -> Model:
    """The model as the training job runs it."""
    return Model(config, training.fused_attention)


def _norm(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm_bias else 1)


def _embedding(config: ModelConfig, name: str) -> LayerSpec:
    h = config.hidden_size
    tables = h * (config.max_seq_len * config.learned_positions + config.token_types)
    # T5 keeps its bias table in the first block; here, so that all blocks are equal
    tables += config.relative_position_buckets * config.num_heads
    passes_state = name != "embedding"  # the encoder's output travels on beside the decoder's input
    norms = _norm(config) * (config.embedding_norm + (passes_state and config.final_norm))
    return LayerSpec(
        name=name,
        kind=name,
        lookup=True,
        vocabulary_parameters=h,
        replicated_parameters=tables + norms,
        replicated_elements=(2 + 3 * config.dropout + 2 * config.embedding_norm) * h,
        replicated_activation_bytes=(config.dropout + 2 * config.embedding_norm) * h,
        tp_collectives=1,
        output_elements=2 * h if passes_state else h,
        tied=config.tie_embeddings or config.num_encoder_layers > 0,
    )


def _block(config: ModelConfig, index: int, fused: bool) -> LayerSpec:
    h = config.hidden_size
    head_dim = config.head_dim or h // config.num_heads
    kv_heads = config.num_kv_heads or config.num_heads
    ffn = config.ffn_hidden_size or 4 * h
    decoder = bool(config.num_encoder_layers) and index >= config.num_encoder_layers
    kind = "decoder" if decoder else "encoder" if config.num_encoder_layers else "block"
    attentions = 2 if decoder else 1
    q_size, kv_size = config.num_heads * head_dim, kv_heads * head_dim
    inputs = (2 if config.gated_mlp else 1) * ffn
    attention_gemms = (Gemm(q_size + 2 * kv_size, h, "column"), Gemm(h, q_size, "row"))
    gemms = attention_gemms * attentions + (Gemm(inputs, h, "column"), Gemm(h, ffn, "row"))
    masked = config.causal and kind != "encoder"
    self_core = AttentionCore(config.num_heads, kv_heads, head_dim, masked)
    cross_core = AttentionCore(config.num_heads, kv_heads, head_dim, False)
    weights = sum(gemm.out_features * gemm.in_features for gemm in gemms)
    qkv_bias = config.linear_bias if config.qkv_bias is None else config.qkv_bias
    column_bias = attentions * (q_size + 2 * kv_size) * qkv_bias + inputs * config.linear_bias
    row_bias = sum(g.out_features for g in gemms if g.split == "row") * config.linear_bias
    sublayers = attentions + 1
    mask = 1 if config.dropout else 0
    # a norm of queries and keys reads and writes them, and keeps its input
    normed = attentions * (q_size + kv_size) * config.qk_norm
    return LayerSpec(
        name=f"layers.{index}",
        kind=kind,
        gemms=gemms,
        cores=(self_core, cross_core) if decoder else (self_core,),
        sharded_parameters=weights + column_bias,
        replicated_parameters=row_bias
        + sublayers * _norm(config)
        + _head_norms(config, attentions, head_dim),
        # norm: read, write; dropout and residual: two reads, one write; each per sublayer
        replicated_elements=5.0 * sublayers * h,
        sharded_elements=float(inputs + ffn + 2 * normed),
        # norm input, product input (2 bytes each), dropout mask (1 byte); per sublayer
        replicated_activation_bytes=(4.0 + mask) * sublayers * h,
        # Q, K, V and the projection's input; MLP pre-activations and the second product's input
        sharded_activation_bytes=attentions * (4.0 * q_size + 4.0 * kv_size) + 2.0 * (inputs + ffn + normed),
        score_bytes=0.0 if fused else (4.0 + mask) * config.num_heads * attentions,
        tp_collectives=sublayers,
        tp_collectives_backward=sublayers,
        output_elements=2 * h if decoder else h,
        recomputable=True,
    )


def _head_norms(config: ModelConfig, attentions: int, head_dim: int) -> int:
    """Parameters of the norms of queries and keys."""
    return 2 * attentions * head_dim * (2 if config.norm_bias else 1) * config.qk_norm


def _head(config: ModelConfig) -> LayerSpec:
    h = config.hidden_size
    transform = config.head_transform
    norms = config.final_norm + transform
    gemms = ((Gemm(h, h, "replicated"),) if transform else ()) + (Gemm(config.vocab_size, h, "vocabulary"),)
    return LayerSpec(
        name="head",
        kind="head",
        gemms=gemms,
        sharded_parameters=config.vocab_size * config.output_bias,
        vocabulary_parameters=h,
        replicated_parameters=_norm(config) * norms + (h * h + h) * transform,
        replicated_elements=2.0 * norms * h,
        replicated_activation_bytes=(2.0 + 2.0 * config.final_norm + 4.0 * transform) * h,
        tp_collectives_backward=1,
        output_elements=config.vocab_size,
        tied=config.tie_embeddings,
    )


def _loss(config: ModelConfig) -> LayerSpec:
    # Megatron's vocabulary-parallel cross-entropy: logits in 16 bits, softmax in float32
    return LayerSpec(
        name="loss",
        kind="loss",
        sharded_elements=6.0 * config.vocab_size,
        sharded_activation_bytes=6.0 * config.vocab_size,
        joined=True,
    )
