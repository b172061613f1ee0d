"""Compose configuration files and overrides, and turn them into checked dataclasses."""

import os
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.config._imported import Imported
from darts_parallel.config._keys import type_at
from darts_parallel.config.box import with_box
from darts_parallel.config.checks import require
from darts_parallel.config.huggingface import resolve_path
from darts_parallel.config.messages import config_sentence, error_sentence
from darts_parallel.config.old_keys import current_folder, yaml_files
from darts_parallel.config.schema import Config, config_dir, register_schema
from darts_parallel.config.trainer import group_file, group_names
from darts_parallel.config.words import (
    EVERY_WORD,
    given_values,
    require_clear_machine,
    without_words,
)
from darts_parallel.errors import ConfigError, DartsParallelError, Entries, read_json, read_text

Check = Callable[[Imported], str] | None
"""Refuses a model that a Hugging Face file describes and the layers do not."""
MOST_VALUES = 100_000
"""Values of a configuration file; all shipped ones together have fewer."""
JOBS = {"training", "experiment", "plan", "tune.from"}
"""Overrides that say which job it is."""
ANY = "training=any"
"""The job of models without a file of their name in the group; batch and length are assumed."""
LENGTH_ASSUMED = 8192
"""Tokens of a sequence, or fewer where the model takes fewer."""
TOKENS_ASSUMED = 65_536
"""Tokens of a batch for each GPU."""
MOST_TOKENS_ASSUMED = 4_194_304
MOST_TRIED = 4
"""Proposals of one refusal that are tried; no key has as many rules."""
_PROPOSAL = re.compile(r"(?P<key>[\w.]+)=.+; try (?P<near>\[[^\]]*\]|[^\s=,]+)(,? or .+)?\.")
"""Key and proposal of a refusal; a proposal is one value, not another key and not advice."""


def to_config(composed: DictConfig, overrides: Sequence[str] = (), check: Check = None) -> Config:
    """Turn a composed configuration into checked dataclasses: the last line that knows OmegaConf.

    Args:
        overrides: The overrides that it was composed with, for messages.
        check: Refuses a model that a Hugging Face file describes and the layers do not.

    Errors:
        ConfigError: a missing or mistyped value, or one that breaks a rule.
    """
    try:
        typed = _typed(resolve_path(composed, overrides, check), overrides)
        config = OmegaConf.to_object(_with_own_sizes(typed, overrides))
    except (OmegaConfBaseException, AssertionError) as error:
        # OmegaConf asserts on a part of what is null
        if isinstance(error.__cause__, DartsParallelError):
            raise error.__cause__ from None
        raise ConfigError(config_sentence(error, overrides)) from None
    assert isinstance(config, Config)
    return config


def _typed(composed: DictConfig, overrides: Sequence[str]) -> Any:
    """Return a configuration of typed nodes; nodes of a plan or of `+key` have no types."""
    added = any(override.startswith(("+", "~")) for override in overrides)
    if OmegaConf.get_type(composed) is Config and not added:
        return composed
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return OmegaConf.unsafe_merge(OmegaConf.structured(Config), values)


