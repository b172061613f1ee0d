"""Hydra's and OmegaConf's errors as one sentence that names the key, the value, the rule and a way out."""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException

from darts_parallel.config.schema import Config, config_dir
from darts_parallel.errors import DartsParallelError

CONFIG_LIBRARIES = ("hydra", "omegaconf", "yaml", "antlr4", "argparse")
Given = dict[str, str]
Rule = Callable[[re.Match[str], Given], str]


def error_sentence(error: BaseException, overrides: Sequence[str] = ()) -> str | None:
    """One sentence for an error that the user can mend; None for any other, which is a bug of ours.

    Args:
        error: What was raised.
        overrides: The overrides of the command, to name the value that was given.
    """
    for known in (error, error.__cause__):
        if isinstance(known, DartsParallelError):
            return str(known)
    if _raised_by(error, CONFIG_LIBRARIES):
        return config_sentence(error, overrides)
    if isinstance(error, OSError):
        where = "standard output" if error.filename is None else error.filename
        rule = f"output: {where} cannot be written ({error.strerror})"
        return f"{rule}; nearest legal: a folder that can be written, e.g. hydra.run.dir=outputs/run."
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "search: this machine has too little memory for it; lower search.num_restarts or pin space.pp."
    return None


def _raised_by(error: BaseException, libraries: tuple[str, ...]) -> bool:
    """Whether the error comes from the code of one of `libraries`."""
    if type(error).__module__.split(".")[0] in libraries:
        return True
    trace, last = error.__traceback__, ""
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        last = package if package in (*libraries, "darts_parallel", "baselines", "torch") else last
        trace = trace.tb_next
    return last in libraries and not isinstance(error, OSError)


