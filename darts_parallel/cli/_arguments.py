"""The command's arguments before Hydra sees them: verbs, own flags, refusals."""

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from darts_parallel.config import (
    EVERY_WORD,
    given_values,
    group_names,
    readable_folder,
    require,
)
from darts_parallel.config import with_keys as with_keys
from darts_parallel.errors import ConfigError, Entries

COMPOSED = ("output", "tune", "verification")
"""Root keys that always come from the command."""
PRINTED = ("plan", "export", "explain", "price", "output")
"""Root keys that change only what is written and printed, not the problem."""
VERBS = {
    "tune": "the plan of the job",
    "price": "a plan, or degrees such as tp=2",
    "explain": "a plan",
}
"""Verbs of the command, and the plan that each names; `price` takes degrees of its own, too."""
UNQUOTED = re.compile(r"^((?:plan|tune\.from)=(?=.*=)|[^=]+=(?=.*[^\x00-\x7f]))(?!['\"\[{])(.*)$")
"""An override with letters such as ü, or a plan in a folder of a sweep: Hydra takes them in quotes alone."""
OVERRIDE = re.compile(r"[~+]{0,2}[\w./@:-]+(=|$)")
ADDED_WORD = re.compile(r"^\+{1,2}(?=\w+=)")
"""Hydra's signs for a new key, before a word or a group: `+tp=2` is `tp=2`."""
KEY_OF_GROUP = re.compile(r"[+]{0,2}(\w+)\.[^=]+=")
"""An override of a key inside a group, and the group."""
GROUPS = ("model", "cluster", "trainer", "space", "search")
"""Groups whose names users give alone, or several of them."""
FIRST = ("graph", "design", "profile")
"""Commands with arguments of their own."""
TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
SWITCH = {"action": "store_const", "const": True}
FLAGS: dict[str, Entries] = {
    "--hydra-help": SWITCH,
    "--version": SWITCH,
    "--resolve": SWITCH,
    "--run -r": SWITCH,
    "--multirun -m": SWITCH,
    "--shell-completion -sc": SWITCH,
    "--package -p": {},
    "--config-path -cp": {},
    "--config-name -cn": {},
    "--config-dir -cd": {},
    "--cfg -c": {"choices": ("job", "hydra", "all")},
    "--info -i": {"choices": TOPICS},
    "--explain": SWITCH,
    "--top": {"type": int},
    "--from-log": {},
    "--force": SWITCH,
}
"""Flags of Hydra and of this command. A job is not run again from a pickle
(`--experimental-rerun`), which may hold any code."""
OWN_FLAGS = {
    "explain": "explain",
    "top": "tune.top",
    "from_log": "tune.log",
    "force": "tune.force",
}
"""Flags of this command, and the keys that they set; `tune.` goes with the verb."""


class FlagParser(ArgumentParser):
    """The command's flags; a wrong one is a `ConfigError`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        for names, settings in FLAGS.items():
            self.add_argument(*names.split(), **settings)
        self.add_argument("overrides", nargs="*")

    def error(self, message: str) -> NoReturn:
        """Refuse the flags in one sentence."""
        flag = re.search(r"--([\w-]+)[ =]([^\s-]\S*)", message)
        near = f"{flag[1]}={flag[2]}" if flag else "tp=4"
        ways = f"keys without dashes, such as {near}, or --help, which lists the flags"
        raise ConfigError(f"{message}; try {ways}.")


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Put flags before overrides, as Hydra wants them, and write verbs and own flags as overrides.

    `tune plan.json --top 3` sets `tune.from` and `tune.top`, `--from-log` `tune.log`, `--explain`
    `explain`.

    Errors:
        ConfigError: a flag that does not exist or lacks its value; an override that cannot be read.
    """
    given = list(arguments)
    for place, word in enumerate(given):
        if word in ("--info", "-i") and not {*TOPICS} & {*given[place + 1 : place + 2]}:
            given[place] = "--info=all"
    flags = vars(FlagParser().parse_intermixed_args(given))
    overrides = _without_verb(flags.pop("overrides"))
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        key = OWN_FLAGS.get(name)
        if value is None:
            continue
        if name == "config_dir":
            value = readable_folder(value)
        if key is None:
            words.append(flag if value is True else f"{flag}={value}")
            continue
        near = f"darts-parallel tune plan.json {flag} ..."
        goes = key in OWN_FLAGS or "tune" in arguments
        require(goes, f"{flag} {value}", "go with the verb tune", near)
        overrides.append(f"{key}={'true' if value is True else value}")
    overrides = [ADDED_WORD.sub("", override) for override in overrides]
    for override in overrides:
        for group in GROUPS:
            if override in group_names(group):
                raise ConfigError(f"{override} lacks its group; try {group}={override}.")
            if override.startswith(f"{group}=["):
                near = f"-m {re.sub('[][]', '', override)}, which plans each"
                require(False, override, "name one file of its group", near)
        if override.endswith(".json") and "=" not in override:
            ways = "-m plan=FIRST.json,SECOND.json, which prices both in one table"
            raise ConfigError(f"{override} is one plan too many; try {ways}.")
        if override in FIRST:
            rule = "be the first word, without --multirun"
            require(False, override, rule, f"darts-parallel {override}")
        if not OVERRIDE.match(override):
            near = re.sub(r"\[(\d+)\]", r".\1", override)
            near = "key=value" if near == override else near
            raise ConfigError(f"the override {override} cannot be read; try {near}.")
    return [*words, *(UNQUOTED.sub(r"\1'\2'", override) for override in overrides)]


def _without_verb(given: list[str]) -> list[str]:
    """Write a verb and the plan after it as overrides; a plan's file alone is priced."""
    verb = next((argument for argument in given if argument in VERBS), None)
    place = 0 if verb is None else given.index(verb)
    before = given[:place]
    after = given[place:] if verb is None else given[place + 1 :]
    key = "tune.from" if verb == "tune" else "plan"
    switch = [f"{verb}=true"] if verb in ("price", "explain") else []
    named = bool(after) and ("=" not in after[0] or Path(after[0]).is_file())
    file = after[0] if named else ""
    if file and (verb is not None or file.endswith(".json")):
        return [*before, f"{key}={file}", *after[1:], *switch]
    rest = before + after
    names = given_values(rest).keys()
    if verb == "price" and names & EVERY_WORD.keys() and key not in names:
        # the user's own degrees: the best plan with them, whatever its chance of fitting
        return ["space=uniform", "space.out_of_memory=0.5", *rest, *switch]
    if verb is not None and not any(argument.startswith(f"{key}=") for argument in rest):
        raise ConfigError(f"{verb} needs {VERBS[verb]}; try darts-parallel {verb} plan.json.")
    return rest + switch


def deferred_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments for Hydra, and those that change keys of a plan's own configuration.

    Hydra would look for their keys in what it composes, whose cluster may have fewer node groups.
    Where the group itself is given (`cluster=...`), they belong to that.
    """
    names = given_values([argument.lstrip("+~") for argument in arguments]).keys()
    if not names & {"plan", "tune.from"} or "experiment" in names or "--multirun" in arguments:
        return list(arguments), []
    for_hydra: list[str] = []
    deferred: list[str] = []
    for argument in arguments:
        found = KEY_OF_GROUP.match(argument)
        roots = {*names, *COMPOSED, *PRINTED, "hydra"}
        own = found is not None and found[1] not in roots
        (deferred if own else for_hydra).append(argument)
    return for_hydra, deferred
