"""A Transformer as an ordered chain of layers: parameters, FLOP and activation bytes of each.

Activation bytes follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, term by term, so that
grouped-query attention, gated MLPs and fused attention change only the terms that they touch.
All per-token figures are for one token of one sequence; "sharded" parts divide by `tp`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import TrainingConfig
from darts_parallel.problem.experts import Experts, dense_width, experts_of, latent_attention

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times `tp`."""


@dataclass(frozen=True)
class Gemm:
    """A weight matrix product with `out_features x in_features` weights, split over `tp` ranks."""

    out_features: int
    in_features: int
    split: str
    """`column` divides `out_features`, `row` divides `in_features`, `vocabulary` pads and divides;
    `replicated` divides neither."""


@dataclass(frozen=True)
class AttentionCore:
    """Scores, softmax and weighted sum of one attention (no weights)."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


@dataclass(frozen=True)
class RecomputedPart:
    """A part of a block that selective recomputation may throw away and compute again."""

    module: str
    """Megatron-LM's word (`--recompute-modules`)."""
    gemms: tuple[Gemm, ...] = ()
    replicated_activation_bytes: float = 0.0
    """Bytes a token that need not be kept, of `LayerSpec.replicated_activation_bytes`."""
    sharded_activation_bytes: float = 0.0


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
    experts: Experts | None = None
    """Routed experts, which none of the figures above hold; their router is in the replicated ones."""
    parts: tuple[RecomputedPart, ...] = ()
    """What `training.recompute_modules` can name beside the attention core and the experts."""

    def parameters(self, vocab_size: int) -> int:
        """Number of parameters with `vocab_size` rows in its vocabulary table."""
        rows = self.vocabulary_parameters * vocab_size
        experts = 0 if self.experts is None else self.experts.parameters
        return self.sharded_parameters + self.replicated_parameters + rows + experts


