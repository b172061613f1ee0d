"""The scan of a state-space layer; its other parts are priced as in any layer (`problem/state_space.py`)."""

from typing import ClassVar

import torch
from torch import Tensor

from darts_parallel.cost.choices import BothPasses
from darts_parallel.cost.compute import ATTENTION_HALF_SIZE, BACKWARD_FACTOR, stream_seconds
from darts_parallel.cost.sharding import context_gather
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import NOTHING, Contribution, CostTerm
from darts_parallel.problem import LayerSpec

VECTOR_SHARE = 1.0 / 16.0
"""Speed of float32 arithmetic outside the tensor cores, of the 16-bit peak (A100 data sheet:
19.5 and 312 TFLOP/s)."""


class ScanTerm(CostTerm):
    """Seconds of the scan, and of the exchange that divides its heads over context-parallel ranks."""

    name = "state-space scan"
    message = "context_parallel"
    repeated_with = "core_attn"
    formulas: ClassVar = {
        "state-space scan": (
            "chunked products, chunk states, recurrence; backward repeats the states",
            "Dao and Gu 2024, section 6",
        )
    }

    def present(self, layer: LayerSpec) -> bool:
        """Return whether the layer scans."""
        return layer.scan is not None

    def layer_cost(self, stage: StageContext, layer: LayerSpec) -> Contribution:
        """Price the scan's kernels, and in backward those that it repeats."""
        forward, again = scan_seconds(stage, layer)
        return Contribution(forward=forward, backward=BACKWARD_FACTOR * forward + again)

    def message_seconds(
        self, stage: StageContext, layer: LayerSpec, compute: BothPasses
    ) -> BothPasses:
        """Return the seconds of an all-to-all before and after the scan (Megatron-LM), each `(O, C)`."""
        choices = stage.choices
        if choices.cp == 1 or layer.scan is None:
            return NOTHING, NOTHING
        moved = stage.width * layer.scan.gathered * choices.tokens / choices.tp
        seconds = context_gather(stage, moved)
        return seconds, seconds


def scan_seconds(stage: StageContext, layer: LayerSpec) -> BothPasses:
    """Return the seconds of a scan forward, and of the part that backward repeats, each `(O, C)`.

    Chunks multiply on matrix units like fused attention of equally narrow heads. The scan of
    Mamba-1 (heads of one feature) has no products and runs on the vector units.
    """
    device = stage.device
    none = torch.zeros_like(stage.choices.tokens)
    scan = layer.scan
    if scan is None:
        return none, none
    share = stage.choices.tokens / stage.choices.tp
    filled = scan.head_dim / (scan.head_dim + ATTENTION_HALF_SIZE)
    rate = device.half_flops * device.attention_efficiency * filled
    if scan.head_dim == 1:
        rate = device.half_flops * VECTOR_SHARE

    def seconds(flops: float, elements: float) -> Tensor:
        traffic = stage.width * share * elements
        return torch.maximum(share * flops / rate, stream_seconds(traffic, device))

    return seconds(scan.flops, scan.elements), seconds(scan.flops_again, scan.elements_again)


TERM = ScanTerm()
