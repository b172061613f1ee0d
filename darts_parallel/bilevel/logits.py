"""The upper level: gradients of `log(seconds per step) + log(steps to target)` in the logits.

Steps to target answer to three measurements of the run itself:

- the validation loss, by the exchange rate (nats per e-fold of steps). Its gradient in the mixture tells
  which block suffers from which sum, but not how much: in a mixture of roundings their errors average
  out (measured: logits took 2-bit sums that cost 0.2 nats alone). How much is told by short trials in
  which all blocks sum by the same bits (`rollout.py`); without trials the mixture's gradient stands alone;
- the progress of compressed gradients. Trials tell what each number of bits costs when all
  blocks use it. Which block that comes from is told by one step: a step along a
  gradient lowers the validation loss by the inner product of the two, and what a block's compressed
  gradient lacks of the exact one's is its share. Without trials the one-step figure itself is used;
  it overrates the cost (measured: 0.8 of a step at 2 bits where trials of 40 steps show next to no loss),
  because it does not see what error feedback delivers later;
- the noise scale: `1 + B_noise / B` for a global batch of B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import CandidateSet
from darts_parallel.bilevel.quantize import flatten_layer
from darts_parallel.bilevel.time_model import TimeModel
from darts_parallel.bilevel.trainer import Loss, WeightTrainer
from darts_parallel.bilevel.transformer import Weights, mixed_loss

FINITE_DIFFERENCE = 0.01
"""Norm of the weights' displacement (Liu et al. 2019, arXiv 1806.09055, section 2.3)."""


