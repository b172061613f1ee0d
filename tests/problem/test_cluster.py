"""Better hardware never hurts, and costs are differentiable in it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.table import build_tables
from darts_parallel.plan.space import outer_spaces
from darts_parallel.planner.methods import check
from darts_parallel.problem.cluster import Cluster, Device, Link, NodeGroup
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.random_plans import random_plans

SMALL = ["model=toy", "cluster=toy", "training=toy", "model.hidden_size=512", "model.ffn_hidden_size=2048",
         "space.num_micro_batches=[4,16]"]  # fmt: skip


def _with_group(problem: Problem, change: Callable[[NodeGroup], NodeGroup]) -> Problem:
    groups = tuple(change(group) for group in problem.cluster.groups)
    return replace(problem, cluster=replace(problem.cluster, groups=groups))


def _with_device(problem: Problem, **changes: object) -> Problem:
    return _with_group(problem, lambda g: replace(g, device=replace(g.device, **changes)))  # type: ignore[arg-type]


def _better(problem: Problem, what: str, factor: float) -> Problem:
    device: Device = problem.cluster.groups[0].device
    inter: Link = problem.cluster.inter_node
    intra: Link = problem.cluster.groups[0].intra_node
    if what == "memory":
        return _with_device(problem, memory=device.memory * factor)
    if what == "peak_flops":
        return _with_device(problem, peak_flops=device.peak_flops * factor)
    if what == "memory_bandwidth":
        return _with_device(problem, memory_bandwidth=device.memory_bandwidth * factor)
    if what == "inter_node":
        faster: Cluster = replace(
            problem.cluster, inter_node=replace(inter, bandwidth=inter.bandwidth * factor)
        )
        return replace(problem, cluster=faster)
    if what == "intra_node":
        link = replace(intra, bandwidth=intra.bandwidth * factor)
        return _with_group(problem, lambda g: replace(g, intra_node=link))
    lower = replace(inter, latency=inter.latency / factor)
    return replace(problem, cluster=replace(problem.cluster, inter_node=lower))


def _optimum(problem: Problem) -> float:
    answer = check(problem)
    assert answer.proven
    return answer.iteration_time_s


@pytest.mark.parametrize("memory_gib", [0.16, 0.3])
def test_better_hardware_never_makes_the_optimum_worse(memory_gib: float) -> None:
    problem = load_problem([*SMALL, f"cluster.devices.toy.memory_GiB={memory_gib}"])
    slower = _optimum(problem)
    assert slower < float("inf")
    for what in ("memory", "peak_flops", "memory_bandwidth", "inter_node", "intra_node", "latency"):
        assert _optimum(_better(problem, what, 2.0)) <= slower * (1 + 1e-12), what


PARAMETERS = (
    "peak_flops", "memory_bandwidth", "gemm_efficiency", "gemm_half_size", "memory_efficiency",
    "attention_efficiency", "layer_overhead", "overlap_exponent",
)  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_costs_are_differentiable_in_the_device(name: str) -> None:
    problem = load_problem(["model=llama3_8b", "cluster=h100_1x8", "training=llama3_8b", "space.pp=2"])
    table = build_tables(problem, outer_spaces(problem)[:1])[0]
    plans = random_plans(table, 4, torch.Generator().manual_seed(0))
    value = float(getattr(problem.cluster.groups[0].device, name))

    def seconds(parameter: torch.Tensor) -> torch.Tensor:
        changed = _with_device(problem, **{name: parameter})
        return evaluate_batch(build_tables(changed, outer_spaces(changed)[:1])[0], plans).iteration_time.sum()

    parameter = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(seconds(parameter), parameter)
    step = 1e-6 * value
    with torch.no_grad():
        above, below = (seconds(torch.tensor(value + s, dtype=torch.float64)) for s in (step, -step))
    assert float(slope) != 0.0
    assert float(slope) == pytest.approx(float(above - below) / (2 * step), rel=1e-4)


def test_costs_are_differentiable_in_the_links(default_problem: Problem) -> None:
    spaces = outer_spaces(default_problem)
    table = build_tables(default_problem, spaces[3:4])[0]
    plans = random_plans(table, 4, torch.Generator().manual_seed(0))
    link = default_problem.cluster.inter_node
    bandwidth = torch.tensor(float(link.bandwidth), dtype=torch.float64, requires_grad=True)
    cluster = replace(default_problem.cluster, inter_node=replace(link, bandwidth=bandwidth))
    cost = evaluate_batch(build_tables(replace(default_problem, cluster=cluster), spaces[3:4])[0], plans)
    (slope,) = torch.autograd.grad(cost.iteration_time.sum(), bandwidth)
    assert float(slope) < 0.0