def _with_own_sizes(typed: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with a module's own name, and the batch and length that `ANY` assumes.

    Args:
        typed: The composed configuration.
        overrides: Batch and length that they give stay.
    """
    model = OmegaConf.select(typed, "model")
    if not isinstance(model, DictConfig):
        return typed
    changed: Entries = {}
    shape = _first_input(model)
    if shape and model.name == "module":
        changed["model.name"] = str(model.path).rpartition(":")[2]
        if OmegaConf.is_missing(model, "hidden_size"):
            changed["model.hidden_size"] = shape[-1]
    if ANY in overrides:
        named = set(given_values(overrides))
        changed |= _assumed_job(typed, shape or [1, None], named)
    result = typed.copy() if changed else typed
    for key, value in changed.items():
        OmegaConf.update(result, key, value)
    return result


def _first_input(model: DictConfig) -> list[Any]:
    """Return the shape `[sequences, tokens, ...]` of a module's first input; empty where there is none."""
    inputs = OmegaConf.to_container(model, resolve=False).get("inputs")  # type: ignore[union-attr]
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    return first if isinstance(first, list) and len(first) > 1 else []


def _assumed_job(typed: DictConfig, shape: Sequence[Any], named: set[str]) -> dict[str, int]:
    """Return the batch and the length that `ANY` assumes, where they are not named."""
    result = {}
    sequences, length = shape[:2]
    if not isinstance(length, int):
        length = min(LENGTH_ASSUMED, typed.model.max_seq_len)
    if "training.seq_len" in named:
        length = typed.training.seq_len
    else:
        result["training.seq_len"] = length
    if "training.global_batch_size" not in named:
        gpus = sum(group.count * group.gpus for group in typed.cluster.nodes)
        tokens = min(MOST_TOKENS_ASSUMED, TOKENS_ASSUMED * gpus)
        unit = sequences if isinstance(sequences, int) and sequences > 0 else 1
        doublings = max(round(log2(tokens / length / unit)), 0)
        result["training.global_batch_size"] = int(unit * 2**doublings)
    return result


def load_config(
    overrides: list[str] | None = None, extra_dir: str | None = None, check: Check = None
) -> Config:
    """Return the checked configuration that `overrides` compose.

    Errors:
        ConfigError: one sentence with the key, its value, the rule and a value that works.
    """
    given = overrides or []
    try:
        return _loaded(given, extra_dir, check)
    except ConfigError as error:
        raise ConfigError(with_tried_value(str(error), given, extra_dir)) from None


def with_tried_value(sentence: str, overrides: Sequence[str], extra_dir: str | None = None) -> str:
    """Return a refusal whose proposal breaks no rule of its key.

    A rule knows its own closest value, and not the other rules of the key. Here the proposal is
    tried: where it is refused, too, the proposal of that refusal takes its place.

    Args:
        sentence: `KEY=VALUE must ...; try NEAR.`; all others are returned as they are.
        overrides: `key=value`, as the command was given.
        extra_dir: A folder of the user's own configuration files.
    """
    refusal = _PROPOSAL.fullmatch(sentence)
    if refusal is None:
        return sentence
    key = refusal["key"]
    near = refusal["near"]
    others = [one for one in overrides if not one.startswith(f"{key}=")]
    if len(others) == len(overrides):
        return sentence
    for _ in range(MOST_TRIED):
        try:
            _loaded([*others, f"{key}={near}"], extra_dir, None)
        except ConfigError as error:
            again = _PROPOSAL.fullmatch(str(error))
            if again is None or again["key"] != key:
                break
            near = again["near"]
        except Exception:  # the first refusal is true whatever this one is
            return sentence
        else:
            break
    return f"{sentence[: refusal.start('near')]}{near}{sentence[refusal.end('near') :]}"


def _loaded(overrides: list[str], extra_dir: str | None, check: Check) -> Config:
    if extra_dir is not None:
        rule = "be a folder"
        extra_dir = os.path.abspath(os.path.expanduser(extra_dir))
        require(
            os.path.isdir(extra_dir), f"config_dir={extra_dir}", rule, "None, for the shipped files"
        )
        extra_dir = readable_folder(extra_dir)
    arguments = with_own_job(with_keys(overrides, extra_dir), extra_dir)
    if extra_dir is not None:
        arguments.append(folder_override(extra_dir))
    return to_config(composed_config(arguments), arguments, check)


def with_keys(arguments: Sequence[str], folder: str | None = None) -> list[str]:
    """Return arguments with keys in place of short words and of a machine in one line.

    Args:
        folder: Of the user's own configuration files, unless `--config-dir` is an argument.

    Errors:
        ConfigError: `gpus` or `nodes` could mean something else on this cluster.
    """
    arguments = with_box(arguments)
    if {"gpus", "nodes"} & given_values(arguments).keys():
        require_clear_machine(arguments, _own_node_groups(arguments, folder))
    return without_words(arguments)


def _own_node_groups(arguments: Sequence[str], folder: str | None) -> list[Any]:
    """Return the node groups of the cluster, or of the plan, that the arguments name.

    None where an argument is wrong: the composition of all arguments says which.
    """
    given = given_values(arguments)
    plan = given.get("plan") or given.get("tune.from")
    with suppress(DartsParallelError, LookupError, TypeError):
        if plan is not None and "cluster" not in given:
            plan_data = read_json(plan, plan, "a plan.json", ConfigError)
            return list(OmegaConf.create(plan_data["cluster"]["nodes"]))
        groups = [
            f"{key}={value}" for key, value in given.items() if value and key not in EVERY_WORD
        ]
        groups = [own for own in groups if not own.startswith("-")]
        if users := folder or given.get("--config-dir"):
            groups.append(folder_override(users))
        return list(composed_config(groups).cluster.nodes)
    return []


def folder_override(folder: str) -> str:
    """Return the override with which Hydra reads a user's folder, too; its path may have any signs."""
    path = str(Path(folder).absolute()).replace("'", "\\'")
    return f"hydra.searchpath=['file://{path}']"


def readable_folder(folder: str) -> str:
    """Return a user's folder of configuration files as this version reads it (`current_folder`).

    Errors:
        ConfigError: the aliases of a file stand for more than `MOST_VALUES`, which would fill the
            memory.
    """
    for path in yaml_files(folder):
        require_few_values(str(path), path)
    return current_folder(folder)


def require_few_values(setting: str, path: Path) -> None:
    """Refuse a YAML file whose aliases stand for more than `MOST_VALUES`.

    Whoever loads the file says what else is wrong with it.
    """
    count = 0
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        root = yaml.compose(read_text(path), yaml.SafeLoader)  # type: ignore[no-untyped-call]
        count = _values(root, {})
    rule = f"hold at most {MOST_VALUES:,} values, and its aliases stand for {float(count):.3g}"
    require(count <= MOST_VALUES, setting, rule, "it without aliases")


def _values(node: Any, known: dict[int, int]) -> int:
    """Count the values of a node, aliases at each of their places; a loop counts once."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 1
    entries = [] if node is None or isinstance(node.value, str) else node.value
    for entry in entries:
        children = entry if isinstance(entry, tuple) else (entry,)
        known[id(node)] += sum(_values(child, known) for child in children)
    return known[id(node)]


def with_own_job(arguments: Sequence[str], folder: str | None = None) -> list[str]:
    """Return the arguments; a model that is named alone takes the job of its name, or `ANY`.

    A `training.software` of the user's folder brings its figures along.

    Args:
        folder: Of the user's own configuration files, unless `--config-dir` is an argument.
    """
    given = given_values(arguments)
    result = list(arguments)
    users = folder or given.get("--config-dir")
    software = given.get("training.software")
    if users and software and Path(users, "software", f"{software}.yaml").is_file():
        result.append(f"+software@own_software={software}")
    model = given.get("model")
    if model is not None and not JOBS & given.keys():
        own = group_file("training", model)
        shipped = own.is_file() or (users and Path(users, "training", own.name).is_file())
        result.append(f"training={model}" if shipped else ANY)
    return result


def composed_config(arguments: list[Any]) -> DictConfig:
    """Compose the configuration files and `arguments`; not checked yet.

    Groups take Hydra most of the time: equal choices of them are composed once, and it sets values
    in a copy.

    Errors:
        ConfigError: an argument names nothing, or has a value of another type.
    """
    values = [
        one for one in arguments if _VALUE.match(one) and not group_names(one.partition("=")[0])
    ]
    groups = tuple(argument for argument in arguments if argument not in values)
    if "hydra" not in "".join(arguments):  # may name folders of other files
        try:
            composed = pickle.loads(_composed_groups(groups, _file_times()))
            for change in OverridesParser.create().parse_overrides(values):
                if change.is_sweep_override():
                    raise ConfigError(f"{change.input_line} gives several values")
                OmegaConf.update(composed, change.key_or_group, change.value())
            return composed
        except Exception as error:
            if isinstance(error, OmegaConfBaseException) and error.full_key:
                raise ConfigError(config_sentence(error, arguments)) from None
    return compose_whole(arguments)


_NUMBER = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?", re.IGNORECASE)
"""Numbers as YAML reads them."""
_EMPTY = re.compile(r"\{\s*\}")
_VALUE = re.compile(r"[a-z_]\w*(\.\w+)*=")
"""Overrides that set a value or choose a group; others have signs of Hydra's."""


def _file_times() -> int:
    """Return a number that differs whenever a configuration file is changed, added or renamed.

    It sums the nanoseconds of the last change of all files and folders.
    """
    return sum(path.stat().st_mtime_ns for path in config_dir().rglob("*"))


@lru_cache(maxsize=256)
def _composed_groups(groups: tuple[str, ...], file_times: int) -> bytes:
    """Compose groups, pickled: copying OmegaConf's nodes takes seven times as long."""
    return pickle.dumps(compose_whole(list(groups)))


def compose_whole(arguments: list[Any]) -> DictConfig:
    """Compose all of `arguments` as `composed_config` does, without its memory."""
    register_schema()
    running = GlobalHydra.instance().hydra
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            return compose(config_name="config", overrides=arguments)
    except Exception as error:
        sentence = error_sentence(error, arguments)
        if sentence is None:
            raise
        raise ConfigError(sentence) from None
    finally:
        GlobalHydra.instance().hydra = running


def refuse_silent_overrides(overrides: Sequence[str], schema: Any = Config) -> None:
    """Refuse an empty mapping, which a merge ignores, and a number other than 0 and 1 for a switch.

    Args:
        overrides: `key=value` as the command was given.
        schema: Dataclass of the keys.

    Errors:
        ConfigError: names the key, the value and the closest valid one.
    """
    for override in overrides:
        key, given, value = override.partition("=")
        value = value.strip()
        if not given or key.startswith(("~", "hydra")):
            continue
        key = key.lstrip("+")
        if _EMPTY.fullmatch(value):
            reason = "would change nothing, since mappings are merged"
            way_out = f"try leaving {key} out of the command, or name an entry of it"
            raise ConfigError(f"{key}={value} {reason}; {way_out}.")
        number = _NUMBER.fullmatch(value) and value not in ("0", "1")
        if number and type_at(key, schema) is bool:
            require(False, f"{key}={value}", "be true or false", "true")
