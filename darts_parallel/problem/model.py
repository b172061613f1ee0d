"""A Transformer as an ordered chain of layers: parameters, FLOP and activation bytes of each.

Activation bytes follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, term by term, so that
grouped-query attention, gated MLPs and fused attention change only the terms that they touch.
All per-token figures are for one token of one sequence; "sharded" parts divide by `tp`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from darts_parallel.config import (
    ATTENTION,
    EXPERTS,
    MAMBA,
    MLP,
    SYMBOLS,
    ModelConfig,
)
from darts_parallel.errors import remembered
from darts_parallel.problem.layer_spec import (
    AttentionCore,
    Experts,
    Gemm,
    LayerSpec,
    RecomputedPart,
    mlp_of,
    weights,
    with_parts,
)
from darts_parallel.problem.state_space import state_space

NORMED = ("linear_qkv", "linear_fc1")
"""Products whose input is the output of a norm, which nothing else needs in backward. The input of
`linear_proj` is kept by the attention itself."""


def with_adapters(layer: LayerSpec, rank: int, targets: Sequence[str]) -> LayerSpec:
    """Return the layer with adapters next to its products named in `targets`, all else frozen.

    LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1) replaces a product `W x` by `W x + B A x`
    with `A` of `rank x in` and `B` of `out x rank` numbers, and trains A and B alone: W has no
    gradient, no master copy and no moments, and backward computes the gradient of its input only. A
    frozen product without an adapter does not keep its input for backward. Adapters are divided by
    `tp` as their products are (Megatron-Bridge), the collectives of their `rank` numbers a token
    left aside.
    """
    adapted = [gemm for gemm in layer.gemms if gemm.module in targets]
    adapters: list[Gemm] = []
    split = 0
    whole = 0
    for gemm in adapted:
        adapters += _pair(gemm, rank)
        numbers = rank * (gemm.in_features + gemm.out_features)
        if gemm.split == "replicated":
            whole += numbers
        else:
            split += numbers
    dropped = _inputs_dropped(layer, targets)
    head = sum(2.0 * gemm.in_features for gemm in layer.gemms if gemm.split == "vocabulary")
    between = 2.0 * rank * len(adapted)  # outputs of A are inputs of B
    parts = tuple(_part(part, dropped) for part in layer.parts)
    layer = replace(layer, frozen=True, adapters=tuple(adapters), parts=parts)
    layer = replace(layer, adapter_parameters=split, replicated_adapter_parameters=whole)
    if layer.half_of:
        block, other = (with_adapters(half, rank, targets) for half in layer.half_of)
        layer = replace(layer, half_of=(block, other))
    return replace(
        layer,
        replicated_activation_bytes=layer.replicated_activation_bytes - dropped.norms - head,
        sharded_activation_bytes=layer.sharded_activation_bytes - dropped.ffn + between,
    )


def _pair(gemm: Gemm, rank: int) -> tuple[Gemm, Gemm]:
    second = "replicated" if gemm.split == "replicated" else "column"
    return Gemm(rank, gemm.in_features, gemm.split), Gemm(gemm.out_features, rank, second)


class Dropped(NamedTuple):
    """Bytes a token of inputs that backward does not need, since their products have no adapter."""

    norms: float
    """Outputs of norms."""
    ffn: float
    """Input of `linear_fc2`."""


def _inputs_dropped(layer: LayerSpec, targets: Sequence[str]) -> Dropped:
    """Return the inputs of products without adapter."""
    ffn = 0.0
    if "linear_fc2" not in targets:
        ffn = sum(2.0 * gemm.in_features for gemm in layer.gemms if gemm.module == "linear_fc2")
    after_norms = [gemm for gemm in layer.gemms if gemm.module in NORMED]
    without = [gemm for gemm in after_norms if gemm.module not in targets]
    # the router and the dispatcher read the norms' outputs, too
    if layer.experts is not None or not without:
        return Dropped(0.0, ffn)
    normed = sum(p.replicated_activation_bytes for p in layer.parts if p.module == "layernorm")
    width = max(gemm.in_features for gemm in after_norms)
    if normed == 2.0 * width * len(after_norms):  # each product has a norm of its own
        return Dropped(2.0 * width * len(without), ffn)
    return Dropped(normed if without == after_norms else 0.0, ffn)


def _part(part: RecomputedPart, dropped: Dropped) -> RecomputedPart:
    if part.module == "layernorm":
        left = part.replicated_activation_bytes - dropped.norms
        return replace(part, replicated_activation_bytes=left)
    if part.module in ("mlp", "shared_experts"):
        left = part.sharded_activation_bytes - dropped.ffn
        return replace(part, sharded_activation_bytes=left)
    return part


VOCABULARY_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times `tp`."""


