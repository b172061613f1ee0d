"""Shapes of routed experts: parameters and products."""

from dataclasses import dataclass
from math import comb

from darts_parallel.config import ATTENTION, MLP, ModelConfig, expert_pattern, symbol


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
    def parameters(self) -> int:
        """Parameters of all experts, the router left aside."""
        biases = (self.inputs + self.hidden) * self.bias
        return self.count * (self.hidden * (self.inputs + self.width) + biases)

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


def mlp_of(config: ModelConfig, index: int) -> tuple[Experts | None, int]:
    """Return the routed experts of block `index`, and the inner size of the MLP that every token passes.

    That is the block's MLP, or in an expert layer its shared experts; 0 where there is none.
    """
    char, width = symbol(config, index), config.ffn_hidden_size or 4 * config.hidden_size
    if char == ATTENTION:
        return None, 0
    if char == MLP or config.num_experts is None or not expert_pattern(config)[index]:
        return None, width
    experts = Experts(
        count=config.num_experts,
        top_k=config.moe_router_topk,
        hidden=config.hidden_size,
        width=config.moe_ffn_hidden_size or width,
        gated=config.gated_mlp,
        bias=config.linear_bias,
        router_bias=config.moe_router_bias,
        groups=config.moe_router_num_groups or 1,
        group_top_k=config.moe_router_group_topk or config.moe_router_num_groups or 1,
        capacity_factor=config.moe_expert_capacity_factor,
    )
    return experts, config.moe_shared_expert_intermediate_size or 0
