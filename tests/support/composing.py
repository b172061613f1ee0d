"""Hydra in tests: it reads each shipped file once and composes each choice of the shipped groups once."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.object_type import ObjectType

from darts_parallel.config.schema import config_dir


def compose_groups_once(patch: pytest.MonkeyPatch) -> None:
    """Give Hydra a memory of what files and groups say, a third of a second; it sets values anew.

    What it remembers it pickles: to copy OmegaConf's nodes takes it seven times as long.
    """
    memory: dict[str, bytes] = {}
    list_defaults, make_map = defaults_list._create_defaults_list, defaults_list._create_interpolation_map
    compose, load = ConfigLoaderImpl._compose_config_from_defaults_list, ConfigRepository.load_config

    def once(sources: list[Any], key: object, make: Callable[[], Any]) -> Any:
        if not shipped(sources):
            return make()
        name = repr(key)
        if name not in memory:
            memory[name] = pickle.dumps(make())
        return pickle.loads(memory[name])

    def list_once(repo: Any, config_name: str, overrides: Overrides, **settings: bool) -> Any:
        groups = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}

        def make() -> Any:
            return list_defaults(repo, config_name, overrides, **settings), groups

        found, marked = once(repo.get_sources(), ("list", config_name, groups, settings), make)
        vars(overrides).update(marked)
        return found

    def compose_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        return once(repo.get_sources(), ("compose", defaults), lambda: compose(self, defaults, repo))

    def load_once(self: ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None:
            return load(self, config_path)
        return once([source], ("load", source.path, config_path), lambda: load(self, config_path))

    def map_where_needed(overrides: Overrides, defaults: list[Any], self_added: bool) -> Any:
        """What Hydra makes of every list, a third of its time, to resolve the interpolations in it."""
        return make_map(overrides, defaults, self_added) if "${" in repr(defaults) else None

    patch.setattr(ConfigRepository, "load_config", load_once)
    patch.setattr(defaults_list, "_create_interpolation_map", map_where_needed)
    patch.setattr(defaults_list, "_create_defaults_list", list_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_once)


def shipped(sources: list[Any]) -> bool:
    """Whether no file of a test can change what Hydra reads there."""
    folders = {source.path.removeprefix("file://") for source in sources if source.scheme() == "file"}
    return folders <= {config_dir()}
