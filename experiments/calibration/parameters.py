"""The few physical parameters that are fitted, their bounds, and what is known of them before any run.

A parameter lives on an unbounded scale: the logarithm of a positive number, the logit of a share. Its
value for one device, link or stack is a base that all share plus a deviation of its own; a source that was
not in the data has the base alone. Priors are normal on that scale.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

BEST_SHAPE = {
    # share of the peak of the best bf16 matrix product (stas00/ml-engineering,
    # compute/accelerator/README.md @744d01e1); t4: NVIDIA developer forum, thread 264462 (power limit)
    "a100": 0.869, "h100": 0.803, "h100_hbm2e": 0.803, "h100_pcie": 0.70, "b200": 0.776, "gb200": 0.729,
    "mi300x": 0.511, "mi250x": 0.60, "v100": 0.80, "t4": 0.37, "a10": 0.70,
}  # fmt: skip
FAMILY = {"a100_40": "a100", "a100_80": "a100", "v100_16": "v100", "h200": "h100"}
"""Device files whose compute parameters are one: they differ in memory only."""
BEST_LINK = {
    # share of the data sheet's rate in a large all-reduce (NVIDIA GTC24 s62129, figure in
    # stas00/ml-engineering network/benchmarks @744d01e1); omnipath: its all_reduce_bench on 32 A100
    # before the fix of 02-25, 40.5 of 400 Gbit/s, a lower end; efa, roce, xgmi, ethernet: nothing measured,
    # so somewhat below InfiniBand
    "nvlink2": 0.81, "nvlink3": 0.773, "nvlink4": 0.822, "nvlink5": 0.8, "pcie": 0.6, "xgmi": 0.8,
    "infiniband": 0.93, "roce": 0.85, "efa": 0.7, "omnipath": 0.3,
    "omnipath_before_fix": 0.2, "ethernet": 0.75,
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A fitted quantity: where it applies, its prior and how far single devices or stacks may be off."""

    name: str
    scope: str
    """`all`, `device`, `stack`, `intra` or `inter`: what has a deviation of its own."""
    prior: float
    """Value before any run; for a share of something known, the share."""
    base_sd: float
    """Standard deviation of the base, on the unbounded scale."""
    own_sd: float = 0.0
    """The same of a deviation."""
    share: bool = False
    """In (0, 1); else any positive number."""
    offset: float = 0.0
    """Added to a positive number: its least value."""
    meaning: str = ""


QUANTITIES = (
    Quantity("gemm_efficiency", "device", 0.0, 0.4, 0.3, share=True,
             meaning="share of the peak that large matrix products reach; prior: BEST_SHAPE"),
    Quantity("attention_efficiency", "device", 0.6, 0.4, 0.3, share=True,
             meaning="the same of fused attention with large heads (arXiv 2307.08691: 0.5-0.7 on A100)"),
    Quantity("gemm_half_size", "all", 100.0, 0.5,
             meaning="rows or columns at which a product reaches half of that"),
    Quantity("misaligned_efficiency", "all", 0.9, 0.7, share=True,
             meaning="share that products keep where a side is no multiple of 64 elements"),
    Quantity("fp8_efficiency", "all", 0.85, 0.5, share=True,
             meaning="share of gemm_efficiency in fp8 (1402.6/1979 over 794.5/989 on H100: 0.88)"),
    Quantity("memory_efficiency", "all", 0.8, 0.5, share=True,
             meaning="share of the memory bandwidth that streaming kernels reach"),
    Quantity("streaming_factor", "stack", 1.3, 0.4, 0.3,
             meaning="memory traffic of element-wise kernels against that of fused ones"),
    Quantity("layer_overhead_us", "stack", 100.0, 0.7, 0.7,
             meaning="launch gaps and framework overhead of a layer's forward pass"),
    Quantity("overlap_exponent", "stack", 1.0, 0.7, 0.7, offset=1.0,
             meaning="g of (a^g + b^g)^(1/g), compute a beside communication b; 1: no overlap"),
    Quantity("reserved_GiB", "stack", 3.0, 0.7, 0.7,
             meaning="CUDA context, buffers of the framework and NCCL"),
    Quantity("state_factor", "stack", 1.1, 0.2, 0.3,
             meaning="bytes of parameters, gradients, optimizer state held, per byte of the formula"),
    Quantity("activation_factor", "stack", 1.1, 0.2, 0.3,
             meaning="the same for activations that are kept"),
    Quantity("tp_hidden_share", "stack", 0.1, 0.7, 1.0, share=True,
             meaning="share of the tensor-parallel communication that runs beside the products"),
    Quantity("intra_efficiency", "intra", 0.0, 0.3, 0.3, share=True,
             meaning="share of the data sheet's bandwidth inside a node; prior: BEST_LINK"),
    Quantity("inter_efficiency", "inter", 0.0, 0.3, 0.6, share=True,
             meaning="the same between nodes"),
    Quantity("intra_latency_us", "all", 3.0, 0.7, meaning="seconds of one step of a ring inside a node"),
    Quantity("inter_latency_us", "all", 5.0, 0.7, meaning="the same between nodes"),
)  # fmt: skip
UNKNOWN_SHARE = 0.7
"""Prior of a share for a device or link that is not listed."""
KNOWN = {"gemm_efficiency": BEST_SHAPE, "intra_efficiency": BEST_LINK, "inter_efficiency": BEST_LINK}


@dataclass(frozen=True)
class Place:
    """What a run's parameters depend on."""

    device: str
    stack: str
    intra: str
    inter: str

    def of(self, scope: str) -> str:
        """The name within a scope."""
        return "all" if scope == "all" else str(getattr(self, scope))


class Parameters:
    """Index of all latent numbers: one base for each quantity, one deviation for each name in its scope."""

    def __init__(self, places: list[Place], quantities: tuple[Quantity, ...] = QUANTITIES) -> None:
        self.quantities = quantities
        keys: list[tuple[str, str]] = []
        sds: list[float] = []
        for quantity in quantities:
            keys.append((quantity.name, ""))
            sds.append(quantity.base_sd)
            if quantity.own_sd > 0:
                names = sorted({place.of(quantity.scope) for place in places})
                keys += [(quantity.name, name) for name in names]
                sds += [quantity.own_sd] * len(names)
        self.keys = keys
        self.sd = torch.tensor(sds, dtype=torch.float64)
        self.index = {key: i for i, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self.keys)

    def zero(self) -> Tensor:
        """The prior's mean: every latent number is an offset to it."""
        return torch.zeros(len(self), dtype=torch.float64)

    def values(self, latent: Tensor, place: Place) -> dict[str, Tensor]:
        """Value of every quantity at a place, differentiable in `latent`."""
        return {q.name: self.value(latent, q, place.of(q.scope)) for q in self.quantities}

    def value(self, latent: Tensor, quantity: Quantity, name: str) -> Tensor:
        """Value of one quantity for one name of its scope."""
        x = latent[self.index[quantity.name, ""]]
        own = self.index.get((quantity.name, name)) if name else None
        x = x + latent[own] if own is not None else x
        prior = KNOWN[quantity.name].get(name, UNKNOWN_SHARE) if quantity.name in KNOWN else quantity.prior
        if quantity.share:
            return torch.sigmoid(x + log(prior / (1.0 - prior)))
        return quantity.offset + prior * torch.exp(x)
