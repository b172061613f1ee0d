"""The command `darts-parallel`: compose, plan, report, write.

What is slow to import (torch, and all that needs it) is imported when a job is known to be valid.
"""

import atexit
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from math import inf
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from darts_parallel.cli._arguments import deferred_overrides, flags_first, with_keys
from darts_parallel.cli._help import help_asked, help_lines
from darts_parallel.cli._job_config import job_config
from darts_parallel.cli._listing import LISTS, listing
from darts_parallel.cli._run_folder import RunFolder, forget_sweeps
from darts_parallel.cli._sweeps import sweep_folder
from darts_parallel.config import (
    composed_config,
    config_dir,
    register_schema,
    run_folder,
    user_errors,
    with_own_job,
)
from darts_parallel.errors import (
    REFUSED,
    DartsParallelError,
    begin_command,
    fail,
    package_version,
    replace_closed_outputs,
)

FOLDERS = ("hydra.run.dir=", "hydra.sweep.")
"""Overrides by which a user chooses where a run writes."""
NEEDS_HYDRA = re.compile(r"-|[+~]*hydra(?!\.run\.dir=[\w./-]+$)")
"""Arguments that only Hydra's own start understands: flags, and its keys but a plain folder."""


def plan_graph() -> None:
    """Plan a module of the user's own (`darts-parallel graph`)."""
    from darts_parallel.bilevel import train_operators
    from darts_parallel.graph import main as plan_module

    plan_module(sys.argv[2:], *[train_operators] * ("train=true" in sys.argv))


def design_machine() -> None:
    """Find the best use of a budget (`darts-parallel design`)."""
    from darts_parallel.cli._design import main as spend_budget

    spend_budget(sys.argv[2:])


def measure_machine() -> None:
    """Measure the machine at hand (`darts-parallel profile`)."""
    from darts_parallel.machine import main as measure

    del sys.argv[1]
    raise SystemExit(measure())


COMMANDS: dict[str, Callable[[], None]] = {
    "graph": plan_graph,
    "design": design_machine,
    "profile": measure_machine,
}
"""Commands that compose no job."""


def run_process() -> None:
    """Run `main` as a process, which ends without freeing its objects one by one: torch made many.

    What others registered for the end of the process comes first.
    """
    done: list[int] = []

    def leave() -> None:
        if done:
            sys.stdout.flush()
            os._exit(0)

    atexit.register(leave)
    gc.disable()  # until `begin_command`: to look for garbage takes a tenth of the imports' time
    main()
    done.append(1)


def main() -> None:
    """Run the command: exit status 0, or 2 with one sentence that the user can follow."""
    command = COMMANDS.get("".join(sys.argv[1:2]))
    if command is not None:
        command()
        return
    replace_closed_outputs()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    register_schema()
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, replace=True)
    began = time.time()
    _print_whatever_comes()
    try:
        with user_errors(sys.argv):
            _answer(sys.argv[1:], began)
    except KeyboardInterrupt:
        fail("interrupted before any plan was found.")


def _answer(given: Sequence[str], began: float) -> None:
    """Print what the arguments ask for, or run their jobs; `sys.argv` gets what Hydra reads."""
    if given and given[0] in LISTS:
        print("\n".join(listing(*given)))
        return
    if help_asked(given):
        print("\n".join(help_lines(given)))
        return
    arguments = with_own_job(with_keys(flags_first(given)))
    sys.argv[1:], held = deferred_overrides(arguments)
    if "--version" in sys.argv[1:]:
        print(f"darts-parallel {package_version()}")
        return
    if "model=module" in sys.argv:
        from darts_parallel.graph import derived_keys

        sys.argv += derived_keys(sys.argv[1:])

    found = []

    def task(composed: DictConfig) -> float:
        found.append(run_task(composed, began, held))
        return found[-1]

    try:
        if any(NEEDS_HYDRA.match(argument) for argument in sys.argv[1:]):
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(
                task
            )()
        else:
            found.append(run_single(sys.argv[1:], held))
        if found and min(found) == inf:
            raise SystemExit(REFUSED)
    except BaseException:
        forget_sweeps(began)
        raise


def _print_whatever_comes() -> None:
    """Print `?` for signs that the encoding of standard output (cp1252, ascii) lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def run_single(arguments: Sequence[str], held: Sequence[str]) -> float:
    """Run a job that needs nothing else of Hydra than its composition, as `run_task` does.

    Hydra's own start composes every job twice: first to ask whether it is a sweep.
    """
    overrides = [argument for argument in arguments if not argument.startswith(FOLDERS)]
    composed = composed_config(overrides)
    path = run_folder(arguments)
    entered = RunFolder(path.absolute(), fresh=not path.exists())
    path.mkdir(parents=True, exist_ok=True)
    named = len(overrides) < len(arguments)
    return _run_entered(entered, composed, [*overrides, *held], named=named, swept=False)


def run_task(composed: DictConfig, began: float, held: Sequence[str] = ()) -> float:
    """Run one job of the command; return the seconds per iteration, which sweepers minimise.

    A refused job prints its sentence here, since Hydra would print its own lines about an exception.
    It takes infinitely long, so a sweep goes on with its next job.

    Args:
        began: Wall-clock seconds at which the command began.
        held: Overrides that Hydra has not seen (`deferred_overrides`).
    """
    settings = HydraConfig.get()
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    given = [str(override) for override in overrides] if isinstance(overrides, list) else []
    given += held
    named = any(override.startswith(FOLDERS) for override in settings.overrides.hydra)
    swept = settings.mode == RunMode.MULTIRUN
    entered = RunFolder.enter(Path(settings.runtime.output_dir), began)
    return _run_entered(entered, composed, given, named=named, swept=swept)


def _run_entered(
    entered: RunFolder,
    composed: DictConfig,
    given: Sequence[str],
    *,
    named: bool,
    swept: bool,
) -> float:
    """Run a job in a folder that exists; infinite seconds where it is refused."""
    try:
        with user_errors(given), entered.own(named=named) as folder:
            return _run_in(folder, composed, given, swept=swept)
    except SystemExit as end:
        if end.code != REFUSED:
            raise
    return inf


def _run_in(folder: RunFolder, composed: DictConfig, given: Sequence[str], *, swept: bool) -> float:
    """Check the job's configuration, then import what is slow, and run the job."""
    try:
        config = job_config(composed, given)
        from darts_parallel.cli._task import run_in

        begin_command()
        return run_in(folder, config, given, swept=swept)
    except BaseException as error:
        if swept and isinstance(error, DartsParallelError):
            folder.leave(given)
        else:
            folder.restore()
        raise
