"""`darts-parallel tune plan.json --from-log train.log`: plans to try, what was measured, what follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from darts_parallel.cli._trainer_log import MOST, read_log
from darts_parallel.cli._trainers import start_command
from darts_parallel.config import load_config, ranged, read_typed, require
from darts_parallel.cost import evaluate
from darts_parallel.errors import ConfigError, Entries, read_text
from darts_parallel.planner import (
    SECONDS,
    Proposal,
    Trial,
    Tuning,
    deviations,
    own_cluster,
    tune,
    with_run,
)
from darts_parallel.plans import Plan, read_plan, write_json, write_text
from darts_parallel.problem import GIB, Problem, read_rows
from darts_parallel.report import (
    Outcome,
    fits_label,
    plan_dict,
    print_line,
    shown_path,
    table_of,
)
from darts_parallel.report import seconds as seconds_label

SHOWN = 8
"""Plans in the table."""
COLUMNS = (
    ">",
    "expected>",
    "80 %",
    "model alone>",
    "fits>",
    "plan",
)


@dataclass
class TrialRow:
    """A row of `tune.measured`."""

    plan: str = MISSING
    """File of the plan that was tried."""
    seconds: float | None = ranged(None, 1.0 / MOST, MOST)
    """Per iteration; null where it ran out of memory."""
    memory_gb: float | None = ranged(None, 1.0 / MOST, MOST)
    """Peak of the fullest device, in 2^30 bytes."""
    oom: bool = False
    """Whether it ran out of memory."""


def run_tuning(problem: Problem, folder: Path, console: Console) -> float:
    """Propose plans, with the trials so far; returns the seconds expected of the best one.

    Leaves plan.json, the plan that is expected to be fastest, and plan_1.json, ... to be tried
    next.

    Errors:
        ConfigError, PlanError: a trial names no plan of this problem, or nothing that was measured,
            or seconds that are too far off.
    """
    settings = problem.config.tune
    source = str(settings["from"])
    logged = settings["log"]
    if logged is not None:
        problem = _with_stored_figures(problem)
    plan = read_plan(source, problem.model, "tune.from")
    trials = read_trials(problem, settings["measured"])
    if logged is not None:
        run = read_log(str(logged), problem)
        print_line(console, run.said)
        reserved = max(group.device.reserved for group in problem.cluster.groups)
        memory = None if run.peak is None else run.peak + reserved
        trials.append(Trial(source, plan, run.seconds, memory, run.ranks))
    if not settings["force"]:
        trials = [_believed(problem, trial, console) for trial in trials]
    state = tune(problem, plan, trials, _risk_levels(problem, source))
    said = []
    if logged is not None:
        name = f"{logged} ({run.seconds:.6g} s)"
        problem = with_run(problem, replace(trials[-1], name=name))
        said = _store(problem, folder)
    files = {}
    for number, proposal in enumerate(state.next(int(settings["top"])), 1):
        file = folder / f"plan_{number}.json"
        files[file] = proposal
        write_json(file, _plan_file(problem, proposal))
    best = state.proposals[0]
    found = {"from": source, "scale": state.scale, "excluded": state.excluded}
    found["trials"] = [
        {"plan": trial.name, "seconds": trial.seconds, "memory_bytes": trial.memory_bytes}
        for trial in trials
    ]
    found["best"] = _entry(problem, best, folder / "plan.json")
    found["next"] = [_entry(problem, proposal, file) for file, proposal in files.items()]
    write_json(folder / "plan.json", _plan_file(problem, best) | {"tune": found})
    _print(problem, state, files, trials, folder, console)
    for line in said:
        print_line(console, line)
    return best.expected_s


def _believed(problem: Problem, trial: Trial, console: Console) -> Trial:
    """Return a trial without a peak that is too far off; say by how much, and what would explain it.

    Errors:
        ConfigError: its seconds are too far off.
    """
    doubts = deviations(problem, trial)
    for doubt in doubts:
        for line in doubt.sentences():
            print_line(console, f"{trial.name}: {line}")
        require(
            doubt.quantity != SECONDS,
            f"tune: {trial.name} measured at {trial.seconds:.4g} s",
            f"be as predicted, and is {doubt.sds:.1f} standard deviations off",
            "this plan's own run on an idle machine, or --force within a factor of ten",
        )
    return replace(trial, memory_bytes=None) if doubts else trial


def _stored_file(problem: Problem) -> Path:
    """Return the file of `tune.figures` with what logs say of the problem's cluster."""
    folder = Path(str(problem.config.tune["figures"])) / "cluster"
    return folder / f"{own_cluster(problem).name}.yaml"


def _with_stored_figures(problem: Problem) -> Problem:
    """Return the problem with the figures that earlier logs have left."""
    path = _stored_file(problem)
    own = problem.config.cluster
    if not path.exists():
        return problem
    stored = load_config([f"cluster={path.stem}"], str(path.parents[1])).cluster
    pairs = zip(stored.nodes, own.nodes, strict=False)
    nodes = [replace(old, count=new.count) for old, new in pairs]
    return problem.with_config(cluster=replace(stored, nodes=nodes))


def _store(problem: Problem, folder: Path) -> list[str]:
    """Write the cluster with its runs; say how to plan this job by them: plan.json holds both."""
    path = _stored_file(problem)
    cluster = problem.config.cluster
    runs = {run.log for run in cluster.runs}
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "# Moved by the runs below; darts-parallel tune --from-log adds to them.\n"
    write_text(path, head + OmegaConf.to_yaml(OmegaConf.structured(cluster)))
    return [
        f"efficiencies after all logs ({len(runs)}): {path}",
        f"plan this job with them: darts-parallel price {shown_path(folder / 'plan.json')}",
    ]