@dataclass(frozen=True)
class Model:
    """The chain of layers: embedding, blocks, head, loss (and a decoder embedding for T5)."""

    config: ModelConfig
    fused_attention: bool
    whole_ends: bool = False
    """Embedding and head, prediction modules with it, each stay on the stage of the block next to
    them."""
    lora_rank: int = 0
    """Rank of the adapters that alone are trained; 0: everything is."""
    lora_targets: tuple[str, ...] = ()
    block: LayerSpec | None = None
    """Every block, where a layer source describes it and no key of the model."""
    half_blocks: bool = False
    """Attention and MLP of a block are layers of their own (`space.cut`)."""
    replicated_key_values: bool = False
    """Tensor parallelism may have more ranks than key-value heads: each then holds a copy of one."""

    @remembered
    def on_ranks(self, tp: int) -> "Model":
        """Return the model of which each of `tp` ranks has a part: with copies of key-value heads."""
        heads = self.config.num_kv_heads
        near = self.config.window_kv_heads
        if not self.replicated_key_values or heads is None or tp <= heads:
            return self
        copied = replace(self.config, num_kv_heads=tp, window_kv_heads=near and max(near, tp))
        return replace(self, config=copied)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the names of all layers in order."""
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers in order."""
        config = self.config
        chain = [_embedding(config, "embedding")]
        for index in range(config.num_layers):
            if config.num_encoder_layers and index == config.num_encoder_layers:
                chain.append(_embedding(config, "decoder_embedding"))
            chain += self._layers_of_block(index)
        for depth in range(config.mtp_num_layers):
            chain.append(_prediction(config, depth, self.fused_attention))
        chain += [_head(config), _loss(config)]
        if self.lora_rank:
            chain = [with_adapters(own, self.lora_rank, self.lora_targets) for own in chain]
        if self.whole_ends:
            # the first block stays with the embedding; predictions and head with the last block
            for place in (1, *range(len(chain) - 2 - config.mtp_num_layers, len(chain) - 1)):
                chain[place] = replace(chain[place], fused_to_previous=True)
        return tuple(chain)

    def _layers_of_block(self, index: int) -> list[LayerSpec]:
        """Return a block, or its halves."""
        if self.block is None:
            own = _block(self.config, index, self.fused_attention)
        else:
            own = replace(self.block, name=f"layers.{index}")
        if not self.half_blocks:
            return [own]
        return list(_halves(self.config, index, self.fused_attention, own))

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
        """Return model FLOP per token, forward and backward (Narayanan et al. 2021).

        Frozen weights have no gradient, which is a third of a product's FLOP.
        """
        matmul = 0
        scores = 0.0
        scans = 0.0
        for layer in self.layers:
            matmul += self._products(layer)
            for core in layer.cores:
                scores += 2 * core.heads * core.head_dim * core.keys(seq_len)
            if layer.scan is not None:
                scans += layer.scan.flops
        trained = 6.0 * matmul
        if self.lora_rank:
            trained = 4.0 * matmul + 6.0 * self.num_trained_parameters
        return trained + 6.0 * scores + 3.0 * scans

    def _products(self, layer: LayerSpec) -> int:
        """Return the multiplications of a token with the weights of a layer."""
        count = 0
        for gemm in layer.gemms:
            vocabulary = gemm.split == "vocabulary"
            columns = self.config.vocab_size if vocabulary else gemm.out_features
            count += gemm.in_features * columns
        if experts := layer.experts:
            routed = experts.top_k * (experts.inputs + experts.width)
            count += experts.hidden * (experts.count + routed)
        return count


