"""The same training step on one process with no parallelism: what a plan must agree with."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from darts_parallel.problem import Problem
from darts_parallel.run.chunks import LOSS
from darts_parallel.run.engine import make_optimizer
from darts_parallel.run.transformer import build_layer, parameter_names


@dataclass
class Reference:
    """The whole model on one device; tied tables are one parameter."""

    problem: Problem
    layers: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer

    @staticmethod
    def build(problem: Problem, seed: int, device: torch.device) -> "Reference":
        """The model with the weights that `seed` gives every process."""
        config, layers = problem.model.config, {}
        for spec in problem.model.layers:
            if spec.name != LOSS:
                fused = problem.training.fused_attention
                layers[spec.name] = build_layer(config, fused, spec.name, config.vocab_size, seed).to(device)
        if config.tie_embeddings:
            layers["head"].output.weight = layers["embedding"].table.weight  # type: ignore[union-attr]
        parameters = list(dict.fromkeys(p for layer in layers.values() for p in layer.parameters()))
        return Reference(problem, layers, make_optimizer(problem, parameters))

    def forward_backward(self, batch: Tensor, num_micro_batches: int) -> float:
        """Mean loss, nats; gradients stay on the parameters.

        Args:
            batch: Tokens, shape `(B, T + 1)`.
            num_micro_batches: Parts that are computed one after the other.
        """
        device = next(self.layers["head"].parameters()).device
        total = 0.0
        for part in batch.to(device).chunk(num_micro_batches):
            state = part[:, :-1]
            for layer in self.layers.values():
                state = layer(state)
            loss = functional.cross_entropy(state.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            loss = loss / self.problem.tokens_per_iteration
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def update(self) -> None:
        """The optimizer step; gradients are forgotten."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by the names that the plan's layers use; a tied table has two."""
        result = {}
        for name, layer in self.layers.items():
            for full, parameter in parameter_names(layer, name):
                assert parameter.grad is not None
                result[full] = parameter.grad
        return result

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied table counted once."""
        return sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
