"""A paired test without assumptions about the distribution."""

from collections.abc import Sequence

import torch

MOST_EXACT = 16
"""Pairs up to which all signs are enumerated."""
SAMPLES = 65_536


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a mean difference under exchangeable signs (Fisher 1935, The Design of Experiments).

    All `2^n` signs are enumerated up to 16 pairs, 65,536 of them are drawn beyond.

    Args:
        differences: Of pairs.

    Returns:
        Probability of a mean at least as far from 0; 1 without pairs.
    """
    count = len(differences)
    if not count:
        return 1.0
    values = torch.tensor(differences, dtype=torch.float64)
    if count <= MOST_EXACT:
        bits = torch.arange(2**count).unsqueeze(1) >> torch.arange(count)
        signs = 1.0 - 2.0 * (bits & 1).double()
    else:
        generator = torch.Generator().manual_seed(0)
        signs = 1.0 - 2.0 * torch.randint(2, (SAMPLES, count), generator=generator).double()
        signs[0] = 1.0
    means = (signs @ values).abs()
    return float((means >= values.sum().abs() * (1.0 - 1e-12)).double().mean())
