"""`plan.json`: what it holds, how it is written (atomically) and read back."""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from darts_parallel.config import Config, require, to_config, translate
from darts_parallel.errors import DartsParallelError, PlanError, read_json
from darts_parallel.plans.phases import BatchPhase, phases_of
from darts_parallel.plans.strategy import SCHEMA, Plan
from darts_parallel.problem import Model, Problem
from darts_parallel.schedules import Searched

ONCE = ("plan", "export", "tune")
"""Root keys of provenance: they are no part of the problem."""


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one piece (`write_text`)."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file in one piece (`write_bytes`)."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one piece: it is there whole or not at all.

    Errors:
        DartsParallelError: the folder cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DartsParallelError(f"output: {path} cannot be written ({error.strerror}).") from None


def read_plan(path: str, model: Model, key: str = "plan", batch: int = 0) -> Plan:
    """Read the plan of a `plan.json` that was made for the same model.

    Args:
        key: Of the configuration, under which the path was given.
        batch: Global batch size of the job; 0: that of the file. Micro-batches keep the size that they
            have in the file, and their number follows.

    Errors:
        PlanError: the file is missing, broken, or of another model.
        ConfigError: the micro-batches of the file do not divide the batch.
    """
    data = _read(path, key)
    try:
        if isinstance(data, dict) and "schema" not in data:
            raise PlanError(f"the field schema is missing; try {SCHEMA}.")
        plan = Plan.from_dict(data)
    except PlanError as error:
        raise PlanError(f"{key}={path}: {str(error).removeprefix('plan: ')}") from None
    made_for = data.get("model")
    name = made_for.get("name") if isinstance(made_for, dict) else None
    if name is not None and name != model.config.name:
        raise PlanError(
            f"{key}={path} was made for model={name}, but this problem has model={model.config.name}; "
            f"try model={name}."
        )
    for index, (layer, spec) in enumerate(zip(data["layers"], model.layers, strict=False)):
        if layer.get("name", spec.name) != spec.name:
            raise PlanError(
                f"{key}={path}: layers[{index}].name={layer['name']!r} must be the model's; try {spec.name}."
            )
    before = 0
    with suppress(KeyError, TypeError):  # a file without its job
        before = data["config"]["training"]["global_batch_size"]
    known = before and batch not in (0, before)
    return _with_batch(plan, before, batch, f"{key}={path}") if known else plan


def _with_batch(plan: Plan, before: int, batch: int, source: str) -> Plan:
    """Return a plan with as many micro-batches of their size in a file as a global batch has."""
    group = plan.pp if plan.virtual_stages > 1 else 1
    unit = before * group // gcd(before * group, plan.num_micro_batches)
    near = max(round(batch / unit), 1) * unit
    rule = f"be a multiple of {unit} with the micro-batches of {source}"
    if isinstance(plan.passes, Searched):
        near = before
        rule = f"be {near}, for whose micro-batches {source} lists every pass"
    require(batch == near, f"training.global_batch_size={batch}", rule, near)
    return replace(plan, num_micro_batches=batch * plan.num_micro_batches // before)


def read_phases(path: str) -> list[BatchPhase]:
    """Read the phases of the training in a `plan.json`; none where one batch size holds throughout.

    Errors:
        PlanError: the file is missing, or its phases are broken.
    """
    try:
        return phases_of(_read(path, "plan"))
    except PlanError as error:
        raise PlanError(f"plan={path}: {str(error).removeprefix('plan: ')}") from None


def read_own_problem(path: str) -> Problem:
    """Read the problem that a `plan.json` was made for, from the configuration that it holds.

    Errors:
        PlanError, ConfigError: as `required_config`.
    """
    return Problem.from_config(required_config(path))


def required_config(path: str, key: str = "plan") -> Config:
    """Read the configuration in a `plan.json`.

    Args:
        key: Of the configuration, under which the path was given.

    Errors:
        PlanError: the file is missing, broken, or holds no configuration.
        ConfigError: its configuration breaks a rule of this version.
    """
    config = own_config(path, key=key)
    if config is None:
        raise PlanError(
            f"{key}={path}: the field config is missing; try a plan.json of the command."
        )
    return config


def own_config(path: str, *, key: str = "plan", **changes: Any) -> Config | None:
    """Read the configuration in a `plan.json`, None where it holds none.

    Args:
        key: Of the configuration, under which the path was given.
        changes: Root keys that get another value.

    Errors:
        PlanError, ConfigError: as `required_config`, of a file that is broken.
    """
    data = _read(path, key)
    config = data.get("config") if isinstance(data, dict) else None
    if not isinstance(config, dict):
        return None
    kept = {key: value for key, value in config.items() if key not in ONCE}
    translate(kept, f"{key}={path}")
    return to_config(OmegaConf.create({**kept, **changes}))


def _read(path: str, key: str) -> Any:
    return read_json(path, f"{key}={path}", "the plan.json of an earlier run", PlanError)
