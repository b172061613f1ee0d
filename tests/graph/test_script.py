"""The Python file of a plan: torch's own styles run it, with its collectives."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from darts_parallel.graph import load_module, make_inputs, plan_module, plan_script
from darts_parallel.run.workers import Workers
from tests.graph.test_programme import mesh

SHAPES = [[2, 1024, 2048]]


def products() -> nn.Module:
    return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048, bias=False))


def gated() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=2048, intermediate_size=8192)
    return nn.Sequential(transformers.models.llama.modeling_llama.LlamaMLP(config))


class Residual(nn.Module):
    """Two products behind a norm, next to a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(2048), gated()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Inside(nn.Module):
    """Products that read the output of a norm inside their own module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(2048), nn.Linear(8192, 2048)
        self.gate, self.up = nn.Linear(2048, 8192), nn.Linear(2048, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.out(torch.relu(self.gate(h)) * self.up(h))


def inside() -> nn.Module:
    return nn.Sequential(Inside())


def normed() -> nn.Module:
    return nn.Sequential(Residual(), Residual())


def run_script(name: str, text: str) -> dict[str, Any]:
    """Run forward and backward of a parallelized module and of the whole one on every process."""
    space: dict[str, Any] = {}
    exec(text, space)
    torch.manual_seed(0)
    whole, split = globals()[name](), globals()[name]()
    split.load_state_dict(whole.state_dict())
    split = space["parallelize"](split, init_device_mesh("cpu", (2,)))
    x = torch.randn(1, 8, 2048)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    with CommDebugMode() as comms:
        made = split(two)
        made.sum().backward()
    expected = whole(one)
    expected.sum().backward()
    assert one.grad is not None
    ran = {str(kind).split(".")[-1]: count for kind, count in comms.get_comm_counts().items()}
    close = torch.allclose(made, expected, atol=1e-5) and torch.allclose(one.grad, two.grad, atol=1e-4)
    return {"ran": ran, "close": close}


@pytest.mark.parametrize("name", ["products", "gated", "inside"])
def test_the_file_runs_the_plan_with_its_collectives(two: Workers, name: str) -> None:
    module, inputs = load_module(f"tests.graph.test_script:{name}"), make_inputs(SHAPES)
    planned = plan_module(module, inputs, mesh(2))
    text = plan_script(planned)
    assert text is not None
    listed = Counter(c.step.kind for c in planned.plan.collectives)
    for answer in two.run(run_script, name, text):
        assert answer["close"]
        assert sum(answer["ran"].values()) == sum(listed.values())
        assert all(any(kind in ran for kind in listed) for ran in answer["ran"])


def test_norms_on_shards_are_sequence_parallel(two: Workers) -> None:
    """Where memory is short, norms and residuals work on parts of the sequence."""
    module, inputs = load_module("tests.graph.test_script:normed"), make_inputs([[1, 8192, 2048]])
    loose = plan_module(module, inputs, mesh(2)).plan
    memory = loose.space.memory_bytes(loose.assignment) / 2.0**30 - 0.02
    planned = plan_module(module, inputs, mesh(2), memory=memory)
    text = plan_script(planned)
    assert text is not None
    assert '"*.norm": tp.SequenceParallel(sequence_dim=1' in text
    listed = Counter(c.step.kind for c in planned.plan.collectives if c.of == "activation")
    for answer in two.run(run_script, "normed", text):
        assert answer["close"]
        assert sum(answer["ran"].values()) == sum(listed.values())


def test_a_plan_beyond_the_styles_has_no_file() -> None:
    module, inputs = load_module("tests.graph.test_script:products"), make_inputs(SHAPES)
    assert plan_script(plan_module(module, inputs, mesh(2, 2))) is None
