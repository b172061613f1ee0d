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


def evaluate_configurations(problem: "Problem", configurations: list[tuple[int, int, int]]) -> Configurations:
    """Seconds of all `configurations` at once (one vectorised pass)."""
    if not problem.cluster.homogeneous:
        raise UnsupportedError(
            f"cost=searcher must have nodes of one type, and cluster={problem.cluster.name} mixes them; "
            "nearest legal: cost=analytic."
        )
    dp, tp, pp = torch.tensor(configurations, dtype=torch.float64).unbind(1)
    group, training, model = problem.cluster.groups[0], problem.training, problem.model
    width = 4 if training.precision == "fp32" else 2
    tokens = problem.tokens_per_iteration
    flops = model.flops_per_token(training.seq_len) * tokens
    efficiency = BASE_EFF / (
        (1 + DP_EFF_PENALTY_FACTOR * (dp - 1))
        * (1 + TP_EFF_PENALTY_FACTOR * (tp - 1))
        * (1 + IMBALANCE_PENALTY_FACTOR * (dp - tp).abs())
    )
    compute = flops / (group.device.peak_flops * dp * tp * efficiency)
    compute = torch.where(pp > 1, compute / OVERLAP_RATIO_PP, compute)
    inside, between = group.intra_node.bandwidth, problem.cluster.inter_node.bandwidth
    gradients = float(model.num_parameters * width)
    link = torch.where(dp <= group.gpus, inside, between)
    activation = float(tokens * model.config.hidden_size * width)
    collectives = sum(layer.tp_collectives + layer.tp_collectives_backward for layer in model.layers)
    return Configurations(
        dp=dp, tp=tp, pp=pp,
        terms={
            "compute": compute,
            "tensor_parallel": 2 * (tp - 1) / tp * (collectives * activation / tp) / inside,
            "gradient_sync": 2 * (dp - 1) / dp * gradients / link,
            "p2p_and_resharding": (pp - 1) * 2 * activation / inside,
        },
    )  # fmt: skip


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
        "OVERLAP_RATIO_PP": OVERLAP_RATIO_PP,
    }
    return {
        "model": problem.model.config.name,
        "cluster": problem.cluster.name,
        "training": asdict(problem.training),
        "constants": constants,
        "configurations": result.to_json(),
    }
