"""A Transformer as an ordered chain of layers: parameters, FLOP and activation bytes of each.

Activation bytes follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, term by term, so that
grouped-query attention, gated MLPs and fused attention change only the terms that they touch.
All per-token figures are for one token of one sequence; "sharded" parts divide by `tp`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from darts_parallel.config.layer_pattern import ATTENTION, MAMBA, MLP, SYMBOLS, symbol, windowed
from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import TrainingConfig
from darts_parallel.problem.adapters import with_adapters
from darts_parallel.problem.experts import Experts, dense_width, experts_of, latent_attention
from darts_parallel.problem.layer_spec import AttentionCore as AttentionCore
from darts_parallel.problem.layer_spec import Gemm as Gemm
from darts_parallel.problem.layer_spec import LayerSpec as LayerSpec
from darts_parallel.problem.layer_spec import RecomputedPart as RecomputedPart
from darts_parallel.problem.state_space import state_space

VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times `tp`."""


@dataclass(frozen=True)
class Model:
    """The chain of layers: embedding, blocks, head, loss (and a decoder embedding for T5)."""

    config: ModelConfig
    fused_attention: bool
    whole_ends: bool = False
    """Embedding and head, prediction modules with it, each stay on the stage of the block next to them."""
    lora_rank: int = 0
    """Rank of the adapters that alone are trained; 0: everything is."""
    lora_targets: tuple[str, ...] = ()

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers in order."""
        config = self.config
        chain = [_embedding(config, "embedding")]
        for index in range(config.num_layers):
            if config.num_encoder_layers and index == config.num_encoder_layers:
                chain.append(_embedding(config, "decoder_embedding"))
            chain.append(_block(config, index, self.fused_attention))
        chain += [_prediction(config, depth, self.fused_attention) for depth in range(config.mtp_num_layers)]
        layers = (*chain, _head(config), _loss(config))
        if self.lora_rank:
            layers = tuple(with_adapters(layer, self.lora_rank, self.lora_targets) for layer in layers)
        if not self.whole_ends:
            return layers
        ends = (1, *range(len(layers) - 2 - config.mtp_num_layers, len(layers) - 1))  # first block, mtp, head
        return tuple(
            replace(layer, fused_to_previous=layer.fused_to_previous or i in ends)
            for i, layer in enumerate(layers)
        )

    @cached_property
    def kinds(self) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
        """The distinct layers, named by their kind, and the number of every layer's."""
        known: dict[LayerSpec, int] = {}
        numbers = [known.setdefault(replace(one, name=one.kind), len(known)) for one in self.layers]
        return tuple(known), tuple(numbers)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied tables counted once, vocabulary not padded."""
        config = self.config
        total = sum(layer.parameters(config.vocab_size) for layer in self.layers)
        copies = sum(layer.tied for layer in self.layers)
        return total - max(copies - 1, 0) * config.hidden_size * config.vocab_size

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that have a gradient: all, or those of the adapters."""
        adapters = sum(layer.all_adapter_parameters for layer in self.layers)
        return adapters if self.lora_rank else self.num_parameters

    @cached_property
    def has_experts(self) -> bool:
        """Some layer has routed experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: all but those of the experts that it is not sent to."""
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        return self.num_parameters - sum(layer.inactive for layer in experts)

    def flops_per_token(self, seq_len: int) -> float:
        """Return model FLOP (forward and backward, no recomputation) per token, Narayanan et al. 2021.

        Frozen weights have no gradient, which is a third of a product's FLOP.
        """
        matmul = sum(
            gemm.in_features * (self.config.vocab_size if gemm.split == "vocabulary" else gemm.out_features)
            for layer in self.layers
            for gemm in layer.gemms
        )
        for experts in (layer.experts for layer in self.layers if layer.experts is not None):
            matmul += experts.hidden * (experts.count + experts.top_k * (experts.inputs + experts.width))
        scores = sum(
            2 * core.heads * core.head_dim * core.keys(seq_len)
            for layer in self.layers
            for core in layer.cores
        )
        scans = sum(layer.scan.flops for layer in self.layers if layer.scan is not None)
        weights = 6.0 * matmul
        if self.lora_rank:
            weights = 4.0 * matmul + 6.0 * self.num_trained_parameters
        return weights + 6.0 * scores + 3.0 * scans


def build_model(config: ModelConfig, training: TrainingConfig) -> Model:
    """Build the model as the training job runs it."""
    targets = tuple(training.lora_targets)
    return Model(config, training.fused_attention, lora_rank=training.lora_rank, lora_targets=targets)


def _norm(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm_bias else 1) * config.norm_scale