def config_sentence(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """One sentence for an error of the configuration layer.

    Args:
        error: A HydraException or OmegaConfBaseException.
        overrides: The overrides of the command, to name the value that was given.
    """
    if isinstance(error, OverrideParseException):
        return _unreadable_override(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, error.options)
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("yaml") or isinstance(error, UnicodeDecodeError):
        return f"a configuration file cannot be read ({text}); nearest legal: YAML in UTF-8."
    cause = error.__cause__
    while cause is not None and type(cause).__module__.startswith(("omegaconf", "hydra")):
        text = f"{text} {' '.join(str(cause).split())}"
        cause = cause.__cause__
    given = dict(o.lstrip("+~").split("=", 1) for o in overrides if "=" in o)
    for pattern, render in _RULES:
        match = re.search(pattern, text)
        if match:
            return render(match, given)
    text = re.sub(r" See https?://\S+ for details\.?", "", text)
    text = re.sub(r" (full_key|reference_type|object_type)[:=].*$", "", text)
    return text if text.endswith(".") else f"{text}."


def _unreadable_override(override: str) -> str:
    return (
        f"the override {override} cannot be read; nearest legal: key=value, the value in quotes where it "
        "holds other signs than letters, digits and ._-/."
    )


_PLUGINS = {
    "hydra/sweeper/optuna": "optuna",
    "hydra/launcher/joblib": "sweep",
    "hydra/launcher/submitit_slurm": "slurm",
    "hydra/launcher/submitit_local": "slurm",
    "hydra/launcher/ray": "ray",
}
"""Options that Hydra knows once a plugin is installed, and the extra of this project that installs it."""


def _unknown_option(config: str, options: Sequence[str] | None) -> str:
    group, name = config.rsplit("/", 1) if "/" in config else ("", config)
    names = sorted(options or [path.stem for path in (Path(config_dir()) / group).glob("*.yaml")])
    if not names:
        groups = sorted(path.name for path in Path(config_dir()).iterdir() if path.is_dir())
        near = get_close_matches(group, groups, n=1, cutoff=0.0)[0]
        return (
            f"{group}={name}: {group} must be one of the groups {', '.join(groups)}; nearest legal: {near}."
        )
    near = get_close_matches(name, names, n=1, cutoff=0.0)[0]
    if config in _PLUGINS:
        extra = _PLUGINS[config]
        return (
            f"{group}={name} needs a Hydra plugin that is not installed; nearest legal: {near}, or "
            f"pip install 'darts-parallel[{extra}]'."
        )
    return f"{group}={name} must name a file of the group {group}: {', '.join(names)}; nearest legal: {near}."


def _option_not_found(match: re.Match[str], given: Given) -> str:
    return _unknown_option(match.group(1), None)


def _option_not_text(match: re.Match[str], given: Given) -> str:
    groups = {path.name for path in Path(config_dir()).iterdir() if path.is_dir()}
    key = next((k for k in given if k in groups), next(iter(given), "group"))
    return _unknown_option(f"{key}/{given.get(key, '')}", None)


def _unknown_key(match: re.Match[str], given: Given) -> str:
    named = match.groupdict()
    key = named.get("full") or named["key"]
    full = next((name for name in given if name == key or name.endswith(f".{key}")), key)
    prefix = _PREFIXES.get(named.get("kind") or "")
    if prefix is None:
        keys = all_keys(Config)
    else:
        kind = _kind_at(prefix)
        own = full.rpartition(".")[0]
        parent = own if _stands_at(kind, own) else prefix  # a link stands at several places
        keys = [f"{parent}.{entry.name}" if parent else entry.name for entry in fields(kind)]
        full = full if "." in full or not prefix else f"{prefix}.{full}"
    near = get_close_matches(full, _meant(full.rpartition(".")[2]) or keys, n=1, cutoff=0.0)[0]
    value = f"={given[full]}" if full in given else ""
    return f"{full}{value} is not a key of the configuration; nearest legal: {near}."


def _meant(name: str) -> list[str]:
    """Keys of that name elsewhere (`pp`, `training.micro_batch_size`), or of these initials (`search.lr`)."""
    everywhere = all_keys(Config)
    named = [key for key in everywhere if key.rpartition(".")[2] == name]
    return named or [key for key in everywhere if _initials(key) == name]


def _initials(key: str) -> str | None:
    """First letters of the words of a key's name; None where it is one word."""
    words = key.rpartition(".")[2].split("_")
    return "".join(word[0] for word in words) if len(words) > 1 else None


def _wrong_type(match: re.Match[str], given: Given) -> str:
    value, kind = match.group("value"), match.group("kind")
    key = match.groupdict().get("key") or next((k for k, v in given.items() if v == value), "value")
    words = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    return (
        f"{key}={given.get(key, value)} must be {words.get(kind, kind)}; nearest legal: {_near(value, kind)}."
    )


def _near(value: str, kind: str) -> str:
    if kind.lower() == "bool":
        return (
            "false" if get_close_matches(value, ["true", "false"], n=1, cutoff=0.0) == ["false"] else "true"
        )
    number = re.match(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", value)
    if number is None or abs(float(number.group())) > 2**53:
        return "1"
    return str(round(float(number.group()))) if kind == "Integer" else number.group()


def _not_null(match: re.Match[str], given: Given) -> str:
    key = match.group("key")
    return f"{key}={given.get(key, 'null')} must have a value; nearest legal: leave {key} out of the command."


def _part_of_null(match: re.Match[str], given: Given) -> str:
    key = next((key for key in given if ".inter_node" in key), next(reversed(given), "a key"))
    whole = key[: key.index(".inter_node") + len(".inter_node")] if ".inter_node" in key else key
    return (
        f"{key}={given.get(key, '')} cannot be set, because {whole} is null in its file; nearest legal: a "
        "cluster file of your own (--config-dir) whose node group has an inter_node."
    )


def _kept(match: re.Match[str], given: Given) -> str:
    return f"~{match.group('key')} must stay, it is part of the schema; nearest legal: give it another value."


def _shape(words: str) -> Rule:
    def render(match: re.Match[str], given: Given) -> str:
        key = match.group("key")
        value = f"={given[key]}" if key in given else ""
        return f"{key}{value} must be {words}."

    return render


def _fields_of(match: re.Match[str], given: Given) -> str:
    kind = match.group("kind")
    prefix = _PREFIXES.get(kind)
    if prefix is None:
        return f"a value of the type {kind} has the wrong shape."
    place = prefix.removesuffix("[]")
    for key, value in given.items():
        numbered = re.match(rf"{re.escape(place)}\.\d+\.(.+)", key)
        if prefix.endswith("[]") and numbered is not None:
            return (
                f"{key}={value} must change an entry that {place} has, counted from 0; "
                f"nearest legal: {place}.0.{numbered.group(1)}={value}."
            )
    names = ", ".join(entry.name for entry in fields(_kind_at(prefix)))
    return f"{prefix} must be a mapping; nearest legal: one with the keys {names}."


def _missing(match: re.Match[str], given: Given) -> str:
    prefix = _PREFIXES.get(match.groupdict().get("kind", ""))
    key = f"{prefix}.{match.group('key')}" if prefix else match.group("key")
    return f"{key} is missing and has no default; nearest legal: give it a value."


def _interpolation(match: re.Match[str], given: Given) -> str:
    key = match.group("key")
    value = f"={given[key]}" if key in given else ""
    return f"{key}{value} refers to what does not exist; nearest legal: a plain value."


def _sweep_needed(match: re.Match[str], given: Given) -> str:
    key, values = match.group(1), match.group(2)
    first = values.split(",")[0]
    return (
        f"{key}={values} gives several values; nearest legal: {key}={first}, {key}=[{values}] for a list, "
        "or --multirun for one run with each."
    )


def _no_folder(match: re.Match[str], given: Given) -> str:
    path = match.group("key")
    near = next(parent for parent in Path(path).absolute().parents if parent.is_dir())
    return f"--config-dir={path} must be a folder; nearest legal: {near}."


_RULES: list[tuple[str, Rule]] = [
    (r"Could not (?:find|load) '([^']+)'", _option_not_found),
    (r"Config group override must be a string", _option_not_text),
    (r"Ambiguous value for argument '([^=]+)=(.*?)' 1\.", _sweep_needed),
    (r"Could not override '(?P<key>[^']+)'\..*Key '[^']+' (?:is )?not in '(?P<kind>\w+)'", _unknown_key),
    (r"Could not override '(?P<key>[^']+)'\.", _unknown_key),
    (r"Could not append .*override '(?P<key>[^'=]+)", _unknown_key),
    (r"Key '(?P<key>[^']+)' (?:is )?not in '(?P<kind>\w+)'.*?full_key: (?P<full>[^ ]+)", _unknown_key),
    (r"Value '(?P<value>[^']*)'.*could not be converted to (?P<kind>\w+).*full_key: (?P<key>[\w.\[\]]+)",
     _wrong_type),
    (r"Value '(?P<value>[^']*)'.*is not a valid (?P<kind>\w+).*full_key: (?P<key>[\w.\[\]]+)", _wrong_type),
    (r"Unexpected type for root: NoneType|'NoneType' object has no attribute", _part_of_null),
    (r"field '(?P<key>[\w.\[\]]+)' is not Optional", _not_null),
    (r"does not support deletion full_key: (?P<key>[\w.\[\]]+)", _kept),
    (r"is not a ListConfig, list or tuple.*full_key: (?P<key>[\w.\[\]]+)",
     _shape("a list; nearest legal: the value in [ ]")),
    (r"Cannot assign \w+ to Dict.*full_key: (?P<key>[\w.\[\]]+)",
     _shape("a mapping; nearest legal: one such as {bf16: 125.0}")),
    (r"Cannot convert '\w+' to string: .*full_key: (?P<key>[\w.\[\]]+)",
     _shape("text; nearest legal: one word")),
    (r"is not a subclass of (?P<kind>\w+)", _fields_of),
    (r"(?:Interpolation key|while resolving interpolation).*full_key: (?P<key>[\w.\[\]]+)", _interpolation),
    (r"Missing mandatory value: .*full_key: (?P<key>[\w.\[\]]+)", _missing),
    (r"Missing mandatory value: (?P<key>[\w.\[\]]+)", _missing),
    (r"Structured config of type `(?P<kind>\w+)` has missing mandatory value: (?P<key>\w+)", _missing),
    (r"Additional config directory '(?P<key>[^']*)' not found",
     _no_folder),
]  # fmt: skip


def _nested(kind: Any) -> list[tuple[str, Any]]:
    """Fields of a schema dataclass that hold further ones: dotted suffix and type."""
    found = []
    for entry in fields(kind):
        for inner in (entry.type, *get_args(entry.type)):
            if is_dataclass(inner):
                origin: Any = get_origin(entry.type)
                suffix = "[]" if origin is list else ".*" if origin is dict else ""
                found.append((f"{entry.name}{suffix}", inner))
    return found


def _prefixes(kind: Any, prefix: str = "") -> Given:
    """Where each schema dataclass stands, e.g. `NodeGroupConfig` at `cluster.nodes[]`."""
    result = {kind.__name__: prefix}
    for suffix, inner in _nested(kind):
        for name, place in _prefixes(inner, f"{prefix}.{suffix}".lstrip(".")).items():
            result.setdefault(name, place)
    return result


def _kind_at(prefix: str) -> Any:
    kind: Any = Config
    while prefix:
        suffix, kind = next((s, k) for s, k in _nested(kind) if f"{prefix}.".startswith(f"{s}."))
        prefix = prefix[len(suffix) :].lstrip(".")
    return kind


def _stands_at(wanted: Any, place: str, kind: Any = Config, pattern: str = "") -> bool:
    """Whether a dotted place as a user writes it (`cluster.nodes.0`) holds the schema dataclass `wanted`."""
    if kind is wanted and re.fullmatch(pattern, place):
        return True
    for suffix, inner in _nested(kind):
        inside = re.escape(suffix).replace(r"\[\]", r"(\[\d+\]|\.\d+)").replace(r"\.\*", r"\.[^.]+")
        if _stands_at(wanted, place, inner, rf"{pattern}\.{inside}" if pattern else inside):
            return True
    return False


def all_keys(kind: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a schema dataclass."""
    keys = [f"{prefix}{entry.name}" for entry in fields(kind)]
    for suffix, inner in _nested(kind):
        keys.extend(all_keys(inner, f"{prefix}{suffix}."))
    return keys


_PREFIXES = _prefixes(Config)
