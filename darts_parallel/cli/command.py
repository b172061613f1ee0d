"""The command `darts-parallel`: compose, plan, report, write."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from darts_parallel.bilevel.command import run_bilevel
from darts_parallel.cli.arguments import deferred_overrides, flags_first
from darts_parallel.cli.job_config import job_config
from darts_parallel.cli.run_folder import RunFolder, forget_sweeps
from darts_parallel.cli.sweep_table import OVERRIDES, sweep_folder
from darts_parallel.cli.tune import run_tuning
from darts_parallel.config.messages import error_sentence
from darts_parallel.config.schema import config_dir, register_schema
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import UnsupportedError
from darts_parallel.export import (
    export_lines,
    export_plan,
    require_trainers,
    trainers_line,
    write_export,
)
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.file import package_version, write_json
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.node_choice import Rental
from darts_parallel.planner.planning import choose_nodes
from darts_parallel.planner.planning import plan as find_plan
from darts_parallel.planner.verification import answered
from darts_parallel.planner.watcher import Update, Watcher
from darts_parallel.problem.billing import bill, choose
from darts_parallel.problem.problem import Problem
from darts_parallel.report import text as report
from darts_parallel.report.elasticities import sensitivity
from darts_parallel.report.ending import render_ending
from darts_parallel.report.plan_json import plan_dict
from darts_parallel.report.tensorboard import Tracker
from darts_parallel.report.trace import trace_dict

FOLDERS = ("hydra.run.dir=", "hydra.sweep.")
"""Overrides by which a user chooses where a run writes."""
READER_LEFT = 141
"""Exit status where the reader of a pipe has gone: 128 and the number of SIGPIPE, as other programs."""


def main() -> None:
    """Entry point: exit status 0, or 2 with one sentence for an error that the user can mend."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    torch.set_num_threads(1)  # small tensors: threads cost more than they bring, and sums keep one order
    register_schema()
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, replace=True)
    began = time.time()

    def task(composed: DictConfig) -> float:
        return run_task(composed, began, held)

    held: list[str] = []
    _print_whatever_comes()
    try:
        sys.argv[1:], held = deferred_overrides(flags_first(sys.argv[1:]))
        if "--version" in sys.argv[1:]:
            print(f"darts-parallel {package_version()}")
            return
        hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")(task)()
        sys.stdout.flush()
    except KeyboardInterrupt:
        _fail("interrupted before any plan was found.")
    except BrokenPipeError:
        # whoever read the output has enough of it; what was written to files is whole
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(READER_LEFT) from None
    except Exception as error:
        sentence = error_sentence(error, [*sys.argv[1:], *held])
        if sentence is None:
            raise
        forget_sweeps(began)
        _fail(sentence)


