"""Hydra's and OmegaConf's errors as one sentence: key, value, rule and a way out."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import errors

from darts_parallel.config._keys import (
    TYPE_WORDS,
    all_fields,
    closest_key,
    plain_type,
    type_at,
    walk,
)
from darts_parallel.config.checks import member_sentence
from darts_parallel.config.schema import Config, config_dir
from darts_parallel.config.trainer import group_names
from darts_parallel.config.words import NAMES, WORDS
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
"""Options of the groups `hydra/...` that need a plugin, and the extra of this project that installs
it."""
NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?([eE][+-]?\d)?(?![\dx])")
"""The start of a text that is a number of moderate size."""
BITS = re.compile(r"Gb(it|ps|/s|it/s|its)?")
THOUSANDFOLD = ("", "K", "M", "G")
"""Signs after a number, by powers of 1024 for whole numbers, and of 1000 for others."""
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '([^=]+)=(.*?)' 1\.")
UNKNOWN_KEY = re.compile(r"(?:override|delete from config\.) '([^'=]+)")
WRONG_GROUP = re.compile(
    r"In '([^']+)/[^']+': (?:ValidationError|ConfigTypeError)"
    r"(?:.* subclass of (.+?)\. value: (.*?) full_key)?"
)
PACKAGES = re.compile(r"\w+\.")
"""The packages before the name of a type."""
NO_FOLDER = re.compile(r"Additional config directory '([^']*)' not found")
LIBRARY_TALK = re.compile(
    r" See https?://\S+ for details\.?| (full_key|reference_type|object_type)[:=].*$"
)
"""Parts of the libraries' messages that help no user."""


def error_sentence(error: BaseException, overrides: Sequence[str] = ()) -> str | None:
    """Return one sentence for an error that the user can correct; None for a bug of ours."""
    for known in (error, error.__cause__):
        if isinstance(known, DartsParallelError):
            return str(known)
    if _is_of_configuration(error):
        return config_sentence(error, overrides)
    if isinstance(error, OSError):
        place = error.filename or "standard output"
        way_out = "try a folder that can be written, e.g. outputs/run"
        return f"output: {place} cannot be written ({error.strerror}); {way_out}."
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        way_out = "lower search.num_restarts or pin space.pp"
        return f"search: this machine has too little memory for it; {way_out}."
    return None


def _is_of_configuration(error: BaseException) -> bool:
    """Return whether a library of the configuration itself raised an error."""
    if type(error).__module__.startswith(LIBRARIES):
        return True
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    known = [name for name in names if name.startswith(LIBRARIES + OWN)]
    raised_there = bool(known) and known[-1].startswith(LIBRARIES)
    return raised_there and not isinstance(error, OSError)


def config_sentence(
    error: BaseException, overrides: Sequence[str] = (), schema: Any = Config
) -> str:
    """Return one sentence for an error of the configuration libraries about keys of a dataclass."""
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        way_out = "try key=value, with quotes around other signs, or --help for the commands"
        return f"the override {error.override} cannot be read; {way_out}."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, error.options)
    if type(error).__module__.startswith("yaml") or isinstance(error, UnicodeDecodeError):
        return f"a configuration file cannot be read ({text}); try YAML in UTF-8."
    given = dict(o.lstrip("+~").split("=", 1) for o in overrides if "=" in o)
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, errors.OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    if inner is not None and inner.full_key:
        return _value_sentence(inner, given, schema)
    return _text_sentence(text, given, schema)