def _norm(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm_bias else 1) * config.norm_scale


def _embedding(config: ModelConfig, name: str) -> LayerSpec:
    h = config.hidden_size
    positions = (config.max_seq_len + config.position_offset) * config.learned_positions
    tables = h * (positions + config.token_types)
    # T5 keeps its bias table in the first block; here, so that all blocks are equal
    tables += config.relative_position_buckets * config.num_heads
    # the encoder's output travels on next to the decoder's input
    passes_state = name != "embedding"
    norms = config.embedding_norm + (passes_state and config.final_norm)
    shared = config.num_encoder_layers + config.mtp_num_layers
    tied = config.tie_embeddings or shared > 0
    layer = LayerSpec(name=name, kind=name, vocabulary_parameters=h, tied=tied)
    kept = config.dropout + 2 * config.embedding_norm
    states = 2 if passes_state else 1
    layer = replace(layer, tp_collectives=1, output_elements=states * h)
    return replace(
        layer,
        replicated_parameters=tables + _norm(config) * norms,
        replicated_elements=(2 + 2 * config.dropout + kept) * h,
        replicated_activation_bytes=kept * h,
    )


def _halves(config: ModelConfig, index: int, fused: bool, whole: LayerSpec) -> Iterator[LayerSpec]:
    """Yield attention and MLP of a block as layers."""
    block = replace(whole, name="")
    mlp_symbol = EXPERTS if whole.experts else MLP
    attention = replace(_block(config, index, fused, ATTENTION), name="")
    mlp = replace(_block(config, index, fused, mlp_symbol), name="")
    yield replace(attention, name=f"{whole.name}.attention", half_of=(block, mlp))
    yield replace(mlp, name=f"{whole.name}.mlp", half_of=(block, attention))


def _block(config: ModelConfig, index: int, fused: bool, half: str | None = None) -> LayerSpec:
    h = config.hidden_size
    char = half or config.symbol(index)
    if char == MAMBA:
        mixer = state_space(config)
        scales = mixer.replicated_parameters + _norm(config)
        return replace(mixer, name=f"layers.{index}", replicated_parameters=scales)
    experts, ffn = mlp_of(config, index, char)
    decoder = bool(config.num_encoder_layers) and index >= config.num_encoder_layers
    attentions = 2 if decoder else int(char in (None, ATTENTION))
    latent = config.multi_latent_attention and attentions
    near = bool(attentions) and config.windowed(index)
    attention = _latent(config) if latent else _attention(config, attentions, near)
    mlp = _mlp(config, ffn, experts)
    kind = _block_kind(config, decoder, char)
    if experts is not None:
        kind = "experts"
    window = config.sliding_window if near else None
    core, *indexer = attention.cores
    core = replace(core, dropout=config.dropout)
    masked = replace(core, causal=config.causal and kind != "encoder", window=window)
    cores = (masked, replace(core, causal=False))[:attentions]
    # the experts' tokens leave and enter sequence-parallel, without a collective of the tp group
    collectives = attentions + bool(ffn)
    if window is not None:
        kind = f"sliding_{kind}"
    # softmax; with dropout its mask and its output as well (without, PyTorch returns the input)
    scores = 0.0 if fused else (2.0 + 3.0 * config.dropout) * config.num_heads * attentions
    attention = replace(attention, cores=(*cores, *indexer))
    layer = LayerSpec(
        name=f"layers.{index}",
        kind=kind,
        experts=experts,
        recomputable=True,
        score_bytes=scores,
        tp_collectives=collectives,
    )
    layer = replace(layer, tp_collectives_backward=collectives, output_elements=h * (1 + decoder))
    sublayers = attentions + (bool(ffn) or experts is not None)
    norms = sublayers
    if char == ATTENTION and config.mamba_shares_norm and config.symbol(index - 1) == MAMBA:
        norms = 0
    if config.block_norms is not None and (half or char is None):
        norms = config.block_norms // (2 if half else 1)
    counts = Sublayers(attentions, sublayers, norms)
    return with_parts(layer, attention, mlp, _residuals(config, counts))


