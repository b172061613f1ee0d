"""Adam without its import cost.

`torch.optim.Adam` imports the compiler stack on first use (1.4 s of a search that takes 3 s, measured
with torch 2.13). This is the same update; a test pins it to `torch.optim.Adam`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

EPSILON = 1e-8
BETAS = (0.5, 0.999)
"""Decay of the two moments in a search of plans. A few hundred annealed steps change the loss
quickly, so the mean forgets faster than with the usual 0.9."""


@dataclass
class Adam:
    """Step as Kingma and Ba 2015 (arXiv 1412.6980), algorithm 1, without weight decay.

    Attributes:
        parameters: Leaf tensors with their learning rates.
        betas: Decay of the two moments.
    """

    parameters: list[tuple[Tensor, float]]
    betas: tuple[float, float] = BETAS
    steps: int = 0
    moments: list[tuple[Tensor, ...]] = field(init=False)
    """Running mean of the gradient and of its square, by parameter."""

    def __post_init__(self) -> None:
        self.moments = []
        for parameter, _ in self.parameters:
            mean = torch.zeros_like(parameter)
            self.moments.append((mean, torch.zeros_like(parameter)))

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter, _ in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Move every parameter that has a gradient; `scale` is a factor on all learning rates."""
        self.steps += 1
        first, second = self.betas
        root = (1.0 - second**self.steps) ** 0.5
        for (parameter, rate), moments in zip(self.parameters, self.moments, strict=True):
            mean, square = moments
            gradient = parameter.grad
            if gradient is None:
                continue
            mean.lerp_(gradient, 1.0 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
            deviation = square.sqrt().div_(root).add_(EPSILON)
            step = scale * rate / (1.0 - first**self.steps)
            parameter.addcdiv_(mean, deviation, value=-step)

    def state(self) -> dict[int, tuple[Tensor, ...]]:
        """Return the moments of every parameter by its identity."""
        pairs = zip(self.parameters, self.moments, strict=True)
        return {id(parameter): moments for (parameter, _), moments in pairs}

    def restore(self, state: dict[int, tuple[Tensor, ...]], steps: int) -> None:
        """Take over moments of parameters and the number of steps that they have seen."""
        self.moments = [state[id(parameter)] for parameter, _ in self.parameters]
        self.steps = steps
