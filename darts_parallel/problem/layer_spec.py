"""Sizes of one layer that the cost model reads: products, attention, scan, experts, bytes.

Activation bytes follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4. All per-token figures
are for one token of one sequence; "sharded" parts divide by `tp`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import comb

from darts_parallel.config import ATTENTION, MLP, ModelConfig


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer and their router.

    Each expert is an MLP of `width` inner features; a token passes `top_k` of them.
    """

    count: int
    top_k: int
    hidden: int
    width: int
    gated: bool
    bias: bool
    router_bias: bool
    groups: int = 1
    """Groups of experts of which a token uses `group_top_k`."""
    group_top_k: int = 1
    capacity_factor: float | None = None
    """Rows of an expert, padded or cut, per row of an even load; None: dropless."""

    @property
    def inputs(self) -> int:
        """Columns of the first product of one expert."""
        return (2 if self.gated else 1) * self.width

    @property
    def parameters(self) -> int:
        """Parameters of all experts, the router left aside."""
        biases = (self.inputs + self.hidden) * self.bias
        return self.count * (self.hidden * (self.inputs + self.width) + biases)

    def distinct(self, parts: int) -> float:
        """Return how many of `parts` equal shares of the experts a token is sent to, on average.

        A token draws its experts without repetition, so that a share is missed with the
        hypergeometric
        probability; where routing is limited to groups and a share holds whole groups, it draws the
        groups that its experts fill (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

        Args:
            parts: A divisor of the experts, or of the groups.
        """
        if self.groups > 1 and parts <= self.groups:
            filled = self.group_top_k * (1.0 - (1.0 - 1.0 / self.group_top_k) ** self.top_k)
            low = int(filled)
            above = filled - low
            hit = [_hit(self.groups, self.groups // parts, drawn) for drawn in (low, low + 1)]
            return parts * ((1.0 - above) * hit[0] + above * hit[1])
        return parts * _hit(self.count, self.count // parts, self.top_k)


def _hit(things: int, share: int, drawn: int) -> float:
    """Return the probability that `drawn` of `things` hit a share of them."""
    return 1.0 - comb(things - share, drawn) / comb(things, drawn)


def mlp_of(config: ModelConfig, index: int, char: str | None = None) -> tuple[Experts | None, int]:
    """Return the routed experts of a block, and the inner size of the MLP of every token.

    That is the block's MLP, or in an expert layer its shared experts; 0 where there is none.
    """
    width = config.mlp_width
    if char == ATTENTION:
        return None, 0
    if char == MLP or config.num_experts is None or not config.expert_pattern[index]:
        return None, width
    groups = config.moe_router_num_groups or 1
    experts = Experts(
        config.num_experts,
        config.moe_router_topk,
        config.hidden_size,
        config.moe_ffn_hidden_size or width,
        config.gated_mlp,
        config.linear_bias,
        config.moe_router_bias,
    )
    experts = replace(
        experts,
        groups=groups,
        group_top_k=config.moe_router_group_topk or groups,
        capacity_factor=config.moe_expert_capacity_factor,
    )
    return experts, config.moe_shared_expert_intermediate_size or 0


@dataclass(frozen=True)
class Gemm:
    """A weight matrix product with `out_features x in_features` weights, split over `tp` ranks."""

    out_features: int
    in_features: int
    split: str
    """`column` divides `out_features`, `row` divides `in_features`, `vocabulary` pads and divides;
    `replicated` divides neither."""
    module: str = ""
    """Name that adapters have for it (`training.lora_targets`); empty: it has no adapter."""


def weights(gemms: Iterable[Gemm]) -> int:
    """Return the number of weights of some products."""
    return sum(gemm.out_features * gemm.in_features for gemm in gemms)


@dataclass(frozen=True)
class AttentionCore:
    """Scores, softmax and weighted sum of one attention (no weights)."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    """Tokens that a query looks back at; None: all."""
    dropout: bool = False
    """Scores are dropped between the softmax and the weighted sum."""

    def keys(self, seq_len: int) -> float:
        """Return the keys that a query meets, counted as without a mask (Narayanan et al. 2021).

        The first queries of a causal window meet fewer: the mean of min(i, w) over the sequence,
        doubled.
        """
        if self.window is None or self.window >= seq_len:
            return seq_len
        return self.window * (2.0 - self.window / seq_len) if self.causal else self.window


@dataclass(frozen=True)
class Scan:
    """The scan of a state-space layer (no weights), figures per token, all divided by `tp`."""

    flops: float
    """FLOP of the forward pass."""
    flops_again: float
    """FLOP that backward repeats of it: chunk states and scores are not kept."""
    elements: float
    """Elements that the scan's kernels read and write in forward."""
    elements_again: float
    """Elements that the repeated kernels, the convolution among them, move."""
    head_dim: int
    """Smallest side of the matrix products; 1: no matrix products."""
    heads: int
    """Heads (channels of Mamba-1): what tensor and context parallelism divide."""
    gathered: float
    """Elements that context parallelism moves from sequence to heads and back."""


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
    """Sizes of one layer that the cost model reads; equal kinds differ in name alone."""

    name: str = ""
    kind: str = ""
    gemms: tuple[Gemm, ...] = ()
    cores: tuple[AttentionCore, ...] = ()
    scan: Scan | None = None
    """The scan of a state-space layer."""
    sharded_parameters: int = 0
    """Weights divided by `tp`, vocabulary tables excluded."""
    replicated_parameters: int = 0
    """Norms and the biases of row-parallel products: on every tp rank."""
    vocabulary_parameters: int = 0
    """hidden_size per row of a vocabulary table, 0 without one."""
    replicated_elements: float = 0.0
    """Elements per token that streaming kernels move outside the tp region (sharded by SP)."""
    sharded_elements: float = 0.0
    """Elements per token that they move inside the tp region: activation function, float32
    softmax."""
    replicated_activation_bytes: float = 0.0
    """Kept for backward per token, outside the tp region, in 16-bit training (sharded by SP)."""
    sharded_activation_bytes: float = 0.0
    """Kept for backward per token, divided by `tp`."""
    normed: float = 0.0
    """Features of a token that RMSNorms read; a LayerNorm is one kernel everywhere."""
    share_for_weights: float = 1.0
    """Share of the bytes kept for backward that weights' gradients need after the input's; blocks
    have theirs from their products (`cost/activations.py`)."""
    score_bytes: float = 0.0
    """Kept per token and key position by unfused attention, divided by `tp`: the 5as term of Korthikanti
    et al. 2022 with dropout, 2as without."""
    tp_collectives: int = 0
    """All-reduces (or reduce-scatter + all-gather pairs) of the hidden state in the forward
    pass."""
    tp_collectives_backward: int = 0
    output_elements: int = 0
    """Elements per token that go to the next layer."""
    recomputable: bool = False
    fused_to_previous: bool = False
    """Must stay on the stage of its predecessor: no trainer computes the loss on another rank."""
    tied: bool = False
    """Holds the embedding weights, and another layer holds them too."""
    experts: Experts | None = None
    """Routed experts, which none of the figures above hold; their router is in the replicated
    ones."""
    frozen: bool = False
    """None of its weights is trained but those of `adapters`."""
    adapters: tuple[Gemm, ...] = ()
    """Low-rank products next to frozen ones (`problem/model.py`)."""
    adapter_parameters: int = 0
    """Weights of `adapters` divided by `tp`."""
    replicated_adapter_parameters: int = 0
    captured: bool = False
    """Its seconds and bytes are those of operator plans (`problem/layer_sources.py`): no part of it
    is computed again alone."""
    parts: tuple[RecomputedPart, ...] = ()
    """Parts that `training.recompute_modules` can name besides the attention core and the
    experts."""
    half_of: tuple["LayerSpec", "LayerSpec"] | None = None
    """Whole block and other half of a layer that is half a block: both halves cost what the block
    costs."""

    @property
    def trained(self) -> tuple[Gemm, ...]:
        """Products whose weights have a gradient."""
        return self.adapters if self.frozen else self.gemms

    def parameters(self, vocab_size: int) -> int:
        """Return the parameters with `vocab_size` rows in its table, adapters left aside."""
        rows = self.vocabulary_parameters * vocab_size
        experts = 0 if self.experts is None else self.experts.parameters
        return self.sharded_parameters + self.replicated_parameters + rows + experts


SUMMED = (
    "sharded_parameters",
    "replicated_parameters",
    "replicated_elements",
    "sharded_elements",
    "replicated_activation_bytes",
    "sharded_activation_bytes",
    "normed",
    "gemms",
    "cores",
    "parts",
)
"""Sizes of a layer that are those of its parts together."""


def with_parts(layer: LayerSpec, *others: LayerSpec) -> LayerSpec:
    """Return a layer that consists of itself and of other parts."""
    for other in others:
        sums = {name: getattr(layer, name) + getattr(other, name) for name in SUMMED}
        layer = replace(layer, **sums)
    return layer
