"""Hydra's and OmegaConf's errors as one sentence that names the key, the value, the rule and a way out."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import errors

from darts_parallel.config._keys import closest_key, type_at, walk
from darts_parallel.config.schema import Config, config_dir
from darts_parallel.errors import DartsParallelError, closest

LIBRARIES = ("hydra", "omegaconf", "yaml", "antlr4", "argparse")
"""Packages whose errors are about the configuration."""
OWN = ("darts_parallel", "baselines", "torch")
"""Packages whose errors are bugs, also where they stand on top of a library."""
PLUGINS = {
    "sweeper/optuna": "optuna",
    "launcher/joblib": "sweep",
    "launcher/submitit_slurm": "slurm",
    "launcher/submitit_local": "slurm",
    "launcher/ray": "ray",
}
"""Options of the groups `hydra/...` that a plugin brings, and the extra of this project that installs it."""
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
}


def error_sentence(error: BaseException, overrides: Sequence[str] = ()) -> str | None:
    """Return one sentence for an error that the user can correct; None for any other, a bug of ours."""
    for known in (error, error.__cause__):
        if isinstance(known, DartsParallelError):
            return str(known)
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    raiser = next((name for name in reversed(names) if name.startswith((*LIBRARIES, *OWN))), "")
    raised_there = raiser.startswith(LIBRARIES) and not isinstance(error, OSError)
    if raised_there or type(error).__module__.startswith(LIBRARIES):
        return config_sentence(error, overrides)
    if isinstance(error, OSError):
        rule = f"output: {error.filename or 'standard output'} cannot be written ({error.strerror})"
        return f"{rule}; try a folder that can be written, e.g. hydra.run.dir=outputs/run."
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "search: this machine has too little memory for it; lower search.num_restarts or pin space.pp."
    return None


def config_sentence(
    error: BaseException, overrides: Sequence[str] = (), schema: Any = Config
) -> str:
    """Return one sentence for an error of the configuration libraries about keys of a dataclass."""
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return f"the override {error.override} cannot be read; try key=value, with quotes around other signs."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, error.options)
    if type(error).__module__.startswith("yaml") or isinstance(error, UnicodeDecodeError):
        return f"a configuration file cannot be read ({text}); try YAML in UTF-8."
    given = dict(o.lstrip("+~").split("=", 1) for o in overrides if "=" in o)
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, errors.OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    if isinstance(inner, errors.OmegaConfBaseException) and inner.full_key:
        return _value_sentence(inner, given, schema)
    return _text_sentence(text, given, schema)


def _unknown_option(config: str, options: Sequence[str] | None) -> str:
    group, name = config.rsplit("/", 1) if "/" in config else ("", config)
    groups = sorted(path.name for path in Path(config_dir()).iterdir() if path.is_dir())
    names = sorted(options or [path.stem for path in (Path(config_dir()) / group).glob("*.yaml")])
    if not names:
        near = closest(group, groups)
        return f"{group}={name}: {group} must be one of the groups {', '.join(groups)}; try {near}."
    near = closest(name, names)
    if group.startswith("model/"):
        group, _, owner = group.partition("/")
        name, near = (
            f"{owner}/{name}",
            f"{near}, or model=hf model.path=config.json of a local copy",
        )
    rule = f"must name a file of the group {group}: {', '.join(names)}"
    if extra := PLUGINS.get(config.removeprefix("hydra/")):
        rule = "needs a Hydra plugin that is not installed"
        near += f", or pip install -e '.[{extra}]'"
    return f"{group}={name} {rule}; try {near}."


def _value_sentence(
    error: errors.OmegaConfBaseException, given: dict[str, str], schema: Any
) -> str:
    """Say what is wrong with the value at the key that OmegaConf names."""
    dotted = re.sub(r"\[(\w+)\]", r".\1", str(error.full_key))
    key = next((k for k in given if k == dotted or k.startswith(f"{dotted}.")), str(error.full_key))
    shown = f"{key}={given[key]}" if key in given else key
    if isinstance(error, (errors.ConfigKeyError, errors.ConfigAttributeError)):
        return f"{shown} is not a key of the configuration; try {closest_key(key, schema)}."
    if isinstance(error, errors.MissingMandatoryValue):
        return f"{key} is missing and has no default; try giving it a value."
    if isinstance(error, errors.InterpolationResolutionError):
        return f"{shown} refers to what does not exist; try a plain value."
    if "does not support deletion" in str(error):
        return f"~{key} must stay, it is part of the schema; try giving it another value."
    if "is not Optional" in str(error):
        return f"{shown} must have a value; try leaving {key} out of the command."
    if error.value == {} and key != dotted:
        place = dotted.rpartition(".")[0]
        first = f"{place}.0{key.removeprefix(dotted)}={given[key]}"
        return f"{shown} must change an entry that {place} has, counted from 0; try {first}."
    value, holder = given.get(key, str(error.value)), error.object_type
    kind = type_at(str(error.key), holder) if is_dataclass(holder) else type_at(dotted, schema)
    return f"{key}={value} {_must_be(kind, value)}"


def _must_be(kind: Any, value: str) -> str:
    """Say what a field of type `kind` takes, and which value near `value` it would."""
    near = "one word"
    if is_dataclass(kind) or get_origin(kind) is dict:
        keys = ", ".join(entry.name for entry in fields(kind)) if is_dataclass(kind) else ""
        return f"must be a mapping; try one {f'with the keys {keys}' if keys else 'such as {bf16: 125.0}'}."
    if kind is bool:
        near = closest(value, ["true", "false"])
    elif kind in (int, float):
        number = re.match(r"-?\d{1,15}(\.\d+)?([eE][+-]?\d)?(?!\d)", value)
        near = ("1" if kind is int else "0.5") if number is None else number[0]
        near = str(round(float(near))) if kind is int else near
    elif get_origin(kind) is list:
        near = f"[{value}]"
    return f"must be {WORDS.get(get_origin(kind) or kind, 'plain text')}; try {near}."


def _text_sentence(text: str, given: dict[str, str], schema: Any) -> str:
    """Say what is wrong where the libraries give no key of their own."""
    if match := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)' 1\.", text):
        key, values = match.groups()
        return (
            f"{key}={values} gives several values; try {key}={values.split(',')[0]}, {key}=[{values}] "
            "for a list, or --multirun for one run with each."
        )
    if match := re.search(r"(?:override|delete from config\.) '([^'=]+)", text):
        shown = f"{match[1]}={given[match[1]]}" if match[1] in given else match[1]
        return f"{shown} is not a key of the configuration; try {closest_key(match[1], schema)}."
    if match := re.search(r"In '([^']+)/[^']+': ValidationError", text):
        return f"{match[1]} {_must_be(type_at(match[1], schema), '')}"
    if match := re.search(r"Additional config directory '([^']*)' not found", text):
        near = next(parent for parent in Path(match[1]).absolute().parents if parent.is_dir())
        return f"--config-dir={match[1]} must be a folder; try {near}."
    if "Config group override must be" in text:
        key = next(
            (k for k, v in given.items() if re.fullmatch(r"null|true|false|[\d.e-]+", v)), "group"
        )
        return _unknown_option(f"{key}/{given.get(key, '')}", None)
    for key, value in given.items() if "NoneType" in text else ():
        optional = [
            n for n, (_, kind) in enumerate(walk(key, schema), 1) if type(None) in get_args(kind)
        ]
        whole = ".".join(key.split(".")[: optional[0]]) if optional else key
        entries, *rest = re.split(r"\.\d+\.", whole)
        first = f"all entries whole, {entries}=[{{..., {rest[0]}: {{...}}}}]" if rest else ""
        if rest or whole != key:
            way = first or f"giving {whole} a value first"
            return f"{key}={value} cannot be set, because {whole} is null; try {way}."
    text = re.sub(
        r" See https?://\S+ for details\.?| (full_key|reference_type|object_type)[:=].*$", "", text
    )
    return text if text.endswith((".", "?")) else f"{text}."
