"""Short words of the field for keys: `tp=4` stands for `space.tp=4` in every command."""

import os
from collections.abc import Sequence
from typing import Any

from darts_parallel.config.trainer import module_data
from darts_parallel.errors import ConfigError

NAMES: dict[str, dict[str, str]] = module_data(__file__)
"""Parts of `words.yaml` next to this file, which explains them."""
WORDS = NAMES["words"]
"""Key that each word stands for."""
EVERY_WORD = NAMES["parts"] | WORDS
"""Key of each word, and of last parts of keys of the space that are taken without their group, too."""
JOB_GROUPS = ("model", "training", "trainer", "space", "cost")
"""Groups of keys that are of a job whatever the machine."""
MOST_GROWTH = 2
"""Factor over the cluster's own GPUs of a node above which `gpus` probably counts the cluster."""


def given_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of overrides by key."""
    return dict(argument.partition("=")[::2] for argument in arguments)


def of_job(argument: str) -> bool:
    """Return whether an override is of a job and not of the machine, or of one command."""
    key = argument.partition("=")[0]
    return EVERY_WORD.get(key, key).partition(".")[0] in JOB_GROUPS


def without_words(arguments: Sequence[str]) -> list[str]:
    """Return overrides with keys in place of words, and with the path of `~` in values."""
    result = []
    for argument in arguments:
        word, given, value = argument.partition("=")
        if value.lstrip("'").startswith("~/"):  # which shells leave behind a key with a dot
            value = value.replace("~", os.path.expanduser("~"), 1)
        result.append(f"{EVERY_WORD.get(word, word)}{given}{value}" if given else argument)
    return result


def require_clear_machine(arguments: Sequence[str], own: Sequence[Any]) -> None:
    """Refuse `gpus` and `nodes` where they could mean something else.

    Args:
        arguments: Of the command, words included.
        own: Node groups of the cluster before the words change them.

    Errors:
        ConfigError: there are several node groups, or `gpus` seems to count those of all nodes.
    """
    given = given_values(arguments)
    for word in ("gpus", "nodes"):
        if word in given and len(own) > 1:
            raise ConfigError(
                f"{word}={given[word]} must name one of the {len(own)} node groups of the cluster; "
                f"try {WORDS[word]}={given[word]}, which is the first one."
            )
    gpus = given.get("gpus", "")
    if not gpus.isdigit() or not own:
        return
    size = int(own[0].gpus)
    if int(gpus) > MOST_GROWTH * size and int(gpus) % size == 0:
        raise ConfigError(
            f"gpus={gpus} must be the GPUs of one node, of which this cluster has {size}; "
            f"try nodes={int(gpus) // size}, or {WORDS['gpus']}={gpus} for such nodes."
        )