@dataclass(frozen=True)
class Model:
    """The chain of layers: embedding, blocks, head, loss (and a decoder embedding for T5)."""

    config: ModelConfig
    fused_attention: bool
    whole_ends: bool = False
    """Embedding and head each stay on the stage of the block beside them."""

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers in order."""
        config = self.config
        chain = [_embedding(config, "embedding")]
        for index in range(config.num_layers):
            if config.num_encoder_layers and index == config.num_encoder_layers:
                chain.append(_embedding(config, "decoder_embedding"))
            chain.append(_block(config, index, self.fused_attention))
        layers = (*chain, _head(config), _loss(config))
        if not self.whole_ends:
            return layers
        ends = (1, len(layers) - 2)  # the first block, the head
        return tuple(replace(layer, joined=layer.joined or i in ends) for i, layer in enumerate(layers))

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied tables counted once, vocabulary not padded."""
        config = self.config
        total = sum(layer.parameters(config.vocab_size) for layer in self.layers)
        copies = sum(layer.tied for layer in self.layers)
        return total - max(copies - 1, 0) * config.hidden_size * config.vocab_size

    @property
    def has_experts(self) -> bool:
        """Some layer has routed experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: all but those of the experts that it is not sent to."""
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        return self.num_parameters - sum(layer.inactive for layer in experts)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOP (forward and backward, no recomputation) per token, Narayanan et al. 2021."""
        matmul = sum(
            gemm.in_features * (self.config.vocab_size if gemm.split == "vocabulary" else gemm.out_features)
            for layer in self.layers
            for gemm in layer.gemms
        )
        for experts in (layer.experts for layer in self.layers if layer.experts is not None):
            matmul += experts.hidden * (experts.count + experts.top_k * (experts.inputs + experts.width))
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
    experts, ffn = experts_of(config, index), dense_width(config, index)
    decoder = bool(config.num_encoder_layers) and index >= config.num_encoder_layers
    kind = "decoder" if decoder else "encoder" if config.num_encoder_layers else "block"
    attentions = 2 if decoder else 1
    attention = _latent(config) if config.multi_latent_attention else _attention(config, attentions)
    inputs = (2 if config.gated_mlp else 1) * ffn
    mlp = (Gemm(inputs, h, "column"), Gemm(h, ffn, "row")) if ffn else ()
    masked = config.causal and kind != "encoder"
    cores = tuple(replace(attention.core, causal=causal) for causal in (masked, False)[:attentions])
    row_bias = (attentions + bool(ffn)) * h * config.linear_bias
    sublayers = attentions + 1
    mask = 1 if config.dropout else 0
    router = 0
    if experts is not None:
        router = experts.router_parameters + h * bool(ffn and config.moe_shared_expert_gate)
    # the experts' tokens leave and enter sequence-parallel, without a collective of the tp group
    collectives = attentions + bool(ffn)
    weights = sum(gemm.out_features * gemm.in_features for gemm in mlp)
    dense = "mlp" if experts is None else "shared_experts"
    mlp_bytes = 2.0 * (inputs + ffn)
    parts = (RecomputedPart(dense, mlp, sharded_activation_bytes=mlp_bytes),) if ffn else ()
    norms = RecomputedPart("layernorm", replicated_activation_bytes=2.0 * sublayers * h)
    return LayerSpec(
        name=f"layers.{index}",
        kind=kind if experts is None else "experts",
        gemms=attention.gemms + mlp,
        cores=cores,
        sharded_parameters=attention.sharded_parameters + weights + inputs * config.linear_bias,
        replicated_parameters=row_bias + sublayers * _norm(config) + attention.replicated_parameters + router,
        # norm: read, write; dropout and residual: two reads, one write; each per sublayer
        replicated_elements=5.0 * sublayers * h + attention.replicated_elements,
        sharded_elements=float(inputs + ffn) + attention.sharded_elements,
        # norm input, product input (2 bytes each), dropout mask (1 byte); per sublayer
        replicated_activation_bytes=(4.0 + mask) * sublayers * h + attention.replicated_activation_bytes,
        # the attention's tensors; MLP pre-activations and the second product's input
        sharded_activation_bytes=attention.sharded_activation_bytes + mlp_bytes,
        score_bytes=0.0 if fused else (4.0 + mask) * config.num_heads * attentions,
        tp_collectives=collectives,
        tp_collectives_backward=collectives,
        output_elements=2 * h if decoder else h,
        recomputable=True,
        experts=experts,
        parts=(*attention.parts, *parts, norms),
    )


@dataclass(frozen=True)
class _Attention:
    """What the attention of a block adds to its specification."""

    gemms: tuple[Gemm, ...]
    core: AttentionCore
    sharded_parameters: int
    replicated_parameters: int
    sharded_elements: float
    sharded_activation_bytes: float
    replicated_elements: float = 0.0
    replicated_activation_bytes: float = 0.0
    parts: tuple[RecomputedPart, ...] = ()


def _attention(config: ModelConfig, attentions: int) -> _Attention:
    """Grouped-query attention, `attentions` times (self and cross)."""
    h = config.hidden_size
    head_dim = config.head_dim or h // config.num_heads
    kv_heads = config.num_kv_heads or config.num_heads
    q_size, kv_size = config.num_heads * head_dim, kv_heads * head_dim
    gemms = (Gemm(q_size + 2 * kv_size, h, "column"), Gemm(h, q_size, "row")) * attentions
    qkv_bias = config.linear_bias if config.qkv_bias is None else config.qkv_bias
    bias = attentions * (q_size + 2 * kv_size) * qkv_bias
    sinks = attentions * config.num_heads * config.attention_sinks
    # a norm of queries and keys reads and writes them, and keeps its input
    normed = attentions * (q_size + kv_size) * config.qk_norm
    return _Attention(
        gemms=gemms,
        core=AttentionCore(config.num_heads, kv_heads, head_dim, True),
        sharded_parameters=sum(g.out_features * g.in_features for g in gemms) + bias + sinks,
        replicated_parameters=_head_norms(config, attentions, head_dim),
        sharded_elements=2.0 * normed,
        # Q, K, V and the projection's input
        sharded_activation_bytes=attentions * (4.0 * q_size + 4.0 * kv_size) + 2.0 * normed,
    )


def _latent(config: ModelConfig) -> _Attention:
    """Multi-head latent attention, trained with its keys and values expanded (Megatron-LM)."""
    latent = latent_attention(config)
    assert latent is not None
    down, up = (tuple(Gemm(*shape) for shape in shapes) for shapes in (latent.down, latent.up))
    out = Gemm(*latent.out)
    up_part = RecomputedPart("mla_up_proj", up, sharded_activation_bytes=2.0 * latent.expanded)
    # queries and keys are longer than values; their mean gives the same products and bytes
    core = AttentionCore(latent.heads, latent.heads, (latent.query + latent.value) // 2, True)
    norm_scales = (2 if config.norm_bias else 1) * latent.norms
    return _Attention(
        gemms=(*down, *up, out),
        core=core,
        sharded_parameters=sum(g.out_features * g.in_features for g in (*up, out)),
        replicated_parameters=sum(g.out_features * g.in_features for g in down) + norm_scales,
        # the rotary part is joined to every head of queries and keys: read and written
        sharded_elements=2.0 * 2 * latent.heads * latent.query,
        sharded_activation_bytes=2.0 * (latent.expanded + latent.heads * latent.value),
        replicated_elements=2.0 * latent.norms,
        # products' outputs are the norms' inputs, and the norms' outputs the next products' inputs
        replicated_activation_bytes=2.0 * (latent.low + latent.norms),
        parts=(up_part,),
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
