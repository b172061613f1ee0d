"""A Transformer as an ordered chain of layers: parameters, FLOP and activation bytes of each.

Activation bytes follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, term by term, so that
grouped-query attention, gated MLPs and fused attention change only the terms that they touch.
All per-token figures are for one token of one sequence; "sharded" parts divide by `tp`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from darts_parallel.config import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MLP,
    SYMBOLS,
    ModelConfig,
    symbol,
    windowed,
)
from darts_parallel.problem.layer_spec import (
    AttentionCore,
    Experts,
    Gemm,
    LayerSpec,
    RecomputedPart,
    mlp_of,
    weights,
)
from darts_parallel.problem.state_space import state_space

NORMED = ("linear_qkv", "linear_fc1")
"""Products whose input is the output of a norm, which nothing else needs in backward. The input of
`linear_proj` is kept by the attention itself."""


def with_adapters(layer: LayerSpec, rank: int, targets: Sequence[str]) -> LayerSpec:
    """Return the layer with adapters of `rank` next to its products named in `targets`; all else is frozen.

    LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1) replaces a product `W x` by `W x + B A x` with `A` of
    `rank x in` and `B` of `out x rank` numbers, and trains A and B alone: W has no gradient, no master copy
    and no moments, and backward computes the gradient of its input only.
    A frozen product without an adapter does not keep its input for backward. Adapters are divided by `tp` as
    their products are (Megatron-Bridge), the collectives of their `rank` numbers a token left aside.
    """
    adapted = [gemm for gemm in layer.gemms if gemm.module in targets]
    adapters = tuple(product for gemm in adapted for product in _pair(gemm, rank))
    split = [rank * (g.in_features + g.out_features) for g in adapted if g.split != "replicated"]
    whole = [rank * (g.in_features + g.out_features) for g in adapted if g.split == "replicated"]
    norms, ffn = _inputs_dropped(layer, targets)
    head = sum(2.0 * gemm.in_features for gemm in layer.gemms if gemm.split == "vocabulary")
    return replace(
        layer,
        frozen=True,
        adapters=adapters,
        adapter_parameters=sum(split),
        replicated_adapter_parameters=sum(whole),
        # what A makes is the input of B
        replicated_activation_bytes=layer.replicated_activation_bytes - norms - head,
        sharded_activation_bytes=layer.sharded_activation_bytes - ffn + 2.0 * rank * len(adapted),
        parts=tuple(_part(part, norms, ffn) for part in layer.parts),
        half_of=layer.half_of
        and (
            with_adapters(layer.half_of[0], rank, targets),
            with_adapters(layer.half_of[1], rank, targets),
        ),
    )


def _pair(gemm: Gemm, rank: int) -> tuple[Gemm, Gemm]:
    second = "replicated" if gemm.split == "replicated" else "column"
    return Gemm(rank, gemm.in_features, gemm.split), Gemm(gemm.out_features, rank, second)


def _inputs_dropped(layer: LayerSpec, targets: Sequence[str]) -> tuple[float, float]:
    """Return the bytes a token of inputs without adapter: outputs of norms, input of `linear_fc2`."""
    present = [gemm.module for gemm in layer.gemms if gemm.module in NORMED]
    without = [module for module in present if module not in targets]
    normed = next(
        (p.replicated_activation_bytes for p in layer.parts if p.module == "layernorm"), 0.0
    )
    width = max((gemm.in_features for gemm in layer.gemms if gemm.module in NORMED), default=0)
    apart = normed == 2.0 * width * len(present)  # each has a norm of its own
    norms = 2.0 * width * len(without) if apart else normed * (without == present != [])
    if layer.experts is not None:
        norms = 0.0  # the router and the dispatcher read them, too
    ffn = sum(2.0 * g.in_features for g in layer.gemms if g.module == "linear_fc2" not in targets)
    return norms, ffn


def _part(part: RecomputedPart, norms: float, ffn: float) -> RecomputedPart:
    if part.module == "layernorm":
        return replace(part, replicated_activation_bytes=part.replicated_activation_bytes - norms)
    if part.module in ("mlp", "shared_experts"):
        return replace(part, sharded_activation_bytes=part.sharded_activation_bytes - ffn)
    return part


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
    block: LayerSpec | None = None
    """Every block, where a layer source describes it and no key of the model."""
    half_blocks: bool = False
    """Attention and MLP of a block are layers of their own (`space.cut`)."""

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers in order."""
        config = self.config
        chain = [_embedding(config, "embedding")]
        for index in range(config.num_layers):
            if config.num_encoder_layers and index == config.num_encoder_layers:
                chain.append(_embedding(config, "decoder_embedding"))
            own = self.block and replace(self.block, name=f"layers.{index}")
            own = own or _block(config, index, self.fused_attention)
            chain += (
                _halves(config, index, self.fused_attention, own) if self.half_blocks else [own]
            )
        chain += [
            _prediction(config, depth, self.fused_attention)
            for depth in range(config.mtp_num_layers)
        ]
        layers = (*chain, _head(config), _loss(config))
        if self.lora_rank:
            layers = tuple(
                with_adapters(layer, self.lora_rank, self.lora_targets) for layer in layers
            )
        if not self.whole_ends:
            return layers
        ends = (
            1,
            *range(len(layers) - 2 - config.mtp_num_layers, len(layers) - 1),
        )  # first block, mtp, head
        fused = [layer.fused_to_previous or i in ends for i, layer in enumerate(layers)]
        return tuple(
            replace(layer, fused_to_previous=own) for layer, own in zip(layers, fused, strict=True)
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
        if not self.lora_rank:
            return self.num_parameters
        return sum(
            one.adapter_parameters + one.replicated_adapter_parameters for one in self.layers
        )

    @cached_property
    def has_experts(self) -> bool:
        """Some layer has routed experts."""
        return any(layer.experts is not None for layer in self.layers)

    def flops_per_token(self, seq_len: int) -> float:
        """Return model FLOP (forward and backward, no recomputation) per token, Narayanan et al. 2021.

        Frozen weights have no gradient, which is a third of a product's FLOP.
        """
        products, vocabulary = (
            (g for layer in self.layers for g in layer.gemms),
            self.config.vocab_size,
        )
        matmul = sum(
            g.in_features * (vocabulary if g.split == "vocabulary" else g.out_features)
            for g in products
        )
        for experts in (layer.experts for layer in self.layers if layer.experts is not None):
            matmul += experts.hidden * (
                experts.count + experts.top_k * (experts.inputs + experts.width)
            )
        cores = (core for layer in self.layers for core in layer.cores)
        scores = sum(2 * core.heads * core.head_dim * core.keys(seq_len) for core in cores)
        scans = sum(layer.scan.flops for layer in self.layers if layer.scan is not None)
        trained = (
            4.0 * matmul + 6.0 * self.num_trained_parameters if self.lora_rank else 6.0 * matmul
        )
        return trained + 6.0 * scores + 3.0 * scans


def _norm(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm_bias else 1) * config.norm_scale


def _embedding(config: ModelConfig, name: str) -> LayerSpec:
    h = config.hidden_size
    positions = (config.max_seq_len + config.position_offset) * config.learned_positions
    tables = h * (positions + config.token_types)
    # T5 keeps its bias table in the first block; here, so that all blocks are equal
    tables += config.relative_position_buckets * config.num_heads
    passes_state = (
        name != "embedding"
    )  # the encoder's output travels on next to the decoder's input
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


def _halves(config: ModelConfig, index: int, fused: bool, whole: LayerSpec) -> Iterator[LayerSpec]:
    """Yield attention and MLP of a block as layers."""
    symbols = {"attention": ATTENTION, "mlp": EXPERTS if whole.experts else MLP}
    block, *parts = (
        replace(own, name="")
        for own in (whole, *(_block(config, index, fused, char) for char in symbols.values()))
    )
    for word, own, other in zip(symbols, parts, reversed(parts), strict=True):
        yield replace(own, name=f"{whole.name}.{word}", half_of=(block, other))


def _block(config: ModelConfig, index: int, fused: bool, half: str | None = None) -> LayerSpec:
    h, char = config.hidden_size, half or symbol(config, index)
    if char == MAMBA:
        mixer = state_space(config)
        scales = mixer.replicated_parameters + _norm(config)
        return replace(mixer, name=f"layers.{index}", replicated_parameters=scales)
    experts, ffn = mlp_of(config, index, char)
    decoder = bool(config.num_encoder_layers) and index >= config.num_encoder_layers
    kind = "decoder" if decoder else "encoder" if config.num_encoder_layers else "block"
    kind = "experts" if experts is not None else SYMBOLS.get(char or "", kind)
    attentions = 2 if decoder else int(char in (None, ATTENTION))
    window = config.sliding_window if attentions and windowed(config, index) else None
    latent = config.multi_latent_attention and attentions
    attention = _latent(config) if latent else _attention(config, attentions)
    mlp = _mlp(config, ffn, experts)
    masked = config.causal and kind != "encoder"
    core, *indexer = attention.cores
    cores = (replace(core, causal=masked, window=window), replace(core, causal=False))[:attentions]
    out_bias = (
        config.linear_bias if config.attention_output_bias is None else config.attention_output_bias
    )
    own = h * attentions * out_bias + attention.replicated_parameters + mlp.replicated_parameters
    sublayers = attentions + (bool(ffn) or experts is not None)
    norms = sublayers
    if config.block_norms is not None and (half or char is None):
        norms = config.block_norms // (2 if half else 1)
    mask = 1 if config.dropout else 0
    # the experts' tokens leave and enter sequence-parallel, without a collective of the tp group
    collectives = attentions + bool(ffn)
    # one norm's output may feed two products
    fed = min(norms, sublayers)
    normed = RecomputedPart("layernorm", replicated_activation_bytes=2.0 * fed * h)
    return LayerSpec(
        name=f"layers.{index}",
        kind=kind if window is None else f"sliding_{kind}",
        gemms=attention.gemms + mlp.gemms,
        cores=(*cores, *indexer),
        sharded_parameters=attention.sharded_parameters + mlp.sharded_parameters,
        replicated_parameters=own + norms * _norm(config),
        # norm: read, write; dropout and residual of a sublayer: two reads, one write
        replicated_elements=(2.0 * norms + 3.0 * sublayers) * h + attention.replicated_elements,
        sharded_elements=mlp.sharded_elements + attention.sharded_elements,
        # norm inputs, product inputs (2 bytes each), dropout masks (1 byte)
        replicated_activation_bytes=(2.0 * (norms + fed) + mask * sublayers) * h
        + attention.replicated_activation_bytes,
        sharded_activation_bytes=attention.sharded_activation_bytes + mlp.sharded_activation_bytes,
        score_bytes=0.0 if fused else (4.0 + mask) * config.num_heads * attentions,
        tp_collectives=collectives,
        tp_collectives_backward=collectives,
        output_elements=2 * h if decoder else h,
        recomputable=True,
        experts=experts,
        parts=(*attention.parts, *mlp.parts, normed),
    )


def _mlp(config: ModelConfig, ffn: int, experts: Experts | None) -> LayerSpec:
    """Describe the dense MLP of a block, or the shared experts and the router next to routed ones."""
    h, inputs = config.hidden_size, (2 if config.gated_mlp else 1) * ffn
    gemms = (
        (Gemm(inputs, h, "column", "linear_fc1"), Gemm(h, ffn, "row", "linear_fc2")) if ffn else ()
    )
    bias = config.linear_bias if config.mlp_bias is None else config.mlp_bias
    router = config.activation_parameters * bool(ffn)
    if experts is not None:
        router += experts.router_parameters + h * bool(ffn and config.moe_shared_expert_gate)
    # pre-activations and the second product's input
    kept, name = 2.0 * (inputs + ffn), "mlp" if experts is None else "shared_experts"
    return LayerSpec(
        name="",
        kind="",
        gemms=gemms,
        sharded_parameters=weights(gemms) + inputs * bias,
        replicated_parameters=h * bool(ffn) * bias + router,
        sharded_elements=float(inputs + ffn),
        sharded_activation_bytes=kept,
        parts=(RecomputedPart(name, gemms, sharded_activation_bytes=kept),) if ffn else (),
    )


def _attention(config: ModelConfig, attentions: int) -> LayerSpec:
    """Describe grouped-query attention, `attentions` times (self and cross)."""
    h = config.hidden_size
    head_dim = config.head_dim or h // config.num_heads
    kv_heads = config.num_kv_heads or config.num_heads
    q_size, kv_size = config.num_heads * head_dim, kv_heads * head_dim
    gate = config.attention_gate_size or 0
    gated = attentions * q_size * bool(gate)
    ins = Gemm(q_size + 2 * kv_size + gate, h, "column", "linear_qkv")
    gemms = (ins, Gemm(h, q_size, "row", "linear_proj")) * attentions
    qkv_bias = config.linear_bias if config.qkv_bias is None else config.qkv_bias
    bias = attentions * (q_size + 2 * kv_size) * qkv_bias
    sinks = attentions * config.num_heads * config.attention_sinks
    # a norm of queries and keys reads and writes them, and keeps its input
    normed = attentions * (q_size + kv_size) * config.qk_norm
    scales = attentions * (q_size + kv_size) * config.qk_norm_whole
    head_norms = config.qk_norm and not config.qk_norm_whole
    return LayerSpec(
        name="",
        kind="",
        gemms=gemms,
        cores=(AttentionCore(config.num_heads, kv_heads, head_dim, True),),
        sharded_parameters=weights(gemms) + bias + sinks + scales,
        replicated_parameters=2
        * attentions
        * head_dim
        * (2 if config.norm_bias else 1)
        * head_norms,
        # the gate reads itself and the attention's output, and writes the projection's input
        sharded_elements=2.0 * normed + 3.0 * gated,
        # Q, K, V and the projection's input; with a gate, itself and what it is applied to
        sharded_activation_bytes=attentions * (4.0 * q_size + 4.0 * kv_size + 2.0 * gate)
        + 2.0 * (normed + gated),
    )


def _latent(config: ModelConfig) -> LayerSpec:
    """Describe multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    It is trained with its keys and values expanded (Megatron-LM).
    """
    h, heads, q_rank = config.hidden_size, config.num_heads, config.q_lora_rank or 0
    sizes = (
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    kv_rank, nope, rope, value = (size or 0 for size in sizes)  # the schema refuses null
    query, normed = nope + rope, q_rank + kv_rank
    # every tensor-parallel rank has the products into the low ranks whole (Megatron-LM)
    down = tuple(Gemm(n, h, "replicated", "linear_qkv") for n in (q_rank, kv_rank + rope) if n)
    queries = Gemm(heads * query, q_rank or h, "column", "linear_qkv")
    up = (queries, Gemm(heads * (nope + value), kv_rank, "column", "linear_qkv"))
    out = Gemm(h, heads * value, "row", "linear_proj")
    # queries, values, and keys as projected next to those that the rotary part is joined to (Megatron-LM)
    expanded = heads * (2 * query + nope + value)
    # the indexer's queries, one key for all heads, and the heads' weights, whole on every rank
    index_heads, width = config.indexer_num_heads or 0, config.indexer_head_dim or 0
    shapes = ((index_heads * width, q_rank or h), (width, h), (index_heads, h))
    index = tuple(Gemm(n, size, "replicated") for n, size in shapes if n)
    # its scores have no weighted sum: half an attention's products
    scores = (AttentionCore(index_heads, 1, width // 2, config.causal),) * bool(index_heads)
    return LayerSpec(
        name="",
        kind="",
        gemms=(*down, *index, *up, out),
        # queries and keys are longer than values; their mean gives the same products and bytes
        cores=(AttentionCore(heads, heads, (query + value) // 2, True), *scores),
        sharded_parameters=weights((*up, out)),
        # the indexer's key has a norm with scale and shift
        replicated_parameters=weights((*down, *index))
        + (2 if config.norm_bias else 1) * normed
        + 2 * width,
        # the rotary part is joined to every head of queries and keys: read and written
        sharded_elements=2.0 * 2 * heads * query,
        sharded_activation_bytes=2.0 * (expanded + heads * value),
        replicated_elements=2.0 * (normed + width),
        # products' outputs are the norms' inputs, and the norms' outputs the next products' inputs
        replicated_activation_bytes=2.0
        * (2 * normed + rope + (index_heads + 2) * width + index_heads),
        parts=(RecomputedPart("mla_up_proj", up, sharded_activation_bytes=2.0 * expanded),),
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
