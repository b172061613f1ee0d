"""The Python file of a plan: a module that it parallelizes is used like any other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from darts_parallel.graph import plan_script
from darts_parallel.graph.verify import Made
from darts_parallel.run.workers import Workers
from tests.graph.named_modules import Counting, made
from tests.graph.running import plan_made
from tests.graph.test_rediscovery import Ends


def products(hidden: int = 2048) -> nn.Module:
    return nn.Sequential(
        nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden, bias=False)
    )


class Scaled(nn.Module):
    """A tied head with a loss by vocabulary, and a tensor of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = Ends(8192, 64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.ends(tokens, targets) * torch.tensor([0.5, float("inf")])[0]


def scaled() -> Made:
    tokens = torch.randint(0, 64, (2, 2, 16), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    return Scaled(), [tokens[0], tokens[1]]


counting = partial(made, Counting)


def trained(module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """Take three steps of Adam and return the state of the module."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        module(*inputs).pow(2).mean().backward()
        optimizer.step()
    return module.state_dict()


def train_both(make: Callable[[], Made], text: str) -> dict[str, float]:
    """Train a module by the file of its plan, and as a whole; return the largest differences."""
    file: dict[str, Any] = {}
    exec(text, file)
    whole, inputs = make()
    split, _ = make()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis0",))
    expected = trained(whole.eval(), inputs)
    found = trained(file["parallelize"](split.eval(), mesh), inputs)
    assert found.keys() == expected.keys()
    parts = {name: part.full_tensor() for name, part in found.items()}
    return {name: float((parts[name] - one).abs().max()) for name, one in expected.items()}


@pytest.mark.parametrize(
    ("make", "line"), [(scaled, "('vocabulary',)"), (counting, 'CHANGED = ["mean"]')]
)
def test_a_parallelized_module_trains_like_the_whole_one(
    two: Workers, make: Callable[[], Made], line: str
) -> None:
    """Tied weights stay tied, buffers change, and inputs are plain tensors."""
    text = plan_script(plan_made(make, (2,)))
    assert line in text
    for differences in two.run(train_both, make, text):
        assert max(differences.values()) < 1e-4, differences
