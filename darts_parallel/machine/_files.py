"""The device and the cluster file of a profile, with where each figure comes from."""

import os
import platform
import resource

import torch

from darts_parallel.machine._compute import MOST_EXTRAPOLATED, ComputeProfile
from darts_parallel.machine._links import LinkProfile
from darts_parallel.machine._timing import MeasuredMachine
from darts_parallel.problem import GIB


def node_memory(machine: MeasuredMachine) -> tuple[float, float]:
    """Return bytes of one device, and those that torch and its context hold already."""
    if machine.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(machine.device)
        return float(total), float(total - free - torch.cuda.memory_reserved(machine.device))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # ru_maxrss: kibibytes on Linux; most of it is torch itself
    return total / machine.ranks_per_node, resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss * 1024.0


def machine_words(machine: MeasuredMachine) -> str:
    """Name the machine that was measured."""
    if machine.device.type == "cuda":
        return f"{torch.cuda.get_device_name(machine.device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads a process, torch {torch.__version__}"


def device_yaml(
    compute: ComputeProfile, machine: MeasuredMachine, memory: tuple[float, float], when: str
) -> str:
    """Write the text of `device/NAME.yaml`.

    Args:
        memory: Bytes of one device, and those that are taken before any model.
    """
    device, (total, taken) = compute.fit.device, memory
    peaks = ", ".join(f"{name}: {value / 1e12:.6g}" for name, value in compute.fit.peaks.items())
    hidden = "none, gloo sends on the cores that compute"
    if machine.device.type == "cuda":
        hidden = "not measured, the defaults"
    bound = (
        f"# Bound: the products of {', '.join(compute.fit.bounded)} are too small to show the rate of an\n"
        f"# endless one, which may be {MOST_EXTRAPOLATED:g} times that of the fastest: measure larger ones.\n"
    )
    return f"""\
# {machine_words(machine)}; measured {when} by darts-parallel profile on {machine.world} processes at once.
# Peaks: the fastest product of {len(compute.gemms)} measured, or the fitted rate of an endless one.
# gemm_*: fitted to the products of {compute.gemms[0].precision}, median error {compute.fit.error:.1%}.
# memory_bandwidth: a copy; memory_efficiency: sum, GELU, layer norm against it; attention: causal.
# layer_overhead: a block of one token. overlap_exponent, tp_hidden_share: {hidden}.
{bound if compute.fit.bounded else ""}memory_GiB: {total / GIB:.6g}
peak_TFLOPs: {{{peaks}}}
memory_bandwidth_GBps: {float(device.memory_bandwidth) / 1e9:.6g}
gemm_efficiency: {float(device.gemm_efficiency):.6g}
gemm_half_size: {float(device.gemm_half_size):.6g}
attention_efficiency: {float(device.attention_efficiency):.6g}
memory_efficiency: {float(device.memory_efficiency):.6g}
layer_overhead_us: {float(device.layer_overhead) * 1e6:.6g}
overlap_exponent: {float(device.overlap_exponent):g}
tp_hidden_share: {float(device.tp_hidden_share):g}
reserved_GiB: {min(taken, 0.5 * total) / GIB:.6g}
"""


def cluster_yaml(
    name: str,
    machine: MeasuredMachine,
    intra: LinkProfile | None,
    inter: LinkProfile | None,
    compute: ComputeProfile,
    when: str,
) -> str:
    """Write the text of `cluster/NAME.yaml`; a link that nothing crosses gets those of the nearest."""
    backend = "nccl" if machine.device.type == "cuda" else "gloo"
    memory = (
        f"bandwidth_GBps: {float(compute.fit.device.memory_bandwidth) / 1e9:.6g}, latency_us: 0.0"
    )
    inside = memory if intra is None else _link(intra)
    between = inside if inter is None else _link(inter)
    no_intra = "one device a node, so nothing crosses it: the memory's bandwidth stands there"
    no_inter = "one node, so nothing crosses it: the figures inside the node stand there"
    return f"""\
# {machine.nodes} x {machine.ranks_per_node} devices; {when}, by darts-parallel profile over {backend}.
# Links: least squares on relative errors of all-reduce, all-gather and messages of all sizes.
# intra_node: {no_intra if intra is None else _words(intra)}.
# inter_node: {no_inter if inter is None else _words(inter)}.
defaults:
  - /device@devices.{name}: {name}

name: {name}
nodes:
  - {{count: {machine.nodes}, gpus: {machine.ranks_per_node}, device: {name}, intra_node: {{{inside}}}}}
inter_node: {{{between}}}
"""


def _link(link: LinkProfile) -> str:
    return f"bandwidth_GBps: {link.bandwidth / 1e9:.6g}, latency_us: {link.latency * 1e6:.6g}"


def _words(link: LinkProfile) -> str:
    sizes = sorted({time.size for time in link.times})
    return (
        f"{len(link.times)} cases of {sizes[0]} to {sizes[-1]} bytes, median error {link.error:.1%}"
    )