@dataclass
class Logits:
    """The free parameters of the plan."""

    choices: Tensor
    """Of the blocks' candidates, `(blocks, C)`."""
    edges: Tensor
    """Of the tensor-parallel degree of embedding and of head, `(2, D)`: they carry no bits."""
    batch: Tensor
    """Of the global batch sizes, `(batches,)`."""

    @staticmethod
    def initial(blocks: int, choices: CandidateSet, batches: int, generator: torch.Generator) -> "Logits":
        """Nearly equal logits, 1e-3 of noise as in DARTS."""
        degrees = len({c.tp for c in choices.candidates})
        shapes = ((blocks, len(choices.candidates)), (2, degrees), (batches,))
        parts = [(1e-3 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]
        return Logits(*parts)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them, for the optimizer."""
        return self.choices, self.edges, self.batch


@dataclass
class Progress:
    """Moving averages of how much validation loss each pair saves, block by block, and what trials say.

    For gradients: the loss that a step along each delivered gradient would save. For sums: minus the
    loss's gradient in the pair's weight, whose differences are what one pair saves against another.
    """

    decay: float
    by_pair: Tensor | None = None
    """Nats (of gradients: per unit of learning rate), `(blocks, K)`; moves with every logit step."""
    elsewhere: float = 0.0
    """The same of the weights outside the blocks."""
    trial_costs: Tensor | None = None
    """Mean over trials of the log steps that each pair costs, `(K,)`."""
    trials: int = 0

    def add_trial(self, costs: Tensor) -> None:
        """Take in one set of trials, log steps of shape `(K,)`."""
        self.trials += 1
        old = torch.zeros_like(costs) if self.trial_costs is None else self.trial_costs
        self.trial_costs = old + (costs - old) / self.trials

    def update(self, by_pair: Tensor, elsewhere: float) -> None:
        """Take in one measurement."""
        if self.by_pair is None:
            self.by_pair, self.elsewhere = by_pair, elsewhere
            return
        self.by_pair = self.decay * self.by_pair + (1.0 - self.decay) * by_pair
        self.elsewhere = self.decay * self.elsewhere + (1.0 - self.decay) * elsewhere

    def log_steps(self, pair_weights: Tensor) -> Tensor:
        """Log of the steps that compression costs, up to a constant; 0 before it is measured.

        Args:
            pair_weights: Of the gradient pairs, shape `(blocks, K)`.
        """
        if self.by_pair is None:
            return pair_weights.sum() * 0.0
        if self.trial_costs is not None:
            lacking = torch.relu(self.by_pair.amax(1, keepdim=True) - self.by_pair)
            share = lacking / lacking.sum(0).clamp(min=torch.finfo(lacking.dtype).tiny)
            return (pair_weights * share * self.trial_costs).sum()
        total = (pair_weights * self.by_pair).sum() + self.elsewhere
        return -torch.log(total) if float(total.detach()) > 0.0 else total * 0.0


@dataclass(frozen=True)
class UpperGradient:
    """Both parts of the upper objective's gradient, and what they were computed from."""

    loss_part: Tensor
    """In `Logits.choices`, from steps to target."""
    time_part: Tensor
    """In the same, from seconds per step."""
    edges: Tensor
    batch: Tensor
    validation_loss: float
    seconds: float
    """Expected seconds per step of the mixture."""


@dataclass
class UpperLevel:
    """Computes the logits' gradients.

    Attributes:
        choices: Candidates of a block.
        times: One time model for each global batch size.
        batches: Those sizes.
        mix: Where candidates are mixed.
        order: `first` or `second`.
        progress: Of compressed gradients.
        sums: Of rounded sums across tensor-parallel ranks.
    """

    choices: CandidateSet
    times: Sequence[TimeModel]
    batches: Sequence[int]
    mix: str
    order: str
    progress: Progress
    sums: Progress
    forward: Tensor = field(init=False)
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.forward, self.gradient = self.choices.to_forward, self.choices.to_gradient

    def loss(self, weights: Tensor) -> Loss:
        """The mixed model's loss at candidate weights `(blocks, C)`."""
        pairs = weights @ self.forward.to(weights.dtype)
        return lambda model, tokens: mixed_loss(model, tokens, self.choices, pairs, self.mix)

    def gradients(
        self,
        logits: Logits,
        temperature: float,
        trainer: WeightTrainer,
        batches: tuple[Tensor, Tensor],
        delivered: Sequence[Tensor],
        nats_per_efold: float,
    ) -> UpperGradient:
        """Gradients of both parts at the current weights.

        Args:
            logits: Where they are taken.
            temperature: Of the softmax.
            trainer: Weights and optimizer.
            batches: Training and validation tokens.
            delivered: Gradients of the last weight step by block, `(K, P)`.
            nats_per_efold: Exchange rate.
        """
        weights = torch.softmax(logits.choices / temperature, -1)
        value, by_weight, model_gradient = self._validation(weights.detach(), trainer, batches)
        self._measure_progress(trainer, model_gradient, delivered)
        steps = self._sum_steps(weights, by_weight, nats_per_efold)
        steps = steps + self.progress.log_steps(weights @ self.gradient)
        (loss_part,) = torch.autograd.grad(steps, logits.choices, retain_graph=True)
        edges, outer = (torch.softmax(part / temperature, -1) for part in (logits.edges, logits.batch))
        seconds = torch.stack([time.seconds(weights, edges) for time in self.times])
        noise = trainer.noise.sequences or 0.0
        noise_steps = torch.tensor([1.0 + noise / batch for batch in self.batches], dtype=torch.float64).log()
        upper = (outer.double() * (seconds.log() + noise_steps)).sum()
        time_part, edge_part, batch_part = torch.autograd.grad(upper, logits.tensors())
        mean_seconds = float((outer.double() * seconds).sum().detach())
        return UpperGradient(loss_part, time_part, edge_part, batch_part, value, mean_seconds)

    def _sum_steps(self, weights: Tensor, by_weight: Tensor, nats_per_efold: float) -> Tensor:
        """Log of the steps that rounded sums cost, up to a constant.

        Args:
            weights: Of the candidates, `(blocks, C)`.
            by_weight: Gradient of the validation loss in them, which candidates of one pair share.
            nats_per_efold: Exchange rate.
        """
        self.sums.update(-(by_weight @ self.forward) / self.forward.sum(0), 0.0)
        if self.sums.trial_costs is None:
            return (weights * by_weight).sum() / nats_per_efold
        return self.sums.log_steps(weights @ self.forward)

    def _validation(
        self, weights: Tensor, trainer: WeightTrainer, batches: tuple[Tensor, Tensor]
    ) -> tuple[float, Tensor, Weights]:
        """Validation loss, its gradient in the candidates' weights, and in the model's weights."""
        train, validation = batches
        if self.order == "first":
            return self._differentiate(trainer.weights, weights, validation)
        scale = trainer.preconditioner()
        _, _, inner = self._differentiate(trainer.weights, weights, train)
        rate = trainer.learning_rate
        ahead = {name: w - rate * scale[name] * inner[name] for name, w in trainer.weights.items()}
        value, direct, outer = self._differentiate(ahead, weights, validation)
        vector = {name: scale[name] * gradient for name, gradient in outer.items()}
        norm = float(torch.stack([v.square().sum() for v in vector.values()]).sum().sqrt())
        size = FINITE_DIFFERENCE / max(norm, 1e-30)
        # in float64: the difference of two float32 gradients would be mostly rounding
        sides = []
        for sign in (1.0, -1.0):
            moved = {n: w.double() + sign * size * vector[n].double() for n, w in trainer.weights.items()}
            sides.append(self._differentiate(moved, weights.double(), train)[1])
        mixed = (sides[0] - sides[1]) / (2.0 * size)
        return value, direct - rate * mixed.to(direct.dtype), outer

    def _differentiate(
        self, model: Weights, weights: Tensor, tokens: Tensor
    ) -> tuple[float, Tensor, Weights]:
        leaf = weights.clone().requires_grad_()
        leaves = {name: weight.detach().clone().requires_grad_() for name, weight in model.items()}
        loss = self.loss(leaf)(leaves, tokens)
        found = torch.autograd.grad(loss, (leaf, *leaves.values()))
        return float(loss.detach()), found[0], dict(zip(leaves, found[1:], strict=True))

    def _measure_progress(
        self, trainer: WeightTrainer, gradient: Weights, delivered: Sequence[Tensor]
    ) -> None:
        """Inner products of the validation gradient with the steps that each delivered gradient makes."""
        scale = trainer.preconditioner()
        stepped = {name: (scale[name] * g).unsqueeze(0) for name, g in gradient.items()}
        rows = [
            sent @ flatten_layer(stepped, trainer.block_names(index)).squeeze(0)
            for index, sent in enumerate(delivered)
        ]
        outside = [name for name in gradient if not name[0].isdigit()]
        # outside weights travel at 16 bits whatever is chosen: their direction is Adam's own first moment
        moments = dict(zip(trainer.weights, trainer.optimizer.moments, strict=True))
        elsewhere = sum(float((stepped[name].squeeze(0) * moments[name][0]).sum()) for name in outside)
        self.progress.update(torch.stack(rows), elsewhere)
