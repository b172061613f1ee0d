"""Better hardware never hurts, and costs are differentiable in it."""

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.table import build_tables
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.exact_check import check
from tests.support.hardware import scaled
from tests.support.random_plans import random_plans

SMALL = [
    "model=toy",
    "cluster=toy",
    "training=toy",
    "model.hidden_size=512",
    "model.ffn_hidden_size=2048",
    "space.num_micro_batches=[4,16]",
]


def _optimum(problem: Problem) -> float:
    answer = check(problem)
    assert answer.proven
    return answer.iteration_time_s


@pytest.mark.parametrize("memory_gib", [0.16, 0.3])
def test_better_hardware_never_makes_the_optimum_worse(memory_gib: float) -> None:
    problem = load_problem([*SMALL, f"cluster.devices.toy.memory_GiB={memory_gib}"])
    slower = _optimum(problem)
    assert slower < float("inf")
    for name in (
        "devices.toy.memory",
        "devices.toy.peak_flops",
        "devices.toy.memory_bandwidth",
        "inter_node.bandwidth",
        "intra_node.bandwidth",
    ):
        assert _optimum(scaled(problem, name, 2.0)) <= slower * (1 + 1e-12), name
    assert _optimum(scaled(problem, "inter_node.latency", 0.5)) <= slower * (1 + 1e-12)


LLAMA = ["model=llama3_8b", "training=llama3_8b"]
FIGURES = (
    "peak_flops",
    "memory_bandwidth",
    "gemm_efficiency",
    "gemm_half_size",
    "divided_half_size",
    "kernel_gap",
    "memory_efficiency",
    "attention_efficiency",
    "layer_overhead",
    "overlap_exponent",
)


@pytest.mark.parametrize(
    ("job", "names"),
    [
        ([*LLAMA, "cluster=h100_1x8"], [f"devices.h100.{figure}" for figure in FIGURES]),
        (["model=gpt2_xl", "training=gpt2_xl"], ["inter_node.bandwidth"]),
    ],
)
def test_costs_are_differentiable_in_the_hardware(job: list[str], names: list[str]) -> None:
    problem = load_problem([*job, "space.pp=2"])
    spaces = outer_spaces(problem)[:1]
    plans = random_plans(build_tables(problem, spaces)[0], 4, torch.Generator().manual_seed(0))

    def seconds(name: str, factor: torch.Tensor) -> torch.Tensor:
        return evaluate_batch(
            build_tables(scaled(problem, name, factor), spaces)[0], plans
        ).iteration_time.sum()

    for figure in names:
        factor = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(seconds(figure, factor), factor)
        with torch.no_grad():
            above, below = (
                seconds(figure, torch.tensor(1.0 + s, dtype=torch.float64)) for s in (1e-6, -1e-6)
            )
        assert float(slope) != 0.0
        assert float(slope) == pytest.approx(float(above - below) / 2e-6, rel=1e-4), figure
