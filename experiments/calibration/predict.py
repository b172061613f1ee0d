"""Seconds and bytes that the cost model predicts for a run, differentiable in the fitted parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.cost import CostTable, HardPlans, OffloadedPlans, hard_plan
from darts_parallel.errors import Entries
from darts_parallel.planner import NARROW_SHARES
from darts_parallel.problem import CONTEXT_GIB, FULL, GIB, Cluster, Link, NodeGroup
from experiments.calibration.problems import MeasuredCase
from experiments.data.runs import DEVICE

Values = Mapping[str, Tensor | float]
MICROSECOND = 1e-6
RESERVED = "reserved_GiB"
"""Adds to the memory of the plan; no cost depends on it."""
CARD_GIB = 80.0
"""Memory of the GPU for which it is fitted."""
NARROW_FIELD = "fp8_efficiency"
"""Field of a `Device` that holds the share of its job's precision below 16 bits."""
OF_DEVICE = ("gemm_efficiency", "attention_efficiency", *NARROW_SHARES)
"""Shares that belong to a device: in a cluster of several kinds, those of the others stay as shipped."""
ETHERNET_GBPS = 6.25
"""10^9 bytes/s out of a node at which the efficiency of Ethernet was fitted (50 Gbit/s, AMP's T4 nodes)."""
HOST_STATE = 18.0 / 12.0
"""Bytes in host memory per byte of optimizer state: 16-bit parameters, and gradients next to Adam's three
numbers in float32 (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, section 3)."""
HOST_PROCESS = 3.0 * GIB
"""Resident bytes of a training process next to that (BigScience's notes on GPT-2 of 9e64edec, line 202)."""
FILLED = 0.9
"""Largest share of a slower link that its flows reach; the rest is framing and acknowledgements."""
LINK_PREFIXES = ("intra_", "inter_")
"""First letters of the quantities of links; all others are fields of a device file."""


@dataclass(frozen=True)
class Prediction:
    """Seconds per iteration and the bytes of the device with the highest memory use, 0-dimensional."""

    seconds: Tensor
    memory: Tensor
    fits: bool
    """The median peak of every device, all that the framework holds counted, is within its capacity,
    and what is offloaded within a known host memory.

    Of a run whose source does not print its recomputation: with full recomputation, which needs the
    least; seconds and memory are those without.
    """


def predict(case: MeasuredCase, values: Values) -> Prediction:
    """Predict a run under given parameters.

    Args:
        values: By name, as `Parameters.values`; figures of the shipped device file stand for the rest.
    """
    run = case.run
    problem = replace(case.problem, cluster=with_parameters(case, values))
    plan = case.plan
    table, plans, cost = hard_plan(plan, problem)
    device = problem.cluster.groups[0].device
    reserve = torch.as_tensor(device.reserved)
    if RESERVED in values:
        reserve = reserved_bytes(values[RESERVED], device.memory)
    fits = bool(cost.feasible[0])
    if not fits and not run.prints("recompute"):
        fullest = replace(plan, layers=tuple(replace(s, recompute="full") for s in plan.layers))
        fits = bool(hard_plan(fullest, problem)[2].feasible[0])
    if run.host_GiB is not None and table.host is not None:
        factor = float(torch.as_tensor(device.state_factor).detach())
        fits &= _host_bytes(table, plans, factor) <= run.host_GiB * GIB
    memory = cost.memory[0].max() + reserve * (run.memory_metric == DEVICE)
    return Prediction(cost.iteration_time[0], memory, fits)


def reserved_bytes(fitted: Tensor | float, memory: float) -> Tensor:
    """Return what a framework keeps of a GPU of so many bytes: the context, and a share of the GPU.

    PyTorch's allocator keeps blocks that no tensor fills until the GPU is full, and frees them before it
    fails (its notes on CUDA semantics; DeepSpeed edaa7221 warns of such flushes, stage 3 of ZeRO, line 2650).
    """
    return torch.as_tensor(CONTEXT_GIB * GIB + (fitted - CONTEXT_GIB) * memory / CARD_GIB)


def _host_bytes(table: CostTable, plans: HardPlans, factor: float) -> float:
    """Return the host memory of a process whose plan has one stage: inputs of its blocks and state.

    Args:
        factor: Of the device's state; the host has no such allocator.
    """
    assert table.host is not None
    offloaded = OffloadedPlans(table, plans.outer, plans.choices, plans.stages(), table.host)
    activation, optimizer = offloaded.fractions()[0, 0].tolist()
    # embedding, head and loss keep what they keep on the device
    inputs = offloaded.activation[0, 1:-2].sum()
    state = HOST_STATE * offloaded.state[0, 0] / factor
    return float((activation * inputs + optimizer * state).detach()) + HOST_PROCESS


def with_parameters(case: MeasuredCase, values: Values) -> Cluster:
    """Put fitted parameters in the place of the shipped ones."""
    problem = case.problem
    cluster = problem.cluster
    first = case.run.devices[0]
    speeds = problem.config.cluster.devices[first].attention_TFLOPs
    factors = problem.software.switch_factors(speeds)
    fields: Entries = {}
    for name, value in values.items():
        elsewhere = name == RESERVED or name in NARROW_SHARES or name.startswith(LINK_PREFIXES)
        if not elsewhere:
            moved = torch.as_tensor(value) * factors.get(name, 1.0)
            unit = MICROSECOND if name.endswith("_us") else 1.0
            in_units = moved.clamp(max=FULL.get(name, math.inf)) * unit
            fields[name.removesuffix("_us")] = in_units
    narrow = f"{problem.training.precision}_efficiency"
    if narrow in values:
        fields[NARROW_FIELD] = values[narrow]
    others = {name: value for name, value in fields.items() if name not in OF_DEVICE}

    def link(old: Link, place: str) -> Link:
        efficiency = values.get(f"{place}_efficiency")
        latency = values.get(f"{place}_latency_us")
        if (
            efficiency is not None
            and place == "inter"
            and float(old.bandwidth) < ETHERNET_GBPS * 1e9
        ):
            # one flow reaches a ceiling, whatever the link's rate: a slower link is filled
            ceiling = torch.as_tensor(efficiency) * (ETHERNET_GBPS * 1e9 / float(old.bandwidth))
            efficiency = ceiling.clamp(max=FILLED)
        return replace(
            old,
            bandwidth=old.bandwidth if efficiency is None else old.bandwidth * efficiency,
            latency=old.latency if latency is None else latency * 1e-6,
        )

    def group(old: NodeGroup) -> NodeGroup:
        device = replace(old.device, **(fields if old.device.name == first else others))
        if RESERVED in values:
            own = reserved_bytes(values[RESERVED], device.memory)
            device = replace(device, reserved=float(own.detach()))
        inter = None if old.inter_node is None else link(old.inter_node, "inter")
        intra = link(old.intra_node, "intra")
        return replace(old, device=device, intra_node=intra, inter_node=inter)

    return replace(
        cluster,
        groups=tuple(group(g) for g in cluster.groups),
        inter_node=link(cluster.inter_node, "inter"),
    )
