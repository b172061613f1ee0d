"""Random clusters of two node types with a tiny model, small enough for brute force."""

from dataclasses import replace

import torch

from darts_parallel.problem.cluster import Link
from darts_parallel.problem.problem import Problem, load_problem

PINS = [
    "space.num_micro_batches=[1,4]",
    "training.global_batch_size=4",
    "space.zero_stage=1",
    "space.recompute=[none,full]",
    "space.sequence_parallel=false",
]


def random_mixed(seed: int) -> Problem:
    """Draw two device types of random speed, memory, links and node sizes; few layers and strategies."""
    rng = torch.Generator().manual_seed(seed)

    def factor(low: float, high: float) -> float:
        return float(low * (high / low) ** float(torch.rand(1, generator=rng)))

    names = ["model=toy", "cluster=toy_mixed", "training=toy", "model.num_layers=2"]
    problem = load_problem([*names, *PINS])
    groups = []
    for group in problem.cluster.groups:
        device = replace(
            group.device,
            memory=group.device.reserved + factor(1.0e6, 8e6),
            peak_flops=float(group.device.peak_flops) * factor(0.1, 3.0),
            layer_overhead=1e-5 * factor(0.3, 3.0),
        )
        link = Link(
            factor(1e8, 4e10), 1e-6 * factor(1.0, 9.0), bool(torch.rand(1, generator=rng) < 0.5)
        )
        nic = (
            Link(factor(1e8, 4e10), 1e-6 * factor(1.0, 9.0))
            if torch.rand(1, generator=rng) < 0.5
            else None
        )
        count, gpus = ((1, 4), (2, 2), (1, 2))[int(torch.randint(3, (1,), generator=rng))]
        groups.append(
            replace(group, device=device, intra_node=link, inter_node=nic, count=count, gpus=gpus)
        )
    return replace(problem, cluster=replace(problem.cluster, groups=tuple(groups)))
