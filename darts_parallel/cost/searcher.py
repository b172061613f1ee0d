"""The closed-form 3D-parallel searcher (`cost=searcher`): seconds of a product dp x tp x pp, for comparison.

It knows no memory, no stages and no strategies below (dp, tp, pp): a base efficiency is lowered
with every further data- and tensor-parallel rank and with their imbalance, and communication adds
up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from darts_parallel.config import TrainingConfig
from darts_parallel.cost.choices import Tensors, element_bytes, float_tensor
from darts_parallel.errors import Amounts, PlanError, UnsupportedError
from darts_parallel.plans import Plan, divisors
from darts_parallel.problem import Cluster, Model

CONSTANTS = {
    "BASE_EFF": 0.35,
    "DP_EFF_PENALTY_FACTOR": 0.20,
    "TP_EFF_PENALTY_FACTOR": 0.25,
    "IMBALANCE_PENALTY_FACTOR": 0.10,
    "OVERLAP_RATIO_PP": 0.60,
}
"""Efficiency of one GPU, penalties on it by data- and tensor-parallel degree, busy share of a
pipeline."""
Product = tuple[int, int, int]
"""Degrees dp, tp and pp."""


def products(devices: int) -> Iterator[Product]:
    """Yield every `(dp, tp, pp)` whose product is `devices`."""
    for tp in divisors(devices):
        yield from ((devices // (tp * pp), tp, pp) for pp in divisors(devices // tp))


@dataclass(frozen=True)
class SearcherModel:
    """The figures of a job that the closed form reads, and the closed form itself, in real degrees."""

    flops: float
    """Operations of an iteration."""
    peak: float | Tensor
    """Operations per second of a GPU."""
    gradients: float
    """Bytes of all gradients."""
    activation: float
    """Bytes of one activation of all tokens."""
    collectives: int
    """Tensor-parallel collectives of an iteration, forward and backward, all layers."""
    inside: float | Tensor
    """Bytes per second inside a node."""
    between: float | Tensor
    """Bytes per second between nodes."""
    gpus: int
    """GPUs of a node."""
    beyond: float
    """The least data-parallel degree that leaves the node; infinite where none does."""

    @staticmethod
    def of(model: Model, cluster: Cluster, training: TrainingConfig) -> "SearcherModel":
        """Read a job.

        Errors:
            UnsupportedError: the nodes differ.
        """
        if not cluster.homogeneous:
            raise UnsupportedError(
                f"cost=searcher must have nodes of one type, and cluster={cluster.name} mixes them; "
                "try cost=analytic."
            )
        group = cluster.groups[0]
        width = element_bytes(training)
        tokens = training.global_batch_size * training.seq_len
        wide = [degree for degree in divisors(cluster.num_devices) if degree > group.gpus]
        flops = model.flops_per_token(training.seq_len) * tokens
        gradients = float(model.num_parameters * width)
        activation = float(tokens * model.config.hidden_size * width)
        collectives = 0
        for layer in model.layers:
            collectives += layer.tp_collectives + layer.tp_collectives_backward
        inside = group.intra_node.bandwidth
        between = cluster.inter_node.bandwidth
        beyond = float(min(wide, default=inf))
        return SearcherModel(
            flops,
            group.device.peak_flops,
            gradients,
            activation=activation,
            collectives=collectives,
            inside=inside,
            between=between,
            gpus=group.gpus,
            beyond=beyond,
        )

    def terms(self, dp: Tensor, tp: Tensor, pp: Tensor) -> Tensors:
        """Return the seconds per iteration by cause, of the shape of the degrees, real and at least 1.

        The model has two steps at whole degrees: `pp > 1`, and `dp` beyond a node. Between the
        degrees next to a step the values are interpolated in the logarithm of the degree, so that
        real degrees have a slope.
        """
        of_dp = 1 + CONSTANTS["DP_EFF_PENALTY_FACTOR"] * (dp - 1)
        of_tp = 1 + CONSTANTS["TP_EFF_PENALTY_FACTOR"] * (tp - 1)
        of_imbalance = 1 + CONSTANTS["IMBALANCE_PENALTY_FACTOR"] * (dp - tp).abs()
        efficiency = CONSTANTS["BASE_EFF"] / (of_dp * of_tp * of_imbalance)
        compute = self.flops / (self.peak * dp * tp * efficiency)
        piped = torch.log2(pp).clamp(0.0, 1.0)
        whole = torch.log2(float_tensor(self.beyond / self.gpus))
        outside = (torch.log2(dp / self.gpus) / whole).clamp(0.0, 1.0)
        per_byte = (1 - outside) / self.inside + outside / self.between
        reduced = self.collectives * self.activation / tp
        compute = compute * (1 - piped + piped / CONSTANTS["OVERLAP_RATIO_PP"])
        tensor_parallel = 2 * (tp - 1) / tp * reduced / self.inside
        gradient_sync = 2 * (dp - 1) / dp * self.gradients * per_byte
        p2p = (pp - 1) * 2 * self.activation / self.inside
        return {
            "compute": compute,
            "tensor_parallel": tensor_parallel,
            "gradient_sync": gradient_sync,
            "p2p_and_resharding": p2p,
        }

    def breakdowns(self, degrees: Sequence[Product]) -> list[Amounts]:
        """Return the seconds per iteration by cause of every product, in one vectorised pass."""
        terms = self.terms(*float_tensor(degrees).unbind(1))
        rows = torch.stack(list(terms.values()), 1).tolist()
        return [dict(zip(terms, row, strict=True)) for row in rows]

    def breakdown(self, plan: Plan) -> Amounts:
        """Return the seconds per iteration by cause of a plan whose layers all agree on (dp, tp).

        Errors:
            PlanError: the plan mixes degrees, or has one that the model does not know.
        """
        degrees = {(layer.dp, layer.tp) for layer in plan.layers}
        if len(degrees) > 1 or plan.cp > 1 or plan.virtual_stages > 1:
            raise PlanError(
                "plan: cost=searcher must have one (dp, tp) for all layers, cp=1 and virtual_stages=1, and "
                f"the plan has {len(degrees)}, cp={plan.cp} and virtual_stages={plan.virtual_stages}; "
                "try cost=analytic."
            )
        return self.breakdowns([(*degrees.pop(), plan.pp)])[0]
