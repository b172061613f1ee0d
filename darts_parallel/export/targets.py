"""The targets by name, and how their files are written."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from darts_parallel.config import EXPORTS, HALF_BLOCK, ModelConfig, read_trainer
from darts_parallel.errors import UnsupportedError
from darts_parallel.export.common import Exported, Price, Refusals, Request
from darts_parallel.plans import BatchPhase, LayerStrategy, Plan, parts_beyond, write_text
from darts_parallel.problem import Problem

TARGETS: dict[str, Callable[[Request], Exported]] = {
    name: import_module(f"{__package__}.{name}").export for name in EXPORTS
}
"""The exporters by the names of their trainers: each is the function `export` of the module of
that name."""


def export_plan(
    problem: Problem,
    plan: Plan,
    target: str,
    price: Price | None = None,
    phases: Sequence[BatchPhase] = (),
) -> Exported:
    """Express `plan` in the words of `target`.

    Args:
        plan: A plan that is legal for it.
        price: Seconds per iteration of a plan, for refusals; infinite where it does not fit.
        phases: Of the training, where its global batch size changes.

    Errors: UnsupportedError: the target cannot express the plan or the model; names what, and the
        closest space to search in.
    """
    job = Request(target, problem, plan, price=price, phases=phases)
    exported = _express(job)
    job.settle()
    notes = list(exported.notes)
    if len(phases) > 1 and not exported.follows_phases:
        batch = phases[-1].global_batch_size
        notes.append(
            f"of the {len(phases)} phases of the training the files run the last alone, from step "
            f"{phases[-1].from_step} on at a global batch size of {batch}: each phase is a run of its own"
        )
    if plan.node_order and not plan.inside_nodes:
        order = ", ".join(map(str, plan.node_order))
        notes.append(
            f"start the nodes in the plan's order: node ranks 0, 1, ... are the cluster's nodes {order}"
        )
    return replace(exported, notes=tuple(notes))


def _express(job: Request) -> Exported:
    config = job.model
    if job.trainer.own_model:
        for key, words in parts_beyond(config, job.trainer.model_parts):
            raise job.refuse(
                f"model={config.name} has {words} (model.{key}={getattr(config, key)}), which no file "
                "written for it has",
                f"export={_trainer_with_parts(config)}, or trainer=none for a plan without files",
            )
    if job.half_blocks and not job.trainer.half_blocks:
        raise job.refuse(
            f"space.cut={HALF_BLOCK}, and its stages hold whole blocks",
            "cutting at space.cut=layer",
        )
    job.require_abilities()
    return TARGETS[job.target](job)


def _trainer_with_parts(config: ModelConfig) -> str:
    """Name a trainer for all parts of a model: the one with most parts, or one that wraps models."""
    trainers = [read_trainer(name) for name in EXPORTS]
    widest = max(trainers, key=lambda trainer: len(trainer.model_parts))
    if not any(parts_beyond(config, widest.model_parts)):
        return widest.name
    for trainer in trainers:
        lacks_experts = any(lack.when == {"num_experts": "some"} for lack in trainer.lacks)
        if not trainer.own_model and not (config.num_experts and lacks_experts):
            return trainer.name
    return widest.name


def taken_by(problem: Problem, plan: Plan) -> list[str]:
    """Name the trainers that can express `plan`."""
    return [name for name in TARGETS if not refusals(problem, plan, name)]


def require_trainers(problem: Problem) -> None:
    """Refuse a model or job of which the trainers that the configuration names take no plan at all.

    Errors: UnsupportedError: a trainer of `export` or `space.trainer` lacks the model, or a setting
        of the job.
    """
    config = problem.config
    for key, target in (("export", config.export), ("space.trainer", config.space.trainer)):
        if target is None or config.plan is not None:
            continue
        named = "trainer" if target == config.trainer.name else key
        job = Request(target, problem, _plain(problem), key=named)
        job.refusals.extend(model_refusals(problem, target))
        job.settle()


def _plain(problem: Problem) -> Plan:
    """Return data parallelism alone, which every trainer runs."""
    ranks = problem.cluster.num_devices
    return Plan(1, (0, problem.num_layers), (LayerStrategy(1, ranks),) * problem.num_layers)


def model_refusals(problem: Problem, target: str) -> Refusals:
    """Return the refusals of a target for the model and the job, whatever the plan."""
    return [
        entry
        for entry in refusals(problem, _plain(problem), target)
        if not entry[1].startswith("space")
    ]


def refusals(problem: Problem, plan: Plan, target: str) -> Refusals:
    """Return all that a target refuses of a plan, each with its way out."""
    job = Request(target, problem, plan, writes=False)
    with suppress(UnsupportedError):
        _express(job)
    return job.refusals


def write_export(exported: Exported, folder: Path) -> list[Path]:
    """Write the files whole and return their paths, the main one first.

    Errors:
        DartsParallelError: a file cannot be written.
    """
    paths = []
    for name, text in exported.files.items():
        paths.append(folder / name)
        write_text(paths[-1], text)
    return paths


def export_lines(target: str, exported: Exported, paths: list[Path]) -> list[str]:
    """Describe an export to its user: its files, and what they do not say."""
    return [
        f"{target}: {', '.join(map(str, paths))}",
        *(f"note: {n}" for n in exported.notes),
    ]