def _risk_levels(problem: Problem, source: str) -> list[Plan]:
    """Read the fastest and the safest plan of the tuned one, which lie next to it."""
    text = read_text(source)
    plans = []
    for level in ("fastest", "safe"):
        path = Path(source).with_name(f"plan_{level}.json")
        if f'"{path.name}"' in text and path.exists():
            plans.append(read_plan(str(path), problem.model, "tune.from"))
    return plans


def _entry(problem: Problem, proposal: Proposal, file: Path) -> dict[str, object]:
    """Return a proposal for `plan.json`."""
    batch = problem.training.global_batch_size
    entry = {"plan": str(file), "description": proposal.plan.describe(batch)}
    seconds = {
        "predicted_iteration_time_s": proposal.predicted_s,
        "expected_iteration_time_s": proposal.expected_s,
        "iteration_time_interval_s": proposal.interval_s,
    }
    command = start_command(problem, proposal.plan, file)
    known = {"trials": proposal.trials, "chance": proposal.chance, "command": command}
    return entry | seconds | known


def _plan_file(problem: Problem, proposal: Proposal) -> Entries:
    return plan_dict(Outcome(problem, proposal.plan, evaluate(proposal.plan, problem)))


def read_trials(problem: Problem, measured: Any) -> list[Trial]:
    """Read the trials of `tune.measured`: a list of mappings, or a CSV file with their keys as columns.

    Args:
        measured: None, a path, or `[{plan: FILE, seconds: 1.2}, {plan: FILE, oom: true}]`;
            `memory_gb` is that of the fullest device in GiB.

    Errors:
        ConfigError: a trial without a plan or a measurement; an unreadable file.
        PlanError: its plan is not one of this model.
    """
    return [
        _trial(problem, f"tune.measured[{number}]", row)
        for number, row in enumerate(_rows(measured))
    ]


def _trial(problem: Problem, place: str, row: Mapping[str, Any]) -> Trial:
    """Check one trial."""
    given = read_typed(TrialRow, row, place)
    rule = "say seconds, or oom: true where it ran out of memory"
    near = f"{{plan: {given.plan}, seconds: 1.2}}"
    require(given.oom == (given.seconds is None), place, rule, near)
    plan = read_plan(given.plan, problem.model, f"{place}.plan")
    evaluate(plan, problem)  # refuses a plan of another cluster or batch
    memory = None if given.memory_gb is None else given.memory_gb * GIB
    return Trial(given.plan, plan, given.seconds, memory)


def _rows(measured: Any) -> list[Mapping[str, Any]]:
    """Return the rows of `tune.measured`, unchecked."""
    if isinstance(measured, (DictConfig, ListConfig)):
        measured = OmegaConf.to_container(measured, resolve=True)
    if measured is None:
        return []
    if isinstance(measured, str):
        return _file_rows(measured)
    if isinstance(measured, list) and all(isinstance(row, dict) for row in measured):
        return measured
    raise ConfigError(
        f"tune.measured={measured} must be a list of trials or a CSV file; try "
        "[{plan: plan_1.json, seconds: 1.2}]."
    )


def _file_rows(path: str) -> list[Mapping[str, Any]]:
    """Return the rows of a CSV file, without empty cells."""
    plan, *others = TrialRow.__dataclass_fields__
    rows = read_rows(path, (plan,), others, "tune.measured=")
    return [{key: value for key, value in row.items() if value} for _, row in rows]


def _print(
    problem: Problem,
    state: Tuning,
    files: Mapping[Path, Proposal],
    trials: Sequence[Trial],
    folder: Path,
    console: Console,
) -> None:
    print_line(console, f"{problem.config.model.name} on {problem.config.cluster.name}")
    if pins := problem.config.space.pins:
        print_line(console, f"only plans with {', '.join(pins)}, as this job; tp=null frees tp")
    if trials:
        ran = sum(trial.seconds is not None for trial in trials)
        told = f"{len(trials)} trials, {ran} ran; measured / predicted {state.scale:.3f}"
        print_line(console, f"{told}; {state.excluded} plans left out for their memory")
    console.print(_table(state, problem.training.global_batch_size))
    console.print("\nTry next", style="bold")
    for file, proposal in files.items():
        print_line(console, f"  {start_command(problem, proposal.plan, file)}")
    if not files:
        print_line(console, "  nothing: every candidate was tried")
    then = f"darts-parallel tune {shown_path(folder / 'plan_1.json')} --from-log LOG"
    print_line(console, f"then: {then}, or tune.measured=FILE.csv")


def _table(state: Tuning, batch: int) -> Table:
    table = table_of("\nPlans in the expected order", *COLUMNS)
    for place, proposal in enumerate(state.proposals[:SHOWN], 1):
        share = 100.0 * (proposal.interval_s[1] / proposal.expected_s - 1.0)
        plan = proposal.plan.describe(batch)
        if proposal.trials:
            plan += f" · tried {proposal.trials} ×"
        expected = seconds_label(proposal.expected_s)
        predicted = seconds_label(proposal.predicted_s)
        fits = fits_label(proposal.chance)
        table.add_row(str(place), expected, f"± {share:.0f} %", predicted, fits, plan)
    return table
