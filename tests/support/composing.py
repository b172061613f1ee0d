"""Configurations for tests: Hydra, which takes a quarter of a second, composes each choice of groups once."""

import re
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from darts_parallel.config.composition import composition, load_config, to_config
from darts_parallel.config.schema import Config
from darts_parallel.errors import DartsParallelError

NUMBER = r"-?\d+(\.\d+)?(e-?\d+)?"
WORD = r"[a-z][a-z0-9_]*"
PLAIN = re.compile(rf"({NUMBER}|{WORD}|\[(({NUMBER}|{WORD})(,({NUMBER}|{WORD}))*)?\])")
"""Values that mean the same to Hydra and here: numbers, words, lists of them."""
GROUP = re.compile(rf"{WORD}={WORD}")
KEY = re.compile(rf"{WORD}(\.\w+)+")
FILES = ("path", "profile")
"""Last words of keys that name files, which may change between two calls."""
WORDS = {"null": None, "true": True, "false": False}


class Composer:
    """`load_config` with a memory of what Hydra composed of groups."""

    def __init__(self) -> None:
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def load_config(self, overrides: list[str] | None = None, extra_dir: str | None = None) -> Config:
        """As `problem.load_config`, which says what is wrong where something is."""
        given = list(overrides or [])
        groups = [override for override in given if GROUP.fullmatch(override)]
        values = [override.partition("=") for override in given if override not in groups]
        plain = all(KEY.fullmatch(key) and PLAIN.fullmatch(value) for key, _, value in values)
        if plain and extra_dir is None and not any(key.endswith(FILES) for key, _, _ in values):
            with suppress(DartsParallelError, OmegaConfBaseException, AssertionError, AttributeError):
                return self._changed(groups, [(key, parsed(value)) for key, _, value in values], given)
        return load_config(overrides, extra_dir)

    def _changed(self, groups: list[str], values: list[tuple[str, Any]], given: list[str]) -> Config:
        key = tuple(groups)
        if key not in self._composed:
            self._composed[key] = composition(groups)
        composed = self._composed[key].copy()
        for name, value in values:
            OmegaConf.update(composed, name, value)
        return to_config(composed, given)


def parsed(value: str) -> Any:
    """The value of a `PLAIN` text."""
    if value.startswith("["):
        return [parsed(part) for part in value[1:-1].split(",") if part]
    if re.fullmatch(NUMBER, value):
        return int(value) if re.fullmatch(r"-?\d+", value) else float(value)
    return WORDS.get(value, value)