def _unknown_option(config: str, options: Sequence[str] | None) -> str:
    """Say which files a group has, where `group/name` is none of them."""
    folder = config_dir()
    group, _, name = config.rpartition("/")
    names = sorted(options or group_names(group))
    if not names:
        groups = sorted(path.name for path in folder.iterdir() if path.is_dir())
        rule = f"must be one of the groups {', '.join(groups)}"
        return f"{group}={name}: {group} {rule}; try {closest(group, groups)}."
    others = NAMES["options"]
    near = others.get(f"{group}={name}") or closest(name, names)
    if group.startswith("model/"):
        # a name of the Hugging Face hub, owner/name
        group, name = "model", config.removeprefix("model/")
    gpu, _, size = name.rpartition("_")
    nodes, _, gpus = size.partition("x")
    if name.endswith(".json"):
        near = f"model=hf model.path={name}"
    elif gpus and gpu in group_names("device"):
        near = f"cluster=box gpu={gpu} gpus={gpus} nodes={nodes}"
    else:
        near += others.get(group, "")
    group = group or "--config-name"
    rule = f"must name a file of the group {group}: {', '.join(names)}"
    extra = PLUGINS.get(config.removeprefix("hydra/"))
    if extra is not None:
        rule = "needs a Hydra plugin that is not installed"
        near += f", or pip install -e '.[{extra}]'"
    return f"{group}={name} {rule}; try {near}."


def _shown(key: str, given: dict[str, str]) -> str:
    """Write a key with its value where the command gives one."""
    return f"{key}={given[key]}" if key in given else key


def _unknown_key(key: str, given: dict[str, str], schema: Any) -> str:
    shown = _shown(key, given)
    if schema is not Config and (key in WORDS or type_at(key, Config)):
        place = "of the command that plans, not of this one"
        near = f"darts-parallel {shown}, or --help for the keys of this one"
        return f"{shown} is a key {place}; try {near}."
    plain = key.replace("-", "_").lower()
    known = NAMES["keys"]
    value = given.get(key, "...")
    near = known.get(f"{plain}={value}") or known.get(plain, "")
    near = plain if plain in WORDS else near
    if re.fullmatch(r"[\w.]+", near):
        near += f"={_legal_value(near, value)}"
    near = near or closest_key(key, schema)
    if key.endswith("Gbps"):
        near += ", of bytes: an eighth"
    return f"{shown} is not a key of the configuration; try {near}."


def _legal_value(key: str, value: str) -> str:
    """Return the value of a key that is closest to a user's; the user's where the key names no values."""
    entries = {name: entry for name, _, entry in all_fields(Config)}
    members = entries[key].metadata.get("members") if key in entries else None
    return str(closest(value.lower(), members)) if members else value


def _value_sentence(
    error: errors.OmegaConfBaseException, given: dict[str, str], schema: Any
) -> str:
    """Say what is wrong with the value at the key that OmegaConf names."""
    full_key = str(error.full_key)
    dotted = re.sub(r"\[(\w+)\]", r".\1", full_key)
    key = next((k for k in given if k == dotted or k.startswith(f"{dotted}.")), full_key)
    shown = _shown(key, given)
    if isinstance(error, (errors.ConfigKeyError, errors.ConfigAttributeError)):
        return _unknown_key(key, given, schema)
    if isinstance(error, errors.MissingMandatoryValue):
        near = NAMES["usual"].get(key.rpartition(".")[2], "...")
        return f"{key} is missing and has no default; try {key}={near}."
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
    value = given.get(key, str(error.value))
    holder = error.object_type
    known = fields(holder) if is_dataclass(holder) else ()
    for entry in known:
        if entry.name == error.key and "members" in entry.metadata:
            return member_sentence(key, value, entry.metadata["members"])
    kind = type_at(str(error.key), holder) if is_dataclass(holder) else type_at(dotted, schema)
    return f"{key}={value} {_must_be(kind, value)}"


