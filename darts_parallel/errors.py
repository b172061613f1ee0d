"""The errors a user can cause. Each message is one sentence: key, value, rule, closest valid value.

Ctrl-C is one of them: while a command still imports, nobody is there to catch it.
"""

import ctypes
import errno
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of the signal."""
MOST_SAID = 2000
"""Characters of a sentence that a terminal shows; of a longer one beginning and end."""
MOST_READ = 2**26
"""Characters of a file that is read as text; no plan, model or table has as many."""
STARTER = "DARTS_PARALLEL_STARTER"
"""Variable with the number of the process with which this one must end; set while it is started only."""


class DartsParallelError(Exception):
    """Base of all errors that the command reports as one sentence with exit status 2."""


class ConfigError(DartsParallelError, ValueError):
    """A value that breaks a rule of the configuration."""


class PlanError(DartsParallelError, ValueError):
    """A plan that is broken, or that belongs to another problem."""


class InfeasibleError(DartsParallelError, ValueError):
    """No plan of the space satisfies all constraints; the message names the binding one."""


class UnsupportedError(DartsParallelError, ValueError):
    """A valid request that is not implemented."""


def one_line(sentence: str) -> str:
    """Return a sentence as a terminal may show it: on one line, not endless, without control characters."""
    text = "".join(s if s.isprintable() else ascii(s)[1:-1] for s in " ".join(sentence.split()))
    half = MOST_SAID // 2
    return text if len(text) <= MOST_SAID else f"{text[:half]} ... {text[-half:]}"


def closest(value: object, members: Iterable[Any]) -> Any:
    """Return the member nearest to a number, of two the smaller, or spelled most like a text."""
    known = list(members)
    if isinstance(value, (int, float)):
        return min(known, key=lambda member: (abs(member - value), member))
    return get_close_matches(str(value), [str(member) for member in known], n=1, cutoff=0.0)[0]


def read_text(path: str | Path) -> str:
    """Return the text of a user's file; an OSError says that it has more than `MOST_READ` characters."""
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(MOST_READ + 1)
    if len(text) > MOST_READ:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def read_json(path: str | Path, place: str, near: str, refusal: type[DartsParallelError]) -> Any:
    """Return the content of a user's JSON file; a `refusal` names its place and says to try `near`."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise refusal(f"{place} cannot be read ({error.strerror}); try {near}.") from None
    except (ValueError, RecursionError) as error:
        raise refusal(f"{place} is not valid JSON ({error}); try {near}.") from None


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` by which a package's face imports a module once one of its names is asked for.

    Args:
        modules: Names that each slow module of the package exports, by the module's name.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find


def begin_imports() -> bool:
    """Let Ctrl-C end a command in one sentence until `begin_command`; a library's user keeps the traceback.

    A command is what `python -m` or the script `darts-parallel` starts. Until `end_imports` no garbage is
    looked for: what is imported stays, and to walk through it again and again takes a tenth of the seconds.
    A process that another one starts for its own workers (`STARTER`) is killed when that one dies.

    Returns:
        Whether garbage was collected before.
    """
    if os.environ.get(STARTER) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    command = Path(sys.argv[0]).name in ("-m", "darts-parallel") if sys.argv else False
    alone = threading.current_thread() is threading.main_thread()
    if command and alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_quietly)
    collecting = gc.isenabled()
    gc.disable()
    return collecting


def end_imports(collecting: bool) -> None:
    """Let garbage be collected again, where it was; a command never looks into what it imported."""
    if signal.getsignal(signal.SIGINT) is _end_quietly:
        gc.freeze()
    if collecting:
        gc.enable()


def begin_command() -> None:
    """Hand Ctrl-C over to the command, which catches `KeyboardInterrupt`; what is closed hears nothing."""
    if sys.stdout is None or sys.stderr is None:
        nobody = open(os.devnull, "w")  # noqa: SIM115 - open to the end, as they are
        sys.stdout, sys.stderr = sys.stdout or nobody, sys.stderr or nobody
    if signal.getsignal(signal.SIGINT) is _end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()


def _end_quietly(number: int, frame: FrameType | None) -> None:
    print("interrupted before anything began.", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)  # unwinding half an import would print what it broke
