"""Schema of the model's YAML: its keys, their rules, and the kinds of blocks that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from darts_parallel.config.checks import MAX_SIZE as MAX_SIZE
from darts_parallel.config.checks import (
    check_fields,
    ranged,
    require,
    require_at_least,
    require_at_most,
    require_divisor,
    require_member,
    require_within,
)
from darts_parallel.config.rules import check_rules

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
SYMBOLS = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", EXPERTS: "experts"}
"""Symbols of a hybrid pattern (Megatron-LM, `megatron/core/models/hybrid`), and the kinds they
name."""
SCORE_FUNCTIONS = ("softmax", "sigmoid")
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass
class ModelConfig:
    """A Transformer: `num_layers` blocks between an embedding and a head."""

    name: str = MISSING
    """Name of the model in reports and files."""
    path: str | None = None
    """A Hugging Face config.json to take the sizes from (`model=hf`); null once they are taken.
    With `inputs` the function that makes a block: `package.file:make_block` (`model=module`)."""
    not_priced: str | None = None
    """Parts of a Hugging Face file that have no price, such as a vision tower; null: none."""
    inputs: Any = None
    """Shapes of a block's inputs, `[sequences, tokens, hidden_size]` first; null: blocks as the
    keys say."""
    num_layers: int = ranged(MISSING, 1, 1024)
    """Transformer blocks; with `num_encoder_layers` the first of them form the encoder."""
    hidden_size: int = ranged(MISSING)
    """Features of a token between the blocks."""
    num_heads: int = ranged(MISSING)
    """Heads of the queries of attention."""
    num_kv_heads: int | None = ranged(None)
    """Key/value heads of grouped-query attention; null: as `num_heads`."""
    window_kv_heads: int | None = ranged(None)
    """Key/value heads of windowed blocks, which alone have the sinks then (MiMo-V2); null: as
    `num_kv_heads`."""
    head_dim: int | None = ranged(None)
    """Size of one head; null: hidden_size / num_heads."""
    window_head_dim: int | None = ranged(None)
    """Size of one head in windowed blocks (Gemma 4); null: as `head_dim`."""
    shared_key_values: bool = False
    """In blocks without a window one product gives keys and values (Gemma 4)."""
    ffn_hidden_size: int | None = ranged(None)
    """Inner size of the MLP; null: 4 * hidden_size."""
    gated_mlp: bool = False
    """Two input projections (SwiGLU, GeGLU) instead of one."""
    vocab_size: int = ranged(MISSING)
    """Rows of the embedding and of the output projection."""
    tie_embeddings: bool = True
    """The embedding and the output projection share one matrix."""
    max_seq_len: int = ranged(MISSING)
    """Longest sequence, in tokens; `training.seq_len` may not exceed it."""
    num_encoder_layers: int = ranged(0, 0)
    """Blocks of an encoder whose output every later (decoder) block attends to; 0: none."""
    causal: bool = True
    """False: every token attends to all (BERT)."""
    learned_positions: bool = True
    """A table of `max_seq_len` position embeddings (GPT-2, BERT); false: rotary, ALiBi,
    relative."""
    dropout: bool = True
    """Dropout masks are kept for backward (1 byte an element); Llama trains without."""
    linear_bias: bool = True
    """The matrix products of a block have biases."""
    qkv_bias: bool | None = None
    """Bias of the query, key and value products; null: as `linear_bias` (Qwen2 has only these)."""
    qk_norm: bool = False
    """A norm over each head of queries and keys (Qwen3)."""
    norm_bias: bool = True
    """LayerNorm has scale and shift; RMSNorm only a scale."""
    norm_scale: bool = True
    """Norms have weights; false: none has (OLMo)."""
    norm_epsilon: float | None = ranged(None, 0.0, 1.0)
    """Number that norms add to the variance; trainers' files hold it. null: the trainer's own."""
    rotary_base: float | None = ranged(None, 1, 1e12)
    """Base of rotary positions' angles (Llama 3: 500,000), which trainers' files hold; null: the
    trainer's own."""
    final_norm: bool = True
    """A norm after the last block; false where each block ends with its own (BERT)."""
    embedding_norm: bool = False
    """A normalisation right after the embedding (BLOOM, BERT)."""
    head_transform: bool = False
    """A dense layer and a norm before the output projection (BERT's masked-language head)."""
    output_bias: bool = False
    """The output projection has a bias of `vocab_size` (BERT)."""
    token_types: int = ranged(0, 0)
    """Rows of a token-type embedding (BERT: 2); 0: none."""
    relative_position_buckets: int = ranged(0, 0)
    """Rows of a table of `num_heads` attention biases by distance, one a stack (T5: 32); 0:
    none."""
    attention_sinks: bool = False
    """Every head has a learned logit that takes part in the softmax (GPT-OSS)."""
    attention_gate_size: int | None = ranged(None)
    """Width of a product of the input whose sigmoid gates the attention's output: that of all heads
    (Afmoe) or one number a head (Laguna); null: none."""
    activation_parameters: int = ranged(0, 0)
    """Trained numbers in the activation function of an MLP (Apertus' xIELU: 2)."""
    num_experts: int | None = ranged(None, 1, 2**14)
    """Routed experts of every expert layer; null: a dense model."""
    moe_router_topk: int = ranged(2)
    """Experts that a token is sent to."""
    moe_ffn_hidden_size: int | None = ranged(None)
    """Inner size of one routed expert; null: `ffn_hidden_size`."""
    moe_shared_expert_intermediate_size: int | None = ranged(None)
    """Inner size of all shared experts together, which every token passes; null: none."""
    moe_shared_expert_gate: bool = False
    """A learned scalar gate on the shared experts' output (Qwen2-MoE)."""
    moe_layer_freq: Any = 1
    """Whole number n: the layers 0, n, 2n, ... have experts; a list of `num_layers` zeros and ones
    says it layer by layer (Megatron-LM's `--moe-layer-freq`)."""
    first_k_dense_replace: int = ranged(0, 0)
    """First layers that are dense whatever `moe_layer_freq` says (DeepSeek)."""
    moe_router_bias: bool = False
    """The router's product has a bias (GPT-OSS)."""
    moe_router_enable_expert_bias: bool = False
    """A score bias per expert, moved by load and not by gradients: a buffer, no parameter
    (DeepSeek-V3)."""
    moe_router_score_function: str | None = None
    """Softmax or sigmoid of the router's product; null: sigmoid with an expert bias, else
    softmax."""
    moe_router_pre_softmax: bool = False
    """The softmax is over all experts and not over the chosen ones alone (Qwen2-MoE)."""
    moe_router_topk_scaling_factor: float | None = ranged(None, 1e-6, 1e6)
    """Factor of the chosen experts' scores (DeepSeek-V3: 2.5); null: 1."""
    moe_router_num_groups: int | None = ranged(None)
    """Groups of experts of which a token uses `moe_router_group_topk` only (DeepSeek-V3: 8); null:
    one."""
    moe_router_group_topk: int | None = ranged(None)
    """Groups of experts that a token uses (DeepSeek-V3: 4); null: all."""
    moe_expert_capacity_factor: float | None = ranged(None, 1e-6, 1e6)
    """Tokens an expert takes at most, and is padded to, per token of an even load; null:
    dropless."""
    multi_latent_attention: bool = False
    """Queries, keys and values pass through low ranks (DeepSeek-V2, arXiv 2405.04434, section
    2.1)."""
    q_lora_rank: int | None = ranged(None)
    """Rank of the queries; null: they are projected directly."""
    kv_lora_rank: int | None = ranged(None)
    """Rank that keys and values share; null: attention without low ranks."""
    qk_nope_head_dim: int | None = ranged(None)
    """Size of one head of queries and keys without position (Megatron-LM's `--qk-head-dim`);
    null: attention without low ranks."""
    qk_rope_head_dim: int | None = ranged(None)
    """Rotary part of one head, shared by all heads of the keys (`--qk-pos-emb-head-dim`); null: none."""
    v_head_dim: int | None = ranged(None)
    """Size of one head of the values; null: that of the queries."""
    indexer_num_heads: int | None = ranged(None)
    """Heads of the indexer that picks the keys of sparse latent attention (DeepSeek-V3.2, arXiv
    2512.02556); null: none. The attention is priced over all keys, as in the indexer's warm-up."""
    indexer_head_dim: int | None = ranged(None)
    """Size of one head of the indexer; null: there is no indexer."""
    attention_output_bias: bool | None = None
    """Bias of the product after attention; null: as `linear_bias`."""
    mlp_bias: bool | None = None
    """Bias of the products of the MLP; null: as `linear_bias`."""
    qk_norm_whole: bool = False
    """The norms of queries and keys (`qk_norm`) have a scale for every feature of all heads (OLMo
    2)."""
    block_norms: int | None = ranged(None)
    """Norms of a block. null: one for each of its parts. 1: attention and MLP read the same one
    (GPT-J, Falcon, Cohere). 4: one before and one after each part (Gemma 2, GLM-4)."""
    structure: str | None = None
    """Form of a block that no price depends on and that trainers' own models lack, in words: attention next
    to the MLP (GPT-NeoX, Falcon), norms behind both (OLMo 2, EXAONE 4), multipliers (Granite); null: none."""
    position_offset: int = ranged(0, 0)
    """Rows of the position table that no token uses (OPT, RoBERTa: 2)."""
    sliding_window: int | None = ranged(None)
    """Tokens that attention looks back at in windowed blocks; null: all (Mistral, Gemma)."""
    sliding_window_pattern: Any = None
    """A whole number n: every n-th block attends globally, the others in the window (Gemma 3: 6).
    A list says it block by block: 0 is global, 1 is windowed. null: all blocks are windowed."""
    hybrid_override_pattern: str | None = None
    """Kind of every layer, one symbol each, as in Megatron-LM: `M` Mamba, `*` attention, `-` MLP,
    `E` experts; null: every block is attention and MLP."""
    mamba_state_dim: int = ranged(128)
    """Numbers of the state of a head and channel."""
    mamba_head_dim: int = ranged(64)
    """Channels of one head of a Mamba layer."""
    mamba_num_heads: int | None = ranged(None)
    """Heads of a Mamba layer; null: 2 * hidden_size / mamba_head_dim."""
    mamba_num_groups: int = ranged(8)
    """Groups of heads that share B and C."""
    mamba_conv_kernel: int = ranged(4)
    """Tokens that the convolution before the scan sees."""
    mamba_chunk_size: int = ranged(128)
    """Tokens of a chunk of the scan."""
    mamba_dt_rank: int | None = ranged(None)
    """Rank of the step's product of Mamba-1, whose channels are heads of their own (Jamba); null:
    Mamba-2."""
    mamba_inner_norms: bool = True
    """Mamba-1 has norms of step, B and C (Jamba), Mamba-2 a gated norm; false: the first Mamba, Falcon
    Mamba and Falcon-H1."""
    mamba_delta_rule: bool = False
    """Mamba layers are gated delta nets (Qwen3-Next, Qwen3.5; Yang et al. 2024, arXiv 2412.06464): heads of
    values, groups of keys of `mamba_state_dim`."""
    mamba_gate_rank: int | None = ranged(None)
    """Gate and decay of a gated delta net are two products of this rank, and the decay one number a
    channel of the state (Kimi Linear, arXiv 2510.26692); null: one product, one decay a head."""
    mamba_short_conv: bool = False
    """Mamba layers are convolutions between two gates, without a state (LFM2): heads of one channel."""
    mamba_shares_norm: bool = False
    """Attention right after a Mamba layer reads the output of the same norm (Falcon-H1)."""
    mtp_num_layers: int = ranged(0, 0)
    """Blocks after the last that each predict one token further (multi-token prediction,
    DeepSeek-V3)."""

    @property
    def mlp_width(self) -> int:
        """Inner size of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Size of one head, in blocks without a window."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, in blocks without a window."""
        return self.num_kv_heads or self.num_heads

    @property
    def expert_pattern(self) -> tuple[bool, ...]:
        """Which layers have experts, one entry a layer."""
        layers = range(int(self.num_layers))
        if self.num_experts is None:
            return (False,) * len(layers)
        given = self.moe_layer_freq
        if isinstance(given, int):
            given = [layer % given == 0 for layer in layers]
        return tuple(bool(given[i]) and i >= self.first_k_dense_replace for i in layers)

    @property
    def score_function(self) -> str:
        """The function that turns the router's product into scores, one of `SCORE_FUNCTIONS`."""
        return self.moe_router_score_function or SCORE_FUNCTIONS[self.moe_router_enable_expert_bias]

    def symbol(self, index: int) -> str | None:
        """Return the symbol of block `index` of a hybrid pattern; None for attention and MLP."""
        pattern = self.hybrid_override_pattern
        return pattern[index] if pattern else None

    def windowed(self, index: int) -> bool:
        """Return whether block `index` attends to the last `sliding_window` tokens only.

        A pattern n leaves every n-th block global (Gemma 3: 6, five windows and one global block).
        A list says it block by block. Null makes all of them windows. The blocks of an
        encoder-decoder have none.
        """
        if self.sliding_window is None or self.num_encoder_layers:
            return False
        pattern = self.sliding_window_pattern
        if pattern is None:
            return True
        return bool(pattern[index]) if isinstance(pattern, Sequence) else (index + 1) % pattern != 0

    def __post_init__(self) -> None:
        check_fields("model", self)
        check_rules("model", self)
        self._check_experts()
        self._check_pattern()
        self._check_windows()
        self._check_layers()
        if self.head_dim is None and not self.multi_latent_attention:
            require_divisor(
                "model.num_heads", self.num_heads, "model.hidden_size", self.hidden_size
            )
        if self.num_kv_heads is not None:
            require_divisor(
                "model.num_kv_heads", self.num_kv_heads, "model.num_heads", self.num_heads
            )

    def _check_layers(self) -> None:
        """Refuse more encoder layers, or more predicted tokens, than the layers allow."""
        layers = self.num_layers
        require_at_most("model.mtp_num_layers", self.mtp_num_layers, layers)
        encoder = self.num_encoder_layers
        rule = f"leave a decoder layer of model.num_layers={layers}"
        require(encoder < layers, f"model.num_encoder_layers={encoder}", rule, layers - 1)

    def _check_experts(self) -> None:
        count = self.num_experts
        if count is None:
            return
        require_at_most("model.moe_router_topk", self.moe_router_topk, count)
        require_at_most("model.first_k_dense_replace", self.first_k_dense_replace, self.num_layers)
        groups = self.moe_router_num_groups
        used = self.moe_router_group_topk
        if groups is not None:
            require_divisor("model.moe_router_num_groups", groups, "model.num_experts", count)
            if used is not None:
                require_at_most("model.moe_router_group_topk", used, groups)
        require_member("model.moe_router_score_function", self.score_function, SCORE_FUNCTIONS)
        self._check_frequency()

    def _check_frequency(self) -> None:
        """Refuse a `moe_layer_freq` that is no whole number and no entry for every layer."""
        given = self.moe_layer_freq
        layers = self.num_layers
        if type(given) is int:
            require_at_least("model.moe_layer_freq", given, 1)
            return
        several = isinstance(given, (list, tuple))
        mask = (
            several and len(given) == layers and all(type(x) is int and x in (0, 1) for x in given)
        )
        shown = f"a list of {len(given)}" if several else repr(given)
        rule = f"be a whole number above 0 or a list of model.num_layers={layers} zeros and ones"
        require(mask, f"model.moe_layer_freq={shown}", rule, 1)

    def _check_pattern(self) -> None:
        pattern = self.hybrid_override_pattern
        if pattern is None:
            return
        key = "model.hybrid_override_pattern"
        layers = self.num_layers
        known = "".join(char for char in pattern if char in SYMBOLS)
        rule = f"consist of {', '.join(SYMBOLS)} (Mamba, attention, MLP, experts)"
        near = known or (ATTENTION + MLP) * (layers // 2) or ATTENTION
        require(bool(pattern) and known == pattern, f"{key}={pattern!r}", rule, near)
        size = f"{key} has {len(pattern)} layers, which"
        near = f"model.num_layers={len(pattern)}"
        require(len(pattern) == layers, size, f"be model.num_layers={layers}", near)
        without = EXPERTS not in pattern or bool(self.num_experts)
        has = f"{key}={pattern} has expert layers, and model.num_experts"
        require(without, has, "say how many experts they have", pattern.replace(EXPERTS, MLP))

    def _check_windows(self) -> None:
        pattern = self.sliding_window_pattern
        if pattern is None:
            return
        key = "model.sliding_window_pattern"
        layers = self.num_layers
        if isinstance(pattern, (list, tuple)):
            near = [int(bool(pattern[i % len(pattern)])) if pattern else 1 for i in range(layers)]
            rule = f"have a 0 (global) or 1 (window) for each of the {layers} layers"
            valid = len(pattern) == layers and all(value in (0, 1) for value in pattern)
            require(valid, f"{key}={list(pattern)}", rule, near)
            return
        rule = "be a whole number (every n-th layer is global) or a list of 0 and 1"
        require(type(pattern) is int, f"{key}={pattern!r}", rule, 6)
        require_within(key, pattern, 1, MAX_SIZE)
