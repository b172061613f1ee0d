"""The command `darts-parallel`: compose, plan, report, write."""

import os
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from darts_parallel.cli._arguments import deferred_overrides, flags_first
from darts_parallel.cli._design import main as spend_budget
from darts_parallel.cli._job import Job, fail
from darts_parallel.cli._job_config import job_config
from darts_parallel.cli._run_folder import RunFolder, forget_sweeps
from darts_parallel.cli._sweep_table import OVERRIDES, sweep_folder
from darts_parallel.config import (
    config_dir,
    error_sentence,
    leave_pipe,
    readable_folder,
    register_schema,
    with_own_job,
)
from darts_parallel.errors import begin_command
from darts_parallel.export import require_trainers
from darts_parallel.planner import choose_nodes
from darts_parallel.plans import package_version, write_json
from darts_parallel.problem import Problem
from darts_parallel.report import seconds as seconds_label

PIPED_WIDTH = 100
CONFIG_DIR = "--config-dir="
FOLDERS = ("hydra.run.dir=", "hydra.sweep.")
"""Overrides by which a user chooses where a run writes."""


class PipedConsole(Console):
    """A console that is wide in a pipe, where rich assumes 80 columns.

    It leaves it to the command what follows where the reader of its pipe has gone.
    """

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        if not self.is_terminal:
            self.width = max(self.width, PIPED_WIDTH)

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught, instead of an exit status of its own."""
        raise BrokenPipeError


def main() -> None:
    """Run the command: exit status 0, or 2 with one sentence that the user can follow."""
    if sys.argv[1:2] == ["graph"]:
        from darts_parallel.bilevel import train_operators
        from darts_parallel.graph import main as plan_graph

        plan_graph(sys.argv[2:], *[train_operators] * ("train=true" in sys.argv))
        return
    if sys.argv[1:2] == ["design"]:
        spend_budget(sys.argv[2:])
        return
    if sys.argv[1:2] == ["profile"]:
        from darts_parallel.machine import main as measure

        del sys.argv[1]
        raise SystemExit(measure())
    begin_command()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    torch.set_num_threads(
        1
    )  # small tensors: threads cost more than they bring, and sums keep one order
    register_schema()
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, replace=True)
    began = time.time()

    def task(composed: DictConfig) -> float:
        return run_task(composed, began, held)

    held: list[str] = []
    _print_whatever_comes()
    try:
        sys.argv[1:], held = deferred_overrides(with_own_job(flags_first(sys.argv[1:])))
        for place, argument in enumerate(sys.argv):
            if argument.startswith(CONFIG_DIR):
                sys.argv[place] = CONFIG_DIR + readable_folder(argument.removeprefix(CONFIG_DIR))
        if "--version" in sys.argv[1:]:
            print(f"darts-parallel {package_version()}")
            return
        if "model=module" in sys.argv:
            from darts_parallel.graph import derived_keys

            sys.argv += derived_keys(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")(task)()
        sys.stdout.flush()
    except KeyboardInterrupt:
        fail("interrupted before any plan was found.")
    except BrokenPipeError:
        raise SystemExit(leave_pipe()) from None
    except Exception as error:
        sentence = error_sentence(error, [*sys.argv[1:], *held])
        if sentence is None:
            raise
        forget_sweeps(began)
        fail(sentence)


def _print_whatever_comes() -> None:
    """Print `?` for signs that the encoding of standard output (cp1252, ascii) lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def run_task(composed: DictConfig, began: float, held: Sequence[str] = ()) -> float:
    """Run one job of the command; return the seconds per iteration, which sweepers minimise.

    A refused job ends the command here: Hydra would print its own lines about an exception.

    Args:
        began: Wall-clock seconds at which the command began.
        held: Overrides that Hydra has not seen (`deferred_overrides`).
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
    except KeyboardInterrupt:
        raise
    except BrokenPipeError:
        raise SystemExit(
            leave_pipe()
        ) from None  # here already: Hydra would print a sentence of its own
    except Exception as error:
        sentence = error_sentence(error, given)
        if sentence is None:
            raise
        fail(sentence)


def _run_in(folder: RunFolder, composed: DictConfig, given: Sequence[str], *, swept: bool) -> float:
    """Run the job in its folder, which is as before where the job ends without a result."""
    try:
        problem, rental = choose_nodes(Problem.from_config(job_config(composed, given)))
        require_trainers(problem)
        folder.require_writable()
        if swept:
            write_json(folder.path / OVERRIDES, given)
        found = Job(problem, folder.path, PipedConsole(quiet=swept), rental, given).run()
        if swept:
            print(f"{folder.path.name}: {seconds_label(found)}", flush=True)
        return found
    except BaseException:
        folder.restore()
        raise
