"""Hydra in tests: the command, too, composes each choice of the shipped groups once, and in less time."""

from copy import deepcopy
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import Overrides

from darts_parallel.config.schema import config_dir


def compose_groups_once(patch: pytest.MonkeyPatch) -> None:
    """Give Hydra a memory of what groups compose, a third of a second; it sets values as it always does."""
    listed: dict[str, Any] = {}
    composed: dict[str, Any] = {}
    files: dict[str, Any] = {}
    load = FileConfigSource.load_config
    list_defaults, make_map = defaults_list._create_defaults_list, defaults_list._create_interpolation_map
    compose = ConfigLoaderImpl._compose_config_from_defaults_list

    def list_once(repo: Any, config_name: str, overrides: Overrides, **settings: bool) -> Any:
        groups = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
        key = repr((config_name, groups, settings))
        if not shipped(repo):
            return list_defaults(repo, config_name, overrides, **settings)
        if key not in listed:
            found = list_defaults(repo, config_name, overrides, **settings)
            listed[key] = deepcopy((found, groups))
        found, marked = deepcopy(listed[key])
        vars(overrides).update(marked)
        return found

    def compose_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        key = repr(defaults)
        if not shipped(repo):
            return compose(self, defaults, repo)
        if key not in composed:
            composed[key] = compose(self, defaults, repo)
        return deepcopy(composed[key])

    def map_where_needed(overrides: Overrides, defaults: list[Any], self_added: bool) -> Any:
        """What Hydra makes of every list, a third of its time, to resolve the interpolations in it."""
        return make_map(overrides, defaults, self_added) if "${" in repr(defaults) else None

    def load_once(self: FileConfigSource, config_path: str) -> Any:
        """A file as it was read the first time."""
        if self.path.removeprefix("file://") != config_dir():
            return load(self, config_path)
        if config_path not in files:
            files[config_path] = load(self, config_path)
        return deepcopy(files[config_path])

    patch.setattr(FileConfigSource, "load_config", load_once)
    patch.setattr(defaults_list, "_create_interpolation_map", map_where_needed)
    patch.setattr(defaults_list, "_create_defaults_list", list_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_once)


def shipped(repo: Any) -> bool:
    """Whether no file of a test can change what Hydra reads."""
    folders = {
        source.path.removeprefix("file://") for source in repo.get_sources() if source.scheme() == "file"
    }
    return folders <= {config_dir()}
