"""The problem: model x cluster x training job x space x cost model, frozen."""

import os
import pickle
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.config.huggingface import resolve_path
from darts_parallel.config.messages import config_sentence, error_sentence
from darts_parallel.config.schema import Config, config_dir, register_schema
from darts_parallel.errors import ConfigError, DartsParallelError


def to_config(composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """The last line that knows OmegaConf: a composed configuration to checked dataclasses.

    Args:
        composed: What Hydra composed.
        overrides: The overrides that it was composed with, for messages.

    Errors:
        ConfigError: a missing or mistyped value, or one that breaks a rule.
    """
    try:
        composed = resolve_path(composed, overrides)
        if OmegaConf.get_type(composed) is not Config or not _follows_schema(composed):
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            merged = OmegaConf.unsafe_merge(OmegaConf.structured(Config), values)  # both are its own
            assert isinstance(merged, DictConfig)
            composed = merged
        config = OmegaConf.to_object(composed)
    except (OmegaConfBaseException, AssertionError) as error:  # OmegaConf asserts on a part of what is null
        cause = error.__cause__
        if isinstance(cause, DartsParallelError):
            raise cause from None
        raise ConfigError(config_sentence(error, overrides)) from None
    assert isinstance(config, Config)
    return config


def _follows_schema(node: DictConfig | ListConfig) -> bool:
    """Whether typed nodes have the keys of their schema, all with values, so that a merge changes nothing.

    Hydra has typed what it composed; a merge takes a quarter of the time of composing.
    """
    content: Any = node._content  # to ask for a value would resolve and check it, in twice the time
    if not isinstance(content, dict | list):  # no value, or one that stands elsewhere
        return content is None
    kind = OmegaConf.get_type(node)
    if is_dataclass(kind) and {field.name for field in fields(kind)} != set(content):
        return False
    values = content.values() if isinstance(content, dict) else content
    return all(
        _follows_schema(value) if OmegaConf.is_config(value) else not value._is_missing() for value in values
    )


def load_config(overrides: list[str] | None = None, extra_dir: str | None = None) -> Config:
    """The checked configuration that `overrides` compose."""
    arguments: list[Any] = list(overrides or [])
    if extra_dir is not None:
        if not Path(extra_dir).is_dir():
            raise ConfigError(
                f"config_dir={extra_dir} must be a folder; nearest legal: None, for the shipped files."
            )
        extra_dir = str(Path(extra_dir).absolute())
        arguments.append(f"hydra.searchpath=[file://{extra_dir}]")
    return to_config(composition(arguments), arguments)


def composition(arguments: list[Any]) -> DictConfig:
    """What Hydra composes of the configuration files and `arguments`; not checked yet.

    Groups take Hydra most of the time: equal choices of them are composed once, and it sets values in a copy.

    Errors:
        ConfigError: an argument names nothing, or has a value of another type.
    """
    if any("hydra." in argument for argument in arguments):  # may name folders of other files
        return composed_anew(arguments)
    values = [argument for argument in arguments if _VALUE.match(argument)]
    groups = tuple(argument for argument in arguments if argument not in values)
    with suppress(Exception):  # Hydra says what is wrong when it composes all of the arguments
        changes = OverridesParser.create().parse_overrides(values)
        if not any(change.is_sweep_override() for change in changes):
            composed: DictConfig = pickle.loads(_composed_groups(groups, _file_times()))
            ConfigLoaderImpl._apply_overrides_to_config(changes, composed)
            return composed
    return composed_anew(arguments)


_VALUE = re.compile(r"[a-z_]\w*(\.\w+)+=")
"""What sets a value and chooses no group."""


def _file_times() -> frozenset[tuple[str, int]]:
    """Names of all configuration files with the nanoseconds of their last change."""
    walked = os.walk(config_dir())
    return frozenset(
        (path, os.stat(path).st_mtime_ns)
        for folder, _, names in walked
        for path in (os.path.join(folder, name) for name in names)
    )


@lru_cache(maxsize=256)
def _composed_groups(groups: tuple[str, ...], file_times: frozenset[tuple[str, int]]) -> bytes:
    """Pickled: to copy OmegaConf's nodes takes seven times as long as to read them."""
    return pickle.dumps(composed_anew(list(groups)))


def composed_anew(arguments: list[Any]) -> DictConfig:
    """Compose all of `arguments` as `composition` does, without its memory."""
    register_schema()
    saved = dict(GlobalHydra.instance().__dict__)
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(version_base="1.3", config_dir=config_dir()):
            return compose(config_name="config", overrides=arguments)
    except Exception as error:
        sentence = error_sentence(error, arguments)
        if sentence is None:
            raise
        raise ConfigError(sentence) from None
    finally:
        GlobalHydra.instance().__dict__.update(saved)
