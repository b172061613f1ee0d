"""Seconds and bytes that the cost model predicts for a run, differentiable in the fitted parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from darts_parallel.config.cluster import NARROW
from darts_parallel.cost.evaluation import hard_plan
from darts_parallel.problem.cluster import GIB, Cluster, Link, NodeGroup
from experiments.calibration.parameters import DEVICE, FAMILY, Place
from experiments.calibration.problems import Case

Values = Mapping[str, Tensor | float]


@dataclass(frozen=True)
class Prediction:
    """Seconds per iteration and the fullest device's bytes, 0-dimensional."""

    seconds: Tensor
    memory: Tensor


def place_of(case: Case) -> Place:
    """What the parameters of a run depend on."""
    device = FAMILY.get(case.device, case.device)
    return Place(device, case.run.stack.name, case.intra.name, case.inter.name, case.run.gauge)


def predict(case: Case, values: Values) -> Prediction:
    """What the cost model predicts for a run under given parameters.

    Args:
        values: By name, as `Parameters.values`; figures of the shipped device file stand for the rest.
    """
    problem = replace(case.problem, cluster=with_parameters(case, values))
    _, _, cost = hard_plan(case.plan, problem)
    reserved = values.get(RESERVED)
    reserve = case.problem.cluster.groups[0].device.reserved if reserved is None else reserved * GIB
    allocated = cost.memory[0].max()
    return Prediction(cost.iteration_time[0], allocated + reserve * (case.run.gauge == DEVICE))


DEVICE_FIELDS = {
    "gemm_efficiency": 1.0, "attention_efficiency": 1.0, "gemm_half_size": 1.0, "misaligned_efficiency": 1.0,
    "fp8_efficiency": 1.0, "mxfp8_efficiency": 1.0, "nvfp4_efficiency": 1.0, "memory_efficiency": 1.0,
    "streaming_factor": 1.0, "overlap_exponent": 1.0,
    "state_factor": 1.0, "activation_factor": 1.0, "tp_hidden_share": 1.0,
    "grouped_gemm_efficiency": 1.0, "all_to_all_efficiency": 1.0, "flex_gain": 1.0, "permutation_factor": 1.0,
    "layer_overhead_us": 1e-6, "expert_overhead_us": 1e-6, "reserved_GiB": GIB,
}  # fmt: skip
"""Parameters that are fields of a device (without their unit), and their unit in SI."""
NARROW_FIELD = "fp8_efficiency"
"""Field of a `Device` that holds the share of its job's precision below 16 bits."""
OF_DEVICE = ("gemm_efficiency", "attention_efficiency", *(f"{name}_efficiency" for name in NARROW))
"""Shares that belong to a device: in a cluster of several kinds, those of the others stay as shipped."""
RESERVED = "reserved_GiB"
"""Adds to the memory of the plan; no cost depends on it."""


def with_parameters(case: Case, values: Values) -> Cluster:
    """The cluster of a run with fitted parameters in the place of the shipped ones."""
    cluster = case.problem.cluster
    precision = case.problem.training.precision
    shares = {f"{name}_efficiency" for name in NARROW}
    fields: dict[str, Any] = {
        name.removesuffix("_us").removesuffix("_GiB"): values[name] * unit
        for name, unit in DEVICE_FIELDS.items()
        if name in values and name != RESERVED and name not in shares
    }
    if precision in NARROW and f"{precision}_efficiency" in values:
        fields[NARROW_FIELD] = values[f"{precision}_efficiency"]

    def link(old: Link, place: str) -> Link:
        efficiency, latency = values.get(f"{place}_efficiency"), values.get(f"{place}_latency_us")
        return replace(
            old,
            bandwidth=old.bandwidth if efficiency is None else old.bandwidth * efficiency,
            latency=old.latency if latency is None else latency * 1e-6,
        )

    def group(old: NodeGroup) -> NodeGroup:
        own = old.device.name == case.device
        new = fields if own else {name: value for name, value in fields.items() if name not in OF_DEVICE}
        return replace(
            old,
            device=replace(old.device, **new),
            intra_node=link(old.intra_node, "intra"),
            inter_node=None if old.inter_node is None else link(old.inter_node, "inter"),
        )

    return replace(
        cluster, groups=tuple(group(g) for g in cluster.groups), inter_node=link(cluster.inter_node, "inter")
    )
