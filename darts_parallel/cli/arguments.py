"""The command's arguments before Hydra sees them: flags first, and one sentence for a wrong one."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser

from darts_parallel.cli.job_config import COMPOSED, PRINTED
from darts_parallel.errors import ConfigError

_TAKES_VALUE = re.compile(
    r"^(--cfg|-c|--package|-p|--config-path|-cp|--config-name|-cn|--config-dir|-cd|--experimental-rerun)$"
)

VERBS = {"replan": "the plan that ran", "tune": "the plan of the job"}
"""Verbs of the command, and the plan that each names first."""
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")

_SETS_MODE = ("hydra.mode", "hydra/", "--config", "-cd", "-cp", "-cn")
"""Parts of arguments that may set `hydra.mode`: the override, and configuration files of the user's own."""


@contextmanager
def composed_once(arguments: Sequence[str]) -> Iterator[None]:
    """Keep Hydra from composing all a first time only to read `hydra.mode`, where no argument can set it."""
    asked = Hydra.get_mode
    if not any(part in argument for argument in arguments for part in _SETS_MODE):
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = asked  # type: ignore[method-assign]


def flags_first(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the flags before the overrides; argparse refuses overrides on both sides of a flag.

    Errors:
        ConfigError: a flag that does not exist or lacks its value.
    """
    flags: list[str] = []
    overrides: list[str] = []
    waiting = False
    for argument in _without_verb(arguments):
        if flags and flags[-1] in ("--info", "-i"):
            known = argument in _INFO
            flags.append(argument if known else "all")
            if known:
                continue
        if argument == "--explain" and not waiting:
            overrides.append("explain=true")
        elif waiting or argument.startswith("-"):
            flags.append(argument)
            waiting = not waiting and _TAKES_VALUE.match(argument) is not None
        else:
            overrides.append(argument)
    if flags and flags[-1] in ("--info", "-i"):
        flags.append("all")
    _check(flags, overrides)
    return [*flags, *overrides]


def _without_verb(arguments: Sequence[str]) -> list[str]:
    """The verbs as overrides: `replan plan.json` is `replan.from=plan.json`, and `tune` and `--top` alike."""
    given = _without_top(list(arguments))
    flagged = [False, *(_TAKES_VALUE.match(argument) is not None for argument in given)]
    verb = next((i for i, a in enumerate(given) if a in VERBS and not flagged[i]), None)
    if verb is None:
        return given
    path = next((a for a in given[verb + 1 : verb + 2] if "=" not in a and not a.startswith("-")), None)
    if path is not None:
        return [*given[:verb], f"{given[verb]}.from={path}", *given[verb + 2 :]]
    if not any(argument.startswith(f"{given[verb]}.from=") for argument in given):
        raise ConfigError(
            f"{given[verb]} needs {VERBS[given[verb]]}; "
            f"nearest legal: darts-parallel {given[verb]} plan.json."
        )
    return given[:verb] + given[verb + 1 :]


def _without_top(given: list[str]) -> list[str]:
    """`--top 3` or `--top=3` of the verb `tune` as its key of the configuration."""
    place = next((i for i, a in enumerate(given) if a == "--top" or a.startswith("--top=")), None)
    if place is None:
        return given
    flag, _, value = given[place].partition("=")
    used = 1 if value else 2
    value = value or next(iter(given[place + 1 : place + 2]), "")
    if "tune" not in given or not value.isdigit():
        raise ConfigError(
            f"{flag} {value} must be a whole number of plans of the verb tune; nearest legal: "
            "darts-parallel tune plan.json --top 3."
        )
    return [*given[:place], *given[place + used :], f"tune.top={value}"]


def deferred_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments for Hydra, and those that change keys of a plan's own configuration.

    Hydra would look for their keys in what it composes, whose cluster may have fewer node groups. Where the
    group itself is given (`cluster=...`), they belong to that.
    """
    names = {argument.lstrip("+~").partition("=")[0] for argument in arguments}
    sources = {"plan", *(f"{verb}.from" for verb in VERBS)}
    if not names & sources or "experiment" in names or {"-m", "--multirun"} & set(arguments):
        return list(arguments), []
    own = re.compile(r"^[+]{0,2}(\w+)\.[^=]+=")
    held = [
        argument
        for argument in arguments
        if (match := own.match(argument)) and match.group(1) not in (*names, *COMPOSED, *PRINTED, "hydra")
    ]
    return [argument for argument in arguments if argument not in held], held


def _check(flags: list[str], overrides: list[str]) -> None:
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(
            f"{' '.join(flags)}: {message}; nearest legal: darts-parallel --help lists the flags."
        )

    parser.error = refuse  # type: ignore[method-assign]
    if "--version" not in flags:
        parser.parse_args([*flags, *overrides])
    if any(flag.startswith("--experimental-rerun") for flag in flags):
        # it unpickles a file, which runs whatever code the file names
        refuse("a job is not run again from a pickle")
    for override in overrides:
        if not re.match(r"^[~+]{0,2}[\w./@:-]+(=|$)", override):
            raise ConfigError(f"the override {override} cannot be read; nearest legal: key=value.")