def _block_kind(config: ModelConfig, decoder: bool, char: str | None) -> str:
    """Return the kind of a block without experts."""
    if char in SYMBOLS:
        return SYMBOLS[char]
    if decoder:
        return "decoder"
    return "encoder" if config.num_encoder_layers else "block"


class Sublayers(NamedTuple):
    """Numbers of parts of a block."""

    attentions: int
    all: int
    """Attentions and the MLP."""
    norms: int


def _residuals(config: ModelConfig, counts: Sublayers) -> LayerSpec:
    """Describe the parts outside the tensor-parallel region: norms, dropout, residuals, biases."""
    h = config.hidden_size
    biases = config.attention_output_bias
    if biases is None:
        biases = config.linear_bias
    # one norm's output may feed two products
    fed = min(counts.norms, counts.all)
    normed = RecomputedPart("layernorm", replicated_activation_bytes=2.0 * fed * h)
    parameters = h * counts.attentions * biases + counts.norms * _norm(config)
    # norm: read, write; dropout and residual of a sublayer: two reads, one write
    elements = (2.0 * counts.norms + 3.0 * counts.all) * h
    # norm inputs, product inputs (2 bytes each), dropout masks (1 byte)
    kept = (2.0 * (counts.norms + fed) + config.dropout * counts.all) * h
    return LayerSpec(
        parts=(normed,),
        replicated_parameters=parameters,
        replicated_elements=elements,
        replicated_activation_bytes=kept,
        normed=h * counts.norms * (not config.norm_bias),
    )


def _mlp(config: ModelConfig, ffn: int, experts: Experts | None) -> LayerSpec:
    """Describe the dense MLP of a block, or shared experts and router next to routed experts."""
    h = config.hidden_size
    inputs = (2 if config.gated_mlp else 1) * ffn
    bias = config.linear_bias if config.mlp_bias is None else config.mlp_bias
    router = config.activation_parameters * bool(ffn)
    if experts is not None:
        # which every rank holds
        router += experts.count * (experts.hidden + experts.router_bias)
        router += h * bool(ffn and config.moe_shared_expert_gate)
    if not ffn:
        return LayerSpec(replicated_parameters=router)
    gemms = (Gemm(inputs, h, "column", "linear_fc1"), Gemm(h, ffn, "row", "linear_fc2"))
    # pre-activations and the second product's input
    kept = 2.0 * (inputs + ffn)
    name = "mlp" if experts is None else "shared_experts"
    part = RecomputedPart(name, gemms, sharded_activation_bytes=kept)
    parameters = weights(gemms) + inputs * bias
    return LayerSpec(
        gemms=gemms,
        parts=(part,),
        sharded_parameters=parameters,
        replicated_parameters=h * bias + router,
        sharded_elements=float(inputs + ffn),
        sharded_activation_bytes=kept,
    )


