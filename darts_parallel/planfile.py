"""`plan.json`: what it holds, how it is written (atomically) and read back."""

import json
import os
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from darts_parallel.config import Config
from darts_parallel.cost import CostBreakdown
from darts_parallel.errors import DartsParallelError, PlanError
from darts_parallel.objectives import bill
from darts_parallel.problem import Problem, to_config
from darts_parallel.records import SearchResult
from darts_parallel.sensitivity import sensitivity
from darts_parallel.strategy import SCHEMA, Plan
from darts_parallel.verification import Verification


def package_version() -> str:
    """Version of the installed package."""
    try:
        return version("darts-parallel")
    except PackageNotFoundError:
        return "0+checkout"


def plan_dict(
    problem: Problem,
    plan: Plan,
    cost: CostBreakdown,
    result: SearchResult | None,
    verifications: list[Verification],
    elasticities: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The content of `plan.json` (design, section 6).

    `elasticities` is what `sensitivity` says of the plan; None asks it.
    """
    config, amount = problem.config, bill(problem, cost.iteration_time_s)
    names = tuple(layer.name for layer in problem.model.layers)
    return {
        "schema": SCHEMA,
        "model": asdict(config.model),
        "cluster": asdict(config.cluster),
        "training": asdict(config.training),
        **_placed(plan, names, problem),
        "parallelism": _parallelism(plan, problem.training.global_batch_size),
        "predicted": {
            "iteration_time_s": cost.iteration_time_s,
            "tokens_per_s": cost.tokens_per_s,
            "mfu": cost.mfu,
            "memory_bytes": list(cost.memory_bytes),
            "capacity_bytes": list(cost.capacity_bytes),
            "feasible": cost.feasible,
            # the seed report's model knows no stages: their analytic seconds would contradict its total
            "stage_times_s": [] if config.cost.name == "searcher" else list(cost.stage_times_s),
            "breakdown_s": cost.breakdown_s,
            **({} if amount is None else {"job": amount.to_dict()}),
        },
        "sensitivity": sensitivity(plan, problem) if elasticities is None else elasticities,
        "search": _search_dict(result),
        "verification": {entry.name: _verification_dict(entry, problem) for entry in verifications},
        "version": package_version(),
        "config": asdict(config),
    }


def _parallelism(plan: Plan, global_batch_size: int) -> dict[str, int | None]:
    def common(values: set[int]) -> int | None:
        return values.pop() if len(values) == 1 else None

    return {
        "dp": common({layer.dp for layer in plan.layers}),
        "tp": common({layer.tp for layer in plan.layers}),
        "pp": plan.pp,
        "cp": plan.cp,
        "virtual_stages": plan.virtual_stages,
        "micro_batch_size": common(
            {global_batch_size // (layer.dp * plan.num_micro_batches) for layer in plan.layers}
        ),
    }


def _search_dict(result: SearchResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "method": result.method,
        "why": result.why,
        "seconds": result.seconds,
        "steps": result.steps,
        "restarts": result.restarts,
        "seed": result.seed,
        "raw_iteration_time_s": result.raw_iteration_time_s,
        "plans_evaluated": result.plans_evaluated,
        "stopped_by": result.stopped_by,
    }


def _verification_dict(entry: Verification, problem: Problem) -> dict[str, Any]:
    """The entry, with the baseline's own plan where it beats the one that was found."""
    data = entry.to_dict()
    if entry.plan is not None and entry.gap > 0 and entry.space == problem.config.space.kind:
        names = tuple(layer.name for layer in problem.model.layers)
        data["better_plan"] = _placed(entry.plan, names, problem)
    return data


def _placed(plan: Plan, names: tuple[str, ...], problem: Problem) -> dict[str, Any]:
    """The plan with the ranks that its node order gives every stage."""
    cluster = problem.cluster.arranged(plan.node_order)
    return plan.to_dict(names, cluster.num_devices, cluster.pipeline_ranks)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one piece (`write_text`)."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one piece: it is there whole or not at all.

    Errors:
        DartsParallelError: the folder cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DartsParallelError(f"output: {path} cannot be written ({error.strerror}).") from None


def read_plan(path: str, problem: Problem, key: str = "plan") -> Plan:
    """The plan of a `plan.json` that was made for the same model.

    Args:
        key: Of the configuration, under which the path was given.

    Errors:
        PlanError: the file is missing, broken, or of another model.
    """
    data = _read(path, key)
    try:
        if isinstance(data, dict) and "schema" not in data:
            raise PlanError(f"the field schema is missing; nearest legal: {SCHEMA}.")
        plan = Plan.from_dict(data)
    except PlanError as error:
        raise PlanError(f"{key}={path}: {str(error).removeprefix('plan: ')}") from None
    model = data.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if name is not None and name != problem.model.config.name:
        raise PlanError(
            f"{key}={path} was made for model={name}, but this problem has "
            f"model={problem.model.config.name}; nearest legal: model={name}."
        )
    for index, (layer, spec) in enumerate(zip(data["layers"], problem.model.layers, strict=False)):
        if layer.get("name", spec.name) != spec.name:
            raise PlanError(
                f"{key}={path}: layers[{index}].name={layer['name']!r} must be the model's; "
                f"nearest legal: {spec.name}."
            )
    return plan


def read_own_problem(path: str) -> Problem:
    """The problem that a `plan.json` was made for, from the configuration that it holds.

    Errors:
        PlanError: the file is missing, broken, or holds no configuration.
        ConfigError: its configuration breaks a rule of this version.
    """
    config = own_config(path)
    if config is None:
        raise PlanError(
            f"plan={path}: the field config is missing; nearest legal: a plan.json as the command writes it."
        )
    return Problem.from_config(config)


def own_config(path: str, *, key: str = "plan", **changes: Any) -> Config | None:
    """The configuration in a `plan.json`, None where it holds none.

    Args:
        key: Of the configuration, under which the path was given.
        changes: Root keys that get another value.

    Errors:
        PlanError, ConfigError: as `read_own_problem`.
    """
    data = _read(path, key)
    config = data.get("config") if isinstance(data, dict) else None
    if not isinstance(config, dict):
        return None
    return to_config(OmegaConf.create({**config, "plan": None, "export": None, **changes}))


def _read(path: str, key: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{key}={path} cannot be read ({error.strerror}); nearest legal: the plan.json of an earlier run."
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{key}={path} is not valid JSON ({error}); nearest legal: the plan.json of an earlier run."
        ) from None
