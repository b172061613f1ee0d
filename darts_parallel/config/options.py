"""Command lines other than the main one: `key=value` arguments read into a dataclass."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from darts_parallel.config.checks import as_yaml, check_fields, require
from darts_parallel.config.composition import refuse_silent_overrides, with_tried_value
from darts_parallel.config.messages import config_sentence, error_sentence
from darts_parallel.config.words import given_values
from darts_parallel.errors import (
    INTERRUPTED,
    ConfigError,
    DartsParallelError,
    begin_command,
    fail,
)

Options = TypeVar("Options")
LinesOf = Callable[[Sequence[str]], list[str]]
"""Does what a subcommand's arguments say, and returns the lines to print."""
FOLDER = "hydra.run.dir="
READER_LEFT = 141
"""Exit status where the reader of a pipe has gone: 128 and the number of the signal."""


def parse(kind: type[Options], arguments: Sequence[str]) -> Options:
    """Return options of a dataclass, changed by `key=value` arguments; dots reach into nested ones.

    Args:
        arguments: As the shell gives them; a single value stands for a list of one.

    Errors:
        ConfigError: an unknown key, or a value that breaks a rule.
    """
    defaults: Any = kind()
    for key, value in given_values(arguments).items():
        require(bool(value), f"{key}=", "have a value", f"{key}=VALUE")
    refuse_silent_overrides(arguments, kind)
    try:
        given = OmegaConf.from_cli(list(arguments))
    except (YAMLError, ValueError):
        words = " ".join(arguments)
        raise ConfigError(f"{words} cannot be read; try closed brackets and quotes.") from None
    for entry in fields(defaults):
        key = entry.name
        default = getattr(defaults, key)
        if isinstance(default, list) and key in given:
            if not OmegaConf.is_list(given[key]):
                given[key] = [given[key]]
            near = str(default).replace(" ", "").replace("'", "")
            filled = bool(given[key]) or not default
            require(filled, f"{key}=[]", "list at least one value", f"{key}={near}")
    return read_typed(kind, given, given=arguments)


def read_typed(
    kind: type[Options], values: Any, place: str = "", given: Sequence[str] = ()
) -> Options:
    """Return a dataclass with values that a user wrote, each checked by the type and rule of its field.

    Args:
        values: A mapping.
        place: Where it stands, for messages; empty for options.
        given: The overrides that it was read from.

    Errors:
        ConfigError: an unknown key, or a value that breaks a rule.
    """
    require(isinstance(values, dict | DictConfig), f"{place}={values}", "hold keys", "key: value")
    try:
        found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values))
    except (OmegaConfBaseException, ValueError) as error:
        for known in (error, error.__cause__):
            if isinstance(known, DartsParallelError):
                raise known from None
        sentence = config_sentence(error, given, kind)
        raise ConfigError(f"{place}: {sentence}" if place else sentence) from None
    check_fields(place, found)
    return found


def describe(kind: type[Any]) -> str:
    """Return the options and their defaults, one a line."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(kind))
    lines = []
    for name, value in defaults.items():
        if isinstance(value, dict):
            lines.append(f"  {name}.KEY=VALUE  (keys: {', '.join(map(str, value))})")
        else:
            lines.append(f"  {name}={as_yaml(value)}")
    return "\n".join(lines)


def run_main(name: str, run: Callable[[Any], int]) -> int:
    """Parse the command line into the options that `run` takes, and run it; exit status as `guarded`.

    `--help` prints the docstring of its module, and the options.
    """
    arguments = sys.argv[1:]
    kind = get_type_hints(run)["options"]

    def work() -> int:
        if {"-h", "--help"} & set(arguments):
            about = str(sys.modules[run.__module__].__doc__).strip()
            print(f"{about}\n\nOptions, with their defaults:\n{describe(kind)}")
            return 0
        return run(parse(kind, arguments))

    return guarded(name, work)


def run_subcommand(arguments: Sequence[str], about: str, kind: type[Any], run: LinesOf) -> None:
    """Print the lines of a subcommand of darts-parallel, or its help; exit status as `guarded`."""

    def work() -> int:
        asked = not arguments or {"--help", "-h"} & set(arguments)
        print(about + describe(kind) if asked else "\n".join(run(arguments)))
        return 0

    if status := guarded("darts-parallel", work):
        raise SystemExit(status)


def run_folder(arguments: Sequence[str]) -> Path:
    """Return the folder that a command line names by `hydra.run.dir=`, or one of the time."""
    named = [one.removeprefix(FOLDER) for one in arguments if one.startswith(FOLDER)]
    if named and named[-1]:
        return Path(os.path.expanduser(named[-1]))
    return Path(datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))


def leave_pipe() -> int:
    """Print no more, since the reader of standard output has gone; returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_LEFT


@contextmanager
def user_errors(overrides: Sequence[str], name: str = "darts-parallel") -> Iterator[None]:
    """End the process in one sentence for a user's error, and silently if the reader has left.

    Args:
        overrides: `key=value` as the command was given.
        name: Of the command.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(leave_pipe()) from None
    except Exception as error:
        sentence = error_sentence(error, overrides)
        if sentence is None:
            raise
        fail(with_tried_value(sentence, overrides), name)


def guarded(name: str, work: Callable[[], int]) -> int:
    """Run a command's work with `user_errors`, and return its exit status."""
    begin_command()
    try:
        with user_errors((), name):
            return work()
    except KeyboardInterrupt:
        print(f"{name}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:
        return int(end.code or 0)
