"""The few physical parameters that are fitted, their bounds, and what is known of them before any run.

A parameter lives on an unbounded scale: the logarithm of a positive number, the logit of a share. Its value
for one place is a base that all share plus deviations of the device, of the software, of the link and of
their pairs; a name that was not in the data has the rest alone. Priors are normal on that scale, so that
many runs move a deviation and few leave it to what it is a deviation from.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from darts_parallel.report.uncertainty import FAMILIES, GAUGE

FAMILY = FAMILIES
"""Device files whose compute parameters are one: they differ in memory only."""
POWER = 1400.0 / 1200.0, 500.0 / 700.0
"""Watts of a GB300 per those of a GB200 (NVIDIA, most of a module's GPU), and of torchtitan's H100 with HBM2e
per those of an H100 SXM5: large products run as fast as the power limit lets them."""
BEST_SHAPE = {
    # share of the peak of the best bf16 matrix product (stas00/ml-engineering,
    # compute/accelerator/README.md @744d01e1); v100: 83 of 125 TFLOP/s (arXiv 1803.04014, abstract);
    # t4: NVIDIA developer forum, thread 264462 (power limit);
    # gb300, h100_hbm2e: as gb200 and h100, by their power; b300: as b200
    "a100": 0.869, "h100": 0.803, "h100_hbm2e": 0.803 * POWER[1], "h100_pcie": 0.70, "b200": 0.776,
    "gb200": 0.729, "gb300": 0.729 * POWER[0], "b300": 0.776, "mi300x": 0.511, "mi250x": 0.60, "v100": 0.664,
    "t4": 0.37, "a10": 0.70,
}  # fmt: skip
BEST_LINK = {
    # share of the data sheet's rate in a large all-reduce (NVIDIA GTC24 s62129, figure in
    # stas00/ml-engineering network/benchmarks @744d01e1); omnipath: its all_reduce_bench on 32 A100
    # before the fix of 02-25, 40.5 of 400 Gbit/s, a lower end; efa, roce, xgmi, ethernet: nothing measured,
    # so somewhat below InfiniBand
    "nvlink2": 0.81, "nvlink3": 0.773, "nvlink4": 0.822, "nvlink5": 0.8, "pcie": 0.6, "xgmi": 0.8,
    "infiniband": 0.93, "roce": 0.85, "efa": 0.7, "omnipath": 0.3,
    "omnipath_before_fix": 0.2, "ethernet": 0.75,
}  # fmt: skip
HIDDEN_TP = {"nemo": 0.5, "megatron_core": 0.3, "jax": 0.3}
"""Share of the tensor-parallel communication that runs beside the products: NeMo's recipes turn on
`tp_comm_overlap`; of its published runs about half is hidden."""
DEVICE, ALLOCATED = GAUGE, "allocated"
"""Gauges of memory: all that is gone of a device, which is what runs out; the allocator's peak."""
PAIR = "+"
"""Joins the scopes of a pair, and their names."""


@dataclass(frozen=True)
class Quantity:
    """A fitted quantity: where it applies, its prior and how far single devices or stacks may be off."""

    name: str
    prior: float
    """Value before any run; where `KNOWN` lists names, that of the others."""
    base_sd: float
    """Standard deviation of the base, on the unbounded scale."""
    deviations: tuple[tuple[str, float], ...] = ()
    """Scopes with a deviation of their own (`device`, `stack`, `intra`, `inter`, `gauge`, or two joined by
    `+`), and its standard deviation."""
    share: bool = False
    """In (0, 1); else any positive number."""
    offset: float = 0.0
    """Added to a positive number: its least value."""
    meaning: str = ""
    of_experts: bool = False
    """Only mixtures of experts depend on it; it is all that runs of mixtures are fitted by."""


QUANTITIES = (
    Quantity("gemm_efficiency", 0.7, 0.4, (("device", 0.3), ("stack", 0.2), ("device+stack", 0.2)),
             share=True,
             meaning="share of the peak that large matrix products reach; prior: BEST_SHAPE"),
    Quantity("attention_efficiency", 0.6, 0.4, (("device", 0.3), ("stack", 0.3), ("device+stack", 0.4)),
             share=True,
             meaning="the same of fused attention with large heads (arXiv 2307.08691: 0.5-0.7 on A100)"),
    Quantity("gemm_half_size", 100.0, 0.5,
             meaning="rows or columns at which a product reaches half of that"),
    Quantity("misaligned_efficiency", 0.9, 0.7, share=True,
             meaning="share that products keep where a side is no multiple of 64 elements"),
    Quantity("fp8_efficiency", 0.85, 0.5, (("device", 0.3), ("stack", 0.3)), share=True,
             meaning="share of gemm_efficiency in fp8 (1402.6/1979 over 794.5/989 on H100: 0.88)"),
    Quantity("mxfp8_efficiency", 0.75, 0.5, (("device", 0.3),), share=True,
             meaning="the same of mxfp8, whose blocks have scales of their own"),
    Quantity("nvfp4_efficiency", 0.5, 0.7, (("device", 0.5),), share=True, meaning="the same of nvfp4"),
    Quantity("memory_efficiency", 0.8, 0.5, share=True,
             meaning="share of the memory bandwidth that streaming kernels reach"),
    Quantity("streaming_factor", 1.3, 0.4, (("stack", 0.3),),
             meaning="memory traffic of element-wise kernels against that of fused ones"),
    Quantity("layer_overhead_us", 100.0, 0.7, (("stack", 0.7), ("device+stack", 0.4)),
             meaning="launch gaps and framework overhead of a layer's forward pass"),
    Quantity("overlap_exponent", 1.0, 0.7, (("stack", 0.7),), offset=1.0,
             meaning="g of (a^g + b^g)^(1/g), compute a beside communication b; 1: no overlap"),
    Quantity("reserved_GiB", 3.0, 0.7, (("stack", 0.7), ("device", 0.3)),
             meaning="CUDA context, buffers of the framework and NCCL"),
    Quantity("state_factor", 1.1, 0.2, (("stack", 0.3), ("gauge", 0.2)),
             meaning="bytes of parameters, gradients, optimizer state held, per byte of the formula"),
    Quantity("activation_factor", 1.1, 0.2, (("stack", 0.3), ("gauge", 0.2)),
             meaning="the same for activations that are kept"),
    Quantity("tp_hidden_share", 0.1, 0.7, (("stack", 1.0),), share=True,
             meaning="share of the tensor-parallel communication that runs beside the products"),
    Quantity("grouped_gemm_efficiency", 0.85, 0.6, (("device", 0.3), ("stack", 0.3)), share=True,
             meaning="share of the speed of single products that the grouped products of experts reach",
             of_experts=True),
    Quantity("all_to_all_efficiency", 0.7, 0.2, (("stack", 0.4),), share=True,
             meaning="share of the links' bandwidth that the experts' plain all-to-all reaches",
             of_experts=True),
    Quantity("flex_gain", 1.25, 0.1, (("stack", 0.2),),
             meaning="bandwidth of DeepEP and HybridEP per that (arXiv 2603.07685, table 7: 1.23-1.33)",
             of_experts=True),
    Quantity("permutation_factor", 1.0, 0.4, (("stack", 0.3),),
             meaning="memory traffic of router and permutation against that of fused kernels",
             of_experts=True),
    # half the spread of layers: with as much, the fold that leaves out NeMo's 87 runs of mixtures takes so
    # much of their seconds for overhead of others' that it misses them by 53 % in the mean, not 14
    Quantity("expert_overhead_us", 500.0, 0.35, (("stack", 0.25), ("device+stack", 0.15)),
             meaning="launch gaps and synchronisation of a layer's experts in forward",
             of_experts=True),
    Quantity("intra_efficiency", 0.7, 0.3, (("intra", 0.3), ("intra+stack", 0.2)), share=True,
             meaning="share of the data sheet's bandwidth inside a node; prior: BEST_LINK"),
    Quantity("inter_efficiency", 0.7, 0.3, (("inter", 0.6), ("inter+stack", 0.3)), share=True,
             meaning="the same between nodes"),
    Quantity("intra_latency_us", 3.0, 0.7, (("intra", 0.7),),
             meaning="seconds of one step of a ring inside a node"),
    Quantity("inter_latency_us", 5.0, 0.7, (("inter", 0.7),),
             meaning="the same between nodes"),
)  # fmt: skip
KNOWN = {
    "gemm_efficiency": ("device", BEST_SHAPE),
    "intra_efficiency": ("intra", BEST_LINK),
    "inter_efficiency": ("inter", BEST_LINK),
    "tp_hidden_share": ("stack", HIDDEN_TP),
}
"""Priors by name of a scope."""


@dataclass(frozen=True)
class Place:
    """What a run's parameters depend on."""

    device: str
    stack: str
    intra: str
    inter: str
    gauge: str = DEVICE

    def of(self, scope: str) -> str:
        """The name within a scope, or two joined by `+`."""
        return PAIR.join(str(getattr(self, part)) for part in scope.split(PAIR))


def prior_at(quantity: Quantity, place: Place) -> float:
    """The prior value of a quantity at a place."""
    if quantity.name not in KNOWN:
        return quantity.prior
    scope, table = KNOWN[quantity.name]
    return table.get(place.of(scope), quantity.prior)


def on_scale(quantity: Quantity, prior: float, x: Tensor) -> Tensor:
    """The value whose distance from `prior` on the unbounded scale is `x`."""
    if quantity.share:
        return torch.sigmoid(x + log(prior / (1.0 - prior)))
    return quantity.offset + prior * torch.exp(x)


Key = tuple[str, str, str]
"""Quantity, scope (empty: the base) and name of one latent number."""


class Parameters:
    """Index of all latent numbers: one base for each quantity, one deviation for each name in its scopes."""

    def __init__(self, places: Iterable[Place], quantities: tuple[Quantity, ...] = QUANTITIES) -> None:
        self.quantities = quantities
        everywhere = list(places)
        keys: list[Key] = []
        sds: list[float] = []
        for quantity in quantities:
            keys.append((quantity.name, "", ""))
            sds.append(quantity.base_sd)
            for scope, sd in quantity.deviations:
                names = sorted({place.of(scope) for place in everywhere})
                keys += [(quantity.name, scope, name) for name in names]
                sds += [sd] * len(names)
        self.keys = keys
        self.sd = torch.tensor(sds, dtype=torch.float64)
        self.index = {key: i for i, key in enumerate(keys)}
        own = {quantity.name for quantity in quantities if quantity.of_experts}
        self.of_experts = torch.tensor([key[0] in own for key in keys])
        """Latent numbers that runs of mixtures are fitted by, `(P,)`."""

    def __len__(self) -> int:
        return len(self.keys)

    def zero(self) -> Tensor:
        """The prior's mean: every latent number is an offset to it."""
        return torch.zeros(len(self), dtype=torch.float64)

    def members(self, quantity: Quantity, place: Place) -> list[int]:
        """Latent numbers whose sum is a quantity at a place; what was not in the data is left out."""
        keys = [(quantity.name, "", "")]
        keys += [(quantity.name, scope, place.of(scope)) for scope, _ in quantity.deviations]
        return [self.index[key] for key in keys if key in self.index]

    def values(self, latent: Tensor, place: Place) -> dict[str, Tensor]:
        """Value of every quantity at a place, differentiable in `latent`."""
        return {q.name: self.value(latent, q, place) for q in self.quantities}

    def value(self, latent: Tensor, quantity: Quantity, place: Place) -> Tensor:
        """Value of one quantity at a place."""
        return on_scale(quantity, prior_at(quantity, place), latent[self.members(quantity, place)].sum())
