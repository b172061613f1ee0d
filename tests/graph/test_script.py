"""The Python file of a plan: torch's own styles run it, with its collectives."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from darts_parallel.graph import GraphPlan, load_module, make_inputs, plan_module, plan_script
from darts_parallel.graph.verify import Made
from darts_parallel.run.workers import Workers
from tests.graph.running import check_file, mesh, plan_made
from tests.graph.test_rediscovery import Ends


def products(hidden: int = 2048) -> nn.Module:
    return nn.Sequential(
        nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden, bias=False)
    )


def gated(hidden: int = 2048) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=4 * hidden)
    return nn.Sequential(transformers.models.llama.modeling_llama.LlamaMLP(config))


class Residual(nn.Module):
    """Two products behind a norm, next to a residual path."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(hidden), gated(hidden)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Inside(nn.Module):
    """Products that read the output of a norm inside their own module."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(4 * hidden, hidden)
        self.gate, self.up = nn.Linear(hidden, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.out(torch.relu(self.gate(h)) * self.up(h))


def inside(hidden: int = 2048) -> nn.Module:
    return nn.Sequential(Inside(hidden))


def normed(hidden: int = 2048) -> nn.Module:
    return nn.Sequential(Residual(hidden), Residual(hidden))


def run_script(name: str, text: str) -> dict[str, Any]:
    """Run forward and backward of a small parallelized module and of the whole one on every process."""
    space: dict[str, Any] = {}
    exec(text, space)
    torch.manual_seed(0)
    whole, split = (globals()[name](128) for _ in range(2))
    split.load_state_dict(whole.state_dict())
    split = space["parallelize"](split, init_device_mesh("cpu", (2,)))
    x = torch.randn(1, 8, 128)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    with CommDebugMode() as comms:
        made = split(two)
        made.sum().backward()
    expected = whole(one)
    expected.sum().backward()
    assert one.grad is not None
    ran = {str(kind).split(".")[-1]: count for kind, count in comms.get_comm_counts().items()}
    close = torch.allclose(made, expected, atol=1e-5) and torch.allclose(
        one.grad, two.grad, atol=1e-4
    )
    return {"ran": ran, "close": close}


def check_styles(workers: Workers, name: str, text: str, listed: list[str]) -> None:
    assert "parallelize_module" in text
    for answer in workers.run(run_script, name, text):
        assert answer["close"]
        assert sum(answer["ran"].values()) == len(listed)
        assert all(any(kind in ran for kind in listed) for ran in answer["ran"])


def plan_of(name: str, *shape: int, **options: Any) -> GraphPlan:
    module = load_module(f"tests.graph.test_script:{name}")
    return plan_module(module, make_inputs([shape]), mesh(2), **options).plan


@pytest.mark.parametrize("name", ["products", "gated", "inside"])
def test_the_file_runs_the_plan_with_its_collectives(two: Workers, name: str) -> None:
    plan = plan_of(name, 2, 1024, 2048)
    check_styles(two, name, plan_script(plan), [c.step.kind for c in plan.collectives])


def test_norms_on_shards_are_sequence_parallel(two: Workers) -> None:
    """Where memory is short, norms and residuals work on parts of the sequence."""
    loose = plan_of("normed", 1, 8192, 2048)
    memory = loose.space.memory_bytes(loose.assignment) / 2.0**30 - 0.02
    plan = plan_of("normed", 1, 8192, 2048, memory=memory, sliced=False)
    text = plan_script(plan)
    assert '"*.norm": tp.SequenceParallel(sequence_dim=1' in text
    check_styles(
        two, "normed", text, [c.step.kind for c in plan.collectives if c.of == "activation"]
    )


class Scaled(nn.Module):
    """A loss by vocabulary, which no style says, and a tensor of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = Ends(8192, 64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.ends(tokens, targets) * torch.tensor([0.5, float("inf")])[0]


def scaled() -> Made:
    tokens = torch.randint(0, 64, (2, 2, 16), generator=torch.Generator().manual_seed(2))
    return Scaled(), [tokens[0], tokens[1]], {}


def test_a_plan_beyond_the_styles_is_written_operator_by_operator(two: Workers) -> None:
    plan = plan_made(scaled, (2,))
    text = plan_script(plan)
    assert "split_cross_entropy(mesh, ('vocabulary',)" in text
    check_file(two, scaled, text, plan)
