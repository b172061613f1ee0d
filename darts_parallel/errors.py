"""The errors a user can cause. Each message is one sentence: key, value, rule, closest valid value.

Ctrl-C is one of them: while a command still imports, nobody is there to catch it.
"""

import ast
import ctypes
import errno
import gc
import gzip
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import iter_modules
from types import FrameType
from typing import Any, NoReturn, TypeVar

Entries = dict[str, Any]
"""Values of any kind by name: the content of a JSON or YAML file, or keyword arguments."""
Amounts = dict[str, float]
"""Numbers by name: seconds by cause, bytes by part."""
REFUSED = 2
"""Exit status after an error that the user can correct."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of the signal."""
MOST_SAID = 2000
"""Characters of a sentence that a terminal shows; of a longer one beginning and end."""
MOST_READ = 2**26
"""Characters of a file that is read as text; no plan, model or table has as many."""
Method = TypeVar("Method", bound=Callable[..., Any])
STARTER = "DARTS_PARALLEL_STARTER"
"""Variable with the number of the process with which this one must end; set while it is started
only."""


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


def package_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("darts-parallel")
    except PackageNotFoundError:
        return "0+checkout"


def one_line(sentence: str) -> str:
    """Return a sentence as a terminal may show it: one line, not endless, no control characters."""
    text = ""
    for sign in " ".join(sentence.split()):
        text += sign if sign.isprintable() else ascii(sign)[1:-1]
    if len(text) <= MOST_SAID:
        return text
    half = MOST_SAID // 2
    return f"{text[:half]} ... {text[-half:]}"


def closest(value: object, members: Iterable[Any]) -> Any:
    """Return the member closest to a number (the smaller of two), or spelled most like a text.

    Members that begin with the text come first: `llama4` means `llama4_maverick`.
    """
    members = list(members)
    numbers = [member for member in members if isinstance(member, (int, float))]
    if isinstance(value, (int, float)) and numbers:
        return min(numbers, key=lambda member: (abs(member - value), member))
    names = list(map(str, members))
    longer = [name for name in names if value and name.startswith(str(value))]
    (near,) = get_close_matches(str(value), longer or names, n=1, cutoff=0.0)
    return near


def require_listed(
    value: object, members: Iterable[Any], sentence: str, refusal: type[DartsParallelError]
) -> None:
    """Refuse a value that is none of `members`; the sentence goes on with the closest one."""
    members = list(members)
    if value not in members:
        raise refusal(f"{sentence}; try {closest(value, members)}.")


def read_text(path: str | Path, errors: str = "strict") -> str:
    """Return the text of a user's file, also of a `.gz`; an OSError above `MOST_READ` characters.

    Args:
        errors: What happens to bytes that are not UTF-8, as `open` takes it.
    """
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors=errors) as file:
        text = file.read(MOST_READ + 1)
    if len(text) > MOST_READ:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def read_json(
    path: str | Path,
    place: str,
    near: str,
    refusal: type[DartsParallelError],
) -> Any:
    """Return the content of a user's JSON file, or raise a `refusal` that says to try `near`."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise refusal(f"{place} cannot be read ({error.strerror}); try {near}.") from None
    except (ValueError, RecursionError) as error:
        raise refusal(f"{place} is not valid JSON ({error}); try {near}.") from None


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package: names under `if TYPE_CHECKING` are imported late."""
    module = sys.modules[package]
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    homes: dict[str, str] = {}
    for test in ast.parse(source).body:
        for node in test.body if isinstance(test, ast.If) else ():
            if isinstance(node, ast.ImportFrom):
                homes |= dict.fromkeys((alias.name for alias in node.names), str(node.module))

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find, lambda: sorted({*vars(module), *homes})


def registered(package: str, name: str) -> list[Any]:
    """Return the object of a name in every module of a package without an underscore, by module."""
    modules = sorted(own.name for own in iter_modules(sys.modules[package].__path__))
    public = [module for module in modules if not module.startswith("_")]
    return [getattr(import_module(f"{package}.{module}"), name) for module in public]


def remembered(method: Method) -> Method:
    """Keep the answers of a method in its object, by their arguments; a copy of the object has none."""

    @wraps(method)
    def answer(own: Any, *key: Any) -> Any:
        known = vars(own).setdefault(f"answers of {method.__name__}", {})
        if key not in known:
            known[key] = method(own, *key)
        return known[key]

    return answer  # type: ignore[return-value]


def begin_start() -> None:
    """Let Ctrl-C end a command in one sentence until `begin_command`; libraries keep the traceback.

    A command is a process that `python -m` or the script `darts-parallel` starts. A process that
    starts for another one's workers (`STARTER`) is killed when that other process dies.
    """
    if os.environ.get(STARTER) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    command = bool(sys.argv) and Path(sys.argv[0]).name in ("-m", "darts-parallel")
    alone = threading.current_thread() is threading.main_thread()
    untouched = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if command and alone and untouched:
        signal.signal(signal.SIGINT, _end_quietly)


def replace_closed_outputs() -> None:
    """Write to nobody where standard output or standard error is closed."""
    if sys.stdout is None or sys.stderr is None:
        nobody = open(os.devnull, "w")  # noqa: SIM115 - open to the end, as they are
        sys.stdout = sys.stdout or nobody
        sys.stderr = sys.stderr or nobody


def begin_command() -> None:
    """Hand Ctrl-C over to the command, which has imported all that it needs.

    What the imports made is never looked at as garbage.
    """
    replace_closed_outputs()
    if signal.getsignal(signal.SIGINT) is _end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
    gc.enable()


def fail(sentence: str, name: str = "darts-parallel") -> NoReturn:
    """End a command with one sentence and exit status 2."""
    print(f"{name}: {one_line(sentence)}", file=sys.stderr)
    raise SystemExit(REFUSED)


def _end_quietly(number: int, frame: FrameType | None) -> None:
    print("interrupted before anything began.", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)  # unwinding half an import would print what it broke
