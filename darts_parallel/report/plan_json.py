"""`plan.json`: what it holds, how it is written (atomically) and read back."""

from collections.abc import Sequence
from dataclasses import asdict
from math import exp
from typing import Any

from darts_parallel.cost import CostBreakdown, PipelineModel
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner import Intervals, intervals, offload_slopes, time_elasticities
from darts_parallel.plans import SCHEMA, Plan, package_version
from darts_parallel.problem import Problem, bill
from darts_parallel.schedules import find


def plan_dict(
    problem: Problem,
    plan: Plan,
    cost: CostBreakdown,
    result: SearchResult | None,
    verifications: Sequence[Verification],
    elasticities: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Return the content of `plan.json`.

    Args:
        elasticities: Of the plan's seconds (`planner.sensitivity`); None: those by automatic
            differentiation alone, without that of memory, which takes a search.
    """
    elasticities = time_elasticities(plan, problem) if elasticities is None else elasticities
    config = problem.config
    amount = bill(config.objective, problem.cluster, cost.iteration_time_s)
    names = tuple(layer.name for layer in problem.model.layers)
    return {
        "schema": SCHEMA,
        "model": asdict(config.model)
        | {
            "num_parameters": problem.model.num_parameters,
            "num_trained_parameters": problem.model.num_trained_parameters,
        },
        "cluster": asdict(config.cluster),
        "training": asdict(config.training),
        "trainer": config.trainer.name,
        **_placed(plan, names, problem),
        "parallelism": _parallelism(plan, problem),
        "predicted": {
            "iteration_time_s": cost.iteration_time_s,
            "tokens_per_s": cost.tokens_per_s,
            "mfu": cost.mfu,
            "memory_bytes": list(cost.memory_bytes),
            "capacity_bytes": list(cost.capacity_bytes),
            "feasible": cost.feasible,
            "stage_times_s": list(cost.stage_times_s),
            "breakdown_s": cost.breakdown_s,
            **({"offload_slopes": offload_slopes(plan, problem)} if plan.offload else {}),
            **_uncertainty(intervals(plan, problem, cost, elasticities)),
            **({} if amount is None else {"job": asdict(amount)}),
        },
        "sensitivity": elasticities,
        "search": _search_dict(problem, result),
        "verification": {entry.name: _verification_dict(entry, problem) for entry in verifications},
        "version": package_version(),
        "config": asdict(config),
    }


def _uncertainty(known: Intervals | None) -> dict[str, Any]:
    """Return 80 % intervals and chances of running out of memory; empty without a calibrated model."""
    if known is None:
        return {}
    return {
        "iteration_time_interval_s": list(known.iteration_time_s),
        "memory_interval_bytes": [list(pair) for pair in known.memory_bytes],
        "out_of_memory_probability": known.any_out_of_memory,
        "stage_out_of_memory_probability": list(known.out_of_memory),
        "indistinguishable_below": exp(known.difference) - 1.0,
    }


def _parallelism(plan: Plan, problem: Problem) -> dict[str, int | None]:
    def common(values: set[int]) -> int | None:
        return values.pop() if len(values) == 1 else None

    batch = problem.training.global_batch_size
    expert_keys = ("ep", "etp") if problem.model.has_experts else ()
    return {
        "dp": common({layer.dp for layer in plan.layers}),
        "tp": common({layer.tp for layer in plan.layers}),
        "pp": plan.pp,
        "cp": plan.cp,
        **{key: common({getattr(layer, key) for layer in plan.layers}) for key in expert_keys},
        "virtual_stages": plan.virtual_stages,
        "micro_batch_size": common(
            {batch // (layer.dp * plan.num_micro_batches) for layer in plan.layers}
        ),
    }


def _search_dict(problem: Problem, result: SearchResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    descended = result.gradient_iteration_time_s
    best = min(
        result.iteration_time_s, descended or float("inf")
    )  # a simpler plan may be taken than the best
    raw = result.raw_iteration_time_s if descended is not None else None
    return {
        "method": problem.config.search.method if problem.config.bilevel is None else result.method,
        "taken_from": result.method,
        "why": result.why,
        "seconds": result.seconds,
        "steps": result.steps,
        "restarts": result.restarts,
        "seed": result.seed,
        "raw_iteration_time_s": result.raw_iteration_time_s,
        "gradient_iteration_time_s": descended,
        "raw_gap": None if raw is None else raw / best - 1.0,
        "gradient_gap": None if descended is None else descended / best - 1.0,
        "plans_evaluated": result.plans_evaluated,
        "stopped_by": result.stopped_by,
    }


def _verification_dict(entry: Verification, problem: Problem) -> dict[str, Any]:
    """Return the entry, with the baseline's own plan where it beats the one that was found."""
    data = entry.to_dict()
    if entry.plan is not None and entry.gap > 0 and entry.space == problem.config.space.kind:
        names = tuple(layer.name for layer in problem.model.layers)
        data["better_plan"] = _placed(entry.plan, names, problem)
    return data


def _placed(plan: Plan, names: tuple[str, ...], problem: Problem) -> dict[str, Any]:
    """Return the plan with the ranks that its node order gives each stage, and its schedule."""
    cluster = problem.cluster.arranged(plan.node_order)
    model = PipelineModel.from_config(problem.config.cost, plan.virtual_stages, plan.schedule)
    has_experts = problem.model.has_experts
    placed = plan.to_dict(names, cluster.num_devices, cluster.pipeline_ranks, experts=has_experts)
    return placed | {"schedule": find(model.schedule).name}