def _embedding(config: ModelConfig, name: str) -> LayerSpec:
    h = config.hidden_size
    positions = (config.max_seq_len + config.position_offset) * config.learned_positions
    tables = h * (positions + config.token_types)
    # T5 keeps its bias table in the first block; here, so that all blocks are equal
    tables += config.relative_position_buckets * config.num_heads
    passes_state = name != "embedding"  # the encoder's output travels on next to the decoder's input
    norms = _norm(config) * (config.embedding_norm + (passes_state and config.final_norm))
    return LayerSpec(
        name=name,
        kind=name,
        vocabulary_parameters=h,
        replicated_parameters=tables + norms,
        replicated_elements=(2 + 3 * config.dropout + 2 * config.embedding_norm) * h,
        replicated_activation_bytes=(config.dropout + 2 * config.embedding_norm) * h,
        tp_collectives=1,
        output_elements=2 * h if passes_state else h,
        tied=config.tie_embeddings or config.num_encoder_layers > 0 or config.mtp_num_layers > 0,
    )


def _block(config: ModelConfig, index: int, fused: bool) -> LayerSpec:
    h, char = config.hidden_size, symbol(config, index)
    if char == MAMBA:
        return _mamba(config, index)
    experts, ffn = _mlp_of(config, index, char)
    decoder = bool(config.num_encoder_layers) and index >= config.num_encoder_layers
    kind = "decoder" if decoder else "encoder" if config.num_encoder_layers else "block"
    kind = "experts" if experts is not None else SYMBOLS.get(char or "", kind)
    attentions = 2 if decoder else int(char in (None, ATTENTION))
    window = config.sliding_window if attentions and windowed(config, index) else None
    latent = config.multi_latent_attention and attentions
    attention = _latent(config) if latent else _attention(config, attentions)
    inputs = (2 if config.gated_mlp else 1) * ffn
    mlp = (Gemm(inputs, h, "column", "linear_fc1"), Gemm(h, ffn, "row", "linear_fc2")) if ffn else ()
    masked = config.causal and kind != "encoder"
    first = replace(attention.core, causal=masked, window=window)
    cores = (first, replace(attention.core, causal=False))[:attentions]
    out_bias = config.linear_bias if config.attention_output_bias is None else config.attention_output_bias
    mlp_bias = config.linear_bias if config.mlp_bias is None else config.mlp_bias
    row_bias = h * (attentions * out_bias + bool(ffn) * mlp_bias)
    sublayers = attentions + (bool(ffn) or experts is not None)
    norms = config.block_norms if config.block_norms is not None and char is None else sublayers
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
    # one norm's output may feed two products
    fed = min(norms, sublayers)
    normed = RecomputedPart("layernorm", replicated_activation_bytes=2.0 * fed * h)
    return LayerSpec(
        name=f"layers.{index}",
        kind=kind if window is None else f"sliding_{kind}",
        gemms=attention.gemms + mlp,
        cores=cores,
        sharded_parameters=attention.sharded_parameters + weights + inputs * mlp_bias,
        replicated_parameters=row_bias + norms * _norm(config) + attention.replicated_parameters + router,
        # norm: read, write; dropout and residual of a sublayer: two reads, one write
        replicated_elements=(2.0 * norms + 3.0 * sublayers) * h + attention.replicated_elements,
        sharded_elements=float(inputs + ffn) + attention.sharded_elements,
        # norm inputs, product inputs (2 bytes each), dropout masks (1 byte)
        replicated_activation_bytes=(2.0 * (norms + fed) + mask * sublayers) * h
        + attention.replicated_activation_bytes,
        # the attention's tensors; MLP pre-activations and the second product's input
        sharded_activation_bytes=attention.sharded_activation_bytes + mlp_bytes,
        score_bytes=0.0 if fused else (4.0 + mask) * config.num_heads * attentions,
        tp_collectives=collectives,
        tp_collectives_backward=collectives,
        output_elements=2 * h if decoder else h,
        recomputable=True,
        experts=experts,
        parts=(*attention.parts, *parts, normed),
    )


def _mlp_of(config: ModelConfig, index: int, char: str | None) -> tuple[Experts | None, int]:
    """Return routed experts of a block, and the inner size of its dense (or shared) MLP, 0 without one."""
    if char == ATTENTION:
        return None, 0
    if char == MLP:
        return None, config.ffn_hidden_size or 4 * config.hidden_size
    return experts_of(config, index), dense_width(config, index)


@dataclass(frozen=True)
class _Attention:
    """The part of a block's specification that its attention adds."""

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
    """Describe grouped-query attention, `attentions` times (self and cross)."""
    h = config.hidden_size
    head_dim = config.head_dim or h // config.num_heads
    kv_heads = config.num_kv_heads or config.num_heads
    q_size, kv_size = config.num_heads * head_dim, kv_heads * head_dim
    ins = Gemm(q_size + 2 * kv_size, h, "column", "linear_qkv")
    gemms = (ins, Gemm(h, q_size, "row", "linear_proj")) * attentions
    qkv_bias = config.linear_bias if config.qkv_bias is None else config.qkv_bias
    bias = attentions * (q_size + 2 * kv_size) * qkv_bias
    sinks = attentions * config.num_heads * config.attention_sinks
    # a norm of queries and keys reads and writes them, and keeps its input
    normed = attentions * (q_size + kv_size) * config.qk_norm
    scales = attentions * (q_size + kv_size) * config.qk_norm_whole
    return _Attention(
        gemms=gemms,
        core=AttentionCore(config.num_heads, kv_heads, head_dim, True),
        sharded_parameters=sum(g.out_features * g.in_features for g in gemms) + bias + sinks + scales,
        replicated_parameters=_head_norms(config, attentions, head_dim),
        sharded_elements=2.0 * normed,
        # Q, K, V and the projection's input
        sharded_activation_bytes=attentions * (4.0 * q_size + 4.0 * kv_size) + 2.0 * normed,
    )


