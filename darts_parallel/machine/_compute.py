"""Kernels of one device, and the figures of the cost model that fit them best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from statistics import median

import torch

from darts_parallel.bilevel import TransformerShape, Weights, block, initial_weights
from darts_parallel.config import DeviceConfig
from darts_parallel.cost import ATTENTION_HALF_SIZE, gemm_seconds
from darts_parallel.machine._timing import MeasuredMachine
from darts_parallel.problem import Device, Gemm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
HALF_SIZES = [0.0] + [2.0 ** (i / 4) for i in range(8, 45)]
"""Half sizes that are tried, 4 to 2048."""
MOST_EXTRAPOLATED = 2.0
"""Largest rate of an endless product that a fit may claim, in units of the fastest product measured.

Products so small that launching them is all that they do take equal times, which every large half size
explains: only the rate over the cube of the half size follows from them, and the rate itself may be anything.
"""
Work = Callable[[], object]
STREAMED = 7.0
"""Tensors that a sum, a GELU and a layer norm read and write: 3, 2 and 2."""


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
class BlockTime:
    """One measured Transformer block; seconds of one micro-batch."""

    width: int
    micro_batch: int
    """Sequences."""
    seq_len: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class GemmFit:
    """The figures of the cost model that explain measured products best."""

    device: Device
    """Its peak is that of the main precision."""
    peaks: dict[str, float]
    """FLOP/s by precision."""
    error: float
    """Median of |fitted / measured - 1| over the products of the main precision."""
    bounded: tuple[str, ...]
    """Precisions whose products ask for a peak above `MOST_EXTRAPOLATED` times the fastest of them."""


@dataclass(frozen=True)
class ComputeProfile:
    """Times measured on the device, and the figures of the cost model that follow."""

    gemms: tuple[GemmTime, ...]
    blocks: tuple[BlockTime, ...]
    fit: GemmFit


def gemm_shapes(largest: int) -> list[tuple[int, int, int]]:
    """List rows, inner size and columns: all triples of `largest` and a quarter and a sixteenth of it."""
    sizes = sorted({max(largest // 4**i, 16) for i in range(3)})
    return list(product(sizes, repeat=3))


def measure_compute(
    machine: MeasuredMachine, precisions: Sequence[str], largest: int, seconds: float
) -> ComputeProfile:
    """Measure products, streams, attention and blocks, in `seconds` of wall-clock for all.

    Args:
        precisions: Those of the products; the first is the main one.
    """
    names = [(precision, *shape) for precision in precisions for shape in gemm_shapes(largest)]
    times = machine.measure(
        "matrix products", [_gemm(machine, *name) for name in names], 0.5 * seconds
    )
    gemms = tuple(GemmTime(*name, spent) for name, spent in zip(names, times, strict=True))
    kernels = machine.measure(
        "streams, attention, launches", _kernels(machine, precisions[0], largest), 0.2 * seconds
    )
    copied, *streamed, attended, launched = kernels
    stream = _stream_elements(largest) * WIDTHS[precisions[0]]
    bandwidth = 2 * stream / copied
    hides = machine.device.type == "cuda"  # gloo sends on the cores that compute
    started = Device(
        name="measured",
        memory=0.0,
        peak_flops=1.0,
        memory_bandwidth=bandwidth,
        gemm_efficiency=1.0,
        gemm_half_size=0.0,
        attention_efficiency=1.0,
        memory_efficiency=min(STREAMED * stream / sum(streamed) / bandwidth, 1.0),
        layer_overhead=launched,
        overlap_exponent=DeviceConfig.overlap_exponent if hides else 1.0,
        tp_hidden_share=DeviceConfig.tp_hidden_share if hides else 0.0,
        reserved=0.0,
    )
    fitted = fit_gemms(gemms, started)
    rate = _attention_flops(largest) / attended / float(fitted.device.peak_flops)
    # the model's efficiency is that of large heads; heads of 64 reach a share of it
    efficiency = min(rate * (1.0 + ATTENTION_HALF_SIZE / 64), 1.0)
    device = replace(fitted.device, attention_efficiency=efficiency)
    blocks = _blocks(machine, precisions[0], largest, 0.3 * seconds)
    return ComputeProfile(gemms, blocks, replace(fitted, device=device))


def fit_gemms(gemms: Sequence[GemmTime], device: Device) -> GemmFit:
    """Find the peak, the efficiency and the half size that explain measured products best.

    Of every half size tried the arithmetic rate is the median that the products imply; the one with the
    smallest median error by the whole model (roofline included) is taken, of those that claim no rate beyond
    `MOST_EXTRAPOLATED` times the fastest product. The peak is the largest of the rates of single products and
    of the rate of an endless one; that of another precision is bounded in the same way.

    Args:
        gemms: Of one precision or several; the first product's is the main one.
    """
    by_precision: dict[str, list[GemmTime]] = {}
    for gemm in gemms:
        by_precision.setdefault(gemm.precision, []).append(gemm)
    main = gemms[0].precision
    best, error, bounded = _best_fit(by_precision[main], device)
    rate, half = float(best.peak_flops), float(best.gemm_half_size)
    peak = max(rate, _fastest(by_precision[main]))
    peaks, at_bound = {main: peak}, [main] if bounded else []
    for precision, some in by_precision.items():
        if precision != main:
            wanted = max(_endless_rate(some, half) * peak / rate, _fastest(some))
            peaks[precision] = min(wanted, MOST_EXTRAPOLATED * _fastest(some))
            at_bound += [precision] if wanted > peaks[precision] else []
    return GemmFit(
        replace(best, peak_flops=peak, gemm_efficiency=rate / peak), peaks, error, tuple(at_bound)
    )


def _best_fit(gemms: Sequence[GemmTime], device: Device) -> tuple[Device, float, bool]:
    """Return the allowed candidate of least median error, the error, and if a refused one is better."""
    rates = [_endless_rate(gemms, half) for half in HALF_SIZES]
    tried = [
        replace(device, gemm_half_size=half, gemm_efficiency=1.0, peak_flops=rate)
        for half, rate in zip(HALF_SIZES, rates, strict=True)
    ]
    errors = [median(_errors(gemms, candidate)) for candidate in tried]
    most = MOST_EXTRAPOLATED * _fastest(gemms)
    # a half size of 0 claims the median rate of the products, so that one candidate always remains
    best = min((i for i, rate in enumerate(rates) if rate <= most), key=errors.__getitem__)
    return tried[best], errors[best], errors[best] > min(errors)


def _fastest(gemms: Sequence[GemmTime]) -> float:
    """Return FLOP/s of the fastest product."""
    return max(gemm.flops_per_s for gemm in gemms)


def _endless_rate(gemms: Sequence[GemmTime], half: float) -> float:
    """Return FLOP/s of an endless product by the saturation curve of `compute.gemm_seconds`."""
    return median(
        gemm.flops_per_s * prod((d + half) / d for d in (gemm.rows, gemm.inner, gemm.columns))
        for gemm in gemms
    )


def _errors(gemms: Sequence[GemmTime], device: Device) -> list[float]:
    """Return |fitted / measured - 1| of every product."""
    one = torch.ones((), dtype=torch.float64)

    def fitted(gemm: GemmTime) -> float:
        product = Gemm(gemm.columns, gemm.inner, "column")
        return float(gemm_seconds(product, gemm.rows * one, one, device, WIDTHS[gemm.precision]))

    return [abs(fitted(gemm) / gemm.seconds - 1.0) for gemm in gemms]


def _ones(machine: MeasuredMachine, precision: str, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=DTYPES[precision], device=machine.device)


def _gemm(machine: MeasuredMachine, precision: str, rows: int, inner: int, columns: int) -> Work:
    shapes = ((rows, inner), (inner, columns), (rows, columns))
    left, right, out = (_ones(machine, precision, *shape) for shape in shapes)
    return lambda: torch.mm(left, right, out=out)


def _stream_elements(largest: int) -> int:
    """Count the numbers of a tensor that no cache of its device holds."""
    return -(-max(4 * largest**2, 2**20) // largest) * largest


def _attention_flops(largest: int) -> float:
    """Count the FLOP of causal attention with 8 heads of 64, half of which are skipped."""
    return 4.0 * min(largest, 2048) ** 2 * 8 * 64 / 2


def _kernels(machine: MeasuredMachine, precision: str, largest: int) -> list[Work]:
    """List copy, sum, GELU, layer norm, causal attention, and a block so small that it is all launches."""
    source, other, target = (_ones(machine, precision, _stream_elements(largest)) for _ in range(3))
    weights = _weights(machine, precision, TransformerShape(1, 16, 1, 1, 16))
    query, key, value = _ones(machine, precision, 3, 1, 8, min(largest, 2048), 64)
    attend = torch.nn.functional.scaled_dot_product_attention
    state = _ones(machine, precision, 1, 1, 16)
    return [
        lambda: target.copy_(source),
        lambda: torch.add(source, other, out=target),
        lambda: torch.nn.functional.gelu(source),
        lambda: torch.nn.functional.layer_norm(source.view(-1, largest), (largest,)),
        lambda: attend(query, key, value, is_causal=True),
        partial(_forward, weights, state),
    ]


def _weights(machine: MeasuredMachine, precision: str, shape: TransformerShape) -> Weights:
    initial = initial_weights(shape, torch.Generator().manual_seed(0))
    return {name: w.to(machine.device, DTYPES[precision]) for name, w in initial.items()}


def _blocks(
    machine: MeasuredMachine, precision: str, largest: int, seconds: float
) -> tuple[BlockTime, ...]:
    """Measure blocks of two widths and two micro-batches, forward and backward."""
    context, places, works = min(largest, 256), list[tuple[int, int, int]](), list[Work]()
    for width, size in product((largest // 4, largest // 2), (1, 4)):
        shape = TransformerShape(1, width, max(width // 64, 1), context, 256)
        every = _weights(machine, precision, shape)
        weights = {name: w.requires_grad_() for name, w in every.items() if name.startswith("0.")}
        state = _ones(machine, precision, size, context, width).requires_grad_()
        places.append((width, size, context))
        works += [partial(_forward, weights, state), partial(_forward_backward, weights, state)]
    times = machine.measure("blocks", works, seconds)
    return tuple(
        BlockTime(*place, forward, max(both - forward, 0.0))
        for place, forward, both in zip(places, times[::2], times[1::2], strict=True)
    )


def _forward(weights: Weights, state: torch.Tensor) -> torch.Tensor:
    return block(weights, 0, state, 1, lambda partials: partials.sum(0))


def _forward_backward(weights: Weights, state: torch.Tensor) -> object:
    return torch.autograd.grad(_forward(weights, state).sum(), tuple(weights.values()))
