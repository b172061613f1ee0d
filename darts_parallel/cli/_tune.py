"""`darts-parallel tune plan.json --top 3`: plans to try, what was measured of them, and what follows."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from darts_parallel.cli._trainers import start_command
from darts_parallel.cost import evaluate
from darts_parallel.errors import ConfigError, read_text
from darts_parallel.plan import read_plan, write_json
from darts_parallel.planner import Proposal, Trial, Tuning, proposal_dict, tune
from darts_parallel.problem import GIB, Problem
from darts_parallel.report import fits_label, plan_dict, table_of
from darts_parallel.report import seconds as seconds_label

SHOWN = 8


def run_tuning(problem: Problem, folder: Path, console: Console) -> float:
    """Propose plans, with the trials so far; returns the seconds expected of the best one.

    Leaves plan.json, the plan that is expected to be fastest, and plan_1.json, ... to be tried next.

    Errors:
        ConfigError, PlanError: a trial names no plan of this problem, or nothing that was measured.
    """
    settings = problem.config.tune
    source = str(settings["from"])
    trials = read_trials(problem, settings["measured"])
    state = tune(problem, read_plan(source, problem.model, "tune.from"), trials)
    batch = problem.training.global_batch_size
    best, following = state.proposals[0], state.next(int(settings["top"]))
    entries = []
    for number, proposal in enumerate(following, 1):
        file = folder / f"plan_{number}.json"
        write_json(file, _plan_file(problem, proposal))
        entries.append(proposal_dict(proposal, str(file), start_command(problem, proposal.plan, file), batch))
    found = {
        "from": source,
        "scale": state.scale,
        "excluded": state.excluded,
        "trials": [{"plan": t.name, "seconds": t.seconds, "memory_bytes": t.memory_bytes} for t in trials],
        "best": proposal_dict(
            best, str(folder / "plan.json"), start_command(problem, best.plan, folder / "plan.json"), batch
        ),
        "next": entries,
    }
    write_json(folder / "plan.json", _plan_file(problem, best) | {"tune": found})
    _print(problem, state, following, trials, folder, console)
    return best.expected_s


def _plan_file(problem: Problem, proposal: Proposal) -> dict[str, Any]:
    return plan_dict(problem, proposal.plan, evaluate(proposal.plan, problem), None, [])


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
        seconds, memory = (_number(row.get(key), f"{place}.{key}") for key in ("seconds", "memory_gb"))
        if failed == (seconds is not None):
            raise ConfigError(
                f"{place} must say seconds, or oom: true where it ran out of memory; try "
                f"{{plan: {row['plan']}, seconds: 1.2}}."
            )
        plan = read_plan(str(row["plan"]), problem.model, f"{place}.plan")
        evaluate(plan, problem)  # refuses a plan of another cluster or batch
        trials.append(Trial(str(row["plan"]), plan, seconds, None if memory is None else memory * GIB))
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


def _print(
    problem: Problem,
    state: Tuning,
    following: Sequence[Proposal],
    trials: Sequence[Trial],
    folder: Path,
    console: Console,
) -> None:
    batch = problem.training.global_batch_size
    console.print(f"{problem.config.model.name} on {problem.config.cluster.name}", highlight=False)
    if trials:
        ran = sum(trial.seconds is not None for trial in trials)
        console.print(
            f"{len(trials)} trials, {ran} ran; measured / predicted {state.scale:.3f}; "
            f"{state.excluded} plans left out for their memory",
            highlight=False,
        )
    console.print(_table(state, batch))
    console.print("\nTry next", style="bold")
    for number, proposal in enumerate(following, 1):
        line = start_command(problem, proposal.plan, folder / f"plan_{number}.json")
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    if not following:
        console.print("  nothing: every candidate was tried", highlight=False)
    given = "".join(f"{{plan: {t.name}, seconds: {t.seconds:g}}}, " for t in trials if t.seconds is not None)
    console.print(
        f"then: darts-parallel tune {problem.config.tune['from']} 'tune.measured=[{given}{{plan: "
        f"{folder / 'plan_1.json'}, seconds: ...}}]'",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


def _table(state: Tuning, batch: int) -> Table:
    table = table_of("\nPlans in the expected order", ("", "right"), ("expected", "right"), ("80 %", "left"),
                     ("model alone", "right"), ("fits", "right"), ("plan", "left"))  # fmt: skip
    for place, proposal in enumerate(state.proposals[:SHOWN], 1):
        share = 100.0 * (proposal.interval_s[1] / proposal.expected_s - 1.0)
        tried = f" · tried {proposal.trials} ×" if proposal.trials else ""
        table.add_row(
            str(place), seconds_label(proposal.expected_s), f"± {share:.0f} %",
            seconds_label(proposal.predicted_s), fits_label(proposal.chance),
            proposal.plan.describe(batch) + tried,
        )  # fmt: skip
    return table
