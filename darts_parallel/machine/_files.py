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
    """Return bytes of one device, and bytes that torch and its context hold already."""
    if machine.has_gpu:
        free, total = torch.cuda.mem_get_info(machine.device)
        return float(total), float(total - free - torch.cuda.memory_reserved(machine.device))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # in kibibytes on Linux; most of it is torch itself
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return total / machine.ranks_per_node, resident * 1024.0


def machine_words(machine: MeasuredMachine) -> str:
    """Name the machine that was measured."""
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads a process"
    if machine.has_gpu:
        name = torch.cuda.get_device_name(machine.device)
    return f"{name}, torch {torch.__version__}"


def device_yaml(
    compute: ComputeProfile, machine: MeasuredMachine, memory: tuple[float, float], when: str
) -> str:
    """Write the text of `device/NAME.yaml`.

    Args:
        memory: Bytes of one device, and bytes that are taken before any model.
    """
    fit = compute.fit
    device = fit.device
    total, taken = memory
    peaks = ", ".join(f"{name}: {value / 1e12:.6g}" for name, value in fit.peaks.items())
    hidden = "none, gloo sends on the cores that compute"
    if machine.has_gpu:
        hidden = "not measured, the defaults"
    bound = ""
    if fit.bounded:
        bound = (
            f"# Bound: the products of {', '.join(fit.bounded)} are too small to show the rate of an\n"
            f"# endless one, which may be {MOST_EXTRAPOLATED:g} times that of the fastest: measure larger "
            "ones.\n"
        )
    return f"""\
# {machine_words(machine)}; measured {when} by darts-parallel profile on {machine.world} processes at once.
# Peaks: the fastest product of {len(compute.gemms)} measured, or the fitted rate of an endless one.
# gemm_*: fitted to the products of {compute.gemms[0].precision}, median error {fit.error:.1%}.
# memory_bandwidth: a copy; memory_efficiency: sum, GELU, layer norm against it; attention: causal.
# layer_overhead: a block of one token. overlap_exponent, tp_hidden_share: {hidden}.
{bound}memory_GiB: {total / GIB:.6g}
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
    """Write the text of `cluster/NAME.yaml`; an unused link gets the nearest link's figures."""
    backend = "nccl" if machine.has_gpu else "gloo"
    speed = float(compute.fit.device.memory_bandwidth) / 1e9
    inside = f"bandwidth_GBps: {speed:.6g}, latency_us: 0.0"
    intra_words = "one device a node, so nothing crosses it: the memory's bandwidth stands there"
    if intra is not None:
        inside = _link(intra)
        intra_words = _words(intra)
    between = inside
    inter_words = "one node, so nothing crosses it: the figures inside the node stand there"
    if inter is not None:
        between = _link(inter)
        inter_words = _words(inter)
    return f"""\
# {machine.nodes} x {machine.ranks_per_node} devices; {when}, by darts-parallel profile over {backend}.
# Links: least squares on relative errors of all-reduce, all-gather and messages of all sizes.
# intra_node: {intra_words}.
# inter_node: {inter_words}.
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
    sizes = [time.size for time in link.times]
    return (
        f"{len(sizes)} cases of {min(sizes)} to {max(sizes)} bytes, median error {link.error:.1%}"
    )
