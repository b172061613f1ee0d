"""Low-rank adapters next to frozen weights: a layer of full training to one of LoRA.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1) replaces a product `W x` by `W x + B A x` with `A` of
`rank x in` and `B` of `out x rank` numbers, and trains A and B alone: W has no gradient, no master copy and
no moments, and backward computes the gradient of its input only.
"""

from collections.abc import Sequence
from dataclasses import replace

from darts_parallel.problem.layer_spec import Gemm, LayerSpec, RecomputedPart

NORMED = ("linear_qkv", "linear_fc1")
"""Products whose input is the output of a norm, which nothing else needs in backward. The input of
`linear_proj` is kept by the attention itself."""


def with_adapters(layer: LayerSpec, rank: int, targets: Sequence[str]) -> LayerSpec:
    """Return the layer with adapters of `rank` next to its products named in `targets`; all else is frozen.

    A frozen product without an adapter does not keep its input for backward. Adapters are divided by `tp` as
    their products are (Megatron-Bridge), the collectives of their `rank` numbers a token left aside.
    """
    adapted = [gemm for gemm in layer.gemms if gemm.module in targets]
    adapters = tuple(product for gemm in adapted for product in _pair(gemm, rank))
    split = [rank * (g.in_features + g.out_features) for g in adapted if g.split != "replicated"]
    whole = [rank * (g.in_features + g.out_features) for g in adapted if g.split == "replicated"]
    norms, ffn = _inputs_dropped(layer, targets)
    head = sum(2.0 * gemm.in_features for gemm in layer.gemms if gemm.split == "vocabulary")
    return replace(
        layer,
        frozen=True,
        adapters=adapters,
        adapter_parameters=sum(split),
        replicated_adapter_parameters=sum(whole),
        # what A makes is the input of B
        replicated_activation_bytes=layer.replicated_activation_bytes - norms - head,
        sharded_activation_bytes=layer.sharded_activation_bytes - ffn + 2.0 * rank * len(adapted),
        parts=tuple(_part(part, norms, ffn) for part in layer.parts),
    )


def _pair(gemm: Gemm, rank: int) -> tuple[Gemm, Gemm]:
    second = "replicated" if gemm.split == "replicated" else "column"
    return Gemm(rank, gemm.in_features, gemm.split), Gemm(gemm.out_features, rank, second)


def _inputs_dropped(layer: LayerSpec, targets: Sequence[str]) -> tuple[float, float]:
    """Return the bytes a token of inputs without adapter: outputs of norms, input of `linear_fc2`."""
    present = [gemm.module for gemm in layer.gemms if gemm.module in NORMED]
    without = [module for module in present if module not in targets]
    normed = next((p.replicated_activation_bytes for p in layer.parts if p.module == "layernorm"), 0.0)
    width = max((gemm.in_features for gemm in layer.gemms if gemm.module in NORMED), default=0)
    apart = normed == 2.0 * width * len(present)  # each has a norm of its own
    norms = 2.0 * width * len(without) if apart else normed * (without == present != [])
    if layer.experts is not None:
        norms = 0.0  # the router and the dispatcher read them, too
    ffn = sum(2.0 * g.in_features for g in layer.gemms if g.module == "linear_fc2" not in targets)
    return norms, ffn


def _part(part: RecomputedPart, norms: float, ffn: float) -> RecomputedPart:
    if part.module == "layernorm":
        return replace(part, replicated_activation_bytes=part.replicated_activation_bytes - norms)
    if part.module in ("mlp", "shared_experts"):
        return replace(part, sharded_activation_bytes=part.sharded_activation_bytes - ffn)
    return part
