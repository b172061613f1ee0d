"""The device and the cluster file of a profile, with where each figure comes from."""

import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from darts_parallel.machine._compute import MOST_EXTRAPOLATED, ComputeProfile
from darts_parallel.machine._links import LinkProfile
from darts_parallel.machine._timing import MeasuredMachine
from darts_parallel.problem import GIB

UNUSED = (
    "one device a node, so nothing crosses it: the memory's bandwidth stands there",
    "one node, so nothing crosses it: the figures inside the node stand there",
)
"""Words for a link inside nodes, and for one between them, that joins nothing."""


@dataclass(frozen=True)
class Profile:
    """All that was measured."""

    name: str
    machine: MeasuredMachine
    compute: ComputeProfile
    links: Sequence[LinkProfile | None]
    """Inside nodes, and between them."""
    when: str


def node_memory(machine: MeasuredMachine) -> tuple[float, float]:
    """Return bytes of one device, and bytes that torch and its context hold already."""
    if machine.has_gpu:
        free, total = torch.cuda.mem_get_info(machine.device)
        return float(total), float(total - free - torch.cuda.memory_reserved(machine.device))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # in kibibytes on Linux; most of it is torch itself
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return total / machine.ranks_per_node, resident * 1024.0


def device_yaml(profile: Profile, memory: tuple[float, float]) -> str:
    """Write the text of `device/NAME.yaml`.

    Args:
        memory: Bytes of one device, and bytes that are taken before any model.
    """
    machine = profile.machine
    compute = profile.compute
    device = compute.device
    total, taken = memory
    peaks = ", ".join(f"{name}: {value / 1e12:.6g}" for name, value in compute.peaks.items())
    processor = f"{platform.machine()} CPU, {torch.get_num_threads()} threads a process"
    hidden = "none, gloo sends on the cores that compute"
    if machine.has_gpu:
        processor = torch.cuda.get_device_name(machine.device)
        hidden = "not measured, the defaults"
    return f"""\
# {processor}, torch {torch.__version__}.
# Measured {profile.when} by darts-parallel profile on {machine.world} processes at once.
# Peaks: the fastest product of {len(compute.gemms)} measured, or the fitted rate of an endless one, but
# at most {MOST_EXTRAPOLATED:g} times the fastest: measure larger products if that is too little.
# gemm_*: fitted to the products of {compute.gemms[0].precision}, median error {compute.error:.1%}; above
# 50 % measure again, on an idle machine.
# memory_bandwidth: a copy; memory_efficiency: sum, GELU, layer norm against it; attention: causal.
# layer_overhead: a block of one token. overlap_exponent, tp_hidden_share: {hidden}.
memory_GiB: {total / GIB:.6g}
peak_TFLOPs: {{{peaks}}}
memory_bandwidth_GBps: {float(device.memory_bandwidth) / 1e9:.6g}
gemm_efficiency: {float(device.gemm_efficiency):.6g}
gemm_half_size: {float(device.gemm_half_size):.6g}
attention_efficiency: {float(device.attention_efficiency):.6g}
memory_efficiency: {float(device.memory_efficiency):.6g}
layer_overhead_us: {float(device.layer_overhead) * 1e6:.6g}
kernel_gap_us: 0
collective_start_us: 0
divided_half_size: 0
overlap_exponent: {float(device.overlap_exponent):g}
tp_hidden_share: {float(device.tp_hidden_share):g}
reserved_GiB: {min(taken, 0.5 * total) / GIB:.6g}
"""


def cluster_yaml(profile: Profile) -> str:
    """Write the text of `cluster/NAME.yaml`; an unused link gets the nearest link's figures."""
    name = profile.name
    machine = profile.machine
    backend = "nccl" if machine.has_gpu else "gloo"
    bandwidth = float(profile.compute.device.memory_bandwidth)
    figures = f"bandwidth_GBps: {bandwidth / 1e9:.6g}, latency_us: 0.0"
    texts = []
    for link, words in zip(profile.links, UNUSED, strict=True):
        if link is not None:
            figures = (
                f"bandwidth_GBps: {link.bandwidth / 1e9:.6g}, latency_us: {link.latency * 1e6:.6g}"
            )
            sizes = [time.size for time in link.times]
            words = f"{len(sizes)} cases of {min(sizes)} to {max(sizes)} bytes"
            words += f", median error {link.error:.1%}"
        texts += [figures, words]
    inside, intra_words, between, inter_words = texts
    return f"""\
# {machine.nodes} x {machine.ranks_per_node} devices; {profile.when}, by darts-parallel profile, {backend}.
# Links: least squares on relative errors of all-reduce, all-gather and messages of all sizes; above a
# median error of 50 % measure again, on an idle machine.
# intra_node: {intra_words}.
# inter_node: {inter_words}.
defaults:
  - /device@devices.{name}: {name}

name: {name}
nodes:
  - {{count: {machine.nodes}, gpus: {machine.ranks_per_node}, device: {name}, intra_node: {{{inside}}}}}
inter_node: {{{between}}}
"""
