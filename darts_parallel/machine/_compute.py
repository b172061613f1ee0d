"""Kernels of one device, and the figures of the cost model that fit them best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from math import prod
from operator import attrgetter
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from darts_parallel.config import DeviceConfig, ModelConfig
from darts_parallel.cost import ATTENTION_HALF_SIZE, float_tensor, gemm_seconds
from darts_parallel.errors import Amounts, Entries
from darts_parallel.machine._timing import MeasuredMachine
from darts_parallel.problem import Device, Gemm
from darts_parallel.run import build_layer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF_SIZES = [0.0] + [2.0 ** (i / 4) for i in range(8, 45)]
"""Half sizes that are tried, 4 to 2048."""
MOST_EXTRAPOLATED = 2.0
"""Largest rate of an endless product that a fit may claim, in units of the fastest product
measured.

Very small products all take the time of their launch, which every large half size explains. Such
products determine only the ratio of the rate to the cube of the half size; the rate itself could be
anything.
"""
Work = Callable[[], object]
STREAMED = 7.0
"""Tensors that a sum, a GELU and a layer norm read and write: 3, 2 and 2."""
UNFITTED: Entries = {
    "memory": 0.0,
    "reserved": 0.0,
    "peak_flops": 1.0,
    "gemm_efficiency": 1.0,
    "gemm_half_size": 0.0,
    "attention_efficiency": 1.0,
    "overlap_exponent": DeviceConfig.overlap_exponent,
    "tp_hidden_share": DeviceConfig.tp_hidden_share,
}
"""Figures of a device that are not measured yet, and the defaults of those that never are."""
LONGEST_SEQUENCE = 2048
"""Tokens of the measured attention, at most."""
HEADS = 8
HEAD_DIM = 64


@dataclass(frozen=True)
class GemmTime:
    """One measured matrix product of `rows x inner` by `inner x columns`."""

    precision: str
    rows: int
    inner: int
    columns: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        """Return the arithmetic rate."""
        return 2.0 * self.rows * self.inner * self.columns / self.seconds


@dataclass(frozen=True)
class ComputeProfile:
    """Products measured on a device, and the figures of the cost model that explain them best."""

    gemms: tuple[GemmTime, ...]
    device: Device
    """Its peak is that of the main precision."""
    peaks: Amounts
    """FLOP/s by precision."""
    error: float
    """Median of |fitted / measured - 1| over the products of the main precision."""


@dataclass(frozen=True)
class MeasuredKernels:
    """Kernels of one precision on a device; their sizes follow from the largest product."""

    machine: MeasuredMachine
    precision: str
    largest: int

    @property
    def seq_len(self) -> int:
        """Tokens of the measured attention."""
        return min(self.largest, LONGEST_SEQUENCE)

    def ones(self, *shape: int) -> Tensor:
        """Return a tensor on the device."""
        return torch.ones(*shape, dtype=DTYPES[self.precision], device=self.machine.device)

    def stream(self) -> Tensor:
        """Return a tensor that no cache of its device holds, in rows of `largest` numbers."""
        least = max(4 * self.largest**2, 2**20)
        return self.ones(-(-least // self.largest), self.largest)

    def gemm(self, rows: int, inner: int, columns: int) -> Work:
        """Return a matrix product."""
        left = self.ones(rows, inner)
        right = self.ones(inner, columns)
        return partial(torch.mm, left, right, out=self.ones(rows, columns))

    def others(self, source: Tensor) -> list[Work]:
        """List copy, sum, GELU, layer norm, causal attention, and launches."""
        target = source.clone()
        query, key, value = self.ones(3, 1, HEADS, self.seq_len, HEAD_DIM)
        attention = functional.scaled_dot_product_attention
        copy = partial(target.copy_, source)
        add = partial(torch.add, source, source.clone(), out=target)
        gelu = partial(functional.gelu, source)
        norm = partial(functional.layer_norm, source, (self.largest,))
        attend = partial(attention, query, key, value, is_causal=True)
        return [copy, add, gelu, norm, attend, self.launches()]

    def launches(self, *, compiled: bool = False) -> Work:
        """Return a block of one token, so small that its launches alone take time."""
        sizes: Entries = {"num_layers": 1, "hidden_size": 16, "num_heads": 1}
        tiny = build_layer(ModelConfig("tiny", **sizes), False, "layers.0", 1, seed=0)
        token = self.ones(1, 1, 16)
        tiny.to(token)
        if compiled:
            tiny.compile()
        return partial(tiny, token)


def gemm_shapes(largest: int) -> list[tuple[int, int, int]]:
    """List rows, inner size and columns: triples of `largest`, its quarter and sixteenth."""
    sizes = sorted({max(largest // 4**i, 16) for i in range(3)})
    return list(product(sizes, repeat=3))


def measure_compute(
    machine: MeasuredMachine, precisions: Sequence[str], largest: int, seconds: float
) -> ComputeProfile:
    """Measure products, streams, attention and launches, in `seconds` of wall-clock for all.

    Args:
        precisions: Those of the products; the first is the main one.
    """
    names = [(precision, *shape) for precision in precisions for shape in gemm_shapes(largest)]
    works = [MeasuredKernels(machine, name, largest).gemm(*shape) for name, *shape in names]
    # products are most of a training step, and get most of the time
    times = machine.measure("matrix products", works, 0.7 * seconds)
    gemms = tuple(GemmTime(*name, spent) for name, spent in zip(names, times, strict=True))
    kernels = MeasuredKernels(machine, precisions[0], largest)
    source = kernels.stream()
    works = kernels.others(source)
    copied, *streamed, attended, launched = machine.measure(
        "streams, attention, launches", works, 0.3 * seconds
    )
    reached = STREAMED * copied / (2.0 * sum(streamed))
    device = Device(
        name="measured",
        memory_bandwidth=2.0 * source.nbytes / copied,
        memory_efficiency=min(reached, 1.0),
        layer_overhead=launched,
        **UNFITTED,
    )
    if not machine.has_gpu:
        # gloo sends on the cores that compute, so nothing is hidden
        device = replace(device, overlap_exponent=1.0, tp_hidden_share=0.0)
    fitted = fit_gemms(gemms, device)
    # causal attention skips half of the products
    flops = 4.0 * kernels.seq_len**2 * HEADS * HEAD_DIM / 2
    rate = flops / attended / float(fitted.device.peak_flops)
    # the model's efficiency is that of large heads; small ones reach a share of it
    efficiency = min(rate * (1.0 + ATTENTION_HALF_SIZE / HEAD_DIM), 1.0)
    return replace(fitted, device=replace(fitted.device, attention_efficiency=efficiency))


def fit_gemms(gemms: Sequence[GemmTime], device: Device) -> ComputeProfile:
    """Find the peak, the efficiency and the half size that explain measured products best.

    For every half size tried, the arithmetic rate is the median that the products imply. The
    candidate with the smallest median error by the whole model (roofline included) is chosen, if
    its rate is at most `MOST_EXTRAPOLATED` times the fastest product. The peak is the largest of
    the rates of single products and the rate of an endless one; the peak of another precision is
    bounded in the same way.

    Args:
        gemms: Of one precision or several, one after the other; the first is the main one.
    """
    grouped = groupby(gemms, attrgetter("precision"))
    by_precision = {precision: list(some) for precision, some in grouped}
    main = next(iter(by_precision.values()))
    best = _best_fit(main, device)
    efficiency = min(float(best.peak_flops) / _fastest(main), 1.0)
    peaks = {}
    for precision, some in by_precision.items():
        fastest = _fastest(some)
        endless = _endless_rate(some, float(best.gemm_half_size)) / efficiency
        peaks[precision] = min(max(endless, fastest), MOST_EXTRAPOLATED * fastest)
    peak = peaks[gemms[0].precision]
    fitted = replace(best, peak_flops=peak, gemm_efficiency=efficiency)
    return ComputeProfile(tuple(gemms), fitted, peaks, _error(main, best))


def _best_fit(gemms: Sequence[GemmTime], device: Device) -> Device:
    """Return the allowed candidate of the smallest median error."""
    most = MOST_EXTRAPOLATED * _fastest(gemms)
    candidates = []
    for half in HALF_SIZES:
        rate = _endless_rate(gemms, half)
        # a half size of 0 claims the median rate of the products, so one candidate is always allowed
        if rate <= most:
            candidates.append(
                replace(device, gemm_half_size=half, gemm_efficiency=1.0, peak_flops=rate)
            )
    return min(candidates, key=partial(_error, gemms))


def _fastest(gemms: Sequence[GemmTime]) -> float:
    return max(gemm.flops_per_s for gemm in gemms)


def _endless_rate(gemms: Sequence[GemmTime], half: float) -> float:
    """Return FLOP/s of an endless product by the saturation curve of `compute.gemm_seconds`."""
    rates = []
    for gemm in gemms:
        growth = [(size + half) / size for size in (gemm.rows, gemm.inner, gemm.columns)]
        rates.append(gemm.flops_per_s * prod(growth))
    return median(rates)


def _error(gemms: Sequence[GemmTime], device: Device) -> float:
    """Return the median of |fitted / measured - 1| over products."""
    one = float_tensor(1.0)
    errors = []
    for gemm in gemms:
        shape = Gemm(gemm.columns, gemm.inner, "column")
        width = DTYPES[gemm.precision].itemsize
        fitted = gemm_seconds(shape, gemm.rows * one, one, device, width)
        errors.append(abs(float(fitted) / gemm.seconds - 1.0))
    return median(errors)