def _must_be(kind: Any, value: str) -> str:
    """Say what a field of type `kind` takes, and the closest valid value."""
    if is_dataclass(kind):
        keys = ", ".join(entry.name for entry in fields(kind))
        return f"must be a mapping; try one with the keys {keys}."
    origin = get_origin(kind) or kind
    if origin is dict:
        return "must be a mapping; try one such as {bf16: 125.0}."
    if kind is Any:
        return "must be a list or a mapping, as the value before it; try null before it."
    near = "one word"
    if origin is list:
        near = f"[{value}]"
    elif kind is bool:
        near = closest(value, ["true", "false"])
    elif kind in (int, float):
        near = _closest_number(kind, value)
    return f"must be {TYPE_WORDS.get(origin, 'plain text')}; try {near}."


def _closest_number(kind: Any, value: str) -> str:
    """Return the number with which a text begins, or a small one."""
    number = NUMBER.match(value.replace(",", "."))
    if number is None:
        return "1" if kind is int else "0.5"
    sign = value[number.end() :].strip()
    scaled = float(number[0])
    if BITS.fullmatch(sign):
        scaled /= 8
    elif sign == "%":
        scaled /= 100
    elif sign.upper() in THOUSANDFOLD:
        scaled *= (1024 if kind is int else 1000) ** THOUSANDFOLD.index(sign.upper())
    return str(round(scaled)) if kind is int else f"{scaled:g}"


def _text_sentence(text: str, given: dict[str, str], schema: Any) -> str:
    """Say what is wrong where the libraries give no key of their own."""
    if match := SEVERAL_VALUES.search(text):
        key, values = match.groups()
        first = values.partition(",")[0]
        if THOUSANDS.fullmatch(values):
            first = values.replace(",", "")
        elif type_at(key, schema) is float and values.count(",") == 1:
            first = values.replace(",", ".")
        ways = f"{key}={first}, {key}=[{values}] for a list, or --multirun for one run with each"
        return f"{key}={values} gives several values; try {ways}."
    if match := UNKNOWN_KEY.search(text):
        return _unknown_key(match[1], given, schema)
    if match := WRONG_GROUP.search(text):
        return _wrong_file(schema, *match.groups(""))
    if match := NO_FOLDER.search(text):
        near = next(parent for parent in Path(match[1]).absolute().parents if parent.is_dir())
        return f"--config-dir={match[1]} must be a folder; try {near}."
    if "Config group override must be" in text:
        plain = [k for k, v in given.items() if re.fullmatch(r"null|true|false|[\d.e-]+", v)]
        key = next(iter(plain), "group")
        return _unknown_option(f"{key}/{given.get(key, '')}", None)
    if "NoneType" in text:
        for key, value in given.items():
            if sentence := _inside_null(key, value, schema):
                return sentence
    text = LIBRARY_TALK.sub("", text)
    return text if text.endswith((".", "?")) else f"{text}."


def _wrong_file(schema: Any, group: str, wanted: str, value: str) -> str:
    """Say which keys of a group take a type, where a file gives another one.

    Args:
        wanted: Name of the type; empty: of a list.
        value: As the file has it; empty where it is not known.
    """
    kind = type_at(group, schema)
    keys = []
    for key, _, entry in all_fields(kind, f"{group}."):
        if (wanted or "list[").lower() in PACKAGES.sub("", str(entry.type)).lower():
            keys.append(key)
            kind = plain_type(entry.type)
    shown = " or ".join(keys) or group
    shown += f"={value}" if keys and value else ""
    return f"{shown} {_must_be(kind, value)}"


def _inside_null(key: str, value: str, schema: Any) -> str:
    """Refuse a key inside a part that is null or an entry of a list; empty otherwise."""
    parts = key.split(".")
    whole = key
    for number, (_, kind) in enumerate(walk(key, schema), 1):
        if type(None) in get_args(kind):
            whole = ".".join(parts[:number])
            break
    entries, *rest = re.split(r"\.\d+\.", whole)
    if rest:
        way = f"all entries whole, {entries}=[{{..., {rest[0]}: {{...}}}}]"
    elif whole != key:
        way = f"giving {whole} a value first"
    else:
        return ""
    return f"{key}={value} cannot be set, because {whole} is null; try {way}."
