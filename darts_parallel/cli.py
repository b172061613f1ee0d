"""The command `darts-parallel`: compose, search, verify, report, write.

The composition root: the only module of the package that imports `baselines`.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from darts_parallel import report
from darts_parallel.config import config_dir, register_schema
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.errors import ConfigError, DartsParallelError
from darts_parallel.messages import config_sentence
from darts_parallel.planfile import plan_dict, read_plan, write_json
from darts_parallel.problem import Problem, to_config
from darts_parallel.gradient_search import search
from darts_parallel.records import SearchResult, StepRecord
from darts_parallel.searcher import configuration_dicts, products
from darts_parallel.strategy import Plan
from darts_parallel.tracking import Tracker
from darts_parallel.verification import Verification


def main() -> None:
    """Entry point: exit status 0, or 2 with one sentence for an error that the user can mend."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    torch.set_num_threads(1)  # small tensors: threads cost more than they bring, and sums keep one order
    register_schema()
    try:
        hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")(run_task)()
    except DartsParallelError as error:
        _fail(str(error))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error.__cause__
        _fail(str(cause) if isinstance(cause, DartsParallelError) else config_sentence(error, sys.argv[1:]))
    except OSError as error:
        _fail(f"output: {error.filename} cannot be written ({error.strerror}); choose another hydra.run.dir.")
    except KeyboardInterrupt:
        _fail("interrupted before any plan was found.")


def _fail(sentence: str) -> None:
    print(f"darts-parallel: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def run_task(composed: DictConfig) -> float:
    """One job of the command; returns the seconds per iteration, which sweepers minimise."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        problem = Problem.from_config(to_config(composed))
        _require_writable(folder)
        return run_job(problem, folder, Console())
    except DartsParallelError:
        _remove_if_empty(folder)
        raise


def run_job(problem: Problem, folder: Path, console: Console) -> float:
    """Search (or evaluate a given plan), verify, report, and write `plan.json` into `folder`."""
    config = problem.config
    tracker = Tracker(folder / "tensorboard", problem) if config.output.tensorboard else None
    result: SearchResult | None = None
    verifications: list[Verification] = []
    if config.plan is not None:
        plan = read_plan(config.plan, problem)
        cost = evaluate(plan, problem)
    elif config.cost.name == "searcher":
        plan = _searcher_plan(problem, folder)
        cost = evaluate(plan, problem)
    else:
        result = _search(problem, tracker, console)
        plan, cost = result.plan, evaluate(result.plan, problem)
        verifications = _verify(problem, result, console)
    write_json(folder / "plan.json", plan_dict(problem, plan, cost, result, verifications))
    report.render(problem, result, plan, cost, verifications, console)
    _finish(tracker, result, plan, cost, verifications)
    console.print(f"plan: {folder / 'plan.json'}", soft_wrap=True, highlight=False)
    if tracker is not None:
        console.print(f"curves: tensorboard --logdir {folder / 'tensorboard'}", soft_wrap=True, highlight=False)
    return cost.iteration_time_s


def _finish(
    tracker: Tracker | None,
    result: SearchResult | None,
    plan: Plan,
    cost: CostBreakdown,
    verifications: list[Verification],
) -> None:
    if tracker is None:
        return
    tracker.finish(result, plan, cost, verifications)
    tracker.close()


def _search(problem: Problem, tracker: Tracker | None, console: Console) -> SearchResult:
    steps = problem.config.search.num_steps
    with _progress(problem, console, "search", steps) as update:

        def on_record(record: StepRecord) -> None:
            update(record.step, f"best {record.best_time_s:.4f} s/iteration")
            if tracker is not None:
                tracker.record(record)

        return search(problem, on_record=on_record)


@contextmanager
def _progress(problem: Problem, console: Console, title: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
    columns = (SpinnerColumn(), TextColumn(title), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    show = problem.config.output.progress and console.is_terminal
    with Progress(*columns, console=console, disable=not show, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, text: progress.update(task, completed=done, description=text)


def _verify(problem: Problem, result: SearchResult, console: Console) -> list[Verification]:
    """Ask every exact baseline that proves something for the chosen space."""
    from baselines import dynamic_programming, exhaustive
    from baselines.result import BaselineResult

    settings, seed = problem.config.verification, problem.config.search.seed
    if not settings.enabled:
        return []
    kind, found = problem.config.space.kind, result.iteration_time_s
    runs: list[tuple[str, str, Callable[[], BaselineResult]]] = [
        ("exhaustive", "uniform", lambda: exhaustive.find_plan(problem, budget=settings.max_seconds, seed=seed)),
    ]
    if kind != "uniform":
        runs.append(
            ("dynamic_programming", kind, lambda: dynamic_programming.find_plan(
                problem, budget=settings.max_seconds, seed=seed, incumbent=found))
        )  # fmt: skip
    answers = []
    try:
        for name, space, run in runs:
            with _progress(problem, console, f"verification by {name}", None):
                answers.append(_answer(name, space, run(), found))
    except KeyboardInterrupt:
        console.print("verification interrupted: the plan stands, unverified by what is missing below.")
    return answers


def _answer(name: str, space: str, answer: Any, found: float) -> Verification:
    gap = found / answer.iteration_time_s - 1.0 if answer.plan is not None else float("nan")
    return Verification(
        name=name,
        plan=answer.plan,
        iteration_time_s=answer.iteration_time_s,
        gap=0.0 if abs(gap) < 1e-12 else gap,
        seconds=answer.seconds,
        plans_evaluated=answer.plans_evaluated,
        proven=answer.proven,
        space=space,
        lower_bound_s=answer.lower_bound_s,
        note=answer.note,
    )


def _searcher_plan(problem: Problem, folder: Path) -> Plan:
    """The seed report's search: score every (dp, tp, pp), write all scores, take the best that runs."""
    from darts_parallel.uniform import first_plan_that_fits

    began = time.perf_counter()
    units = sum(not layer.joined for layer in problem.model.layers)
    data = configuration_dicts(problem, list(products(problem.cluster.num_devices, units)))
    data["seconds"] = time.perf_counter() - began
    degrees = [(entry["dp"], entry["tp"], entry["pp"]) for entry in data["configurations"]]
    plan = first_plan_that_fits(problem, degrees)
    write_json(folder / "configurations.json", data)
    return plan


def _require_writable(folder: Path) -> None:
    probe = folder / ".darts-parallel-probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output: {folder} cannot be written ({error.strerror}); choose another hydra.run.dir."
        ) from None


def _remove_if_empty(folder: Path) -> None:
    """Leave nothing behind a refused job."""
    for place in (folder / "tensorboard", folder):
        try:
            place.rmdir()
        except OSError:
            return
