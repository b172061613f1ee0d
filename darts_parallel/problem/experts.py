"""Shapes of routed experts and of multi-head latent attention: parameters and products of each."""

from dataclasses import dataclass
from math import comb

from darts_parallel.config.mixture import expert_pattern
from darts_parallel.config.model import ModelConfig

Shape = tuple[int, int, str]
"""Output features, input features and split of a weight product."""


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
    groups: int
    """Groups of experts of which a token uses `group_top_k`."""
    group_top_k: int
    capacity_factor: float | None
    """Rows of an expert, padded or cut, per row of an even load; None: dropless."""

    @property
    def inputs(self) -> int:
        """Columns of the first product of one expert."""
        return (2 if self.gated else 1) * self.width

    @property
    def parameters_each(self) -> int:
        """Parameters of one expert."""
        biases = (self.inputs + self.hidden) * self.bias
        return self.hidden * (self.inputs + self.width) + biases

    @property
    def parameters(self) -> int:
        """Parameters of all experts, the router left aside."""
        return self.count * self.parameters_each

    @property
    def inactive(self) -> int:
        """Parameters of the experts that one token does not pass."""
        return (self.count - self.top_k) * self.parameters_each

    @property
    def router_parameters(self) -> int:
        """Parameters of the router, which every rank holds."""
        return self.count * (self.hidden + self.router_bias)

    def distinct(self, parts: int) -> float:
        """Return the expected number of `parts` equal shares of the experts that one token is sent to.

        A token draws its experts without repetition, so that a share is missed with the hypergeometric
        probability; where routing is limited to groups and a share holds whole groups, it draws the groups
        that its experts fill (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

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


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        """Size of one head of queries and of keys."""
        return self.nope + self.rope

    @property
    def down(self) -> tuple[Shape, ...]:
        """Products into the low ranks; every tensor-parallel rank has them whole (Megatron-LM)."""
        queries: tuple[Shape, ...] = ((self.q_rank, self.hidden, "replicated"),) if self.q_rank else ()
        return (*queries, (self.kv_rank + self.rope, self.hidden, "replicated"))

    @property
    def up(self) -> tuple[Shape, ...]:
        """Products out of the low ranks: queries; keys without position, and values."""
        queries = (self.heads * self.query, self.q_rank or self.hidden, "column")
        return queries, (self.heads * (self.nope + self.value), self.kv_rank, "column")

    @property
    def out(self) -> Shape:
        """Product behind the attention."""
        return self.hidden, self.heads * self.value, "row"

    @property
    def low(self) -> int:
        """Elements a token of the low ranks, the keys' rotary part included."""
        return (self.q_rank or 0) + self.kv_rank + self.rope

    @property
    def norms(self) -> int:
        """Elements a token that the norms of the low ranks read, as many as they have scales."""
        return (self.q_rank or 0) + self.kv_rank

    @property
    def expanded(self) -> int:
        """Elements a token of queries, of keys as projected and with their rotary part, and of values.

        Megatron-LM keeps the projected keys and values next to the keys that the rotary part is joined to.
        """
        return self.heads * (2 * self.query + self.nope + self.value)


def experts_of(config: ModelConfig, index: int) -> Experts | None:
    """Return the experts of layer `index`; None where it is dense."""
    if config.num_experts is None or not expert_pattern(config)[index]:
        return None
    return Experts(
        count=config.num_experts,
        top_k=config.moe_router_topk,
        hidden=config.hidden_size,
        width=config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size,
        gated=config.gated_mlp,
        bias=config.linear_bias,
        router_bias=config.moe_router_bias,
        groups=config.moe_router_num_groups or 1,
        group_top_k=config.moe_router_group_topk or config.moe_router_num_groups or 1,
        capacity_factor=config.moe_expert_capacity_factor,
    )


def dense_width(config: ModelConfig, index: int) -> int:
    """Return the inner size of the MLP that every token of layer `index` passes; 0 where there is none.

    That is the layer's MLP, or in an expert layer its shared experts.
    """
    if config.num_experts is not None and expert_pattern(config)[index]:
        return config.moe_shared_expert_intermediate_size or 0
    return config.ffn_hidden_size or 4 * config.hidden_size


def latent_attention(config: ModelConfig) -> LatentAttention | None:
    """Return the sizes of multi-head latent attention; None where attention is the usual one."""
    if not config.multi_latent_attention:
        return None
    sizes = (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    kv_rank, nope, rope, value = (size or 0 for size in sizes)  # the schema refuses null
    return LatentAttention(
        config.hidden_size, config.num_heads, config.q_lora_rank, kv_rank, nope, rope, value
    )
