"""`darts-parallel tune plan.json --from-log train.log`: plans to try, what was measured, what follows."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from darts_parallel.cli._trainer_log import read_log
from darts_parallel.cli._trainers import start_command
from darts_parallel.config import load_config
from darts_parallel.cost import evaluate
from darts_parallel.errors import ConfigError, read_text
from darts_parallel.planner import Proposal, Trial, Tuning, own_cluster, sureness, tune, with_run
from darts_parallel.plans import Plan, read_plan, write_json, write_text
from darts_parallel.problem import GIB, Problem
from darts_parallel.report import Outcome, fits_label, plan_dict, table_of
from darts_parallel.report import seconds as seconds_label

SHOWN = 8


def run_tuning(problem: Problem, folder: Path, console: Console) -> float:
    """Propose plans, with the trials so far; returns the seconds expected of the best one.

    Leaves plan.json, the plan that is expected to be fastest, and plan_1.json, ... to be tried next.

    Errors:
        ConfigError, PlanError: a trial names no plan of this problem, or nothing that was measured.
    """
    settings = problem.config.tune
    source, log = str(settings["from"]), settings["log"]
    problem = problem if log is None else _with_kept(problem)
    plan = read_plan(source, problem.model, "tune.from")
    trials = read_trials(problem, settings["measured"])
    said = [] if log is None else [_add_log(problem, str(log), source, trials)]
    state = tune(problem, plan, trials, _beside(problem, source))
    if log is not None:
        run, before = trials[-1], sureness(plan, problem)
        seconds = run.seconds or 0.0
        problem = with_run(problem, plan, f"{log} ({seconds:.6g} s)", seconds, run.memory_bytes)
        said += _keep(
            problem,
            f"this plan's seconds: {before} before this log, {sureness(plan, problem)} after it",
        )
    best, following = state.proposals[0], enumerate(state.next(int(settings["top"])), 1)
    files = {folder / f"plan_{number}.json": proposal for number, proposal in following}
    for file, proposal in files.items():
        write_json(file, _plan_file(problem, proposal))
    found = {
        "from": source,
        "scale": state.scale,
        "excluded": state.excluded,
        "trials": [
            {"plan": t.name, "seconds": t.seconds, "memory_bytes": t.memory_bytes} for t in trials
        ],
        "best": _entry(problem, best, folder / "plan.json"),
        "next": [_entry(problem, proposal, file) for file, proposal in files.items()],
    }
    write_json(folder / "plan.json", _plan_file(problem, best) | {"tune": found})
    _print(problem, state, files, trials, folder, console)
    for line in said:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return best.expected_s


def _add_log(problem: Problem, log: str, source: str, trials: list[Trial]) -> str:
    """Add the run of a log to the trials, and say what it printed."""
    seconds, peak, said = read_log(log, problem)
    reserved = max(group.device.reserved for group in problem.cluster.groups)
    memory = None if peak is None else (peak + reserved) / GIB
    trials += read_trials(problem, [{"plan": source, "seconds": seconds, "memory_gb": memory}])
    return said


def _kept(problem: Problem) -> Path:
    """Return the file of `tune.figures` with what logs say of the problem's cluster."""
    return (
        Path(str(problem.config.tune["figures"])) / "cluster" / f"{own_cluster(problem).name}.yaml"
    )


def _with_kept(problem: Problem) -> Problem:
    """Return the problem with the figures that earlier logs have left."""
    path, own = _kept(problem), problem.config.cluster
    if not path.exists():
        return problem
    kept = load_config([f"cluster={path.stem}"], str(path.parents[1])).cluster
    nodes = [replace(old, count=new.count) for old, new in zip(kept.nodes, own.nodes, strict=False)]
    return Problem.from_config(replace(problem.config, cluster=replace(kept, nodes=nodes)))


