"""Bad values for every option of every experiment and of `darts_parallel.run`, each in a process of its own.

A refused option must end in one sentence and leave no file. One that is accepted runs for some seconds, and
Ctrl-C must then end it in a sentence. The processes are forks of this one, which has imported everything.
"""

import importlib
import os
import pkgutil
import random
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import fields
from functools import cache, partial
from pathlib import Path

import experiments
from darts_parallel import evaluate, load_problem, plan
from darts_parallel.plan.file import write_json
from darts_parallel.report.plan_json import plan_dict
from experiments.robustness.inputs import BAD
from experiments.robustness.verdict import Try, Verdict

KIND = "bad options of experiments"
RUN = "darts_parallel.run"
HELPERS = ("results_page", "bilevel_baselines", "study")
"""Modules of `experiments` that are no commands."""
UNTOUCHED = ("publish", "shipped")
"""Options that write into the repository."""
SECONDS = 8
"""An experiment that runs for so long is interrupted."""
LONGEST = 30
"""Seconds that it may take to end then."""
_LEAKED = re.compile(r".*resource_tracker.*leaked.*\n?( *warnings\.warn\(.*\n?)?")
"""What the tracker of semaphores says of a fork, which ends without the finalizers of a whole process."""


def commands() -> list[str]:
    """Modules that are run with `key=value` options."""
    names = [module.name for module in pkgutil.iter_modules(experiments.__path__) if not module.ispkg]
    return [*(f"experiments.{name}" for name in names if name not in HELPERS), f"{RUN}.settings"]


def options_of(module: str) -> list[str]:
    """Names of a command's options, without those that write into the repository."""
    for name, kind in vars(importlib.import_module(module)).items():
        if name.endswith(("Options", "Settings", "Comparison")) and kind.__module__ == module:
            return [entry.name for entry in fields(kind) if entry.name not in UNTOUCHED]
    return []


def tries(count: int, seed: int) -> Iterator[Try]:
    """Every option with one bad value, then options drawn until there are `count`."""
    rng = random.Random(seed)
    every = [(module, name) for module in commands() for name in options_of(module)]
    pairs = [(module, name, rng.choice(BAD)) for module, name in every]
    while len(pairs) < count:
        pairs.append((*rng.choice(every), rng.choice(BAD)))
    for number, (module, name, value) in enumerate(pairs):
        module = module.removesuffix(".settings")
        yield Try(KIND, f"{seed}/{number}", partial(answered, module, f"{name}={value}"))


def answered(module: str, argument: str) -> Verdict:
    """How a command ends with one option."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [argument] if module != RUN else [f"plan={_plan()}", argument]
        status, words = _forked(module, arguments, folder)
        left = [str(path.relative_to(folder)) for path in Path(folder).rglob("*")]
    return Verdict(f"{module} {argument}", _outcome(status, words.strip(), left))


@cache
def _plan() -> str:
    """A plan of two processes, for `darts_parallel.run`."""
    problem = load_problem(["model=toy", "training=toy", "cluster=toy", "cluster.nodes.0.count=1",
                            "cluster.nodes.0.gpus=2", "space=uniform"])  # fmt: skip
    found = plan(problem).plan
    path = Path(tempfile.mkdtemp(prefix="attack-"), "plan.json")
    write_json(path, plan_dict(problem, found, evaluate(found, problem), None, ()))
    return str(path)


def _outcome(status: int | None, words: str, left: list[str]) -> str:
    words = _LEAKED.sub("", words).strip()
    if status is None:
        return f"does not end within {LONGEST} s of Ctrl-C"
    if "Traceback" in words or "Warning" in words:
        return f"exit status {status}: {words[-300:]}"
    if status == 2:
        if left:
            return f"refused, but leaves {left[0]}"
        return "refused" if words.count("\n") == 0 and words.endswith(".") else f"no sentence: {words[-300:]}"
    if status == 130:
        return "interrupted" if words.count("\n") == 0 else f"no sentence: {words[-300:]}"
    return "accepted" if status in (0, 1) else f"exit status {status}: {words[-300:]}"


def _forked(module: str, arguments: list[str], folder: str) -> tuple[int | None, str]:
    """Exit status and last words of a command; no status where it had to be killed."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            _run(module, arguments, folder, said.fileno())
        status = _status(child, SECONDS)
        if status is None:
            os.kill(child, signal.SIGINT)
            status = _status(child, LONGEST)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        said.seek(0)
        return status, said.read()


def _run(module: str, arguments: list[str], folder: str, errors: int) -> None:
    """Be the command; does not return."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.environ["HOME"] = folder
        os.dup2(errors, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = [module, *arguments]
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy's: the module has been imported before
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(child: int, seconds: float) -> int | None:
    """Exit status of a child that ends within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, state = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(state)
        time.sleep(0.05)
    return None
