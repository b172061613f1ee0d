"""Hard switches of one layer: what each block's sums cost at few bits, by forward passes alone.

The gradient of an expected loss in the logits of block l needs the loss of every choice of block l, the
others as they were sampled: summing over the choices of l instead of sampling them is the Rao-Blackwellised
score-function gradient (Paulus, Maddison, Krause 2021, arXiv 2010.04838, for the family).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.quantize import NEAREST, Pair, Rounding
from darts_parallel.bilevel.transformer import Weights, candidate_block, embed, loss_from
from darts_parallel.cost.collectives import LOSSLESS


@torch.no_grad()
def switch_losses(
    weights: Weights,
    tokens: Tensor,
    plan: Sequence[Candidate],
    pairs: Sequence[Pair],
    rounding: Rounding = NEAREST,
) -> Tensor:
    """Nats that each block's sums cost, one block switched at a time.

    Args:
        weights: Of the whole model.
        tokens: Validation bytes, shape `(B, T + 1)`.
        plan: How the other blocks run.
        pairs: K tensor-parallel degrees and bits.
        rounding: How few bits round.

    Returns:
        Loss with the block at each pair minus its loss with exact sums, shape `(blocks, K)`, float64.
    """
    state = embed(weights, tokens)
    rows = []
    for index, own in enumerate(plan):
        exact = _rest(weights, tokens, state, plan, index, (1, LOSSLESS), rounding)
        rows.append([_rest(weights, tokens, state, plan, index, pair, rounding) - exact for pair in pairs])
        state = candidate_block(weights, index, state, own, rounding)
    return torch.tensor(rows, dtype=torch.float64)


def _rest(
    weights: Weights,
    tokens: Tensor,
    state: Tensor,
    plan: Sequence[Candidate],
    index: int,
    pair: Pair,
    rounding: Rounding,
) -> float:
    """Loss when block `index` sums by `pair` and the later ones run as planned."""
    switched = Candidate(pair[0], 1, tp_comm_bits=pair[1])
    for place, candidate in enumerate((switched, *plan[index + 1 :]), index):
        state = candidate_block(weights, place, state, candidate, rounding)
    return float(loss_from(weights, tokens, state))