def _print_whatever_comes() -> None:
    """Where standard output has an encoding of few signs (cp1252, ascii), print `?` for the others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _fail(sentence: str) -> NoReturn:
    print(f"darts-parallel: {' '.join(sentence.split())}", file=sys.stderr)
    raise SystemExit(2)


def run_task(composed: DictConfig, began: float, held: Sequence[str] = ()) -> float:
    """One job of the command; returns the seconds per iteration, which sweepers minimise.

    A refused job ends the command here: Hydra would print its own lines about an exception.

    Args:
        composed: The configuration.
        began: Wall-clock seconds at which the command began.
        held: Overrides that Hydra has not seen (`held_back`).
    """
    settings = HydraConfig.get()
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    given = [str(override) for override in overrides] if isinstance(overrides, list) else []
    given += held
    named = any(override.startswith(FOLDERS) for override in settings.overrides.hydra)
    entered = RunFolder.enter(Path(settings.runtime.output_dir), began)
    try:
        with entered.own(named=named) as folder:
            return _run_in(folder, composed, given, swept=settings.mode == RunMode.MULTIRUN)
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:
        sentence = error_sentence(error, given)
        if sentence is None:
            raise
        _fail(sentence)


def _run_in(folder: RunFolder, composed: DictConfig, given: Sequence[str], *, swept: bool) -> float:
    """The job in its folder, which is as before where the job ends without a result."""
    try:
        problem, rental = choose_nodes(Problem.from_config(job_config(composed, given)))
        require_trainers(problem)
        folder.require_writable()
        if swept:
            write_json(folder.path / OVERRIDES, given)
        return run_job(problem, folder.path, Console(), rental, given)
    except BaseException:
        folder.restore()
        raise


def run_job(
    problem: Problem,
    folder: Path,
    console: Console,
    rental: Rental | None = None,
    overrides: Sequence[str] = (),
) -> float:
    """Search (or evaluate a given plan), verify, report, and write `plan.json` into `folder`.

    Args:
        rental: How the nodes of the problem were chosen out of an offer, and their best uniform plan.
        overrides: What the command changed, `key=value`.
    """
    curves = folder / "tensorboard"
    tracker = Tracker(curves, problem, overrides) if problem.config.output.tensorboard else None
    try:
        return _run_tracked(problem, folder, console, tracker, rental)
    finally:
        if tracker is not None:
            tracker.close()


def _run_tracked(
    problem: Problem, folder: Path, console: Console, tracker: Tracker | None, rental: Rental | None
) -> float:
    config = problem.config
    if config.bilevel is not None and config.plan is None:
        with _progress(problem, console, "bilevel", None) as update:
            return run_bilevel(problem, folder, console, tracker, update, answered)
    if config.tune.get("from") is not None:
        return run_tuning(problem, folder, console)
    planned = find_plan(problem, rental=rental, watcher=_Screen(problem, console, tracker), folder=folder)
    plan, result, checked = planned.plan, planned.result, planned.checked
    cost = evaluate(plan, problem)
    amount = bill(problem, cost.iteration_time_s)
    if amount is not None:
        # refuses what is over the budget or the deadline
        choose(config.objective, [amount], [plan.describe(problem.training.global_batch_size)])
    if config.plan is not None and config.export is not None:
        export_plan(problem, plan, config.export)  # refused before anything is written
    elasticities = _sensitivity(plan, problem)
    written = replace(result, stopped_by="user") if result is not None and checked.interrupted else result
    data = plan_dict(problem, plan, cost, written, checked.answers, elasticities)
    write_json(folder / "plan.json", data | planned.entries())
    if config.output.trace:
        write_json(folder / "plan.trace.json", trace_dict(plan, problem))
    try:
        report.render(problem, result, plan, cost, checked.answers, console, elasticities)
        if tracker is not None:
            tracker.finish(result, plan, cost, checked.answers, elasticities)
    except KeyboardInterrupt:
        console.print("interrupted: plan.json is whole, the report or the curves are not.")
    render_ending(planned, problem, folder, console)
    console.print(trainers_line(problem, plan), soft_wrap=True, highlight=False, markup=False)
    if config.export is not None:
        _export(problem, plan, folder, config.export, console)
    return cost.iteration_time_s


def _export(problem: Problem, plan: Plan, folder: Path, target: str, console: Console) -> None:
    """Write the plan for a trainer; one that cannot express it ends the command, the plan stands."""
    try:
        exported = export_plan(problem, plan, target)
    except UnsupportedError as error:
        _fail(str(error))
    for line in export_lines(target, exported, write_export(exported, folder)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _sensitivity(plan: Plan, problem: Problem) -> dict[str, float]:
    """What the plan's time depends on; nothing after Ctrl-C, which must not cost the plan."""
    try:
        return sensitivity(plan, problem)
    except KeyboardInterrupt:
        return {}


class _Screen(Watcher):
    """Shows a job on the console, and its search as curves."""

    def __init__(self, problem: Problem, console: Console, tracker: Tracker | None) -> None:
        self.problem, self.console, self.tracker = problem, console, tracker

    def progress(self, title: str, total: int | None = None) -> AbstractContextManager[Update]:
        """A progress bar, where somebody looks."""
        return _progress(self.problem, self.console, title, total)

    def record(self, record: StepRecord) -> None:
        """Curves of a step."""
        if self.tracker is not None:
            self.tracker.record(record)

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        self.console.print(sentence)


@contextmanager
def _progress(
    problem: Problem, console: Console, title: str, total: int | None
) -> Iterator[Callable[[int, str], None]]:
    words = TextColumn("{task.description}")
    columns = (SpinnerColumn(), TextColumn(title), BarColumn(), words, TimeElapsedColumn())
    show = problem.config.output.progress and console.is_terminal
    with Progress(*columns, console=console, disable=not show, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, text: progress.update(task, completed=done, description=text)
