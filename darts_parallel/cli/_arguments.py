"""The command's arguments before Hydra sees them: verbs and own flags, one sentence for a wrong one."""

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from darts_parallel.cli._job_config import COMPOSED, PRINTED
from darts_parallel.errors import ConfigError

VERBS = {"tune": "the plan of the job", "price": "a plan", "explain": "a plan"}
"""Verbs of the command, and the plan that each names; `price` takes degrees of its own, too."""
DEGREES = (
    "pp",
    "tp",
    "dp",
    "cp",
    "num_micro_batches",
    "micro_batch_size",
    "virtual_stages",
    "zero_stage",
    "recompute",
    "sequence_parallel",
)
"""Keys of the space that `price` takes without their group."""
SWITCHES = (
    "--help -h",
    "--hydra-help",
    "--version",
    "--resolve",
    "--run -r",
    "--multirun -m",
    "--shell-completion -sc",
)
VALUED = ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd")
CHOICES = {
    "--cfg -c": ("job", "hydra", "all"),
    "--info -i": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""Flags of Hydra. A job is not run again from a pickle (`--experimental-rerun`), which may hold any code."""


class FlagParser(ArgumentParser):
    """The command's flags; a wrong one is a `ConfigError`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        for names in (*SWITCHES, "--explain"):
            self.add_argument(*names.split(), action="store_true")
        for names in VALUED:
            self.add_argument(*names.split())
        for names, choices in CHOICES.items():
            self.add_argument(*names.split(), choices=choices)
        self.add_argument("--top", nargs="?", const="nothing")
        self.add_argument("--from-log")
        self.add_argument("overrides", nargs="*")

    def error(self, message: str) -> NoReturn:
        """Refuse the flags in one sentence."""
        raise ConfigError(f"{message}; try darts-parallel --help, which lists the flags.")


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Put flags before overrides, as Hydra wants them, and write verbs and own flags as overrides.

    `tune plan.json --top 3` sets `tune.from` and `tune.top`, `--from-log` `tune.log`, `--explain` `explain`.

    Errors:
        ConfigError: a flag that does not exist or lacks its value; an override that cannot be read.
    """
    topics = CHOICES["--info -i"]
    told = [
        "--info=all" if word in ("--info", "-i") and following not in topics else word
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False)
    ]
    flags = vars(FlagParser().parse_intermixed_args(["--help"] if told == ["help"] else told))
    log, given = flags.pop("from_log"), flags.pop("overrides")
    if log is not None and "tune" not in given:
        raise ConfigError(
            f"--from-log {log} needs the verb tune; try tune plan.json --from-log {log}."
        )
    overrides = [
        *_without_verb(given, flags.pop("top")),
        *([] if log is None else [f"tune.log={log}"]),
    ]
    overrides += ["explain=true"] if flags.pop("explain") else []
    for override in overrides:
        if not re.match(r"^[~+]{0,2}[\w./@:-]+(=|$)", override):
            raise ConfigError(f"the override {override} cannot be read; try key=value.")
    named = {f"--{name.replace('_', '-')}": value for name, value in flags.items() if value}
    return [
        *(flag if value is True else f"{flag}={value}" for flag, value in named.items()),
        *overrides,
    ]


def _without_verb(given: list[str], top: str | None) -> list[str]:
    """Write a verb, the plan after it and `--top` as overrides; a plan's file alone is priced."""
    verb = next((argument for argument in given if argument in VERBS), None)
    if top is not None and (verb != "tune" or not top.isdigit()):
        raise ConfigError(
            f"--top {top} must be a whole number of plans of the verb tune; try "
            "darts-parallel tune plan.json --top 3."
        )
    place = 0 if verb is None else given.index(verb)
    rest = given if verb is None else given[:place] + given[place + 1 :]
    key = "tune.from" if verb == "tune" else "plan"
    degrees = [f"space.{given}" if given.partition("=")[0] in DEGREES else given for given in rest]
    if (
        rest[place:]
        and "=" not in rest[place]
        and (verb is not None or rest[place].endswith(".json"))
    ):
        rest = [*rest[:place], f"{key}={rest[place]}", *rest[place + 1 :]]
    elif (
        verb == "price" and degrees != rest
    ):  # the user's own degrees: their best plan, whatever its chance
        rest = ["space=uniform", "space.out_of_memory=0.5", *degrees]
    elif verb is not None and not any(argument.startswith(f"{key}=") for argument in rest):
        raise ConfigError(f"{verb} needs {VERBS[verb]}; try darts-parallel {verb} plan.json.")
    rest = [*rest, f"{verb}=true"] if verb in ("price", "explain") else rest
    return [*rest, *([] if top is None else [f"tune.top={top}"])]


def deferred_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments for Hydra, and those that change keys of a plan's own configuration.

    Hydra would look for their keys in what it composes, whose cluster may have fewer node groups. Where the
    group itself is given (`cluster=...`), they belong to that.
    """
    names = {argument.lstrip("+~").partition("=")[0] for argument in arguments}
    if not names & {"plan", "tune.from"} or "experiment" in names or "--multirun" in arguments:
        return list(arguments), []
    own = re.compile(r"^[+]{0,2}(\w+)\.[^=]+=")
    held = [
        argument
        for argument in arguments
        if (match := own.match(argument))
        and match.group(1) not in (*names, *COMPOSED, *PRINTED, "hydra")
    ]
    return [argument for argument in arguments if argument not in held], held
