"""The problem: model x cluster x training job x space x cost model, frozen."""

import os
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.config.huggingface import Imported, resolve_path
from darts_parallel.config.messages import config_sentence, error_sentence
from darts_parallel.config.schema import Config, config_dir, register_schema
from darts_parallel.errors import ConfigError, DartsParallelError


def to_config(
    composed: DictConfig, overrides: Sequence[str] = (), check: Callable[[Imported], None] | None = None
) -> Config:
    """The last line that knows OmegaConf: a composed configuration to checked dataclasses.

    Args:
        composed: What Hydra composed.
        overrides: The overrides that it was composed with, for messages.
        check: Refuses a model that a Hugging Face file describes and the layers do not.

    Errors:
        ConfigError: a missing or mistyped value, or one that breaks a rule.
    """
    try:
        composed = resolve_path(composed, overrides, check)
        typed = OmegaConf.get_type(composed) is Config
        if not typed or any(override.startswith(("+", "~")) for override in overrides):
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


def load_config(
    overrides: list[str] | None = None,
    extra_dir: str | None = None,
    check: Callable[[Imported], None] | None = None,
) -> Config:
    """The checked configuration that `overrides` compose."""
    arguments: list[Any] = list(overrides or [])
    if extra_dir is not None:
        if not Path(extra_dir).is_dir():
            raise ConfigError(f"config_dir={extra_dir} must be a folder; try None, for the shipped files.")
        extra_dir = str(Path(extra_dir).absolute())
        arguments.append(f"hydra.searchpath=[file://{extra_dir}]")
    return to_config(composition(arguments), arguments, check)


def composition(arguments: list[Any]) -> DictConfig:
    """What Hydra composes of the configuration files and `arguments`; not checked yet.

    Groups take Hydra most of the time: equal choices of them are composed once, and it sets values in a copy.

    Errors:
        ConfigError: an argument names nothing, or has a value of another type.
    """
    values = [argument for argument in arguments if _VALUE.match(argument)]
    groups = tuple(argument for argument in arguments if argument not in values)
    if not any("hydra." in argument for argument in arguments):  # may name folders of other files
        with suppress(Exception):  # Hydra says what is wrong when it composes all of the arguments
            composed: DictConfig = pickle.loads(_composed_groups(groups, _file_times()))
            for change in OverridesParser.create().parse_overrides(values):
                if change.is_sweep_override():
                    raise ConfigError(f"{change.input_line} gives several values")
                OmegaConf.update(composed, change.key_or_group, change.value())
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
    running = GlobalHydra.instance().hydra
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
        GlobalHydra.instance().hydra = running