def _attention(config: ModelConfig, attentions: int, near: bool) -> LayerSpec:
    """Describe grouped-query attention, `attentions` times (self and cross).

    Args:
        near: It attends in a window.
    """
    h = config.hidden_size
    head_dim = config.head_size
    if near and config.window_head_dim:
        head_dim = config.window_head_dim
    value_dim = config.v_head_dim or head_dim
    kv_heads = config.kv_heads
    several = config.window_kv_heads
    if several and near:
        kv_heads = several
    q_size = config.num_heads * head_dim
    k_size = kv_heads * head_dim
    kv_size = k_size + kv_heads * value_dim
    projected = k_size if config.shared_key_values and not near else kv_size
    out_size = config.num_heads * value_dim
    gate = config.attention_gate_size or 0
    gated = out_size * bool(gate)
    ins = Gemm(q_size + projected + gate, h, "column", "linear_qkv")
    gemms = (ins, Gemm(h, out_size, "row", "linear_proj")) * attentions
    qkv_bias = config.linear_bias if config.qkv_bias is None else config.qkv_bias
    bias = (q_size + projected) * qkv_bias
    sinks = config.num_heads * (config.attention_sinks and (near or not several))
    # a norm of queries and keys reads and writes them, and keeps its input
    normed = (q_size + k_size) * config.qk_norm
    scales = (q_size + k_size) * config.qk_norm_whole
    head_norms = config.qk_norm and not config.qk_norm_whole
    norm_size = head_dim * (2 if config.norm_bias else 1)
    # Q, K, V and the projection's input; with a gate, the gate and the attention's output
    kept = 2.0 * (q_size + out_size + kv_size) + 2.0 * gate + 2.0 * (normed + gated)
    # keys may be longer than values; their mean gives the same products and bytes
    core = AttentionCore(config.num_heads, kv_heads, (head_dim + value_dim) // 2, True)
    root_mean_square = attentions * normed * (not config.norm_bias)
    moved = 2.0 * normed + 3.0 * gated  # a gate reads itself and the output, and writes the input
    divided = weights(gemms) + attentions * (bias + sinks + scales)
    whole = 2 * attentions * norm_size * head_norms
    return LayerSpec(
        gemms=gemms,
        cores=(core,),
        sharded_parameters=divided,
        replicated_parameters=whole,
        sharded_elements=attentions * moved,
        sharded_activation_bytes=attentions * kept,
        normed=root_mean_square,
    )


def _latent(config: ModelConfig) -> LayerSpec:
    """Describe multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    It is trained with its keys and values expanded (Megatron-LM).
    """
    h = config.hidden_size
    heads = config.num_heads
    q_rank = config.q_lora_rank or 0
    # the schema refuses null
    kv_rank = config.kv_lora_rank or 0
    nope = config.qk_nope_head_dim or 0
    rope = config.qk_rope_head_dim or 0
    value = config.v_head_dim or 0
    query = nope + rope
    # every tensor-parallel rank has the products into the low ranks whole (Megatron-LM)
    down = tuple(Gemm(n, h, "replicated", "linear_qkv") for n in (q_rank, kv_rank + rope) if n)
    queries = Gemm(heads * query, q_rank or h, "column", "linear_qkv")
    up = (queries, Gemm(heads * (nope + value), kv_rank, "column", "linear_qkv"))
    out = Gemm(h, heads * value, "row", "linear_proj")
    # queries and keys are longer than values; their mean gives the same products and bytes
    core = AttentionCore(heads, heads, (query + value) // 2, True)
    normed = q_rank + kv_rank
    norms = (2 if config.norm_bias else 1) * normed
    # products' outputs are the norms' inputs, and the norms' outputs the next products' inputs
    kept = 2.0 * (2 * normed + rope)
    whole = LayerSpec(
        gemms=down,
        replicated_parameters=weights(down) + norms,
        replicated_elements=2.0 * normed,
        replicated_activation_bytes=kept,
    )
    # queries, values, and keys as projected next to keys joined to the rotary part (Megatron-LM)
    expanded = heads * (2 * query + nope + value)
    part = RecomputedPart("mla_up_proj", up, sharded_activation_bytes=2.0 * expanded)
    gemms = (*up, out)
    # the rotary part is joined to every head of queries and keys: read and written
    joined = 2.0 * 2 * heads * query
    kept = 2.0 * (expanded + heads * value)
    divided = LayerSpec(
        gemms=gemms,
        cores=(core,),
        parts=(part,),
        sharded_parameters=weights(gemms),
        sharded_elements=joined,
        sharded_activation_bytes=kept,
    )
    return with_parts(whole, divided, _indexer(config))


def _indexer(config: ModelConfig) -> LayerSpec:
    """Describe the indexer of sparse attention; with its products.

    It has queries, one key for all heads, and a weight of every head, whole on every rank.
    """
    heads = config.indexer_num_heads or 0
    width = config.indexer_head_dim or 0
    hidden = config.hidden_size
    shapes = ((heads * width, config.q_lora_rank or hidden), (width, hidden), (heads, hidden))
    gemms = tuple(Gemm(n, size, "replicated") for n, size in shapes if n)
    # its scores have no weighted sum: half an attention's products
    scores = AttentionCore(heads, 1, width // 2, config.causal)
    # the key has a norm with scale and shift
    parameters = weights(gemms) + 2 * width
    kept = 2.0 * ((heads + 2) * width + heads)
    return LayerSpec(
        gemms=gemms,
        cores=(scores,) * bool(heads),
        replicated_parameters=parameters,
        replicated_elements=2.0 * width,
        replicated_activation_bytes=kept,
    )


def _prediction(config: ModelConfig, depth: int, fused: bool) -> LayerSpec:
    """Describe a module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Norms of the state and of the next token's embedding, a product of both, and a block like the
    last one;
    the states of all depths travel on to the head. The first module reads a copy of the embedding
    table, or the head's where the tables are tied; later ones and a tied head stay on its stage.
    """
    h = config.hidden_size
    first = depth == 0
    holds = first and not config.tie_embeddings
    block = _block(config, config.num_layers - 1, fused)
    kind = "mtp" if holds else "mtp_again"
    layer = replace(
        block,
        name=f"mtp.{depth}",
        kind=kind,
        tied=holds,
        fused_to_previous=not first,
        vocabulary_parameters=h * holds,
        output_elements=(2 + depth) * h,
    )
    layer = replace(
        layer,
        # lookup, and the product's gathered output
        tp_collectives=block.tp_collectives + 2,
        tp_collectives_backward=block.tp_collectives_backward + 1,
    )
    gemms = (Gemm(h, 2 * h, "column"),)
    # lookup, two norms before the product and one after the block
    elements = 2.0 * h + 3 * 2.0 * h
    # inputs of three norms, and of the product
    kept = (3 * 2.0 + 4.0) * h
    product = LayerSpec(
        gemms=gemms,
        sharded_parameters=2 * h * h,
        replicated_parameters=3 * _norm(config),
        replicated_elements=elements,
        replicated_activation_bytes=kept,
    )
    return with_parts(layer, product)


def _head(config: ModelConfig) -> LayerSpec:
    h = config.hidden_size
    transform = config.head_transform
    norms = config.final_norm + transform
    states = 1 + config.mtp_num_layers
    logits = (Gemm(config.vocab_size, h, "vocabulary"),) * states
    dense = (Gemm(h, h, "replicated"),) * transform
    biased = (h * h + h * config.linear_bias) * transform
    layer = LayerSpec(name="head", kind="head", gemms=dense + logits, tied=config.tie_embeddings)
    layer = replace(
        layer,
        tp_collectives_backward=states,
        output_elements=config.vocab_size * states,
        fused_to_previous=config.tie_embeddings and states > 1,
    )
    kept = 2.0 * states + 2.0 * config.final_norm + 4.0 * transform
    biases = config.vocab_size * config.output_bias
    layer = replace(layer, sharded_parameters=biases, vocabulary_parameters=h)
    return replace(
        layer,
        replicated_parameters=_norm(config) * norms + biased,
        replicated_elements=2.0 * norms * h,
        replicated_activation_bytes=kept * h,
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
