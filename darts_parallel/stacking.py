"""Costs of layers under all kinds of stages, stacked into the tensors of a cost table."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from darts_parallel.choice_tensors import ChoiceTensors
from darts_parallel.cluster import Cluster, StageTopology
from darts_parallel.layer_costs import LayerCosts, layer_costs
from darts_parallel.model import LayerSpec
from darts_parallel.problem import Problem
from darts_parallel.strategy import LayerStrategy


def all_layer_costs(
    problem: Problem, pp: int, kinds: list[StageTopology], choices: ChoiceTensors
) -> list[list[LayerCosts]]:
    """Costs by stage kind and layer; equal layers are computed once."""
    layers = problem.model.layers
    result = []
    for kind in kinds:
        known: dict[LayerSpec, LayerCosts] = {}
        for layer in layers:
            spec = replace(layer, name=layer.kind)
            if spec not in known:
                shared = layer.tied and pp == 1 and layer is not layers[0]
                known[spec] = layer_costs(problem, spec, kind, choices, counts_table=not shared)
        result.append([known[replace(layer, name=layer.kind)] for layer in layers])
    return result


def stack(costs: list[list[LayerCosts]], name: str) -> Tensor:
    """Shape `(O, Q, L, C)`."""
    some = costs[0][0].forward
    rows = [torch.stack([getattr(c, name).expand_as(some) for c in kind], dim=1) for kind in costs]
    return torch.stack(rows, dim=1)


def terms(costs: list[list[LayerCosts]]) -> dict[str, Tensor]:
    """The seconds of a micro-batch by cause, each `(O, Q, L, C)`."""
    names = costs[0][0].terms
    return {
        name: torch.stack([torch.stack([c.terms[name] for c in kind], dim=1) for kind in costs], dim=1)
        for name in names
    }


def layouts(choices: Sequence[LayerStrategy]) -> tuple[list[LayerStrategy], Tensor]:
    """One strategy for each distinct layout, and the layout of every strategy."""
    first: dict[tuple[int, bool], LayerStrategy] = {}
    for choice in choices:
        first.setdefault(choice.layout, choice)
    order = list(first)
    return list(first.values()), torch.tensor([order.index(choice.layout) for choice in choices])


def capacities(cluster: Cluster, stages: Sequence[StageTopology]) -> Tensor:
    """Bytes that a device of every stage can give, `(K,)`."""
    devices = [cluster.groups[stage.group].device for stage in stages]
    return torch.tensor([d.memory - d.reserved for d in devices], dtype=torch.float64)
