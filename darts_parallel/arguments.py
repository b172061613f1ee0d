"""The command's arguments before Hydra sees them: flags first, and one sentence for a wrong one."""

import re
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from darts_parallel.errors import ConfigError

_TAKES_VALUE = re.compile(
    r"^(--cfg|-c|--package|-p|--config-path|-cp|--config-name|-cn|--config-dir|-cd|--experimental-rerun)$"
)

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def arranged(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the flags before the overrides; argparse refuses overrides on both sides of a flag.

    Errors:
        ConfigError: a flag that does not exist or lacks its value.
    """
    flags: list[str] = []
    overrides: list[str] = []
    waiting = False
    for argument in arguments:
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


def _check(flags: list[str], overrides: list[str]) -> None:
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(
            f"{' '.join(flags)}: {message}; nearest legal: darts-parallel --help lists the flags."
        )

    parser.error = refuse  # type: ignore[method-assign]
    if "--version" not in flags:
        parser.parse_args([*flags, *overrides])
    for override in overrides:
        if not re.match(r"^[~+]{0,2}[\w./@:-]+(=|$)", override):
            raise ConfigError(f"the override {override} cannot be read; nearest legal: key=value.")
