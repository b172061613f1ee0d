"""The simple cost model of the Searcher report (`cost=searcher`), kept for comparison.

It knows no memory, no stages and no strategies below (dp, tp, pp): a base efficiency is lowered with
every further data- and tensor-parallel rank and with their imbalance, and communication adds up.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from darts_parallel.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from darts_parallel.plan.strategy import Plan
    from darts_parallel.problem.problem import Problem

BASE_EFF = 0.35
"""Share of the peak that one GPU reaches."""
DP_EFF_PENALTY_FACTOR = 0.20
TP_EFF_PENALTY_FACTOR = 0.25
IMBALANCE_PENALTY_FACTOR = 0.10
OVERLAP_RATIO_PP = 0.60


@dataclass(frozen=True)
class Configurations:
    """All (dp, tp, pp) with `dp * tp * pp` GPUs, each of shape `(B,)`, and their seconds by cause."""

    dp: Tensor
    tp: Tensor
    pp: Tensor
    terms: dict[str, Tensor]

    @property
    def iteration_time(self) -> Tensor:
        """Seconds per iteration, shape `(B,)`."""
        return torch.stack(list(self.terms.values())).sum(0)

    def to_json(self) -> list[dict[str, Any]]:
        """Every configuration with its seconds, fastest first."""
        total = self.iteration_time
        return [
            {
                "dp": int(self.dp[i]),
                "tp": int(self.tp[i]),
                "pp": int(self.pp[i]),
                "iteration_time_s": float(total[i]),
                "breakdown_s": {name: float(term[i]) for name, term in self.terms.items()},
            }
            for i in total.argsort(stable=True).tolist()
        ]


def products(devices: int) -> Iterator[tuple[int, int, int]]:
    """Every `(dp, tp, pp)` whose product is `devices`."""
    sizes = [d for d in range(1, devices + 1) if devices % d == 0]
    for tp, pp in product(sizes, sizes):
        if devices % (tp * pp) == 0:
            yield devices // (tp * pp), tp, pp


@dataclass(frozen=True)
class SearcherModel:
    """The figures of a problem that the closed form reads, and the form itself, in real degrees."""

    flops: float
    """Operations of an iteration."""
    peak: float | Tensor
    """Operations per second of a GPU."""
    gradients: float
    """Bytes."""
    activation: float
    """Bytes of one activation of all tokens."""
    collectives: int
    """Tensor-parallel collectives of an iteration, forward and backward, all layers."""
    inside: float | Tensor
    """Bytes per second inside a node."""
    between: float | Tensor
    gpus: int
    """Of a node."""
    beyond: float
    """The least data-parallel degree that leaves the node; infinite where none does."""

    @staticmethod
    def of(problem: "Problem") -> "SearcherModel":
        """Read a problem.

        Errors:
            UnsupportedError: its nodes differ.
        """
        if not problem.cluster.homogeneous:
            raise UnsupportedError(
                f"cost=searcher must have nodes of one type, and cluster={problem.cluster.name} mixes them; "
                "nearest legal: cost=analytic."
            )
        group, training, model = problem.cluster.groups[0], problem.training, problem.model
        width = 4 if training.precision == "fp32" else 2
        tokens, devices = problem.tokens_per_iteration, problem.cluster.num_devices
        wide = [degree for degree in range(group.gpus + 1, devices + 1) if devices % degree == 0]
        return SearcherModel(
            flops=model.flops_per_token(training.seq_len) * tokens,
            peak=group.device.peak_flops,
            gradients=float(model.num_parameters * width),
            activation=float(tokens * model.config.hidden_size * width),
            collectives=sum(layer.tp_collectives + layer.tp_collectives_backward for layer in model.layers),
            inside=group.intra_node.bandwidth,
            between=problem.cluster.inter_node.bandwidth,
            gpus=group.gpus,
            beyond=float(min(wide, default=float("inf"))),
        )

    def terms(self, dp: Tensor, tp: Tensor, pp: Tensor) -> dict[str, Tensor]:
        """Seconds per iteration by cause, of the shape of the degrees.

        The two steps of the report's model, `pp > 1` and `dp` beyond a node, are steps at whole degrees;
        between the last degree before and the first one after them the logarithm of the degree goes over
        from one value to the other, so that real degrees have a slope.

        Args:
            dp, tp, pp: Real, at least 1.
        """
        efficiency = BASE_EFF / (
            (1 + DP_EFF_PENALTY_FACTOR * (dp - 1))
            * (1 + TP_EFF_PENALTY_FACTOR * (tp - 1))
            * (1 + IMBALANCE_PENALTY_FACTOR * (dp - tp).abs())
        )
        compute = self.flops / (self.peak * dp * tp * efficiency)
        piped = torch.log2(pp).clamp(0.0, 1.0)
        outside = torch.zeros_like(dp)
        if self.beyond < float("inf"):
            whole = torch.log2(torch.tensor(self.beyond / self.gpus, dtype=torch.float64))
            outside = (torch.log2(dp / self.gpus) / whole).clamp(0.0, 1.0)
        per_byte = (1 - outside) / self.inside + outside / self.between
        return {
            "compute": compute * (1 - piped + piped / OVERLAP_RATIO_PP),
            "tensor_parallel": 2 * (tp - 1) / tp * (self.collectives * self.activation / tp) / self.inside,
            "gradient_sync": 2 * (dp - 1) / dp * self.gradients * per_byte,
            "p2p_and_resharding": (pp - 1) * 2 * self.activation / self.inside,
        }


def evaluate_configurations(problem: "Problem", configurations: list[tuple[int, int, int]]) -> Configurations:
    """Seconds of all `configurations` at once (one vectorised pass)."""
    dp, tp, pp = torch.tensor(configurations, dtype=torch.float64).unbind(1)
    return Configurations(dp=dp, tp=tp, pp=pp, terms=SearcherModel.of(problem).terms(dp, tp, pp))


def searcher_breakdown(problem: "Problem", plan: "Plan") -> dict[str, float]:
    """Seconds per iteration by cause for a plan whose layers all agree on (dp, tp).

    Errors:
        PlanError: layers differ; the model has no word for that.
    """
    degrees = {(layer.dp, layer.tp) for layer in plan.layers}
    if len(degrees) > 1:
        raise PlanError(
            "plan: cost=searcher must have one (dp, tp) for all layers, and the plan mixes them; "
            "nearest legal: cost=analytic."
        )
    if plan.cp > 1 or plan.virtual_stages > 1:
        raise PlanError(
            "plan: cost=searcher knows neither context parallelism nor interleaving, and the plan has "
            f"cp={plan.cp} and virtual_stages={plan.virtual_stages}; nearest legal: cost=analytic."
        )
    result = evaluate_configurations(problem, [(*degrees.pop(), plan.pp)])
    return {name: float(term[0]) for name, term in result.terms.items()}


def configuration_dicts(problem: "Problem", configurations: list[tuple[int, int, int]]) -> dict[str, Any]:
    """What `configurations.json` holds."""
    result = evaluate_configurations(problem, configurations)
    constants = {
        "BASE_EFF": BASE_EFF,
        "DP_EFF_PENALTY_FACTOR": DP_EFF_PENALTY_FACTOR,
        "TP_EFF_PENALTY_FACTOR": TP_EFF_PENALTY_FACTOR,
        "IMBALANCE_PENALTY_FACTOR": IMBALANCE_PENALTY_FACTOR,
        "OVERLAP_RATIO_PP": OVERLAP_RATIO_PP,
    }
    return {
        "model": problem.model.config.name,
        "cluster": problem.cluster.name,
        "training": asdict(problem.training),
        "constants": constants,
        "configurations": result.to_json(),
    }
