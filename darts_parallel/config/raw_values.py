"""Values of the command that a schema would take without a word, though they say something else."""

import re
from collections.abc import Sequence

from darts_parallel.config.keys import type_at
from darts_parallel.config.schema import Config
from darts_parallel.errors import ConfigError

_NUMBER = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?", re.IGNORECASE)


def refuse_silent_overrides(overrides: Sequence[str]) -> None:
    """Refuse an empty mapping, which a merge ignores, and a number other than 0 and 1 for a switch.

    Args:
        overrides: `key=value` as the command was given.

    Errors:
        ConfigError: names the key, the value and the closest valid one.
    """
    for override in overrides:
        key, given, value = override.partition("=")
        value = value.strip()
        if not given or key.startswith(("~", "hydra")):
            continue
        key = key.lstrip("+")
        if re.fullmatch(r"\{\s*\}", value):
            raise ConfigError(
                f"{key}={value} would change nothing, since mappings are merged; try leaving {key} "
                f"out of the command, or name an entry of it."
            )
        if _NUMBER.fullmatch(value) and value not in ("0", "1") and type_at(key, Config) is bool:
            raise ConfigError(f"{key}={value} must be true or false; try true.")