def _keep(problem: Problem, said: str) -> list[str]:
    """Write the cluster with its runs; say how to use its figures."""
    path, cluster, software = (
        _kept(problem),
        problem.config.cluster,
        problem.config.training.software,
    )
    runs = list(dict.fromkeys(run.log for run in cluster.runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "# Moved by the runs below; darts-parallel tune --from-log adds to them.\n"
    write_text(path, head + OmegaConf.to_yaml(OmegaConf.structured(cluster)))
    named = "" if software is None else f" training.software={software}"
    if (trainer := problem.config.trainer.name) != "none":
        named = f" trainer={trainer}"
    use = f"darts-parallel --config-dir {path.parents[1]} cluster={path.stem}{named}"
    return [
        f"{said} ({len(runs)} in {path})",
        f"plan with them: {use} model={problem.config.model.name}",
    ]


def _beside(problem: Problem, source: str) -> list[Plan]:
    """Read the plans of the ladder of the tuned one, which lie next to it."""
    text, rungs = (
        read_text(source),
        (Path(source).with_name(f"plan_{x}.json") for x in ("fastest", "safe")),
    )
    files = [str(path) for path in rungs if f'"{path.name}"' in text and path.exists()]
    return [read_plan(file, problem.model, "tune.from") for file in files]


def _entry(problem: Problem, proposal: Proposal, file: Path) -> Mapping[str, object]:
    """Return a proposal for `plan.json`."""
    return {
        "plan": str(file),
        "description": proposal.plan.describe(problem.training.global_batch_size),
        "predicted_iteration_time_s": proposal.predicted_s,
        "expected_iteration_time_s": proposal.expected_s,
        "iteration_time_interval_s": list(proposal.interval_s),
        "trials": proposal.trials,
        "chance": proposal.chance,
        "command": start_command(problem, proposal.plan, file),
    }


def _plan_file(problem: Problem, proposal: Proposal) -> dict[str, Any]:
    return plan_dict(Outcome(problem, proposal.plan, evaluate(proposal.plan, problem)))


def read_trials(problem: Problem, measured: Any) -> list[Trial]:
    """Read the trials of `tune.measured`: a list of mappings, or a CSV file with their keys as columns.

    Args:
        measured: None, a path, or `[{plan: FILE, seconds: 1.2}, {plan: FILE, oom: true}]`; `memory_gb` is
            that of the fullest device in GiB.

    Errors:
        ConfigError: a trial without a plan or a measurement; an unreadable file.
        PlanError: its plan is not one of this model.
    """
    rows = _rows(measured)
    trials = []
    for number, row in enumerate(rows):
        place = f"tune.measured[{number}]"
        unknown = [key for key in row if key not in ("plan", "seconds", "memory_gb", "oom")]
        if unknown or not row.get("plan"):
            raise ConfigError(
                f"{place}={dict(row)} must have the keys plan and seconds (or oom: true), and may have "
                "memory_gb; try {plan: plan_1.json, seconds: 1.2}."
            )
        failed = str(row.get("oom", "")).lower() in ("1", "true", "yes")
        seconds, memory = (
            _number(row.get(key), f"{place}.{key}") for key in ("seconds", "memory_gb")
        )
        if failed == (seconds is not None):
            raise ConfigError(
                f"{place} must say seconds, or oom: true where it ran out of memory; try "
                f"{{plan: {row['plan']}, seconds: 1.2}}."
            )
        plan = read_plan(str(row["plan"]), problem.model, f"{place}.plan")
        evaluate(plan, problem)  # refuses a plan of another cluster or batch
        trials.append(
            Trial(str(row["plan"]), plan, seconds, None if memory is None else memory * GIB)
        )
    return trials


def _rows(measured: Any) -> list[Mapping[str, Any]]:
    if isinstance(measured, (DictConfig, ListConfig)):
        measured = OmegaConf.to_container(measured, resolve=True)
    if measured is None:
        return []
    if isinstance(measured, str):
        try:
            lines = read_text(measured).removeprefix("\ufeff").splitlines()
            return [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(lines)]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"tune.measured={measured} cannot be read ({why}); try a CSV file with the "
                "columns plan, seconds, memory_gb, oom."
            ) from None
    if isinstance(measured, list) and all(isinstance(row, dict) for row in measured):
        return measured
    raise ConfigError(
        f"tune.measured={measured} must be a list of trials or a CSV file; try "
        "[{plan: plan_1.json, seconds: 1.2}]."
    )


def _number(value: Any, key: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 1e-12 <= number <= 1e12:
        raise ConfigError(f"{key}={value} must be a number from 1e-12 to 1e12; try 1.0.")
    return number


def _told(trial: Trial) -> str:
    """Write a trial as `tune.measured` takes it."""
    found = "oom: true" if trial.seconds is None else f"seconds: {trial.seconds:g}"
    memory = "" if trial.memory_bytes is None else f", memory_gb: {trial.memory_bytes / GIB:g}"
    return f"{{plan: {trial.name}, {found}{memory}}}, "


def _print(
    problem: Problem,
    state: Tuning,
    files: Mapping[Path, Proposal],
    trials: Sequence[Trial],
    folder: Path,
    console: Console,
) -> None:
    console.print(f"{problem.config.model.name} on {problem.config.cluster.name}", highlight=False)
    if trials:
        ran = sum(trial.seconds is not None for trial in trials)
        told = f"{len(trials)} trials, {ran} ran; measured / predicted {state.scale:.3f}"
        console.print(f"{told}; {state.excluded} plans left out for their memory", highlight=False)
    console.print(_table(state, problem.training.global_batch_size))
    console.print("\nTry next", style="bold")
    for file, proposal in files.items():
        console.print(
            f"  {start_command(problem, proposal.plan, file)}", highlight=False, soft_wrap=True
        )
    if not files:
        console.print("  nothing: every candidate was tried", highlight=False)
    given = "".join(map(_told, trials)) + f"{{plan: {folder / 'plan_1.json'}, seconds: ...}}"
    line = f"then: darts-parallel tune {problem.config.tune['from']} 'tune.measured=[{given}]'"
    if problem.config.tune["log"] is not None:
        line = f"then: darts-parallel tune {folder / 'plan_1.json'} --from-log LOG"
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _table(state: Tuning, batch: int) -> Table:
    table = table_of(
        "\nPlans in the expected order",
        ("", "right"),
        ("expected", "right"),
        ("80 %", "left"),
        ("model alone", "right"),
        ("fits", "right"),
        ("plan", "left"),
    )
    for place, proposal in enumerate(state.proposals[:SHOWN], 1):
        share = 100.0 * (proposal.interval_s[1] / proposal.expected_s - 1.0)
        tried = f" · tried {proposal.trials} ×" if proposal.trials else ""
        table.add_row(
            str(place),
            seconds_label(proposal.expected_s),
            f"± {share:.0f} %",
            seconds_label(proposal.predicted_s),
            fits_label(proposal.chance),
            proposal.plan.describe(batch) + tried,
        )
    return table
