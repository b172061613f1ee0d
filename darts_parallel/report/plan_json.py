"""The content of `plan.json`."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from math import exp, isfinite

from darts_parallel.cost import PipelineModel
from darts_parallel.errors import Entries, package_version
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner import offload_slopes, time_elasticities
from darts_parallel.plans import SCHEMA, Plan
from darts_parallel.problem import Problem, bill
from darts_parallel.report.outcome import Outcome
from darts_parallel.schedules import find

SEARCHED = (
    "why",
    "seconds",
    "steps",
    "restarts",
    "seed",
    "gradient_iteration_time_s",
    "plans_evaluated",
    "stopped_by",
)
"""Parts of a search's result under the same names in plan.json."""


def plan_dict(outcome: Outcome) -> Entries:
    """Return the content of `plan.json`.

    Without elasticities, those of the seconds are computed by automatic differentiation; the
    elasticity of the memory, which takes a search, is then missing.
    """
    problem = outcome.problem
    plan = outcome.plan
    if outcome.elasticities is None:
        outcome = replace(outcome, elasticities=time_elasticities(plan, problem))
    answers = {entry.name: _verification_dict(entry, problem) for entry in outcome.answers}
    data: Entries = {"schema": SCHEMA}
    data |= _job(problem) | _placed(plan, problem)
    data["parallelism"] = _parallelism(plan, problem)
    data["predicted"] = _predicted(outcome)
    data["sensitivity"] = outcome.elasticities
    data["search"] = None if outcome.result is None else _search_dict(outcome, outcome.result)
    data["verification"] = answers
    data["version"] = package_version()
    data["config"] = asdict(problem.config)
    return data


def _job(problem: Problem) -> Entries:
    """Return the model, the cluster and the framework of the job."""
    config = problem.config
    counts = {
        "num_parameters": problem.model.num_parameters,
        "num_trained_parameters": problem.model.num_trained_parameters,
    }
    return {
        "model": asdict(config.model) | counts,
        "cluster": asdict(config.cluster),
        "training": asdict(config.training),
        "trainer": config.trainer.name,
    }


def _predicted(outcome: Outcome) -> Entries:
    """Return seconds, bytes and dollars of the plan, with their intervals."""
    problem = outcome.problem
    plan = outcome.plan
    cost = outcome.cost
    predicted = asdict(cost)
    if plan.offload:
        predicted["offload_slopes"] = offload_slopes(plan, problem)
    sure = outcome.sure
    if sure is not None:
        predicted |= {
            "iteration_time_interval_s": sure.iteration_time_s,
            "memory_interval_bytes": sure.memory_bytes,
            "out_of_memory_probability": sure.any_out_of_memory,
            "stage_out_of_memory_probability": sure.out_of_memory,
            "indistinguishable_below": exp(sure.difference) - 1.0,
        }
    amount = bill(problem.config.objective, problem.cluster, cost.iteration_time_s)
    if amount is not None:
        predicted["job"] = asdict(amount)
    if outcome.failures is not None:
        predicted["failures"] = asdict(outcome.failures)
    return predicted


def _parallelism(plan: Plan, problem: Problem) -> dict[str, int | None]:
    """Return the degrees that all layers share; None where layers differ."""
    layers = plan.layers
    batch = problem.training.global_batch_size // plan.num_micro_batches
    degrees: dict[str, int | None] = {}
    for name in ("pp", "cp", "virtual_stages"):
        degrees[name] = getattr(plan, name)
    for name in ("dp", "tp", "ep", "etp") if problem.model.has_experts else ("dp", "tp"):
        degrees[name] = _common(getattr(layer, name) for layer in layers)
    degrees["micro_batch_size"] = _common(batch // layer.dp for layer in layers)
    return degrees


def _common(values: Iterable[int]) -> int | None:
    """Return the value that all share; None where they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _search_dict(outcome: Outcome, result: SearchResult) -> Entries:
    """Return how the plan was found, and how far its earlier stages are from the best known plan."""
    problem = outcome.problem
    asked = problem.config.search.method
    data: Entries = {}
    data["method"] = asked if problem.config.bilevel is None else result.method
    data["taken_from"] = result.method
    for name in SEARCHED:
        data[name] = getattr(result, name)
    raw = result.raw_iteration_time_s
    data["raw_iteration_time_s"] = raw if isfinite(raw) else None
    data["stages"] = [asdict(stage) | {"gap": outcome.gap(stage)} for stage in outcome.stages]
    return data


def _verification_dict(entry: Verification, problem: Problem) -> Entries:
    """Return the entry, with the baseline's own plan where it beats the one that was found."""
    data = entry.to_dict()
    if entry.plan is not None and entry.gap > 0 and entry.space == problem.config.space.kind:
        data["better_plan"] = _placed(entry.plan, problem)
    return data


def _placed(plan: Plan, problem: Problem) -> Entries:
    """Return the plan with the ranks that its node order gives each stage, and its schedule."""
    cluster = problem.cluster.arranged(plan.node_order)
    experts = problem.model.has_experts
    placed = plan.to_dict(problem.model.layer_names, cluster.pipeline_ranks, experts=experts)
    model = PipelineModel.from_config(problem.config.cost, plan.virtual_stages, plan.schedule)
    return placed | {"schedule": find(model.schedule).name}
