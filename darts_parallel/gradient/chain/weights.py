"""Weights of strategies as the marginals of a chain: differentiable dynamic programming.

Independent softmaxes forget that a layer's strategy goes with its neighbours': between two layers that are
each half tp 2 and half tp 4 they see resharding half of the time, although both halves agree with themselves.
Here a plan of strategies c_1 .. c_L has the probability of a Gibbs distribution,

    exp(sum_l unary[l, c_l] + sum_l pair[l, y(c_l), y(c_l+1)]) / Z,

and its marginals come from the forward-backward recursions in logarithms (Rabiner 1989, section III; as a
layer that gradients pass: Mensch and Blondel 2018, arXiv 1802.03676). Unary terms are the layers' logits less
what a strategy costs under the prices of seconds and bytes that the last step found; pair terms are what lies
between two layouts, p2p where a stage ends there, resharding where none does. Stages stay those of the
monotone edges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.table import CostTable

STRENGTH = 1.0
"""How much the priced costs count: at 1 and temperature 1 a strategy that makes the whole iteration longer by
the share 1 / L of its seconds loses one unit of its logit."""
LEAST = -1e30
"""Logarithm of the weight of what is not legal; infinities have no slope."""


@dataclass(frozen=True)
class ChainPrices:
    """What a step's relaxed plans paid, for the chain of the next step; no slope passes through it."""

    slope: Tensor
    """Seconds per iteration by second of every stage, `(O, R, pp)`."""
    price: Tensor
    """Seconds per iteration by byte of every stage, `(O, R, pp)`."""
    iteration_time: Tensor
    """Seconds, `(O, R)`."""

    def select(self, outer: Tensor, restarts: Tensor) -> "ChainPrices":
        """Those of some restarts, by indices of shape `(O', R')` or broadcast to it."""
        return ChainPrices(*(v[outer, restarts] for v in (self.slope, self.price, self.iteration_time)))


def chain_weights(
    logits: Tensor, stages: Tensor, table: CostTable, prices: ChainPrices | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Weights of strategies and of the layouts of neighbours: marginals of the priced chain.

    Args:
        logits: Shape `(O, R, L, C)`.
        stages: Weights of every layer's stage, `(O, R, L, K)`.
        table: Closed form, stages not interleaved.
        prices: Of the last step; None: the logits alone count, and neighbours are independent.
        temperature: Above 0.

    Returns:
        Shapes `(O, R, L, C)` and `(O, R, L - 1, Y, Y)`.
    """
    unary = logits.masked_fill(~table.allowed[:, None, None, :], LEAST)
    shape, layouts = logits.shape, table.num_layouts
    pair = logits.new_zeros(*shape[:2], shape[2] - 1, layouts, layouts)
    if prices is not None:
        own, pair = priced_terms(stages.detach(), table, prices)
        unary = unary + own
    return chain_marginals(unary / temperature, pair / temperature, table.layout)


def chain_marginals(unary: Tensor, pair: Tensor, layout: Tensor) -> tuple[Tensor, Tensor]:
    """Marginals of the chain's Gibbs distribution.

    Args:
        unary: Logarithms of weights, shape `(..., L, C)`; finite.
        pair: Logarithms of weights of neighbouring layouts, shape `(..., L - 1, Y, Y)`; finite.
        layout: Layout of every strategy, `(C,)`, integer.

    Returns:
        Probability of every strategy, `(..., L, C)`, and of every pair of neighbouring layouts,
        `(..., L - 1, Y, Y)`.
    """
    member = layout.unsqueeze(-1) == torch.arange(pair.shape[-1])
    inside = unary.unsqueeze(-1).masked_fill(~member, LEAST)
    of_layout = torch.logsumexp(inside, dim=-2)  # (..., L, Y)
    before, after = _messages(of_layout, pair)
    held = torch.softmax(before + of_layout + after, dim=-1)
    share = torch.exp(unary - of_layout[..., layout])
    joint = (before + of_layout)[..., :-1, :].unsqueeze(-1) + pair
    joint = joint + (of_layout + after)[..., 1:, :].unsqueeze(-2)
    pairs = torch.softmax(joint.flatten(-2), dim=-1).view(joint.shape)
    return held[..., layout] * share, pairs


def _messages(of_layout: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of what lies before and behind every layer's layouts, each `(..., L, Y)`.

    Both recursions run at once, the one from behind as a forward recursion of the chain turned round.
    """
    layers = of_layout.shape[-2]
    own = torch.stack([of_layout, of_layout.flip(-2)])
    step = torch.stack([pair, pair.flip(-3).transpose(-1, -2)])
    message = torch.zeros_like(own[..., 0, :])
    messages = [message]
    for layer in range(layers - 1):
        reached = (message + own[..., layer, :]).unsqueeze(-1) + step[..., layer, :, :]
        message = torch.logsumexp(reached, dim=-2)
        messages.append(message)
    forward, backward = torch.stack(messages, dim=-2).unbind(0)
    return forward, backward.flip(-2)


def priced_terms(stages: Tensor, table: CostTable, prices: ChainPrices) -> tuple[Tensor, Tensor]:
    """What every strategy and every pair of layouts costs under prices, relative to a layer's share.

    Args:
        stages: Weights of every layer's stage, `(O, R, L, K)`.
        table: Closed form, stages not interleaved.
        prices: Of seconds and bytes.

    Returns:
        Unary terms `(O, R, L, C)` and pair terms `(O, R, L - 1, Y, Y)`: logarithms of weights.
    """
    slope, price = prices.slope.unsqueeze(-2), prices.price.unsqueeze(-2)
    scale = -STRENGTH * table.num_layers / prices.iteration_time
    kinds = torch.nn.functional.one_hot(table.stage_kind, table.time.shape[1]).to(stages.dtype)
    unary = torch.einsum("orlk,kq,oqlc->orlc", stages * slope, kinds, table.time)
    unary = unary + torch.einsum("orlk,kq,oqlc->orlc", stages / table.pp, kinds, table.sync)
    flying = (stages * price * table.in_flight[:, None, None, :]).sum(-1, keepdim=True)
    unary = unary + (stages * price).sum(-1, keepdim=True) * table.static.unsqueeze(1)
    unary = unary + flying * table.activation.unsqueeze(1) + table.per_iteration.unsqueeze(1)
    before, after = stages[..., :-1, :], stages[..., 1:, :]
    within = (before * after * slope) @ kinds
    pair = torch.einsum("orlq,oqlyz->orlyz", within, table.reshard)
    if table.pp > 1 and table.pipeline.blocking:
        borders = torch.nn.functional.one_hot(table.boundary_kind, table.p2p.shape[1]).to(stages.dtype)
        crossing = (before[..., :-1] * after[..., 1:] * slope[..., 1:]) @ borders
        pair = pair + torch.einsum("orlp,oplyz->orlyz", crossing, table.p2p)
    return unary * scale[..., None, None], pair * scale[..., None, None, None]