def _latent(config: ModelConfig) -> _Attention:
    """Describe multi-head latent attention, trained with its keys and values expanded (Megatron-LM)."""
    latent = latent_attention(config)
    assert latent is not None
    down, up = (tuple(Gemm(*s, "linear_qkv") for s in shapes) for shapes in (latent.down, latent.up))
    out = Gemm(*latent.out, "linear_proj")
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
    """Return the parameters of the norms of queries and keys."""
    scales = config.qk_norm and not config.qk_norm_whole
    return 2 * attentions * head_dim * (2 if config.norm_bias else 1) * scales


def _mamba(config: ModelConfig, index: int) -> LayerSpec:
    """Describe a state-space layer with its norm and residual."""
    h, mixer, mask = config.hidden_size, state_space(config), 1 if config.dropout else 0
    return LayerSpec(
        name=f"layers.{index}",
        kind=SYMBOLS[MAMBA],
        gemms=tuple(Gemm(*shape) for shape in mixer.gemms),
        scan=mixer.scan,
        sharded_parameters=mixer.sharded_parameters,
        replicated_parameters=mixer.replicated_parameters + _norm(config),
        replicated_elements=5.0 * h,
        sharded_elements=mixer.sharded_elements,
        replicated_activation_bytes=(4.0 + mask) * h,
        sharded_activation_bytes=mixer.sharded_activation_bytes,
        tp_collectives=1,
        tp_collectives_backward=1,
        output_elements=h,
        recomputable=True,
    )


def _prediction(config: ModelConfig, depth: int, fused: bool) -> LayerSpec:
    """Describe a multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-LM).

    Norms of the state and of the next token's embedding, a product of both, and a block like the last one;
    the states of all depths travel on to the head. The first module reads a copy of the embedding table,
    or the head's where the tables are tied; later ones and a tied head stay on its stage.
    """
    h, first = config.hidden_size, depth == 0
    holds = first and not config.tie_embeddings
    block = _block(config, config.num_layers - 1, fused)
    return replace(
        block,
        name=f"mtp.{depth}",
        kind="mtp" if holds else "mtp_again",
        gemms=(Gemm(h, 2 * h, "column"), *block.gemms),
        sharded_parameters=block.sharded_parameters + 2 * h * h,
        replicated_parameters=block.replicated_parameters + 3 * _norm(config),
        vocabulary_parameters=h * holds,
        # lookup, two norms before the product and one after the block
        replicated_elements=block.replicated_elements + 2.0 * h + 3 * 2.0 * h,
        # inputs of three norms, and of the product
        replicated_activation_bytes=block.replicated_activation_bytes + (3 * 2.0 + 4.0) * h,
        # lookup, and the product's gathered output
        tp_collectives=block.tp_collectives + 2,
        tp_collectives_backward=block.tp_collectives_backward + 1,
        output_elements=(2 + depth) * h,
        fused_to_previous=not first,
        tied=holds,
    )


def _head(config: ModelConfig) -> LayerSpec:
    h = config.hidden_size
    transform = config.head_transform
    norms, states = config.final_norm + transform, 1 + config.mtp_num_layers
    logits = (Gemm(config.vocab_size, h, "vocabulary"),) * states
    gemms = ((Gemm(h, h, "replicated"),) if transform else ()) + logits
    return LayerSpec(
        name="head",
        kind="head",
        gemms=gemms,
        sharded_parameters=config.vocab_size * config.output_bias,
        vocabulary_parameters=h,
        replicated_parameters=_norm(config) * norms + (h * h + h * config.linear_bias) * transform,
        replicated_elements=2.0 * norms * h,
        replicated_activation_bytes=(2.0 * states + 2.0 * config.final_norm + 4.0 * transform) * h,
        tp_collectives_backward=states,
        output_elements=config.vocab_size * states,
        fused_to_previous=config.tie_embeddings and states > 1,
        tied=config.tie_embeddings,
    )


def _loss(config: ModelConfig) -> LayerSpec:
    logits = config.vocab_size * (1 + config.mtp_num_layers)
    # Megatron's vocabulary-parallel cross-entropy: logits in 16 bits, softmax in float32
    return LayerSpec(
        name="loss",
        kind="loss",
        sharded_elements=6.0 * logits,
        sharded_activation_bytes=6.0 * logits,
        # the logits' gradient, which the head's product needs, takes the place of the logits
        share_for_weights=2.0 / 6.0,
        fused_to_previous=True,
    )
